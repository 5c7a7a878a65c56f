"""make test + test-all: real stores, all parts in one process.

A message of another service has its effect once: kills at each step, a restored database, an aborted transaction, two receivers of
one partition, and a switch while a message is in hand. One source takes each message by its place, the other by its own id."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

import msgspec
import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from psycopg.types.json import Json

from domain.accounts import Deposit
from infra.database.connect import connect
from infra.log import clients
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
from policies.engine import Received, Send
from policies.engine.activations import switch
from policies.engine.policy import Policy
from policies.engine.receiver import Receiver
from projections.engine.live.worker import code_of_authors
from tests.engine.api.api import agent
from tests.engine.policies import test_sources
from tests.engine.policies.test_new_database import lose
from tests.engine.policies.test_policies import open_wishes
from tests.engine.policies.test_sources import DAY, Billing, Paid, all_received, received, running, source
from tests.engine.spine import beside, commits, handler, open_account, scalar, send
from tools.dev.stack import Stack
from tools.testing.waiting import DEADLINE_S, until

billing = test_sources.billing


def receive_once(message: Paid, at: Received) -> Iterable[Send]:
    yield Send("accounts/once", Deposit(cents=message.cents, on=DAY))


def receive_later(message: Paid, at: Received) -> Iterable[Send]:
    yield Send("accounts/later", Deposit(cents=message.cents, on=DAY))


BY_PLACE, BY_ID = source(), source("by_id", DEDUP="id", receive=receive_once)


def effects(world: Settings) -> dict[str, Counter[int]]:
    """By account, how often each sum was deposited: by the log."""
    found: dict[str, Counter[int]] = {name: Counter() for name in ("a", "once", "later")}
    for commit in commits(world):
        for event in commit.events:
            if event.type == "MoneyDeposited":
                found[commit.stream.partition("/")[2]][msgspec.json.decode(event.data)["cents"]] += 1
    return found


def each_once(*numbers: int) -> Counter[int]:
    return Counter(dict.fromkeys(numbers, 1))


def all_done(billing: Billing, *policies: str) -> None:
    """All messages are received, and each command has its outcome."""
    for name in policies or ("from_billing", "by_id"):
        all_received(billing, name)
    until(lambda: open_wishes(billing.settings) == 0, "each command has its outcome")


def say(billing: Billing, *numbers: int, producer: Producer | None = None) -> None:
    for number in numbers:
        billing.say({"account": "a", "cents": number}, ident=str(number), producer=producer)


def test_a_kill_before_or_after_the_commit_loses_and_doubles_nothing(
    billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = billing.settings
    left = Counter[Point]({"messages written": 2, "messages received": 2})

    def end(point: Point) -> None:
        if left[point] > 0:
            left[point] -= 1
            raise SystemError("this process is killed here")

    with handler(world), agent(world):
        send(world, open_account("a"), open_account("once"))
        say(billing, 1, 2, 3)
        monkeypatch.setattr(faultpoints, "hook", end)
        with running(billing, BY_PLACE, BY_ID):
            until(lambda: left.total() == 0, "each kill has taken effect")
            say(billing, 4, 4, 5)
            all_done(billing)
    found = effects(world)
    assert found["a"] == Counter({1: 1, 2: 1, 3: 1, 4: 2, 5: 1})
    assert found["once"] == each_once(1, 2, 3, 4, 5)


def test_a_restored_database_receives_again_and_nothing_has_a_second_effect(billing: Billing, stack: Stack) -> None:
    world = billing.settings
    name = scalar(world, "select current_database()")
    with handler(world), agent(world), running(billing, BY_PLACE, BY_ID):
        send(world, open_account("a"), open_account("once"))
        say(billing, 1, 2, 3)
        all_done(billing)
    with psycopg.connect(stack.postgres.url(), autocommit=True) as db:
        db.execute(f'create database "{name}_copy" template "{name}"'.encode())
    with handler(world), agent(world), running(billing, BY_PLACE, BY_ID):
        say(billing, 4, 5, 1)
        all_done(billing)
        before = len(commits(world))
    lose(stack, world, f"{name}_copy")
    assert received(world) == 3
    with handler(world), agent(world), running(billing, BY_PLACE, BY_ID):
        say(billing, 6, 5)
        all_done(billing)
    found = effects(world)
    assert found["a"] == Counter({1: 2, 2: 1, 3: 1, 4: 1, 5: 2, 6: 1})
    assert found["once"] == each_once(1, 2, 3, 4, 5, 6)
    assert len(commits(world)) == before + 3, "by place two, by id one"


def test_what_the_producer_aborts_has_no_effect(billing: Billing) -> None:
    world = billing.settings
    producer = Producer({"bootstrap.servers": world.kafka, "transactional.id": billing.topic})
    producer.init_transactions(DEADLINE_S)
    with handler(world), agent(world), running(billing, BY_PLACE):
        send(world, open_account("a"))
        say(billing, 1)
        producer.begin_transaction()
        say(billing, 2, producer=producer)
        say(billing, 3)
        until(lambda: effects(world)["a"][1], "what comes before an open transaction is received")
        producer.abort_transaction(DEADLINE_S)
        producer.begin_transaction()
        say(billing, 4, producer=producer)
        producer.commit_transaction(DEADLINE_S)
        say(billing, 5)
        all_done(billing, "from_billing")
    assert effects(world)["a"] == each_once(1, 3, 4, 5)


class Frozen:
    """A receive that stands still at a message: what it has in hand is not written yet."""

    def __init__(self, cents: int = 1) -> None:
        self.cents = cents
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def policy(self) -> Policy:
        def receive(message: Paid, at: Received) -> Iterable[Send]:
            if message.cents >= self.cents:
                self.has_begun.set()
                self.goes_on.wait(DEADLINE_S)
            yield Send("accounts/a", Deposit(cents=message.cents, on=DAY))

        return source(receive=receive)


def test_of_two_receivers_of_a_partition_one_counts(billing: Billing) -> None:
    """The other one stood still while its partition was given away, and wakes with old messages in hand."""
    world, frozen = billing.settings, Frozen(2)
    other = Receiver(world, frozen.policy(), "other", lambda: {0, 1, 2})
    with handler(world), agent(world):
        send(world, open_account("a"))
        say(billing, 1)
        with beside(other.run, other.stop, "the other receiver"):
            all_received(billing)  # of one process, only one source at a time begins
            say(billing, 2)
            until(frozen.has_begun.is_set, "it has messages in hand")
            with running(billing, BY_PLACE):
                say(billing, 3)
                all_done(billing, "from_billing")
                frozen.goes_on.set()
                say(billing, 4)
                all_done(billing, "from_billing")
        assert open_wishes(world) == 0
    assert effects(world)["a"] == each_once(1, 2, 3, 4)


@pytest.mark.slow
def test_an_attempt_that_was_fenced_stays_noted(billing: Billing, caplog: pytest.LogCaptureFixture) -> None:
    """The other process may be one that the message has not ended yet."""
    world, frozen = billing.settings, Frozen()
    one = Receiver(world, frozen.policy(), "p1", lambda: {0})
    say(billing, 1)
    with caplog.at_level("INFO"), beside(one.run, one.stop, "the receiver"):
        until(frozen.has_begun.is_set, "it has the message in hand")
        with connect(world, "the other process") as db:
            db.execute("update source_positions set next_offset = next_offset + 1")
        frozen.goes_on.set()
        until(lambda: "a batch was fenced" in caplog.text, "it is fenced")
    assert scalar(world, "select attempt is not null from source_positions where partition = 0")


@pytest.mark.slow
def test_what_a_process_began_with_and_did_not_end_is_tried_one_by_one_and_fetched_once(
    billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, assign, assigned, points = billing.settings, clients.assign, Counter[str](), Counter[Point]()
    first, second = (Receiver(world, BY_PLACE, "p1", lambda: {0}) for _ in range(2))
    with beside(first.run, first.stop, "a receiver"):
        until(lambda: scalar(world, "select count(*) from source_positions") == 1, "it has begun")
    numbers = range(1, 31)
    say(billing, *numbers)
    with connect(world, "as if it had been killed") as db:
        attempt = Json([0, len(numbers) - 1, 1, code_of_authors()])
        db.execute("update source_positions set attempt = %s", [attempt])

    def counted(consumer: Consumer, partitions: list[TopicPartition]) -> None:
        assigned.update(one.topic for one in partitions)
        assign(consumer, partitions)

    monkeypatch.setattr(clients, "assign", counted)
    monkeypatch.setattr(faultpoints, "hook", lambda point: points.update([point]))
    with beside(second.run, second.stop, "the next one"):
        all_received(billing)
    assert points["messages received"] == len(numbers)
    assert assigned[billing.topic] == 1


@pytest.mark.slow
def test_a_receiver_that_looks_while_another_one_writes_the_first_position_goes_on_from_it(billing: Billing) -> None:
    world = billing.settings
    waits = "select count(*) from pg_locks where not granted"
    with handler(world), agent(world):
        send(world, open_account("a"))
        say(billing, 1, 2)
        with running(billing, BY_PLACE):
            all_done(billing, "from_billing")
        with connect(world, "the other receiver") as db:
            [row] = db.execute("delete from source_positions where partition = 0 returning *").fetchall()
            with running(billing, BY_PLACE):
                with db.transaction():
                    db.execute("insert into source_positions values (%s, %s, %s, %s, %s)", row[:5])
                    until(lambda: scalar(world, waits), "it waits for the other one")
                say(billing, 3)
                all_done(billing, "from_billing")
    assert effects(world)["a"] == each_once(1, 2, 3)


def test_a_switch_fences_what_the_version_before_has_in_hand(billing: Billing) -> None:
    world, frozen = billing.settings, Frozen()
    second = source(VERSION=2, receive=receive_later)
    with handler(world), agent(world):
        send(world, open_account("a"), open_account("later"))
        with running(billing, frozen.policy()):
            say(billing, 1)
            until(frozen.has_begun.is_set, "the first version has the message in hand")
            switch(world, second)
            frozen.goes_on.set()
        with running(billing, second):
            say(billing, 2)
            all_done(billing, "from_billing")
    found = effects(world)
    assert (found["a"], found["later"]) == (each_once(), each_once(1, 2))
