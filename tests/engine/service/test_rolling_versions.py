"""make prove: minutes of roll-outs under kills. Who waits by name for whom is also in `commands`, `projections` and `policies`.

A release in which an event and a command have a new version: rolled out beside the old one, in right and wrong order, and back.

Views and states are as they were, so the versions alone put the processes in order. All the while commands and transfers come in,
and handlers, agents and policies are killed. In the end each command was decided once, and the accounts hold what was paid in.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from demo import tree
from demo.background_thread import BackgroundThread
from infra.database.connect import connect
from infra.processes.supervisor import Child, agents, handlers, policies
from infra.settings import Settings
from proofs.chaos.policy_judge import is_at_rest
from tests.engine.service.test_two_releases import DEPOSIT, Edits, Part, Posts, Release, Running, Service, service
from tests.engine.spine import commits, scalar, set_up
from tools.dev.stack import Stack

pytestmark = pytest.mark.prove(part="chaos")

EVENT, COMMAND = "accounts.MoneyDeposited/2", "accounts.Deposit/2"
VERSIONED: Edits = {
    tree.ACCOUNTS: [
        *tree.EDITS[tree.ACCOUNTS],
        (
            "class Deposit:\n    cents: Cents\n",
            'class Deposit:\n    VERSION: ClassVar[int] = 2\n    cents: Cents\n    currency: Text = "CZK"\n',
        ),
        (
            "@fact\nclass Withdraw:\n",
            "@upcaster(Deposit, 1)\ndef in_crowns(body: Body) -> Body:\n"
            '    return {**body, "currency": "CZK"}\n\n\n@fact\nclass Withdraw:\n',
        ),
    ]
}
TRANSFER: Posts = {"/transfers/{}/request-transfer": {"source": "a1", "target": "a2", "cents": 1, "on": "2026-01-02"}}
POSTS = {**DEPOSIT, **TRANSFER}
OLD, NEW = 0, 1
RELEASES = [Release({}, POSTS), Release(VERSIONED, POSTS, new=tuple(DEPOSIT))]
LOOK_S = 0.5
KILL_WITHIN_S = 20.0


class Killer(BackgroundThread):
    """`kill -9` for one process after the other that is no API, each as soon as commands have been answered since the last one."""

    def __init__(self, service: Service) -> None:
        super().__init__("killer")
        self.kills = Counter[str]()
        self._service = service

    def _work(self) -> None:
        answered, waited = 0, 0.0
        while not self._ended.wait(LOOK_S):
            now = sum(client.answered().total() for client in self._service.clients)
            waited += LOOK_S
            if now < answered + 10 and waited < KILL_WITHIN_S:
                continue
            answered, waited = now, 0.0
            running = [child for part in self._service.parts for child in part.children if child.pid]
            victims = [child for child in running if child.name != "api" and child.starts]
            if victims:
                # of the kind that was killed least: by chance, one kind may never be
                child = min(random.sample(victims, len(victims)), key=lambda one: self.kills[one.module])
                if (process := child.process) is not None:
                    process.kill()
                    self.kills[child.module] += 1


class Rollout:
    """A service with both releases, whose processes are started and stopped by role."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.world = service.world

    def start(self, number: int, role: Callable[[int, str], list[Child]]) -> Part:
        return self.service.part(number, *role(1, self.service.place(number)))

    def front(self, number: int) -> Running:
        return self.service.start(number, front_only=True)

    def end(self, *ended: Part | Running) -> None:
        for one in ended:
            if isinstance(one, Running):
                self.service.end(one)
            else:
                one.stop()

    def until_foldable(self) -> None:
        query = "select count(*) from event_types where type = %s"
        self.service.until(lambda: scalar(self.world, query, EVENT) == 1, "agents fold the new version")

    def until_stored(self) -> None:
        """Until the new handlers have decided a deposit, other than a transfer's."""
        newer = partial(newer_events, self.world, "accounts/a1")
        before = newer()
        self.service.until(lambda: newer() > before, "events of the new version are stored")

    def until_said(self, part: Part, *words: str) -> None:
        """Until one line of the part's log has these words."""
        self.service.until(
            lambda: any(all(word in line for word in words) for line in part.said().splitlines()),
            f"a line says {' … '.join(words)}",
        )

    def assert_right(self, *refusals: str) -> None:
        """Raises AssertionError where a command was lost, decided twice or otherwise, or a row is another one than the fold's."""
        self.service.finish()
        with connect(self.world, "test") as db:
            self.service.until(lambda: is_at_rest(db), "all transfers have ended")
            (dead,) = db.execute("select count(*) from outbox where dead is not null").fetchone() or (None,)
        assert dead == 0
        self.service.assert_all_decided_once(*refusals)
        self.service.verify(NEW)
        sent = [one for client in self.service.clients for one in client.sent if not one.code]
        assert scalar(self.world, "select sum(cents)::bigint from balances") == sum(one.path in DEPOSIT for one in sent)
        states = "select state, count(*) from transfers group by state"
        with connect(self.world, "test") as db:
            found: dict[str, int] = dict(db.execute(states).fetchall())
        assert found.keys() <= {"completed", "failed"}
        assert sum(found.values()) == sum(one.path in TRANSFER for one in sent)
        assert found["completed"] > 0


def newer_events(world: Settings, of: str = "") -> int:
    """How many events of the new version are stored, in streams whose names begin like this."""
    found = (event for commit in commits(world) if commit.stream.startswith(of) for event in commit.events)
    return sum(event.type == "MoneyDeposited/2" for event in found)


@contextmanager
def rollout(world: Settings, folder: Path) -> Iterator[Rollout]:
    set_up(world)
    with service(world, folder, RELEASES) as running:
        yield Rollout(running)


def test_agents_first_then_handlers_policies_and_api_then_back_and_forward_again(
    world: Settings, tmp_path: Path
) -> None:
    with rollout(world, tmp_path) as roll:
        old = [roll.start(OLD, role) for role in (agents, handlers, policies)]
        old_front = roll.front(OLD)
        with Killer(roll.service) as killer:
            roll.service.until_answered("the old release answers")
            new = [roll.start(NEW, agents)]
            roll.until_foldable()
            new.append(roll.start(NEW, handlers))
            roll.until_stored()
            new.append(roll.start(NEW, policies))
            new_front = roll.front(NEW)
            roll.service.until_answered("both answer")
            roll.end(old_front, *reversed(old))
            roll.service.until_answered("the new release answers alone")

            # and back: nothing of the old release can go on from here, and nothing is lost
            old_front = roll.front(OLD)
            old_agents = roll.start(OLD, agents)
            roll.end(new_front, new[0])
            roll.until_stored()  # and never folded, since no agent of the new release is left
            roll.until_said(old_agents, "waits for an agent of newer code", "MoneyDeposited/2")
            roll.end(new[1], new[2])
            old_handlers = roll.start(OLD, handlers)
            roll.until_said(old_handlers, "MoneyDeposited/2")

            new = [roll.start(NEW, agents), roll.start(NEW, handlers), roll.start(NEW, policies)]
            roll.service.until_answered("the new release goes on")
            assert killer.kills.keys() >= {"commands.handler", "projections.engine.live.agent"}
        roll.end(old_handlers, old_agents)
        roll.assert_right()


def test_handlers_policies_and_api_before_the_agents_wait_by_name_while_the_old_ones_go_on(
    world: Settings, tmp_path: Path
) -> None:
    with rollout(world, tmp_path) as roll:
        old = [roll.start(OLD, role) for role in (agents, handlers, policies)]
        old_front = roll.front(OLD)
        with Killer(roll.service):
            new_policies = roll.start(NEW, policies)
            roll.until_said(new_policies, "no handler that decides these has run yet, start those first", COMMAND)
            new_handlers = roll.start(NEW, handlers)
            roll.until_said(new_handlers, "no agent that can fold these events has run yet, start those first", EVENT)
            new_front = roll.front(NEW)
            roll.service.until_answered("the old ones go on", without=tuple(DEPOSIT))
            # the old policies send what the new ones wished: not the deposits, which nobody decides yet
            roll.end(new_policies)
            roll.service.until_answered("the old ones go on alone", without=tuple(DEPOSIT))
            assert newer_events(world) == 0
            new_agents = roll.start(NEW, agents)
            roll.until_stored()
            new_policies = roll.start(NEW, policies)
            roll.service.until_answered("both answer everything")
            roll.end(old_front, *old)
            roll.service.until_answered("the new release answers alone")
        assert new_front.client.sent
        roll.assert_right("command-not-live")
        roll.end(new_agents, new_handlers, new_policies)


def test_a_database_restored_to_before_the_release_goes_on_with_it(
    world: Settings, tmp_path: Path, stack: Stack
) -> None:
    """What the old release has decided since the backup, and what its policies wished, is folded by the new one."""
    with rollout(world, tmp_path) as roll:

        def start(number: int) -> list[Part]:
            parts = [roll.start(number, role) for role in (agents, handlers, policies)]
            roll.front(number)
            return parts

        old = start(OLD)
        roll.service.until_answered("the old release answers")
        roll.end(*roll.service.running, *old)
        with backup(world, stack) as restore:
            old = start(OLD)
            roll.service.until_answered("the old release goes on")
            [old_front] = roll.service.running
            start(NEW)
            roll.until_stored()
            roll.end(old_front, *old)
            roll.service.until_answered("the new release answers alone")
            assert scalar(world, "select count(*) from event_types where type = %s", EVENT) == 1
            roll.end(*roll.service.running)
            roll.service.finish()
            restore()  # while nothing else happens: no record comes that would have anybody look
            roll.front(NEW)
            roll.service.until_answered("the new release goes on")
            roll.assert_right("command-not-live")


@contextmanager
def backup(world: Settings, stack: Stack) -> Iterator[Callable[[], None]]:
    """A copy of the database, which nobody may use just now, and how to restore it, whoever uses it then."""
    name = str(conninfo_to_dict(world.database)["dbname"])
    with psycopg.connect(stack.postgres.url(), autocommit=True) as admin:

        def copied(source: str, target: str) -> None:
            admin.execute(f'create database "{target}" template "{source}"'.encode())

        def restore() -> None:
            admin.execute(f'drop database "{name}" with (force)'.encode())
            copied(f"{name}_copy", name)

        copied(name, f"{name}_copy")
        yield restore
        admin.execute(f'drop database "{name}_copy" with (force)'.encode())
