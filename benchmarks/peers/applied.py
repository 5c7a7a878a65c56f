"""What a simple peer has done, by its own tables."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from benchmarks.workload import Order, stream_of
from infra.log.partitioner import partition_of


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
