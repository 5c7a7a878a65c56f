"""Kafka or PostgreSQL away at the start and killed in the middle: the processes wait, recover, and lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands.client import send_all, wait_for
from demo.crew import Crew
from infra.database.migrate import upgrade
from infra.log import topics
from infra.log.clients import KafkaUnavailable
from infra.log.records import Command
from infra.settings import Settings
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.spine import commits, deposit, open_account, scalar, until

if TYPE_CHECKING:
    from infra.dev.stack import Stack

NAMES = [f"n{n}" for n in range(20)]
OPENED = [open_account(name) for name in NAMES]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def deposits(turn: int) -> list[Command]:
    return [deposit(name, f"{name}-{turn}-{n}", 1) for n in range(10) for name in NAMES]


@contextmanager
def crew(world: Settings, folder: Path) -> Iterator[Crew]:
    """One handler and one agent that must live through the block: waiting is not dying and being started again."""
    with Crew(world, folder, handler_count=1, agent_count=1) as running:
        try:
            yield running
            assert [child.starts for child in (*running.handlers, *running.agents)] == [1, 1]
        except BaseException:
            for log in sorted(folder.iterdir()):
                print(f"--- {log.name}\n{log.read_text()[-3_000:]}")
            raise


def sent(world: Settings, commands: list[Command]) -> None:
    send_all(world, commands, lambda _: None)


def answered(world: Settings, commands: list[Command]) -> None:
    assert wait_for(world, commands, lambda _: None, timeout_s=60).accepted == len(commands)


def proven(world: Settings, balance: int) -> None:
    found = verify(world, all_views())
    assert (found.differences, scalar(world, "select sum(cents) from balances_v2")) == (0, balance)
    ids = [(commit.stream, commit.command_id) for commit in commits(world)]
    assert len(set(ids)) == 20 + balance


def test_processes_that_start_before_kafka_and_postgresql_wait_for_them(
    world: Settings, stack: Stack, tmp_path: Path
) -> None:
    upgrade(world)
    topics.ensure(world)
    stack.down()
    try:
        with crew(world, tmp_path) as running:
            names = [child.name for child in (*running.handlers, *running.agents)]
            until(
                lambda: all("does not answer" in _log(tmp_path, name) for name in names), "they say what they wait for"
            )
            stack.up()
            sent(world, OPENED)
            answered(world, OPENED)
        proven(world, 0)
    finally:
        stack.up()


def test_the_broker_killed_in_the_middle_costs_time_only(world: Settings, stack: Stack, tmp_path: Path) -> None:
    upgrade(world)
    topics.ensure(world)
    with crew(world, tmp_path) as running:
        sent(world, OPENED)
        answered(world, OPENED)
        sent(world, deposits(1))
        broker = stack.kafka.process()
        assert broker is not None
        broker.kill()
        broker.wait(10)
        try:
            with pytest.raises(KafkaUnavailable):
                sent(world, deposits(2))
            handler = running.handlers[0].name
            until(lambda: "Kafka does not answer" in _log(tmp_path, handler), "the handler says so")
        finally:
            stack.up()
        sent(world, deposits(1) + deposits(2))
        answered(world, deposits(1) + deposits(2))
    proven(world, 400)


def test_the_database_killed_in_the_middle_costs_time_only(world: Settings, stack: Stack, tmp_path: Path) -> None:
    upgrade(world)
    topics.ensure(world)
    with crew(world, tmp_path) as running:
        sent(world, OPENED)
        answered(world, OPENED)
        server = stack.postgres.process()
        assert server is not None
        server.kill()
        server.wait(10)
        try:
            sent(world, deposits(1))
            names = [child.name for child in (*running.handlers, *running.agents)]
            # Which of the two depends on whether the session heard of its server's end.
            away = "does not answer", "ended this session"
            until(lambda: all(any(word in _log(tmp_path, name) for word in away) for name in names), "both say so")
        finally:
            stack.up()
        answered(world, deposits(1))
    proven(world, 200)


def _log(folder: Path, name: str) -> str:
    file = folder / f"{name}.log"
    return file.read_text() if file.exists() else ""
