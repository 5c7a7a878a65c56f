"""A bank that policies write to: topics of events, commands and activations, with a handler that decides each command once.

Accounts are letters; the first is in partition 0, the next in 1, and again. The policy passes a deposit on to the account that is
its purpose. A deposit without one is rejected if its cents are odd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import msgspec

from commands.intake import fingerprint_of
from domain.accounts import ChargeFee, Deposit, MoneyDeposited, Withdraw
from infra.log.records import Command, Commit, EventRecord, Reason, Record, encode
from policies.engine.policy import Policy, Send
from projections.engine.views.event_context import At
from proofs.model_read.log import Consumer, Log
from tests.engine.log import opening

PARTITIONS = 2
DAY = date(2020, 1, 1)
MOVING = "moving"
EVENTS = {"Deposit": "MoneyDeposited", "Withdraw": "MoneyWithdrawn", "ChargeFee": "FeeCharged"}
MORE = 100
"""Cents that the second version adds."""


def moving(version: int) -> Policy:
    """Passes a deposit on to the account that is its purpose: the second version does so with more cents."""
    more = MORE * (version - 1)

    def react(event: MoneyDeposited, _at: At) -> Iterator[Send]:
        if target := event.details.purpose:
            cents = event.cents + more
            yield Send(
                f"accounts/{target}",
                Deposit(cents=cents, on=DAY),
                then=Withdraw(cents=cents, on=DAY),
                otherwise=ChargeFee(cents=cents, on=DAY),
            )

    return Policy(MOVING, version, react, frozenset({MoneyDeposited}))


def partition_of(stream: str) -> int:
    return (ord(stream[-1]) - ord("a")) % PARTITIONS


@dataclass
class Topics:
    """All that Kafka holds. A command arrives once or twice; the first time it is decided."""

    records: dict[int, list[Record]] = field(default_factory=dict)
    """Events, by partition."""
    activations: list[Record] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for partition in range(PARTITIONS):
            self.records[partition] = [Record(partition, 0, 0, None, opening())]

    def send(self, command: Command) -> None:
        """The handler decides what it does not know."""
        known = {one.id for one in self.commands}
        self.commands.append(command)
        if command.id in known:
            return
        body = msgspec.json.decode(command.data)
        is_odd = command.type == "Deposit" and not body.get("details", {}).get("purpose") and body["cents"] % 2 == 1
        self.versions[command.stream] += not is_odd
        partition = partition_of(command.stream)
        records = self.records[partition]
        offset = len(records)
        commit = Commit(
            stream=command.stream,
            version=self.versions[command.stream],
            events=[] if is_odd else [EventRecord(EVENTS[command.type], command.data)],
            command_id=command.id,
            command_offset=offset,
            fingerprint=fingerprint_of(command),
            outcome="rejected" if is_odd else "accepted",
            reason=Reason("odd", "odd") if is_odd else None,
            epoch=0,
            seq=offset,
            correlation_id=command.correlation_id,
            causation_id=command.causation_id,
            depth=command.depth,
        )
        records.append(Record(partition, offset, 1000 * offset, None, encode(commit)))

    @property
    def ends(self) -> dict[int, int]:
        return {partition: len(records) for partition, records in self.records.items()}


class Bank(Log):
    """The log of a policy's world, which grows."""

    def __init__(self, story: Iterable[tuple[str, str, int]], before: Callable[[Topics], None] | None = None) -> None:
        super().__init__(())
        self.topics = Topics()
        for number, (account, target, cents) in enumerate(story):
            body = {"cents": cents, "on": str(DAY), "details": {"purpose": target}}
            data = msgspec.Raw(msgspec.json.encode(body))
            self.topics.send(Command(f"client {number}", f"accounts/{account}", "Deposit", data))
        if before:
            before(self.topics)
        self.records = self.topics.records

    def take(self, topics: Topics) -> None:
        """Go on from a copy of these."""
        self.topics = deepcopy(topics)
        self.records = self.topics.records

    def consumer(self, *_arguments: Any, **_more: Any) -> Consumer:
        return _BankConsumer(self)


class _BankConsumer(Consumer):
    """Of the topic of activations too."""

    def assign(self, partitions: Any) -> None:
        super().assign(partitions)
        bank = self.log
        assert isinstance(bank, Bank)
        of_policies = any(one.topic == "policies" for one in partitions)
        self.log = Log(())
        self.log.records = {0: bank.topics.activations} if of_policies else bank.records
