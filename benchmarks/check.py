"""Whether a run counts: its end state must equal the independent fold of its input, row by row."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from psycopg import sql
from psycopg.abc import Query

from benchmarks.workload import Expected
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.settings import Settings

PATIENCE_S = 30.0

STATES = "select split_part(stream, '/', 2), version, (state->>'balance')::bigint from streams_accounts_v3"
BALANCES = "select account, transactions + 1, cents from balances_v2"
BALANCES_IN = sql.SQL("select account, transactions + 1, cents from {}")
EVENTS = "select coalesce(sum(transactions + 1), 0)::bigint from balances_v2"
OUTCOMES = "select count(*) from command_outcomes_v3"


class RunVoid(SamefoldError):
    """What a run left behind is not what its input demands: its figures mean nothing."""


class Decided(NamedTuple):
    """What handlers appended to `events`: the broker's times, in ms, of the first commit and of the last."""

    commits: int
    first_ms: int
    last_ms: int

    @property
    def seconds(self) -> float:
        return max(self.last_ms - self.first_ms, 1) / 1000

    @property
    def rate(self) -> float:
        """Commits per second of the broker's time."""
        return self.commits / self.seconds


def check_decisions(
    settings: Settings, start: Mapping[int, int], end: Mapping[int, int], expected: Mapping[str, Expected]
) -> Decided:
    """Every command decided exactly once, as the ledger decides it, under one opening per partition. Raises RunVoid.

    Reads [start, end) of each partition of `events` as plain JSON; the reading rule is applied by hand.
    """
    left = dict(expected)
    times: list[int] = []
    for partition, first in start.items():
        epoch = seq = -1
        for message in _messages(settings, settings.events_topic, partition, first, end[partition]):
            record = json.loads(message.value() or b"{}")
            if record.get("samefold") == "opening/1":
                epoch, seq = message.offset(), 0
                continue
            seq += 1
            if (record["epoch"], record["seq"]) != (epoch, seq):
                raise _void(f"events[{partition}] offset {message.offset()} does not count")
            wanted = left.pop(record["command_id"], None)
            found = Expected(record["outcome"] == "accepted", record["version"])
            if wanted != found:
                raise _void(f"command {record['command_id']} became {found}, not {wanted}")
            times.append(message.timestamp()[1])
    if left:
        raise _void(f"{len(left)} commands were not decided")
    return Decided(len(times), min(times), max(times))


def check_rows(settings: Settings, query: Query, expected: Mapping[str, Any], what: str) -> None:
    """The rows of a query, each a name and its values, are exactly the expected ones. Raises RunVoid."""
    with connect(settings, "samefold bench check", statement_timeout_ms=0) as connection:
        found = {name: tuple(values) for name, *values in connection.execute(query)}
    if found == expected:
        return
    wrong = next(name for name in {**found, **expected} if found.get(name) != expected.get(name))
    raise _void(
        f"{what}: {len(found):,} rows, {len(expected):,} expected; {wrong} is {found.get(wrong)}, not {expected.get(wrong)}"
    )


def check_count(settings: Settings, query: Query, expected: int | str, what: str) -> None:
    """Raises RunVoid."""
    with connect(settings, "samefold bench check", statement_timeout_ms=0) as connection:
        row = connection.execute(query).fetchone()
    if row is None or row[0] != expected:
        raise _void(f"{what}: {row and row[0]}, not {expected}")


def check_public(settings: Settings) -> None:
    """The public topic has as many records as accounts have events: each one is public. Raises RunVoid."""
    found, left = 0, set(range(settings.partitions))
    consumer = _consumer(settings, {"isolation.level": "read_committed", "enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(settings.public_topic, partition, 0) for partition in left])
        deadline = time.monotonic() + PATIENCE_S
        while left:
            for message in consumer.consume(10_000, 0.05):
                error, partition = message.error(), message.partition()
                if error is None:
                    found += 1
                elif error.code() == KafkaError._PARTITION_EOF and partition is not None:
                    left.discard(partition)
                deadline = time.monotonic() + PATIENCE_S
            require(time.monotonic() < deadline, f"'{settings.public_topic}' can't be read to its end")
    finally:
        consumer.close()
    check_count(settings, EVENTS, found, "events, beside the records that were published")


def require(holds: bool, what: str) -> None:
    """Raises RunVoid."""
    if not holds:
        raise _void(what)


def _void(what: str) -> RunVoid:
    return RunVoid(
        f"The run is void: {what}.", "No figure of it is given. Either the benchmark or the product is wrong."
    )


def _messages(settings: Settings, topic: str, partition: int, start: int, stop: int) -> Iterator[Message]:
    """[start, stop) of a partition, by a consumer that has nothing to do with the product's."""
    consumer = _consumer(settings, {})
    try:
        consumer.assign([TopicPartition(topic, partition, start)])
        position, deadline = start, time.monotonic() + PATIENCE_S
        while position < stop:
            for message in consumer.consume(10_000, 0.05):
                if message.error() is None and message.offset() < stop:
                    position = message.offset() + 1
                    deadline = time.monotonic() + PATIENCE_S
                    yield message
            if time.monotonic() > deadline:
                raise _void(f"{topic}[{partition}] ends at {position}, not {stop}")
    finally:
        consumer.close()


def _consumer(settings: Settings, more: Mapping[str, Any]) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": settings.kafka,
            "group.id": "bench-check",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 1,
            "log_level": 2,
            "enable.metrics.push": False,
            **more,
        }
    )
