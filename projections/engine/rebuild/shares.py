"""Shares: a partition may be folded by several tasks, each of which folds the streams whose hash falls to it (ADR 25).

Each applies the reading rule to all records of the partition. Rows, states and parked events of a stream come from one task; only
a summary's key may get sums from several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from zlib import crc32

from infra.log.records import Commit, Head, Opening, decode_head
from infra.processes.engines import Engine
from infra.processes.workers import FEW_RECORDS
from projections.engine.store.commit import Batch

MOST = 8
"""Shares of a partition, on average, unless more tasks are asked for: each reads all of it, so further ones gain little."""
LEAST = 10_000
"""Records of a task, on average at least: its consumer, connections and transactions cost about as much as folding so many."""


class Share(NamedTuple):
    """The `number`th of so many shares of a partition's streams."""

    number: int = 0
    of: int = 1

    def decoder(self, decode: Callable[[bytes], Commit | Opening]) -> Callable[[bytes], Commit | Head | Opening]:
        """Decodes the commits of the share's streams, and of the others what the reading rule needs."""
        number, of = self

        def decode_own(value: bytes) -> Commit | Head | Opening:
            head = decode_head(value)
            if type(head) is Head and crc32(head.stream.encode()) % of != number:
                return head
            return decode(value)

        return decode if of == 1 else decode_own

    def own(self, batch: Batch) -> Batch:
        """The batch with the share's commits only."""
        other: type = Head
        mine = batch.counted if self.of == 1 else [one for one in batch.counted if type(one.commit) is not other]
        return batch._replace(counted=mine)

    def progress(self, batch: Batch) -> int:
        """Its part of the batch's records: those of all shares are as many as there are."""
        return (batch.next.next_offset + self.number) // self.of - (batch.was.next_offset + self.number) // self.of


def split(sizes: Mapping[int, int], engine: Engine, tasks: int | None) -> dict[int, list[Share]]:
    """Each partition's shares, at least one, so that the largest task is as small as can be; `sizes` are in records.

    Without `tasks`, there are as many as the engine runs at once; a small log is not split.
    """
    shares, records = dict.fromkeys(sizes, 1), sum(sizes.values())
    wanted = tasks or (min(engine.slots, MOST * len(sizes)) if records > FEW_RECORDS else 0)
    for _ in range(min(wanted, records // LEAST) - sum(map(bool, sizes.values()))):  # an empty partition's does nothing
        shares[max(sizes, key=lambda partition: sizes[partition] / shares[partition])] += 1
    return {partition: [Share(number, of) for number in range(of)] for partition, of in shares.items()}
