"""Read many partitions from given offsets on, from Kafka or, where it has lost the next record, from the archive.

For agents, which do so in a thread, and for builds that catch up. `whole_log.read_range` reads a range of one partition.
Faust's own client could fetch too, but a record takes four times as much of the interpreter's lock, which is an agent's bottleneck.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from confluent_kafka import Consumer, TopicPartition

from infra.archive.whole_log import archived
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.records import Record, Traced
from infra.log.source import is_not_held, named
from infra.observability import tracing
from infra.processes.process_end import Thread
from infra.settings import Settings


class LogReader:
    """Records of a topic by partition, without gaps. `next` is each partition's next offset. Not thread-safe.

    `traced`: with their traces; by default while an SDK records.
    """

    def __init__(
        self,
        settings: Settings,
        topic: str,
        consumer: Consumer | None = None,
        *,
        gather_ms: int = 0,
        traced: bool | None = None,
    ) -> None:
        self.next: dict[int, int] = {}
        self._settings = settings
        self._topic = topic
        self._traced = traced
        self._consumer = clients.agent_consumer(settings, gather_ms=gather_ms) if consumer is None else consumer
        self._rest_s = 0.005 if gather_ms else 0.0
        """How long the other partitions may take to come, of the fetch that a take's first record came with."""
        self._archived: dict[int, Iterator[tuple[list[Record], int]]] = {}
        """Partitions that are read from the archive, up to its end, and then from Kafka again."""
        self._paused: set[int] = set()
        self._is_known = False
        """The consumer has asked for the topic's leaders."""
        self._assigned = False
        """Whether librdkafka is fetching from `next`."""

    def go_on(self, at: Mapping[int, int]) -> None:
        """Read only these partitions, from these offsets. Fetching begins at once."""
        self._archived = {p: batches for p, batches in self._archived.items() if at.get(p) == self.next[p]}
        self.next = dict(at)
        self._assigned = False
        self._assign(())

    def take(self, most: int, wait: float, full: Collection[int] = ()) -> dict[int, list[Record]]:
        """About `most` records, none of partitions that are `full`; waits for the first one up to `wait` seconds.

        After an error, all records that came with it are fetched again. Raises LogTrimmed if neither Kafka nor the archive has
        the next record, KafkaUnavailable and DatabaseUnavailable, which may pass, and the archive's errors.
        """
        try:
            out_of_archive = self._take_archived(full)
            taken = self._take_held(most, 0 if out_of_archive else wait, full)
        except BaseException:
            self._archived.clear()
            self._assigned = False  # fetch all of it again
            raise
        self.next |= {partition: records[-1].offset + 1 for partition, records in taken.items()}
        self.next |= {partition: after for partition, (_, after) in out_of_archive.items()}
        return taken | {partition: records for partition, (records, _) in out_of_archive.items() if records}

    def end_of(self, partition: int) -> int:
        """The partition's end as last reported by the broker, or 0."""
        _, end = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), cached=True)
        return max(int(end), 0)

    def close(self) -> None:
        self._consumer.close()

    def _take_archived(self, full: Collection[int]) -> dict[int, tuple[list[Record], int]]:
        """A batch, and the offset after it, of each partition that is read from the archive."""
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
        self._assign(full)
        # consume(n) waits for all n: wait for the first, then take what has been fetched
        messages = self._consumer.consume(1, wait)
        if messages:
            messages += self._consumer.consume(most, self._rest_s)
        taken: dict[int, list[Record]] = {}
        wrong: dict[int | None, SamefoldError] = {}
        new = tuple.__new__  # like Record(), in half the time
        tracing_them = tracing.recording() if self._traced is None else self._traced
        for message in messages:
            partition = message.partition()
            mine = taken.get(partition)
            if (error := message.error()) is not None:
                at = mine[-1].offset + 1 if mine else self.next.get(partition, 0)
                if not is_not_held(error):
                    wrong[partition] = named(self._settings, self._topic, partition, at, error)
                    continue
                self._archived.setdefault(partition, archived(self._settings, self._topic, partition, at))
                continue
            if partition in wrong:
                continue
            if mine is None:
                mine = taken[partition] = []
            mine.append(
                new(Record, (partition, message.offset(), message.timestamp()[1], message.key(), message.value()))
            )
            if tracing_them and (headers := message.headers()):
                mine[-1] = Traced.of(mine[-1], headers)
        if wrong:
            self._assigned = False  # fetch again from `next`; an error that lasts comes again
            if not taken:
                raise next(iter(wrong.values()))
        return taken

    def _assign(self, full: Collection[int]) -> None:
        """Let Kafka fetch the partitions that are not read from the archive, and pause those that are full."""
        if not self._assigned:
            if not self._is_known:
                clients.learn_leaders(self._consumer, self._topic)
                self._is_known = True
            # all of them again: a `seek` fails before librdkafka has begun to fetch
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


class Fetcher:
    """Records of the agent's partitions. Each needs a `seek` before its first `take`."""

    def __init__(self, settings: Settings, gather_ms: int = 0) -> None:
        self._log = LogReader(settings, settings.events_topic, gather_ms=gather_ms)
        """Used only in the thread."""
        self._thread = Thread("fetch")
        self._sought: dict[int, int] = {}
        """Offsets to seek at the next take."""

    def seek(self, partition: int, offset: int) -> None:
        """Continue at this offset. Records that were fetched before are not returned any more."""
        self._sought[partition] = offset

    async def take(self, partitions: Collection[int], most: int, wait: float) -> dict[int, tuple[list[Record], int]]:
        """About `most` records by partition, with the partition's end; waits for the first one up to `wait` seconds.

        Raises the errors of `LogReader.take`.
        """
        sought, self._sought = self._sought, {}
        taken = await self._thread.run(partial(self._take, frozenset(partitions), sought, most, wait))
        # records of partitions that were sought meanwhile are outdated
        return {partition: one for partition, one in taken.items() if partition not in self._sought}

    def close(self) -> None:
        self._thread.close(self._log.close)

    def _take(
        self, partitions: frozenset[int], sought: Mapping[int, int], most: int, wait: float
    ) -> dict[int, tuple[list[Record], int]]:
        there = self._log.next
        if sought or partitions != there.keys():
            self._log.go_on({partition: sought.get(partition, there.get(partition, 0)) for partition in partitions})
        taken = self._log.take(most, wait)
        return {partition: (records, self._log.end_of(partition)) for partition, records in taken.items()}
