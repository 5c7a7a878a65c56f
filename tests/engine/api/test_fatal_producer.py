"""make test-all: librdkafka takes seconds to replace a producer.

A producer that can't go on (fatal, librdkafka calls it): another one takes its place, and what is in doubt is treated so.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from api.append import Appender
from commands.handler import Handler
from infra.log import clients
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
from infra.testing.waiting import until
from tests.engine.api.api import everything, unfolded
from tests.engine.api.front import frozen
from tests.engine.infra import fatal
from tests.engine.spine import (
    commits,
    deposit,
    ended_with,
    handler,
    open_account,
    openings,
    project,
    scalar,
    send,
    set_up,
)

if TYPE_CHECKING:
    from infra.dev.stack import Stack

pytestmark = pytest.mark.slow


def test_an_api_appends_again_and_tells_those_who_wait_that_it_does_not_know(world: Settings, stack: Stack) -> None:
    with everything(world) as api, ThreadPoolExecutor(1) as pool:
        assert api.open("before").status_code == 200
        with frozen(stack.kafka):
            waiting = pool.submit(api.open, "meanwhile")
            first = api.services.appender._producer.now
            until(lambda: len(first) > 0, "it is under way")
            fatal.end(first)
            answer = waiting.result()
            assert (answer.status_code, answer.json()["appended"]) == (503, "unknown")
        until(lambda: api.open("meanwhile").status_code == 200, "it appends again")
        assert api.open("after").status_code == 200
    assert [commit.command_id for commit in commits(world)].count("meanwhile") == 1


@pytest.mark.parametrize("point", ["opening sent", "commit sent"])
def test_a_handler_opens_again_and_decides_each_command_once(
    world: Settings, monkeypatch: pytest.MonkeyPatch, point: Point
) -> None:
    set_up(world)
    send(world, *(open_account(f"n{n}") for n in range(40)))
    ended: list[Producer] = []

    def end_at(reached: Point) -> None:
        if reached == point and not ended:
            ended.append(running._producer.now)
            fatal.end(running._producer.now)

    running = Handler(world, "h1")
    monkeypatch.setattr(faultpoints, "hook", end_at)
    with handler(world, running=running):
        until(lambda: project(world) >= 0 and scalar(world, "select count(*) from balances_v2") == 40, "decided")
        send(world, deposit("n1", "last", 5))
        until(lambda: project(world) == 1, "it goes on")
        assert sum(writer.openings for writer in running.writers.values()) > world.partitions
    assert scalar(world, "select sum(cents) from balances_v2") == 5


def test_a_handler_whose_producers_can_never_go_on_ends_by_name(world: Settings) -> None:
    set_up(world)
    with handler(world) as running:
        until(lambda: len(openings(world)) == world.partitions, "it serves")
        end_twice(running)
        ended_with(running, clients.ProducerRefused)


def test_an_api_whose_producers_can_never_go_on_ends_by_name(world: Settings) -> None:
    def serve() -> None:
        with unfolded(world) as api:
            end_twice(api.services.appender)
            until(lambda: api.services.failure is not None, "it ends")

    with pytest.raises(clients.ProducerRefused):
        serve()


def end_twice(process: Handler | Appender) -> None:
    first = process._producer.now
    fatal.end(first)
    until(lambda: process._producer.now is not first, "another one is there")
    fatal.end(process._producer.now)
