"""What simple peers do for each event, three statements in one transaction (row, outcome, position), and what they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg

from benchmarks.workload import Order, stream_of
from infra.log.partitioner import partition_of
from infra.log.records import Commit

TABLES = b"""
create table balances (account text collate "C" primary key, version bigint not null, cents bigint not null);
create table outcomes (stream text collate "C", command_id text collate "C", outcome text not null, version bigint not null,
                       primary key (stream, command_id));
create table offsets (partition int primary key, next_offset bigint not null);
insert into offsets select p, 0 from generate_series(0, %d) p
"""
ROW = b"""
insert into balances as t (account, version, cents) values (%s, %s, %s)
    on conflict (account) do update set version = excluded.version, cents = t.cents + excluded.cents
"""
OUTCOME = b"insert into outcomes (stream, command_id, outcome, version) values (%s, %s, %s, %s)"
POSITION = b"update offsets set next_offset = %s where partition = %s"


class _Movement(msgspec.Struct):
    cents: int = 0


_decode = msgspec.json.Decoder(_Movement).decode


def statements(commit: Commit, partition: int, offset: int) -> Sequence[tuple[bytes, Sequence[Any]]]:
    """What to execute for a commit."""
    [event] = commit.events
    cents = _decode(event.data).cents
    change = -cents if event.type == "MoneyWithdrawn" else cents
    return (
        (ROW, (commit.stream.removeprefix("accounts/"), commit.version, change)),
        (OUTCOME, (commit.stream, commit.command_id, commit.outcome, commit.version)),
        (POSITION, (offset + 1, partition)),
    )


def applied_orders(orders: Sequence[Order], partitions: int, url: str) -> list[Order]:
    """The orders before the offsets where a peer stands: the opening has the first."""
    with psycopg.connect(url) as connection:
        left = {partition: offset - 1 for partition, offset in connection.execute("table offsets") if offset}
    found = []
    for order in orders:
        partition = partition_of(stream_of(order.account), partitions)
        if left.get(partition, 0) > 0:
            left[partition] -= 1
            found.append(order)
    return found


def balances_of(url: str) -> dict[str, tuple[int, int]]:
    """(version, balance) by account name."""
    with psycopg.connect(url) as connection:
        found = connection.execute("select account, version, cents from balances")
        return {account: (version, cents) for account, version, cents in found}
