"""Fills topics with orders: as commands, or as the commits of one writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import Producer

from benchmarks.workload import OPEN, OVERDRAFT_LIMIT, Order, stream_of
from domain.accounts import AccountOpened, Deposit, MoneyDeposited, MoneyWithdrawn, OpenAccount, Withdraw
from domain.engine.versions import stored_type
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.partitioner import partition_of
from infra.log.records import Command, Commit, EventRecord, Opening, encode
from infra.settings import Settings

DAY = date(2026, 1, 2)
DAY_TEXT = DAY.isoformat().encode()
FLUSH_S = 120.0
STEP = 5_000


class Standing(NamedTuple):
    """Where a writer opens a partition, and the offset of the last command that was decided there."""

    end: int
    command_offset: int


class NotLoaded(SamefoldError):
    """The broker did not take all records."""


def fill_commands(settings: Settings, orders: Iterable[Order], advance: Callable[[int], None]) -> int:
    """Append the orders as commands, in their order; how many."""
    fact_of = _facts(
        OpenAccount(overdraft_limit=OVERDRAFT_LIMIT, on=DAY), Deposit(cents=1, on=DAY), Withdraw(cents=1, on=DAY)
    )
    filling = _Filling(settings, settings.commands_topic, advance)
    for account, cents, order_id in orders:
        stream = stream_of(account)
        filling.add(
            stream, partition_of(stream, settings.partitions), encode(Command(order_id, stream, *fact_of(cents)))
        )
    return filling.end()


def fill_log(
    settings: Settings,
    commands_topic_id: str,
    orders: Iterable[Order],
    advance: Callable[[int], None],
    *,
    marks: Iterable[int] = (),
    standing: Mapping[int, Standing] | None = None,
    versions: dict[str, int] | None = None,
) -> tuple[list[int], dict[int, list[int]]]:
    """Write the log of one writer that accepted all these orders, into an empty topic: an opening in each partition, then commits.

    `standing` is where it goes on in one that is not empty, or as one that has had no commands; `versions` are the streams' until
    then, by name, and are changed.
    How many commits each partition has; and, for each of `marks`, how many it had after so many orders.
    """
    opened = AccountOpened(overdraft_limit=OVERDRAFT_LIMIT, on=DAY)
    fact_of = _facts(opened, MoneyDeposited(cents=1, on=DAY), MoneyWithdrawn(cents=1, on=DAY))
    filling = _Filling(settings, settings.events_topic, advance)
    for partition in range(settings.partitions):
        filling.add(None, partition, encode(Opening("bench", commands_topic_id)))
    commits = [0] * settings.partitions
    versions = {} if versions is None else versions
    place_of = cache(partial(partition_of, partitions=settings.partitions))  # its own is for fewer streams
    epochs = [standing[partition].end if standing else 0 for partition in range(settings.partitions)]
    wanted, passed = set(marks), {}
    for number, (account, cents, order_id) in enumerate(orders, start=1):
        stream = stream_of(account)
        partition = place_of(stream)
        version = versions[stream] = versions.get(stream, 0) + 1
        seq = commits[partition] = commits[partition] + 1
        offset = standing[partition].command_offset if standing else seq - 1
        # the id is the fingerprint too: as long, and not compared here
        commit = Commit(
            stream,
            version,
            [EventRecord(*fact_of(cents))],
            order_id,
            offset,
            order_id,
            "accepted",
            None,
            epochs[partition],
            seq,
        )
        filling.add(stream, partition, encode(commit))
        if number in wanted:
            passed[number] = list(commits)
    filling.end()
    return commits, passed


def _facts(opening: Any, deposit: Any, withdrawal: Any) -> Callable[[int], tuple[str, msgspec.Raw]]:
    """By an order's cents, the stored name and the JSON of what it is; the examples are of one cent."""
    opened = stored_type(type(opening)), msgspec.Raw(msgspec.json.encode(opening))
    deposited, withdrawn = (
        (stored_type(type(one)), msgspec.json.encode(one).replace(b'"cents":1', b'"cents":%d'))
        for one in (deposit, withdrawal)
    )

    def fact_of(cents: int) -> tuple[str, msgspec.Raw]:
        if cents == OPEN:
            return opened
        name, body = deposited if cents > 0 else withdrawn
        return name, msgspec.Raw(body % abs(cents))

    return fact_of


class _Filling:
    """A producer in a hurry: no callbacks, all counted at the end."""

    def __init__(self, settings: Settings, topic: str, advance: Callable[[int], None]) -> None:
        self._producer: Producer = clients.producer(settings)
        self._topic = topic
        self._advance = advance
        self._count = 0
        self._failed: list[object] = []

    def add(self, key: str | None, partition: int, value: bytes) -> None:
        while True:
            try:
                self._producer.produce(self._topic, value, key=key, partition=partition)
                break
            except BufferError:
                self._producer.poll(0.02)
        self._count += 1
        if self._count % STEP == 0:
            self._advance(STEP)

    def end(self) -> int:
        if left := self._producer.flush(FLUSH_S):
            raise NotLoaded(
                f"{left} records were not taken by the broker within {FLUSH_S:.0f} s.", "Try a smaller --scale."
            )
        self._advance(self._count % STEP)
        return self._count
