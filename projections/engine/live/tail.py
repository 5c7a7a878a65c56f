"""The log's newest records, kept at hand for those who catch up: what is read ahead need not be waited for under locks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from infra.errors import SamefoldError
from infra.log import clients
from infra.log.records import Record
from infra.log.rule import Reading, read
from infra.log.source import NO_PROGRESS_S, archived, is_not_held, named
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged
from projections.engine.store.commit import Batch

AHEAD = 20_000
"""Records of one partition that are read ahead, and that one read gives, at most."""


class NotArrived(SamefoldError):
    """One read of the log's newest records did not lead to where it was to."""


class Tail:
    """Reads all partitions on from a position; not thread-safe."""

    def __init__(self, settings: Settings, topic: str, at: Mapping[int, Reading]) -> None:
        self.settings = settings
        self.topic = topic
        self._ahead: dict[int, deque[Record]] = {partition: deque() for partition in at}
        self._end = {partition: reading.next_offset for partition, reading in at.items()}
        self._paused: set[int] = set()
        self._archived: dict[int, Iterator[tuple[list[Record], int]]] = {}
        """Partitions that are read out of the archive, until it ends and Kafka goes on."""
        self._consumer = clients.range_consumer(settings, tells_ends=False)
        self._assign()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def close(self) -> None:
        self._consumer.close()

    def exactly(
        self, at: Mapping[int, Reading], to: Mapping[int, Reading], give_up_s: float = NO_PROGRESS_S
    ) -> list[Batch]:
        """What leads from `at` to `to` and nowhere else, in one read. Raises NotArrived, and what `towards` raises."""
        batches = self.towards(at, to, AHEAD * len(at), give_up_s)
        reached = {**at, **{batch.partition: batch.next for batch in batches}}
        if reached != dict(to):
            raise NotArrived(
                f"'{self.topic}' was to be read up to {_offsets(to)}, and one read came to {_offsets(reached)}.",
                "Nothing has changed: run the command again.",
            )
        return batches

    def towards(
        self, at: Mapping[int, Reading], to: Mapping[int, Reading], most: int, give_up_s: float = NO_PROGRESS_S
    ) -> list[Batch]:
        """What leads from `at` towards `to`: a batch for each partition that has not arrived, `most` records in all.

        It may end before `to`: `exactly` is for those who must have arrived.
        The same call again, or one from a later position, gives the same records again, so a transaction that failed is
        tried again. Raises LogChanged when the log does not lead to `to`, KafkaAway, and what reading the archive raises.
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
        """Take in what has arrived, without waiting."""
        self._consume(0)

    def _forget(self, at: Mapping[int, Reading]) -> None:
        for partition, ahead in self._ahead.items():
            while ahead and ahead[0].offset < at[partition].next_offset:
                ahead.popleft()

    def _read_to(self, wanted: Mapping[int, int], give_up_s: float) -> None:
        deadline = time.monotonic() + give_up_s
        while any(self._end[partition] < end for partition, end in wanted.items()):
            self._throttle(wanted)
            if self._consume(0.1):
                deadline = time.monotonic() + give_up_s
            elif time.monotonic() > deadline:
                raise clients.away(self.settings, KafkaException(KafkaError(KafkaError._TIMED_OUT)))

    def _throttle(self, wanted: Mapping[int, int]) -> None:
        """Pause partitions of which enough is at hand, while others are waited for."""
        full = {
            p
            for p, ahead in self._ahead.items()
            if p not in self._archived and len(ahead) >= AHEAD and self._end[p] >= wanted.get(p, 0)
        }
        if pause := full - self._paused:
            self._consumer.pause([TopicPartition(self.topic, partition) for partition in pause])
        if resume := self._paused - full:
            self._consumer.resume([TopicPartition(self.topic, partition) for partition in resume])
        self._paused = full

    def _assign(self) -> None:
        """Have Kafka go on wherever the archive does not."""
        if self._paused:
            self._consumer.resume([TopicPartition(self.topic, partition) for partition in self._paused])
            self._paused = set()
        ends = ((partition, end) for partition, end in self._end.items() if partition not in self._archived)
        clients.assign(self._consumer, [TopicPartition(self.topic, partition, end) for partition, end in ends])

    def _take_archived(self) -> int:
        """Records taken in out of the archive: a batch for each partition of which not enough is at hand."""
        taken = 0
        for partition, batches in list(self._archived.items()):
            if len(self._ahead[partition]) >= AHEAD:
                continue
            records, self._end[partition] = next(batches, (None, self._end[partition]))
            if records is None:
                del self._archived[partition]
                self._assign()
            else:
                self._ahead[partition].extend(records)
                taken += len(records)
        return taken

    def _consume(self, timeout_s: float) -> int:
        """Records taken in; waits only for the first."""
        taken = self._take_archived()
        messages = self._consumer.consume(1, 0 if taken else timeout_s)
        if messages:
            messages += self._consumer.consume(AHEAD, 0)
        for message in messages:
            partition = message.partition()
            if (error := message.error()) is not None:
                if is_not_held(error):
                    self._archived.setdefault(
                        partition, archived(self.settings, self.topic, partition, self._end[partition])
                    )
                else:
                    self._assign()  # what came behind the error comes again
                    raise named(self.settings, self.topic, partition, self._end.get(partition, 0), error)
                continue
            offset = message.offset()
            if offset < self._end[partition]:
                continue
            self._ahead[partition].append(
                Record(partition, offset, message.timestamp()[1], message.key(), message.value())
            )
            self._end[partition] = offset + 1
            taken += 1
        return taken


def _offsets(readings: Mapping[int, Reading]) -> str:
    return " ".join(f"{partition}:{reading.next_offset}" for partition, reading in sorted(readings.items()))
