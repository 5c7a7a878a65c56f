"""make test: all parts in one process, with a receiver of webhooks.

A new database over a log, as after a loss: policies do nothing until an operator says of which events posts are made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from domain.accounts import Deposit, MoneyDeposited, Withdraw
from infra.database.connect import connect
from infra.log import topics
from infra.observability import metrics
from infra.settings import Settings
from policies.engine import policy as declared
from policies.engine.activations import held_policies
from policies.engine.policy import Policy, Post, Send
from projections.engine.live.exporter import Exporter
from projections.engine.views.event_context import At
from tests.engine.api.api import agent
from tests.engine.policies.test_policies import balance, open_wishes, running
from tests.engine.policies.test_webhooks import Receiver, with_endpoints
from tests.engine.spine import commits, deposit, handler, open_account, scalar, send, set_up
from tools.dev.stack import Stack
from tools.doctor import examine
from tools.testing.fixtures import Samefold
from tools.testing.waiting import until


def forward(event: MoneyDeposited, at: At) -> Iterable[Send | Post]:
    """What account 1 gets, account 2 gets too, account 1 gives away, and the outside is told."""
    if at.id == "1":
        yield Send("accounts/2", Deposit(cents=event.cents, on=event.on), then=Withdraw(cents=event.cents, on=event.on))
        yield Post("told", {"cents": event.cents})


FORWARD = Policy("forward", 1, forward, frozenset({MoneyDeposited}))


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    found = Receiver(tmp_path)
    yield found
    found.end()


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "discover", lambda: {"forward": FORWARD})


def lose(stack: Stack, settings: Settings, template: str = "template0") -> None:
    """A copy of the template takes the place of the database."""
    name = scalar(settings, "select current_database()")
    with psycopg.connect(stack.postgres.url(), autocommit=True) as db:
        db.execute(f'drop database "{name}" with (force)'.encode())
        db.execute(f'create database "{name}" template "{template}"'.encode())


def commands(settings: Settings) -> int:
    return sum(topics.describe(settings, settings.commands_topic).end.values())


def read_all(settings: Settings) -> bool:
    """Whether the policy has read all events, and nothing is on its way."""
    ends = topics.describe(settings, settings.events_topic).end
    query = "select sum(next_offset) from positions where agent = 'policy_forward'"
    return bool(scalar(settings, query) == sum(ends.values())) and open_wishes(settings) == 0


@pytest.mark.parametrize(("since", "told"), [("now", [7, 1]), ("beginning", [7, 7, 5, 1]), ("between", [7, 5, 1])])
def test_in_a_new_database_a_policy_waits_for_a_decision_and_then_its_processes_end(
    world: Settings,
    stack: Stack,
    migrated: str,
    receiver: Receiver,
    samefold: Samefold,
    caplog: pytest.LogCaptureFixture,
    since: str,
    told: list[int],
) -> None:
    settings = with_endpoints(world, told=receiver.url("told/ok"))
    cli = partial(samefold, settings=world)

    def got() -> list[int]:
        return [request["body"]["cents"] for request in receiver.got("told")]

    set_up(settings)
    with handler(settings), agent(settings):
        with running(settings, FORWARD):
            send(settings, open_account("1"), open_account("2"), deposit("1", "d1", 7))
            until(lambda: got() == [7] and read_all(settings), "it is live")
        between = scalar(settings, "select (now() + '1 ms')::text")
        send(settings, deposit("1", "d2", 5))
        until(lambda: balance(settings, "1") == 5, "an event comes that it never reads in that database")
    lose(stack, settings, migrated)
    set_up(settings)
    before = commands(settings)
    with agent(settings), running(settings, FORWARD):
        until(lambda: "Policy 'forward' is held" in caplog.text, "it says so")
        until(lambda: balance(settings, "1") == 5, "the read model is there again")
        assert "`samefold policies resume forward --posts-from now`" in caplog.text
        assert (commands(settings), got(), open_wishes(settings)) == (before, [7], 0)
        assert json.loads(cli("policies", "--json").stdout)["forward"]["state"] == "new-database"
        assert "samefold policies resume forward" in cli("policies").stdout
        assert cli("policies", "switch", "forward").stderr.startswith("new-database: ")
        assert cli("policies", "remove", "forward").stderr.startswith("new-database: ")
        caplog.clear()
        moment = between if since == "between" else since
        done = json.loads(cli("policies", "resume", "forward", "--posts-from", moment, "--json").stdout)
        assert (done["policies"], done["by"]) == (["forward"], scalar(settings, "select current_user"))
        until(lambda: commands(settings) > before, "it reacts")
        with handler(settings):
            until(lambda: read_all(settings), "what was under way ends")
            assert (balance(settings, "1"), balance(settings, "2")) == (0, 12)
            send(settings, deposit("1", "d3", 1))
            until(lambda: got()[-1] == 1, "new events post")
            until(lambda: read_all(settings), "and all is done")
    assert (got(), balance(settings, "2")) == (told, 13)


@pytest.mark.parametrize("lost", [False, True], ids=["agents-away", "database-lost"])
def test_a_new_policy_reacts_to_nothing_from_before_its_switch(
    world: Settings,
    stack: Stack,
    migrated: str,
    receiver: Receiver,
    samefold: Samefold,
    monkeypatch: pytest.MonkeyPatch,
    lost: bool,
) -> None:
    settings = with_endpoints(world, told=receiver.url("told/ok"))
    monkeypatch.setattr(declared, "discover", dict)
    set_up(settings)
    with handler(settings):
        with agent(settings):
            send(settings, open_account("1"), open_account("2"))
            until(lambda: balance(settings, "2") == 0, "there is history")
        send(settings, deposit("1", "d1", 7))
        until(lambda: len(commits(settings)) == 3, "no agent has read this")
        if lost:
            lose(stack, settings, migrated)
            set_up(settings)
        monkeypatch.setattr(declared, "discover", lambda: {"forward": FORWARD})
        assert "reacts to events from" in samefold("policies", "switch", "forward", settings=world).stdout
        send(settings, deposit("1", "d2", 1))
        with agent(settings), running(settings, FORWARD):
            until(lambda: receiver.got("told"), "it reacts")
            until(lambda: balance(settings, "2") == 1, "and sends")
    assert [request["body"]["cents"] for request in receiver.got("told")] == [1], "an older post would have come before"


def test_a_held_policy_is_told_wherever_one_looks(
    world: Settings, stack: Stack, migrated: str, samefold: Samefold, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(world)
    with running(world, FORWARD):
        pass
    lose(stack, world, migrated)
    set_up(world)
    exporter, gauge = Exporter(world, "exporter"), 'samefold_view_stopped{view="policy_forward"} '
    exporter._query()
    with running(world, FORWARD):
        exporter._query()
        assert f"{gauge}1.0" in metrics.exposition()[0].decode()
        for name, value in world.environment().items():
            monkeypatch.setenv(name, value)

        def standing_still() -> str:
            return "".join(one.found for one in examine() if one.name == "standing still" and not one.ok)

        until(lambda: "policy forward: held, as this database is new to it" in standing_still(), "the doctor names it")
        assert samefold("policies", "resume", "--posts-from", "now", settings=world).returncode == 0
        for arguments in (), ("forward",):
            refused = samefold("policies", "resume", *arguments, "--posts-from", "now", settings=world)
            assert refused.stderr.startswith("not-held: "), "what a live policy has not read yet posts, too"
        assert samefold("policies", "resume", "forward", "--yes", "--posts-from", "now", settings=world).returncode == 0
        exporter._query()
        assert f"{gauge}0.0" in metrics.exposition()[0].decode()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["forward"], "Missing option '--posts-from'"),
        (["forward", "--posts-from", "soon"], "bad-moment: 'soon'"),
        (["forward", "--posts-from", "0:1"], "it is a time, not positions"),
        (["forward", "--posts-from", "2999-01-01T00:00:00Z"], "is in the future"),
        (["nosuch", "--posts-from", "now"], "never-live: Policy 'nosuch' was never live"),
    ],
)
def test_a_decision_that_names_no_time_or_no_policy_is_none(
    world: Settings, samefold: Samefold, arguments: list[str], what: str
) -> None:
    set_up(world)
    done = samefold("policies", "resume", *arguments, settings=world)
    assert done.returncode != 0
    assert what in done.stderr


def test_a_policy_that_was_removed_long_ago_waits_for_nobody(world: Settings) -> None:
    set_up(world)
    with connect(world, "test") as db:
        db.execute(
            "insert into activations (policy, number, version, positions, log_offset, posts_from) values "
            "('gone', 1, 1, '{}', 100, null), ('gone', 2, 0, '{}', 101, null), ('held', 1, 1, '{}', 102, null)"
        )
        assert held_policies(db) == ["held"]


def test_a_copy_from_before_a_policy_was_made_live_is_new_to_it(world: Settings, samefold: Samefold) -> None:
    """Its positions are not there. Where they are, an older copy goes on from them as ever."""
    set_up(world)
    rows: Any = "select posts_from is null from activations"
    with running(world, FORWARD):
        assert scalar(world, rows) is False
    for keeps_positions in (True, False):
        with connect(world, "test") as db:
            db.execute("delete from activations")
            db.execute("delete from positions where agent = 'policy_forward' and not %s", [keeps_positions])
        with running(world, replace(FORWARD)):
            until(lambda: scalar(world, "select count(*) from activations") == 1, "it is copied from the log")
        assert scalar(world, rows) is not keeps_positions
