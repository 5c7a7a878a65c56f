"""The log's newest records, read ahead for builds that catch up, so that a switch need not wait for them under locks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from infra.errors import SamefoldError
from infra.log import clients
from infra.log.records import Record
from infra.log.rule import Reading, read
from infra.log.source import NO_PROGRESS_S
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged
from projections.engine.live.log_reader import LogReader
from projections.engine.store.commit import Batch

AHEAD = 20_000
"""Most records of one partition that are read ahead, and that one read returns."""


class NotArrived(SamefoldError):
    """One read of the log's newest records did not reach its target."""


class Tail:
    """Reads all partitions from given positions on. Not thread-safe."""

    def __init__(self, settings: Settings, topic: str, at: Mapping[int, Reading]) -> None:
        self.settings = settings
        self.topic = topic
        self._ahead: dict[int, deque[Record]] = {partition: deque() for partition in at}
        self._log = LogReader(settings, topic, clients.range_consumer(settings, tells_ends=False))
        self._log.go_on({partition: reading.next_offset for partition, reading in at.items()})

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def close(self) -> None:
        self._log.close()

    def exactly(
        self, at: Mapping[int, Reading], to: Mapping[int, Reading], give_up_s: float = NO_PROGRESS_S
    ) -> list[Batch]:
        """The batches from `at` exactly to `to`, in one read. Raises NotArrived and the errors of `towards`."""
        batches = self.towards(at, to, AHEAD * len(at), give_up_s)
        reached = {**at, **{batch.partition: batch.next for batch in batches}}
        if reached != dict(to):
            raise NotArrived(
                f"Reading '{self.topic}' up to {_offsets(to)} ended at {_offsets(reached)}.",
                "Nothing has changed. Run the command again.",
            )
        return batches

    def towards(
        self, at: Mapping[int, Reading], to: Mapping[int, Reading], most: int, give_up_s: float = NO_PROGRESS_S
    ) -> list[Batch]:
        """The batches from `at` towards `to`, one for each partition that is not there yet, about `most` records in all.

        They may end before `to`; `exactly` requires that they don't. Calling it again from the same or a later position returns
        the same records, so a failed transaction can be retried. Raises LogChanged when the log does not lead to `to`,
        KafkaUnavailable, and the archive's errors.
        """
        for partition, target in to.items():
            if at[partition].next_offset == target.next_offset and at[partition] != target:
                raise LogChanged(self.topic, partition, at[partition], at[partition], target)
        self._forget(at)
        missing = {
            partition: end.next_offset for partition, end in to.items() if at[partition].next_offset < end.next_offset
        }
        share = max(most // max(len(missing), 1), 1)
        wanted = {
            partition: min(end, at[partition].next_offset + min(share, AHEAD)) for partition, end in missing.items()
        }
        self._read_to(wanted, give_up_s)
        made = []
        for partition, end in wanted.items():
            records = list(islice(self._ahead[partition], end - at[partition].next_offset))
            reading, counted, _ = read(at[partition], [record for record in records if record.offset < end])
            if end == missing[partition] and reading != to[partition]:
                raise LogChanged(self.topic, partition, at[partition], reading, to[partition])
            made.append(Batch(partition, at[partition], reading, counted))
        return made

    def read_ahead(self) -> None:
        """Read what has arrived, without waiting."""
        self._take(0, {})

    def _forget(self, at: Mapping[int, Reading]) -> None:
        for partition, ahead in self._ahead.items():
            while ahead and ahead[0].offset < at[partition].next_offset:
                ahead.popleft()

    def _read_to(self, wanted: Mapping[int, int], give_up_s: float) -> None:
        deadline = time.monotonic() + give_up_s
        while any(self._log.next[partition] < end for partition, end in wanted.items()):
            if self._take(0.1, wanted):
                deadline = time.monotonic() + give_up_s
            elif time.monotonic() > deadline:
                raise clients.away(self.settings, KafkaException(KafkaError(KafkaError._TIMED_OUT)))

    def _take(self, wait: float, wanted: Mapping[int, int]) -> bool:
        """Read what has come of partitions that are not read ahead far enough. Returns whether there was any."""
        there = self._log.next
        full = {p for p, ahead in self._ahead.items() if len(ahead) >= AHEAD and there[p] >= wanted.get(p, 0)}
        taken = self._log.take(AHEAD, wait, full)
        for partition, records in taken.items():
            self._ahead[partition].extend(records)
        return bool(taken)


def _offsets(readings: Mapping[int, Reading]) -> str:
    return " ".join(f"{partition}:{reading.next_offset}" for partition, reading in sorted(readings.items()))
