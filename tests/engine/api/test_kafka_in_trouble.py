"""make test-all: a broker is frozen for seconds each time, and librdkafka takes seconds to replace a producer.

A broker that stands still for some seconds and goes on (a paused machine, a laptop's sleep): commands wait, and are answered. It is
no longer the leader of the epoch that clients remember then, as after a move to another broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import sleep
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from api import stores
from commands import release
from commands.append import Appender
from commands.handler import Handler
from infra.log import topics
from infra.log.clients import KafkaUnavailable, ProducerRefused
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
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
from tools.testing.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from tools.dev.stack import Stack

TAKEN = {200, 202}
"""A command is in the log; its outcome may come later."""
REFUSED_WITHIN_S = 1.0
"""It would be refused at once, and is not answered before the broker goes on."""
FENCED_AFTER_S = 2.5
"""The broker's session with its controller lasts 2 s."""
pytestmark = pytest.mark.slow


@pytest.fixture
def world(world: Settings) -> Settings:
    """Where the broker does not fence a handler that heard nothing of it, however long a slow machine lets it be frozen."""
    return world.model_copy(update={"session_timeout_ms": 60_000})


@pytest.fixture(autouse=True)
def _left_as_it_was(stack: Stack, world: Settings) -> Iterator[None]:
    """The next test finds a broker that leads and has a controller.

    A client that remembered the old epoch would ask in vain for 15 minutes: far beyond any deadline here.
    """
    yield
    until(lambda: _is_back(world), "the broker is back")


def _is_back(world: Settings) -> bool:
    try:
        topics.ensure(world)
    except KafkaUnavailable:
        return False
    return True


def led_anew(stack: Stack, world: Settings) -> None:
    """Returns when the broker leads in another epoch than it did: frozen for longer than its session lasts, again if need be."""
    before = _epoch(world)
    while _epoch(world) == before:
        with frozen(stack.kafka):
            sleep(FENCED_AFTER_S)
        until(lambda: _is_back(world), "the broker leads again")


def _epoch(world: Settings) -> int:
    """In which the broker leads, as it says itself."""
    return topics.Admin(world).ask(lambda client, within_s: _asked(client, world, within_s))


def _asked(client: AdminClient, world: Settings, within_s: float) -> int:
    wanted = {TopicPartition(world.events_topic, 0): OffsetSpec.latest()}
    [asked] = client.list_offsets(wanted, request_timeout=within_s).values()
    return int(asked.result(within_s).leader_epoch)


def test_who_has_asked_before_is_answered_when_the_broker_leads_in_another_epoch(world: Settings, stack: Stack) -> None:
    """Clients of the API, and whoever asks for the ends."""
    with everything(world) as api:
        assert api.open("before").status_code == 200
        _, events = topics.ensure(world)
        admin = topics.Admin(world, 30.0)
        before = topics.ends(events, admin)
        led_anew(stack, world)
        until(lambda: api.open("after").status_code in TAKEN, "it takes commands")
        behind = api.services.stores.seen
        until(lambda: api.services.stores.seen is not behind, "it looks again")
        assert topics.ends(events, admin).keys() == before.keys()


def test_who_is_told_that_another_broker_leads_asks_with_a_client_that_remembers_nothing(world: Settings) -> None:
    topics.ensure(world)
    asked: list[AdminClient] = []

    def question(client: AdminClient, within_s: float) -> set[str]:
        asked.append(client)
        if len(asked) == 1:
            raise KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
        return set(client.list_topics(timeout=within_s).topics)

    assert world.events_topic in topics.Admin(world).ask(question)
    first, second = asked
    assert first is not second


def test_commands_wait_for_a_broker_that_is_silent_for_a_moment_and_are_refused_when_it_is_for_longer(
    world: Settings, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PATIENCE_S", 60.0)
    with everything(world) as api, ThreadPoolExecutor(1) as pool:
        assert api.open("before").status_code == 200
        looks = api.services.stores
        with frozen(stack.kafka):
            until(lambda: not looks.kafka_answered, "a look has failed")
            waiting = pool.submit(api.open, "meanwhile")
            wait([waiting], REFUSED_WITHIN_S)
            until(lambda: waiting.done() or len(api.services.appender._producer.now) > 0, "it is under way")
            monkeypatch.setattr(stores, "PATIENCE_S", 0.0)
            until(lambda: "kafka" in looks.failures, "it is told")
            refused = api.open("refused")
            assert (refused.status_code, refused.json()["appended"]) == (503, "no")
        assert waiting.result().status_code in TAKEN, waiting.result().text
        until(lambda: api.open("refused").status_code in TAKEN, "it takes commands again")


@pytest.mark.parametrize("question", ["which handlers there are", "the ends of partitions"])
def test_a_brokers_silence_is_no_answer(
    stack: Stack, world: Settings, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """librdkafka gives a broker's silence as a value: no handler, the offset -1001.

    Who looks in time finds no answer; a process that was frozen too looks late.
    """
    in_time = Future.result
    monkeypatch.setattr(Future, "result", lambda future, _=None: in_time(future, DEADLINE_S))
    _, events = topics.ensure(world)

    def asked(admin: topics.Admin) -> object:
        return release.alive(admin, world.group_prefix) if "handlers" in question else topics.ends(events, admin)

    admin = topics.Admin(world, 1.0)
    told = asked(admin)
    with frozen(stack.kafka), pytest.raises(KafkaUnavailable):
        asked(admin)
    assert asked(topics.Admin(world)) == told


# ── a producer that can't go on (fatal, librdkafka calls it): another one takes its place, and what is in doubt is treated so ──


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
        assert sum(one.writer.openings for one in running.partitions.values()) > world.partitions
    assert scalar(world, "select sum(cents) from balances_v2") == 5


def test_a_handler_whose_producers_can_never_go_on_ends_by_name(world: Settings) -> None:
    set_up(world)
    with handler(world) as running:
        until(lambda: len(openings(world)) == world.partitions, "it serves")
        end_twice(running)
        ended_with(running, ProducerRefused)


def test_an_api_whose_producers_can_never_go_on_ends_by_name(world: Settings) -> None:
    def serve() -> None:
        with unfolded(world) as api:
            end_twice(api.services.appender)
            until(lambda: api.services.failure is not None, "it ends")

    with pytest.raises(ProducerRefused):
        serve()


def end_twice(process: Handler | Appender) -> None:
    first = process._producer.now
    fatal.end(first)
    until(lambda: process._producer.now is not first, "another one is there")
    fatal.end(process._producer.now)
