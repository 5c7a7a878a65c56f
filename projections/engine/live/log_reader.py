"""Reading many partitions on from given offsets, out of Kafka and, where it does not hold the next record, out of the archive.

For agents, which read on for ever, and for those who catch up; a range of one partition is `infra.log.source.read_range`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from confluent_kafka import Consumer, TopicPartition

from infra.log import clients
from infra.log.records import Record
from infra.log.source import archived, is_not_held, named
from infra.observability import tracing
from infra.settings import Settings


class LogReader:
    """Records of a topic by partition, without a seam. `next` are the offsets after what was taken. Not thread-safe."""

    def __init__(self, settings: Settings, topic: str, consumer: Consumer) -> None:
        self.next: dict[int, int] = {}
        self._settings = settings
        self._topic = topic
        self._consumer = consumer
        self._archived: dict[int, Iterator[tuple[list[Record], int]]] = {}
        """Partitions that are read out of the archive, until it ends and Kafka goes on."""
        self._paused: set[int] = set()
        self._assigned = False
        """Whether librdkafka goes on from `next`."""

    def go_on(self, at: Mapping[int, int]) -> None:
        """Read these partitions and no others, from these offsets; fetching begins at once."""
        self._archived = {p: batches for p, batches in self._archived.items() if at.get(p) == self.next[p]}
        self.next = dict(at)
        self._assigned = False
        self._assign(())

    def take(self, most: int, wait: float, full: Collection[int] = ()) -> dict[int, list[Record]]:
        """What has come, about `most` records, but of no partition that is `full`; waits so many seconds for the first.

        What came with an error is not handed out: all of it comes again. Raises LogTrimmed where neither Kafka nor the archive
        holds what comes next, KafkaAway and DatabaseAway for what may pass, and what else reading the archive raises.
        """
        try:
            out_of_archive = self._take_archived(full)
            taken = self._take_held(most, 0 if out_of_archive else wait, full)
        except BaseException:
            self._archived.clear()
            self._assigned = False  # what came with the error comes again
            raise
        self.next |= {partition: records[-1].offset + 1 for partition, records in taken.items()}
        self.next |= {partition: after for partition, (_, after) in out_of_archive.items()}
        return taken | {partition: records for partition, (records, _) in out_of_archive.items() if records}

    def end_of(self, partition: int) -> int:
        """The partition's end as the broker last told it; 0 where it has not."""
        _, end = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), cached=True)
        return max(int(end), 0)

    def close(self) -> None:
        self._consumer.close()

    def _take_archived(self, full: Collection[int]) -> dict[int, tuple[list[Record], int]]:
        """Of each partition that is in the archive still, a batch and the offset after it."""
        taken = {}
        for partition, batches in list(self._archived.items()):
            if partition in full:
                continue
            if (batch := next(batches, None)) is not None:
                taken[partition] = batch
            else:
                del self._archived[partition]
                self._assigned = False
        return taken

    def _take_held(self, most: int, wait: float, full: Collection[int]) -> dict[int, list[Record]]:
        """What Kafka has."""
        self._assign(full)
        # consume(n) waits for all n: ask for one first, then for what is there
        messages = self._consumer.consume(1, wait)
        if messages:
            messages += self._consumer.consume(most, 0)
        taken: dict[int, list[Record]] = {}
        new = tuple.__new__  # what Record() comes to, in half the time
        tracing_them = tracing.recording()
        for message in messages:
            partition = message.partition()
            mine = taken.get(partition)
            if (error := message.error()) is not None:
                at = mine[-1].offset + 1 if mine else self.next.get(partition, 0)
                if not is_not_held(error):
                    raise named(self._settings, self._topic, partition, at, error)
                self._archived.setdefault(partition, archived(self._settings, self._topic, partition, at))
                continue
            if mine is None:
                mine = taken[partition] = []
            mine.append(
                new(Record, (partition, message.offset(), message.timestamp()[1], message.key(), message.value()))
            )
            if tracing_them and (headers := message.headers()):
                mine[-1] = tracing.Traced.of(mine[-1], headers)
        return taken

    def _assign(self, full: Collection[int]) -> None:
        """Have Kafka go on wherever the archive does not, and pause what is full."""
        if not self._assigned:
            # all of them anew: a `seek` fails while librdkafka has not begun to fetch
            self._resume(self._paused)
            here = [(partition, at) for partition, at in self.next.items() if partition not in self._archived]
            clients.assign(self._consumer, [TopicPartition(self._topic, partition, at) for partition, at in here])
            self._assigned = True
        pausing = {partition for partition in full if partition not in self._archived}
        if pause := pausing - self._paused:
            self._consumer.pause([TopicPartition(self._topic, partition) for partition in pause])
        self._resume(self._paused - pausing)
        self._paused = pausing

    def _resume(self, partitions: Collection[int]) -> None:
        if partitions:
            self._consumer.resume([TopicPartition(self._topic, partition) for partition in partitions])
        self._paused = self._paused - set(partitions)
