"""Shares: a partition may be folded by several tasks, each of which folds the streams whose hash falls to it.

Each task reads the whole partition and applies the reading rule to all its records, but decodes only the bodies of its own. A
stream's events stay in order, and all its rows, states and parked events come from one task. Only a summary's key may get sums from
several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from infra.log.records import Commit, Head, Opening, decode_head
from infra.log.rule import Counted, Reading
from infra.processes.engines import Engine
from infra.processes.workers import FEW_RECORDS

MOST = 8
"""Shares of a partition, unless more tasks are asked for: each reads the whole partition, so further ones gain little."""


class Share(NamedTuple):
    """The `number`th of so many shares of a partition's streams."""

    number: int = 0
    of: int = 1

    def decoder(self, decode: Callable[[bytes], Commit | Opening]) -> Callable[[bytes], Commit | Head | Opening]:
        """Decodes the commits of the share's streams, and of the others what the reading rule needs."""
        number, of = self
        if of == 1:
            return decode

        def decode_own(value: bytes) -> Commit | Head | Opening:
            head = decode_head(value)
            if type(head) is Head and crc32(head.stream.encode()) % of != number:
                return head
            return decode(value)

        return decode_own

    def own(self, counted: Sequence[Counted]) -> Sequence[Counted]:
        """The share's commits among those that count."""
        other: type = Head
        return counted if self.of == 1 else [one for one in counted if type(one.commit) is not other]

    def progress(self, was: Reading, now: Reading) -> int:
        """The records from one reading to the other; those that all shares report are as many as there are."""
        return (now.next_offset + self.number) // self.of - (was.next_offset + self.number) // self.of


WHOLE = Share()


def split(sizes: Mapping[int, int], engine: Engine, tasks: int | None) -> dict[int, int]:
    """How many shares each of these partitions gets, at least one, so that the largest task is as small as can be.

    `sizes` are in records. Without `tasks`, there are as many as the engine runs at once; a small log is not split.
    """
    records = sum(sizes.values())
    most = tasks or MOST
    shares = dict.fromkeys(sizes, 0)
    for _ in range(tasks or (engine.slots if records > FEW_RECORDS else 0)):
        larger = [partition for partition in sizes if shares[partition] < most]
        if larger:
            shares[max(larger, key=lambda partition: sizes[partition] / (shares[partition] + 1))] += 1
    return {partition: max(count, 1) for partition, count in shares.items()}
