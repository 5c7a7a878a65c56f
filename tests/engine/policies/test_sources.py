"""make test + test-all: what another service says, by its topic.

Messages are received once in effect, whatever they look like, and however often positions, topics and code change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from types import ModuleType
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

from domain.accounts import Deposit
from domain.language import Cents, Text
from infra.database.connect import connect
from infra.log import clients, topics
from infra.settings import Settings, Source
from policies.engine import Received, Send, message
from policies.engine.policy import Policy, policy_of
from policies.engine.process import Policies
from tests.engine.api.api import agent, in_a_loop
from tests.engine.policies.test_policies import balance, open_wishes
from tests.engine.spine import commits, handler, open_account, scalar, send, set_up
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
        new = NewTopic(self.topic, partitions, 1, config={"retention.ms": "-1"})
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
        (producer or self.producer).produce(self.topic, value, key, partition, headers=list((headers or {}).items()))
        (producer or self.producer).flush(60)

    def end(self) -> int:
        return sum(topics.describe(self.settings, self.topic).end.values())


@pytest.fixture
def billing(world: Settings) -> Billing:
    set_up(world)
    return Billing(world)


@contextmanager
def running(billing: Billing, *policies: Policy, name: str = "p1") -> Iterator[Policies]:
    with in_a_loop(lambda: Policies(billing.settings, policies, name), name) as process:
        yield process


def received(world: Settings, name: str = "from_billing") -> int:
    count: int = scalar(world, "select coalesce(sum(next_offset), 0) from source_positions where policy = %s", name)
    return count


def dead(world: Settings) -> list[str]:
    with connect(world, "test") as db:
        return [
            why
            for (why,) in db.execute("select dead from outbox where dead is not null order by stream, version, number")
        ]


def all_received(billing: Billing, name: str = "from_billing") -> None:
    until(lambda: received(billing.settings, name) == billing.end(), "all messages are received")


def test_a_message_is_received_once_in_effect(billing: Billing) -> None:
    world = billing.settings
    with running(billing, source()), handler(world), agent(world):
        send(world, open_account("a"))
        for number in range(30):
            billing.say({"account": "a", "cents": 1 + number, "unknown": None}, partition=number % 3, ident=str(number))
        billing.say({"account": "a"}, "reversed.v1")
        billing.say({"account": "a", "cents": 10**6}, "another.v1")
        until(lambda: balance(world, "a") == sum(range(1, 31)), "all is paid")
        all_received(billing)
        until(lambda: open_wishes(world) == 0, "no wish is left")
    assert len({one.command_id for one in commits(world)}) == len(commits(world)) == 31
