"""Policies in a snapshot: outbox and activations, compared with what the log says at exactly the policies' positions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import TopicPartition
from psycopg import sql

from infra.database.connect import Connection
from infra.log import clients
from infra.settings import Settings
from proofs.bank_oracle import ENDED, ENVELOPE, START, Bank, Place, places_in
from proofs.chaos.tail import Tail
from proofs.policy_oracle import COLUMNS, POLICIES, Row, Wishes

SHOWN = 5
LOG_S = 60.0
LATE_S = 60.0
"""A timer that has been due for longer. Transfers that have ended refuse it: it changes nothing, whenever it comes."""


def is_at_rest(connection: Connection) -> bool:
    """Whether nothing but timers waits, and all agents have read as much of the log."""
    (table,) = connection.execute("select table_name from live where view = 'transfers'").fetchone() or (
        "transfers_v1",
    )
    query = sql.SQL(
        "select 1 from outbox where type is distinct from 'GiveUp' or outcome is not null "
        "union all select 1 from positions group by topic, partition having count(distinct next_offset) > 1 "
        "union all select 1 from {} where state <> all(%s) limit 1"
    ).format(sql.Identifier(table))
    return connection.execute(query, [list(ENDED)]).fetchone() is None


class Activation(NamedTuple):
    """A row of the table, or a record of the topic."""

    policy: str
    number: int
    version: int
    positions: Mapping[str, Sequence[int]]
    log_offset: int
    at_ms: int


class Snapshot(NamedTuple):
    places: Mapping[str, list[Place]]
    """By policy; empty before it is live."""
    rows: list[Row]
    activations: list[Activation]


class PolicyJudge:
    """Compares snapshots, each with an independent fold of the log to exactly there. What is wrong is in `violations`."""

    def __init__(self, settings: Settings, tail: Tail) -> None:
        self.settings, self.tail = settings, tail
        self.wishes = {policy: Wishes(policy, settings.partitions) for policy in POLICIES}
        self.violations: list[str] = []
        self.rows = 0
        self._topic: dict[tuple[str, int], Activation] = {}
        self._read = 0

    @property
    def made(self) -> dict[str, tuple[str, str, str]]:
        """Target, type and body of each wish with a policy's own command, by id."""
        return self.wishes["transfers"].made

    def snapshot(self, connection: Connection) -> Snapshot:
        """In the caller's transaction."""
        places = {policy: places_in(connection, f"policy_{policy}") for policy in POLICIES}
        outbox = f"select {COLUMNS} from outbox where policy = any(%s)".encode()
        rows = [Row._make(row) for row in connection.execute(outbox, [list(POLICIES)])]
        activations = connection.execute(
            "select policy, number, version, positions, log_offset, (extract(epoch from at) * 1000)::bigint "
            "from activations where log_offset is not null and policy = any(%s)",
            [list(POLICIES)],
        )
        return Snapshot(places, rows, [Activation._make(row) for row in activations])

    def compare(self, found: Snapshot) -> None:
        """The log must be there up to the snapshot's positions."""
        expected: set[Row] = set()
        for policy, wishes in self.wishes.items():
            for partition, place in enumerate(found.places[policy]):
                for offset in range(wishes.places[partition].next_offset, place.next_offset):
                    wishes.take(partition, offset, *self.tail.records[partition][offset])
                if wishes.places[partition] != place:
                    self._wrong(
                        f"the position of {policy} in partition {partition} is {place}, the log has", wishes.places
                    )
            expected |= set(wishes.rows.values())
        self.rows += len(found.rows)
        rows = {row._replace(due=None) for row in found.rows}  # all timers count from an answer
        if missing := expected - rows:
            self._wrong("the outbox lacks", sorted(missing, key=str)[:SHOWN])
        if extra := rows - expected:
            self._wrong("the outbox has", sorted(extra, key=str)[:SHOWN])
        right = self._recorded(max((one.log_offset for one in found.activations), default=-1))
        if sorted(found.activations, key=str) != sorted(right, key=str):
            self._wrong("activations are not those of the topic:", (found.activations, right))
        for one in right:
            if one.number == 1 and any(Place(*place) != START for place in one.positions.values()):
                self._wrong("the policy does not begin with the log:", one)

    def at_rest(self, found: Snapshot, bank: Bank) -> None:
        """When nothing is under way: each transfer ended once, money was moved or not, and only timers wait."""
        late = (datetime.now(UTC).timestamp() - LATE_S) * 1000
        waiting = [row for row in found.rows if row.type != "GiveUp" or row.outcome or (row.due or 0) < late]
        if waiting:
            self._wrong("the outbox is not empty:", waiting[:SHOWN])
        balance = sum(account.balance for account in bank.accounts.values())
        if balance != bank.brought:
            self._wrong(f"the accounts hold {balance}, and clients brought", bank.brought)
        if held := {stream: account.holds for stream, account in bank.accounts.items() if account.holds}:
            self._wrong("money is on hold:", held)
        steps = {row[0]: row[1] for row in bank.rows["transfers"].values() if row}
        if under_way := {name: step for name, step in steps.items() if step not in ENDED or bank.ends[name] != 1}:
            self._wrong("transfers have not ended once:", under_way)
        moved = sum(step != "failed" for step in steps.values())
        if (bank.debits.total(), bank.credits.total()) != (moved, moved):
            self._wrong(f"{moved} transfers moved money, debits and credits are", (bank.debits, bank.credits))

    def once(self, bank: Bank) -> None:
        """At any moment: no transfer has a second debit, credit or end."""
        for what, times in (("debits", bank.debits), ("credits or refunds", bank.credits), ("ends", bank.ends)):
            if more := {name: number for name, number in times.items() if number > 1}:
                self._wrong(f"transfers have more {what} than one:", more)

    def _recorded(self, last: int) -> list[Activation]:
        """What counts in the topic up to this offset, which it must have."""
        if self._read <= last:
            consumer = clients.range_consumer(self.settings)
            consumer.assign([TopicPartition(self.settings.policies_topic, 0, self._read)])
            deadline = time.monotonic() + LOG_S
            while self._read <= last and time.monotonic() < deadline:
                for message in consumer.consume(100, 0.1):
                    if message.error() is None:
                        self._take(message.offset(), message.timestamp()[1], message.value())
            consumer.close()
            if self._read <= last:
                self._wrong("the topic of policies lacks record", last)
        return [one for one in self._topic.values() if one.log_offset <= last]

    def _take(self, offset: int, time_ms: int, value: bytes | None) -> None:
        self._read = offset + 1
        if value is None or not value.startswith(ENVELOPE):
            return
        record: dict[str, Any] = msgspec.json.decode(value)
        if record["policy"] not in POLICIES:
            return
        key = (record["policy"], record["number"])
        self._topic.setdefault(key, Activation(*key, record["version"], record["positions"], offset, time_ms))

    def _wrong(self, what: str, found: object) -> None:
        self.violations.append(f"P: {what} {found}")
