"""make test + test-all: what another service says, by its topic.

Messages are received once in effect, whatever they look like, and however often positions, topics and code change."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from datetime import UTC, date, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import NewPartitions, NewTopic

from commands.append import produce
from domain.accounts import ChargeFee, Deposit, Withdraw
from domain.language import Cents, Text
from infra.database.connect import connect
from infra.log import clients, topics
from infra.log.records import Headers, encode
from infra.log.source import read_held
from infra.log.topics import TopicMissing
from infra.observability.metrics import REGISTRY
from infra.observability.tracing import traceparent
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings, Source
from policies.engine import Received, Send, activations, message, policy, receiver, relay
from policies.engine.activations import Messages, SourceLostItsEnd, SourceRenamed, begin_of, remove, reposition, switch
from policies.engine.operate import Which, retry, wishes
from policies.engine.policy import Policy, policy_of
from policies.engine.process import Policies
from policies.engine.receiver import Receiver, SourceRecreated, SourceTrimmed
from tests.engine.api.api import agent, in_a_loop
from tests.engine.policies.publishers import publisher
from tests.engine.policies.test_policies import FORWARD, balance, open_wishes
from tests.engine.spine import (
    beside,
    commits,
    delete,
    deposit,
    handler,
    in_a_transaction,
    open_account,
    scalar,
    send,
    set_up,
)
from tools.dev.stack import Stack
from tools.testing.fixtures import world_of
from tools.testing.waiting import until

DAY = date(2026, 1, 1)


@message("paid.v1")
class Paid:
    account: Text
    cents: Cents


@message("reversed.v1")
class Reversed:
    account: Text


def receive(message: Paid | Reversed, at: Received) -> Iterable[Send]:
    if isinstance(message, Paid):
        yield Send(f"accounts/{message.account}", Deposit(cents=message.cents, on=DAY))


def source(name: str = "from_billing", **parts: Any) -> Policy:
    """The policy that a module with these parts declares."""
    module = ModuleType(f"policies.{name}")
    vars(module).update({"VERSION": 1, "SOURCE": "billing", "receive": receive} | parts)
    return policy_of(module)


class Billing:
    """The other service: a topic with three partitions, of which a test writes what it wants."""

    def __init__(self, world: Settings, **setting: Any) -> None:
        self.topic = world.events_topic.replace("events", "billing")
        self.settings = world.model_copy(update={"sources": {"billing": Source(topic=self.topic, **setting)}})
        self.make()
        self.producer = clients.producer(world)

    def make(self, partitions: int = 3) -> None:
        new = NewTopic(
            self.topic, partitions, 1, config={"retention.ms": "-1", "message.timestamp.after.max.ms": f"{2**63 - 1}"}
        )
        admin = clients.admin(self.settings)
        [made] = admin.create_topics([new]).values()
        made.result(60)

    def say(
        self,
        body: Any,
        kind: str = "paid.v1",
        *,
        partition: int = 0,
        ident: str | None = None,
        producer: Producer | None = None,
    ) -> None:
        event = {"specversion": "1.0", "id": ident or "1", "source": "/billing", "type": kind, "data": body}
        self.write(json.dumps(event).encode(), {"content-type": "application/cloudevents+json"}, partition, producer)

    def write(
        self,
        value: bytes | None,
        headers: Mapping[str, str] | None = None,
        partition: int = 0,
        producer: Producer | None = None,
        key: bytes | None = None,
    ) -> None:
        to, told = producer or self.producer, list[KafkaError | None]()

        def is_there() -> bool:  # a producer that knows the topic's former self gives up its first record
            report = {"on_delivery": lambda error, _: told.append(error)}
            to.produce(self.topic, value, key, partition, headers=list((headers or {}).items()), **report)
            to.flush()
            return told[-1] is None

        until(is_there, "the topic has the message")

    def end(self) -> int:
        return sum(topics.describe(self.settings, self.topic).end.values())


@pytest.fixture
def billing(world: Settings) -> Billing:
    set_up(world)
    return Billing(world)


@contextmanager
def running(billing: Billing, *policies: Policy, name: str = "p1") -> Iterator[Policies]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(activations, "discover", lambda: {one.name: one for one in policies})
        with in_a_loop(lambda: Policies(billing.settings, policies, name), name) as process:
            yield process


def received(world: Settings, name: str = "from_billing") -> int:
    count: int = scalar(world, "select coalesce(sum(next_offset), 0) from source_positions where policy = %s", name)
    return count


def dead(world: Settings) -> list[str]:
    with connect(world, "test") as db:
        return [why for (why,) in db.execute("select dead from outbox where dead is not null order by version, number")]


def is_stopped(partition: str) -> float | None:
    return REGISTRY.get_sample_value("samefold_source_stopped", {"policy": "from_billing", "partition": partition})


def test_a_defect_that_ends_a_source_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(receiver, "session", fails)
    with pytest.raises(ZeroDivisionError):
        Receiver(Settings(), source(), "p1", frozenset).run()
    assert is_stopped("all") == 1


def all_received(billing: Billing, name: str = "from_billing") -> None:
    until(lambda: received(billing.settings, name) == billing.end(), "all messages are received")


def test_a_message_is_received_once_in_effect(billing: Billing, caplog: pytest.LogCaptureFixture) -> None:
    world = billing.settings
    with running(billing, source()), handler(world), agent(world):
        send(world, open_account("a"))
        for number in range(29):
            billing.say({"account": "a", "cents": 1 + number, "unknown": None}, partition=number % 3, ident=str(number))
        in_a_transaction(world, billing.topic, 1, None, b'{"type": "paid.v1", "data": {"account": "a", "cents": 30}}')
        billing.say({"account": "a"}, "reversed.v1")
        billing.say({"account": "a", "cents": 10**6}, "another.v1")
        for _ in range(2):
            billing.write(b'{"type": "paid.v1", "data": {"account": "a", "cents": 9}}', {"samefold-hook": "renamed"})
        until(lambda: balance(world, "a") == sum(range(1, 31)), "all is paid")
        all_received(billing)
        until(lambda: open_wishes(world) == 0, "no wish is left")
    assert len({one.command_id for one in commits(world)}) == len(commits(world)) == 31
    assert caplog.text.count("webhooks are passed over") == 1


@pytest.mark.slow
def test_a_message_that_can_not_be_received_is_a_dead_letter_with_its_place(
    billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And holds up nothing. Once the code can, it is received."""
    world, good = billing.settings, {"account": "a", "cents": 1}
    binary = {
        "ce_specversion": "1.0",
        "ce_type": "paid.v1",
        "ce_id": "9",
        "ce_source": "/x",
        "content-type": "application/json",
    }
    with running(billing, source()), handler(world), agent(world):
        send(world, open_account("a"))
        billing.write(b"\xff\x00 secret-value", {"content-type": "application/cloudevents+json"})
        billing.write(b'{"specversion": "1.0"}', {"content-type": "application/cloudevents+json"})
        billing.write(b"[" * 100_000)
        billing.write(b'{"cents": 1}')
        billing.say({"account": "a", "cents": "secret-value"})
        billing.say({"account": "a\n", "cents": 1})
        billing.say({"account": "a", "cents": 1, "more": "x" * 900_000})
        billing.write(json.dumps(good).encode(), binary, key=b"\xff")
        billing.write(json.dumps({"type": "paid.v1", "data": good}).encode())
        billing.write(None, key=b"a")
        billing.say({}, "unknown.v1")
        billing.say({"account": "ä" * 150, "cents": 1})
        all_received(billing)
        until(lambda: balance(world, "a") == 3, "what is good is received")
        found = dead(world)
        assert [why.partition(":")[0] for why in found] == ["bad-message"] * 6 + ["invalid-wish"]
        assert not any("secret-value" in why for why in found)
        total, listed = wishes(world, Which(policy="from_billing"))
        places = {(one.stream, one.version) for one in listed if one.kind == "message"}
        assert (total, places) == (7, {(f"{billing.topic}/0", offset) for offset in range(6)})

        refused, repaired = dict[str, str](), list[bool]()

        @message("paid.v1")
        class Lenient:
            account: Text
            cents: Cents | str

        def receive_any(message: Lenient, at: Received) -> Iterable[Send]:
            if at.offset == 4 and not repaired:
                raise ValueError
            yield Send("accounts/a", Deposit(cents=100, on=DAY))

        receive_any.__annotations__ = {"message": Lenient}
        monkeypatch.setattr(policy, "discover", lambda: {"from_billing": source(receive=receive_any)})
        assert retry(world, Which(policy="from_billing"), refused=refused.__setitem__) == (0, 7)
        assert len(refused) == 6
        assert [why for why in refused.values() if "ValueError at policies/from_billing.py" in why]
        repaired.append(True)
        assert retry(world, Which(policy="from_billing")) == (1, 6)
        until(lambda: balance(world, "a") == 103, "it is received")
    assert len(dead(world)) == 6


@pytest.mark.slow
def test_a_dead_message_that_was_compacted_away_can_only_be_dropped(
    billing: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "discover", lambda: {"from_billing": source()})
    monkeypatch.setattr(receiver, "read_held", lambda *_, **__: iter([([], 1)]))  # as a compacted topic is read
    refused: dict[str, str] = {}
    with running(billing, source()):
        billing.write(b"no json")
        all_received(billing)
        assert retry(billing.settings, Which(policy="from_billing"), refused=refused.__setitem__) == (0, 1)
    assert [*refused.values()] == [f"{billing.topic}[0] does not hold it any more"]


@pytest.mark.slow
def test_a_source_begins_where_its_setting_says(world: Settings) -> None:
    set_up(world)
    billing = Billing(world)
    for number in range(3):
        billing.say({"account": "a", "cents": 1}, partition=number, ident=f"{number}")
    later = topics.describe(world, billing.topic)
    moment = "2100-01-01T00:00:00Z"
    begins = {"earliest": (0, 0, 0), "end": (1, 1, 1), moment: (1, 1, 1), "1999-01-01T00:00:00Z": (0, 0, 0)}
    found = source().source
    assert found is not None
    for begin, offsets in begins.items():
        settings = world.model_copy(update={"sources": {"billing": Source(topic=billing.topic, begin=begin)}})
        assert begin_of(settings, found) == Messages(later.id, dict(enumerate(offsets)))


@pytest.mark.slow
def test_a_begin_is_decided_once(world: Settings) -> None:
    set_up(world)
    billing = Billing(world, begin="end")
    billing.say({"account": "a", "cents": 1})
    with running(billing, source()), handler(world), agent(world):
        all_received_from_the_end = "select count(*) from source_positions where next_offset = 1"
        until(lambda: scalar(world, all_received_from_the_end) == 1, "it has begun")
    earliest = Source(topic=billing.topic, begin="earliest")
    billing.settings = world.model_copy(update={"sources": {"billing": earliest}})
    with running(billing, source()), handler(world), agent(world):
        send(world, open_account("a"))
        billing.say({"account": "a", "cents": 10})
        until(lambda: balance(world, "a") == 10, "what came later is received")


@pytest.mark.slow
def test_a_repeated_message_leads_to_nothing_where_its_id_counts(billing: Billing) -> None:
    world = billing.settings
    with running(billing, source(DEDUP="id")), handler(world), agent(world):
        send(world, open_account("a"))
        for number in range(30):
            billing.say({"account": "a", "cents": 1 + number % 10}, partition=number % 3, ident=str(number % 10))
        billing.write(json.dumps({"type": "paid.v1", "data": {"account": "a", "cents": 1}}).encode())
        all_received(billing)
        until(lambda: balance(world, "a") == sum(range(1, 11)), "each is paid once")
        until(lambda: open_wishes(world) == 1, "no wish is left")
        assert [why.partition(":")[0] for why in dead(world)] == ["bad-message"], "it has no id of its own"
    assert len(commits(world)) == 11


@pytest.mark.slow
def test_what_follows_goes_to_the_stream_that_the_command_went_to(billing: Billing) -> None:
    world = billing.settings

    def charge(message: Paid, at: Received) -> Iterable[Send]:
        yield Send(
            f"accounts/{message.account}", Withdraw(cents=message.cents, on=DAY), otherwise=ChargeFee(cents=1, on=DAY)
        )

    with running(billing, source(receive=charge)), handler(world), agent(world):
        send(world, open_account("a"), deposit("a", "d", 10))
        billing.say({"account": "a", "cents": 4})
        billing.say({"account": "a", "cents": 7})
        until(lambda: balance(world, "a") == 5, "the second one was refused, and cost a fee")
        until(lambda: open_wishes(world) == 0, "no wish is left")


@pytest.mark.slow
def test_a_source_that_fails_at_a_message_stops_there_alone(billing: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "AGAIN_S", 0.1)
    world, seen = billing.settings, list[float | None]()

    def fails(message: Paid, at: Received) -> Iterable[Send]:
        if message.cents == 13:
            seen.append(is_stopped("1"))
            raise ZeroDivisionError("secret-value")
        yield from receive(message, at)

    def said() -> None:
        for partition, cents in enumerate((1, 10, 100)):
            billing.say({"account": "a", "cents": 13 if cents == 10 else cents}, partition=partition)
            billing.say({"account": "a", "cents": cents}, partition=partition)

    with running(billing, source(receive=fails)), handler(world), agent(world):
        send(world, open_account("a"))
        said()
        until(lambda: balance(world, "a") == 202, "the other partitions go on")
        until(lambda: len(seen) > 4, "it is tried again and again")
        assert {*seen[2:]} == {1}, "an alert can wait for it"
        assert received(world) == billing.end() - 2
    with running(billing, source(receive=fails, ON_POISON="park")), handler(world), agent(world):
        until(lambda: balance(world, "a") == 212, "the partition goes on")
        until(lambda: is_stopped("1") == 0, "it says so")
        assert [why.partition(":")[0] for why in dead(world)] == ["bad-message"]
        assert "secret-value" not in dead(world)[0]


@pytest.mark.slow
def test_each_message_belongs_to_the_version_in_force_at_its_place(billing: Billing) -> None:
    world = billing.settings

    def tenfold(message: Paid, at: Received) -> Iterable[Send]:
        yield Send(f"accounts/{message.account}", Deposit(cents=10 * message.cents, on=DAY))

    second = source(VERSION=2, receive=tenfold)
    with handler(world), agent(world):
        send(world, open_account("a"))
        with running(billing, source()):
            billing.say({"account": "a", "cents": 1})
            until(lambda: balance(world, "a") == 1, "the first version receives")
            with running(billing, second, name="p2"):
                switch(billing.settings, second)
                for partition in range(3):
                    billing.say({"account": "a", "cents": 1}, partition=partition)
                until(lambda: balance(world, "a") == 31, "the second version receives")
                until(lambda: open_wishes(world) == 0, "no wish is left")
        remove(billing.settings, "from_billing")
        billing.say({"account": "a", "cents": 500})
        with running(billing, second):
            switch(billing.settings, second)
            all_received(billing)
            until(lambda: balance(world, "a") == 5_031, "it goes on where it was")


@pytest.mark.slow
def test_a_process_receives_the_partitions_that_it_has_of_the_log(billing: Billing) -> None:
    world, own = billing.settings, {0}
    one = Receiver(world, source(), "p1", lambda: frozenset(own))
    positions = "select count(*) from source_positions where partition = %s and next_offset = %s"

    def is_at(partition: int, offset: int) -> bool:
        return bool(scalar(world, positions, partition, offset))

    for partition in range(3):
        billing.say({"account": "a", "cents": 1}, partition=partition)
    with beside(one.run, one.stop, "the receiver"):
        until(lambda: is_at(0, 1), "its own is received")
        own ^= {0, 1}
        until(lambda: is_at(1, 1), "that which it got is received")
        for partition in range(3):
            billing.say({"account": "a", "cents": 1}, partition=partition, ident="2")
        until(lambda: is_at(1, 2), "that is received on")
    assert is_at(0, 1)
    assert not is_at(2, 1)


@pytest.mark.slow
def test_a_process_without_the_setting_leaves_its_share_to_the_others(
    billing: Billing, caplog: pytest.LogCaptureFixture
) -> None:
    without = billing.settings.model_copy(update={"sources": {}})
    with running(billing, source()):
        billing.say({"account": "a", "cents": 1})
        all_received(billing)
        with in_a_loop(lambda: Policies(without, [source()], "p2"), "p2"):
            until(lambda: "policy from_billing: not-configured" in caplog.text, "its agent does not begin")
            for partition in range(3):
                billing.say({"account": "a", "cents": 1}, partition=partition)
            all_received(billing)


@pytest.mark.slow
def test_what_another_process_has_received_meanwhile_is_no_end_that_was_lost(
    billing: Billing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world, describe, asked = billing.settings, topics.describe, Counter[bool]()
    one = Receiver(world, source(), "p1", lambda: {0})

    def behind(*arguments: Any, **named: Any) -> topics.Topic:
        found = describe(*arguments, **named)
        is_receiver = threading.current_thread() is not threading.main_thread() and found.name == billing.topic
        asked[is_receiver] += 1
        if is_receiver and asked[True] == 3:  # where it looks, after it has begun
            billing.say({"account": "a", "cents": 1})
            with connect(world, "the other process") as db:
                db.execute("insert into source_positions values ('from_billing', 0, %s, 1, 1)", [found.id])
        return found

    with monkeypatch.context() as patched:
        patched.setattr(topics, "describe", behind)
        with beside(one.run, one.stop, "the receiver"):
            until(lambda: asked[True] > 3, "it has looked")
            billing.say({"account": "a", "cents": 1}, ident="2")
            until(lambda: received(world) == 2, "it goes on from there")
    assert "source-trimmed" not in caplog.text


@pytest.mark.slow
def test_more_partitions_are_taken_up(billing: Billing) -> None:
    world = billing.settings
    with running(billing, source()), handler(world), agent(world):
        send(world, open_account("a"))
        billing.say({"account": "a", "cents": 1})
        until(lambda: balance(world, "a") == 1, "it receives")
        admin = clients.admin(world)
        [done] = admin.create_partitions([NewPartitions(billing.topic, 5)]).values()
        done.result(60)
        until(lambda: topics.describe(world, billing.topic).partitions == 5, "the broker has them")
        billing.say({"account": "a", "cents": 10}, partition=4, producer=clients.producer(world))
        until(lambda: balance(world, "a") == 11, "the first message of a new partition is received")


@pytest.mark.slow
def test_a_topic_that_was_trimmed_or_made_anew_is_named_and_nothing_is_passed_over(
    billing: Billing, caplog: pytest.LogCaptureFixture
) -> None:
    world = billing.settings
    with handler(world), agent(world):
        send(world, open_account("a"))
        with running(billing, source()):
            billing.say({"account": "a", "cents": 1})
            until(lambda: balance(world, "a") == 1, "it receives")
        for _ in range(3):
            billing.say({"account": "a", "cents": 10})
        delete(world, billing.topic, {0: 3})
        with running(billing, source()):
            until(lambda: SourceTrimmed.code in caplog.text, "it says what is lost")
            assert balance(world, "a") == 1
            reposition(billing.settings, source(), "earliest")
            until(lambda: balance(world, "a") == 11, "it goes on with what there is")
            billing.say({"account": "a", "cents": 100})
            until(lambda: balance(world, "a") == 111, "it receives again")
        caplog.clear()
        with connect(world, "test") as db:  # as in a database from before
            db.execute("update source_positions set next_offset = 1, activation = 1 where partition = 0")
        with running(billing, source()):
            all_received(billing)
        assert SourceTrimmed.code not in caplog.text
        admin = clients.admin(world)
        [gone] = admin.delete_topics([billing.topic]).values()
        gone.result(60)
        until(lambda: billing.topic not in admin.list_topics(timeout=10).topics, "it is deleted")
        billing.make()
        billing.say({"account": "a", "cents": 1_000})
        with running(billing, source()):
            until(lambda: SourceRecreated.code in caplog.text, "it says that it is another topic")
            assert balance(world, "a") == 111
            reposition(billing.settings, source(), "earliest")
            until(lambda: balance(world, "a") == 1_111, "it receives the new topic")


@pytest.mark.slow
def test_a_source_that_is_moved_receives_nothing_twice(billing: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    """While messages come, and by another topic back to the first one."""
    world, first, asked = billing.settings, billing.topic, topics.describe
    left = [first]

    def with_a_message_after_it(settings: Settings, name: str, **options: Any) -> topics.Topic:
        found = asked(settings, name, **options)
        if name in left:
            left.remove(name)
            billing.say({"account": "a", "cents": 10})
            until(lambda: balance(world, "a") == 11, "it is received")
        return found

    with handler(world), agent(world):
        send(world, open_account("a"))
        with running(billing, source()):
            billing.say({"account": "a", "cents": 1})
            until(lambda: balance(world, "a") == 1, "it receives")
            with monkeypatch.context() as patched:
                patched.setattr(topics, "describe", with_a_message_after_it)
                reposition(world, source(), "earliest")
            assert not left
            until(lambda: open_wishes(world) == 0, "no wish is left")
        billing.topic = f"{first}-other"
        billing.make()
        other = world.model_copy(update={"sources": {"billing": Source(topic=billing.topic)}})
        reposition(other, source(), "earliest")
        billing.topic = first
        assert reposition(world, source(), "earliest").messages == Messages(asked(world, first).id, {0: 2, 1: 0, 2: 0})
        with running(billing, source()):
            billing.say({"account": "a", "cents": 100})
            until(lambda: balance(world, "a") == 111, "it goes on where it was")
            until(lambda: open_wishes(world) == 0, "no wish is left")
        remove(world, "from_billing")
        switch(other, source())
        remove(other, "from_billing")
        switch(world, source())
        with running(billing, source()):
            billing.say({"account": "a", "cents": 1_000})
            until(lambda: balance(world, "a") == 1_111, "it goes on where it was")
            until(lambda: open_wishes(world) == 0, "no wish is left")
        ends, point = asked(world, first).end, "activation written"
        with monkeypatch.context() as patched:
            patched.setattr(faultpoints, "hook", lambda at: {}[at] if at == point else None)  # a kill
            with pytest.raises(KeyError, match=point):
                reposition(world, source(), "earliest")
        billing.say({"account": "a", "cents": 1})
        assert reposition(world, source(), "end").messages == Messages(asked(world, first).id, ends | {0: ends[0] + 1})
        with connect(world, "test") as db:  # the topic has lost its end
            db.execute("update source_positions set next_offset = 9 where partition = 0")
        with pytest.raises(SourceLostItsEnd):
            reposition(world, source(), "earliest")


@pytest.mark.slow
def test_a_source_whose_file_was_renamed_receives_nothing_again(
    billing: Billing, caplog: pytest.LogCaptureFixture
) -> None:
    world, renamed = billing.settings, source("from_cards")
    with handler(world), agent(world):
        send(world, open_account("a"))
        billing.say({"account": "a", "cents": 1})
        with running(billing, source()):
            until(lambda: balance(world, "a") == 1, "it receives")
            until(lambda: open_wishes(world) == 0, "no wish is left")
        with running(billing, renamed):
            until(lambda: SourceRenamed.code in caplog.text, "it says what was renamed")
            with pytest.raises(SourceRenamed, match="'from_billing'"):
                switch(world, renamed)
            assert balance(world, "a") == 1
            remove(world, "from_billing")
            until(lambda: balance(world, "a") == 2, "it is another source")


@pytest.mark.slow
def test_the_mark_of_a_transaction_is_no_message_that_waits_or_is_missing(
    billing: Billing, caplog: pytest.LogCaptureFixture
) -> None:
    world = billing.settings
    producer = Producer({"bootstrap.servers": world.kafka, "transactional.id": billing.topic})
    producer.init_transactions(60)
    with handler(world), agent(world):
        send(world, open_account("a"))
        with running(billing, source()):
            producer.begin_transaction()
            billing.say({"account": "a", "cents": 1}, producer=producer)
            producer.commit_transaction(60)
            until(lambda: balance(world, "a") == 1, "it is received")
            all_received(billing)
        delete(world, billing.topic, {0: billing.end()})
        with running(billing, source()):
            billing.say({"account": "a", "cents": 10})
            until(lambda: balance(world, "a") == 11, "the next one is received")
    assert SourceTrimmed.code not in caplog.text


@pytest.mark.slow
def test_a_topic_that_is_missing_is_named_with_its_kafka(stack: Stack) -> None:
    """It is not this service's, so `samefold topics --create` does not make it."""
    there = Source(topic="public", bootstrap=stack.kafka.bootstrap)
    found = source().source
    assert found is not None
    with pytest.raises(TopicMissing) as missing:
        begin_of(Settings(kafka_bootstrap="127.0.0.1:1", sources={"billing": there}), found)
    assert missing.value.message == f"There is no topic 'public' in the Kafka at {stack.kafka.bootstrap}."
    assert "the other team" in missing.value.hint


@pytest.mark.slow
def test_another_kafka_that_is_away_holds_up_no_policy(world: Settings) -> None:
    set_up(world)
    settings = world.model_copy(update={"sources": {"billing": Source(topic="t", bootstrap="127.0.0.1:1")}})
    with in_a_loop(lambda: Policies(settings, [FORWARD, source()], "p1"), "p1"), handler(world), agent(world):
        until(lambda: scalar(world, "select count(*) from positions where agent = 'policy_forward'") > 0, "it is live")
        send(world, open_account("1"), open_account("2"), deposit("1", "d", 7))
        until(lambda: (balance(world, "1"), balance(world, "2")) == (0, 7), "the policy reacts")


@message("money-deposited.v1")
class Deposited:
    account: Text
    cents: Cents


def mirror(message: Deposited, at: Received) -> Iterable[Send]:
    yield Send(f"accounts/{message.account}", Deposit(cents=message.cents, on=DAY))


@pytest.mark.slow
def test_what_one_service_publishes_another_receives_in_the_same_conversation(
    world: Settings, stack: Stack, migrated: str, tmp_path: Path
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    set_up(world)
    with world_of(stack, migrated) as other:
        set_up(other)
        there = Source(topic=world.public_topic, bootstrap=world.kafka)
        second = other.model_copy(update={"sources": {"bank": there}})
        with (
            publisher(world, tmp_path),
            handler(world),
            agent(world),
            handler(second, "h2"),
            agent(second, "a2"),
            in_a_loop(lambda: Policies(second, [source(SOURCE="bank", receive=mirror)], "p2"), "p2"),
        ):
            send(world, open_account("a"))
            send(second, open_account("a"))
            command = msgspec.structs.replace(deposit("a", "d", 7), correlation_id="order-1")
            topic = topics.describe(world, world.commands_topic)
            producer = clients.producer(world)
            produce(producer, topic, command, encode(command), lambda *_: None, [("traceparent", trace.encode())])
            producer.flush(60)
            until(lambda: balance(second, "a") == 7, "the other service has it")
        [commit] = [one for one in commits(second) if one.command_id.startswith("from_billing~")]
        assert (commit.correlation_id, commit.causation_id) == (
            "order-1",
            f"/{world.group_prefix}/accounts accounts/a@2",
        )
        assert commit.depth == 1
        assert trace.split("-")[1] in {kept.split("-")[1] for kept in traces_of(second)}


def traces_of(world: Settings) -> list[str]:
    """The `traceparent` of each commit that has one."""
    topic, headers = topics.describe(world, world.events_topic), dict[int, Headers]()
    found = []
    for partition, end in topic.end.items():
        list(read_held(world, topic.name, partition, 0, end, headers=headers))
        found += [trace for one in headers.values() if (trace := traceparent(one))]
        headers.clear()
    return found


@pytest.mark.slow
def test_a_backlog_fills_neither_the_outbox_nor_the_topic_of_commands(
    billing: Billing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Commands that clients repeat, which get no commit, are not taken for undecided ones."""
    monkeypatch.setattr(receiver, "MOST_UNSENT", 60)
    monkeypatch.setattr(relay, "MOST_UNDECIDED", 30)
    monkeypatch.setattr(relay, "LONG_S", 0)
    monkeypatch.setattr(relay, "MOST", 10)
    billing.settings = world = billing.settings.model_copy(update={"batch": 20})
    event = {"specversion": "1.0", "id": "1", "source": "/x", "type": "paid.v1", "data": {"account": "a", "cents": 1}}
    for number in range(600):
        headers = [("content-type", "application/cloudevents+json")]
        billing.producer.produce(billing.topic, json.dumps(event).encode(), partition=number % 3, headers=headers)
    billing.producer.flush(60)
    most_unsent = most_undecided = 0

    def is_done() -> bool:
        nonlocal most_unsent, most_undecided
        most_unsent = max(most_unsent, scalar(world, "select count(*) from outbox where sent_at is null"))
        decided = scalar(world, "select coalesce(sum(command_offset + 1), 0) from positions where agent = 'core'")
        ends = topics.describe(world, world.commands_topic).end.values()
        most_undecided = max(most_undecided, sum(ends) - decided)
        return balance(world, "a") == 600

    send(world, open_account("a"))
    with running(billing, source()), agent(world):
        until(lambda: is_done() or most_unsent >= 60, "the outbox is full")
        until(lambda: "of its commands are not decided" in caplog.text, "it says that it waits")
        with handler(world):
            until(is_done, "all is received in the end")
            send(world, *[deposit("a", "d", 7)] * 100)
            billing.say({"account": "a", "cents": 1})
            until(lambda: balance(world, "a") == 608, "a message is received after them")
    # a command is unsent until it is marked, a second after its acknowledgement
    assert most_unsent <= 60 + 20 + 30 + 2 * 10
    assert most_undecided <= 1 + 30 + 2 * 10


@message("order.v1")
class Order:
    stream: str
    prices: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stream == "raises":
            raise KeyError("secret-value")


def obey(message: Order, at: Received) -> Iterable[Send]:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    yield Send(message.stream, Deposit(cents=1, on=DAY), due=past, otherwise=ChargeFee(cents=1, on=DAY))


@pytest.mark.slow
def test_odd_values_of_another_team_end_nothing(billing: Billing) -> None:
    """They can't be stored, are no times, or fail in a check: dead letters, and the next message is received."""
    world = billing.settings
    with running(billing, source(receive=obey)), handler(world), agent(world):
        send(world, open_account("a"))
        for odd in ({"stream": "accounts/\0"}, {"stream": "raises"}, {"stream": "accounts/a", "prices": {"\0": "x"}}):
            billing.say(odd, "order.v1")
        traced = {"type": "order.v1", "data": {"stream": "accounts/a"}}
        billing.write(json.dumps(traced).encode(), {"traceparent": "00-\0-1-1"})
        for timestamp in (1, 2**62):
            event = {"specversion": "1.0", "id": "1", "source": "/x", **traced}
            billing.producer.produce(billing.topic, json.dumps(event).encode(), partition=0, timestamp=timestamp)
        billing.producer.flush(60)
        until(lambda: balance(world, "a") == 3, "what is good is received")
        all_received(billing)
        found = dead(world)
    assert [why.partition(":")[0] for why in found] == ["invalid-wish", "bad-message", "bad-message"]
    assert not any("secret-value" in why for why in found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("MOST_WISHES_AT_ONCE", 20), ("WORK_S", 0.0)])
def test_many_wishes_or_much_work_of_many_messages_are_several_transactions(
    billing: Billing, monkeypatch: pytest.MonkeyPatch, name: str, most: float
) -> None:
    monkeypatch.setattr(receiver, name, most)
    points = Counter[Point]()
    monkeypatch.setattr(faultpoints, "hook", lambda point: points.update([point]))
    world = billing.settings

    def ten(message: Paid, at: Received) -> Iterable[Send]:
        for _ in range(10):
            yield from receive(message, at)

    send(world, open_account("a"))
    for number in range(45):
        billing.say({"account": "a", "cents": 1}, partition=number % 3)
    with running(billing, source(receive=ten)), handler(world), agent(world):
        until(lambda: balance(world, "a") == 450, "all is paid")
        all_received(billing)
    assert points["messages received"] >= 450 / 20
