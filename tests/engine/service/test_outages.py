"""make test-all: processes wait at their start, and live through a killed store.

Kafka or PostgreSQL is not there: the processes wait, recover, and lose nothing. Under load, judged all the while, the stores
stumble in `proofs/chaos/test_under_fire.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands.client import wait_for
from demo.crew import Crew
from infra.log import topics
from infra.log.clients import KafkaUnavailable
from infra.log.records import Command
from infra.settings import Settings
from projections.engine.operate.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.spine import commits, deposit, open_account, scalar, send
from tools.testing.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from tools.dev.kafka import Kafka
    from tools.dev.postgres import Postgres
    from tools.dev.stack import Stack

NAMES = [f"n{n}" for n in range(20)]
OPENED = [open_account(name) for name in NAMES]
FIRST = [deposit(name, f"{name}-{n}", 1) for n in range(5) for name in NAMES]
SECOND = [deposit(name, f"{name}-{n}", 1) for n in range(5, 10) for name in NAMES]

Said = Callable[[], list[str]]


@contextmanager
def crew(world: Settings, folder: Path) -> Iterator[Said]:
    """One handler and one agent that must live through the block: waiting is not dying and being started again.

    What is yielded tells their logs.
    """
    with Crew(world, folder, handler_count=1, agent_count=1) as running:
        both = (*running.handlers, *running.agents)
        logs = [folder / f"{child.name}.log" for child in both]
        try:
            yield lambda: [log.read_text() if log.exists() else "" for log in logs]
            assert [child.starts for child in both] == [1, 1]
        except BaseException:
            for log in sorted(folder.iterdir()):
                print(f"--- {log.name}\n{log.read_text()[-3_000:]}")
            raise


def kill(store: Kafka | Postgres) -> None:
    server = store.process()
    assert server is not None
    server.kill()
    server.wait(DEADLINE_S)


@pytest.mark.slow
def test_processes_wait_for_stores_at_their_start_and_a_store_killed_in_the_middle_costs_time_only(
    world: Settings, stack: Stack, tmp_path: Path
) -> None:
    topics.ensure(world)
    gc.collect()  # librdkafka ends this process if one of its threads frees its own client, as garbage of a test before
    stack.down()
    try:
        with crew(world, tmp_path) as said:

            def all_say(*words: str, since: Sequence[str] = ("", "")) -> bool:
                news = [log[len(before) :] for log, before in zip(said(), since, strict=True)]
                return all(any(word in log for word in words) for log in news)

            until(lambda: all_say("does not answer"), "they say what they wait for")
            stack.up()
            answered(world, OPENED)

            was = said()
            kill(stack.postgres)
            send(world, *FIRST)
            # which of the two depends on whether the session heard of its server's end
            until(lambda: all_say("does not answer", "ended this session", since=was), "both say so")
            stack.up()
            answered(world, FIRST)

            was = said()
            gc.collect()
            kill(stack.kafka)
            with pytest.raises(KafkaUnavailable):
                send(world, *SECOND)
            until(lambda: "Kafka does not answer" in said()[0][len(was[0]) :], "the handler says so")
            stack.up()
            answered(world, SECOND)
        sent = [*OPENED, *FIRST, *SECOND]
        found = verify(world, all_views())
        assert (found.differences, scalar(world, "select sum(cents) from balances_v2")) == (0, len(FIRST + SECOND))
        assert {(one.stream, one.command_id) for one in commits(world)} == {(one.stream, one.id) for one in sent}
    finally:
        stack.up()


def answered(world: Settings, commands: list[Command]) -> None:
    """Sent, once more where they were sent before, each has its outcome."""
    send(world, *commands)
    assert wait_for(world, commands, lambda _: None, timeout_s=DEADLINE_S).accepted == len(commands)
