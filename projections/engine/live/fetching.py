"""Fetching what an agent folds: librdkafka, in a thread of its own, from the offsets that the database told.

Faust's own client could fetch too, and does divide the partitions; but a record costs it four times as much of the interpreter's
lock, which is what an agent runs out of first (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from confluent_kafka import TopicPartition

from infra.log import clients
from infra.log.records import Record
from infra.log.source import archived, is_not_held, named
from infra.observability import tracing
from infra.settings import Settings


class Taken(NamedTuple):
    """Records of one partition in offset order, and the partition's end as the broker last told it; 0 where it has not."""

    records: list[Record]
    end: int


class Fetcher:
    """Records of a topic by partition. `seek` each partition before it is first taken from."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._topic = settings.events_topic
        self._consumer = clients.agent_consumer(settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._sought: dict[int, int] = {}
        """Where partitions are to go on from, once the next take begins."""
        self._next: dict[int, int] = {}
        """Of each partition that is fetched: the offset after the last record taken. The thread's own, as are the next two."""
        self._archived: dict[int, Iterator[tuple[list[Record], int]]] = {}
        """Partitions whose next records Kafka does not hold any more, until the archive ends and Kafka goes on."""
        self._assigned = False
        """Whether librdkafka goes on from `_next`."""

    def seek(self, partition: int, offset: int) -> None:
        """Go on from there: no record that was fetched before is handed out any more."""
        self._sought[partition] = offset

    async def take(self, partitions: Collection[int], most: int, wait: float) -> Mapping[int, Taken]:
        """What has come of these partitions, about `most` records; waits so many seconds for the first.

        Raises LogTrimmed where neither Kafka nor the archive holds what comes next, KafkaAway and DatabaseAway for what may pass,
        and what else reading the archive raises.
        """
        sought, self._sought = self._sought, {}
        loop = asyncio.get_running_loop()
        taken = await loop.run_in_executor(self._thread, self._take, frozenset(partitions), sought, most, wait)
        # sought again meanwhile: these are of before
        return {partition: one for partition, one in taken.items() if partition not in self._sought}

    def close(self) -> None:
        self._thread.submit(self._consumer.close)
        self._thread.shutdown(wait=False)

    def _take(self, partitions: frozenset[int], sought: Mapping[int, int], most: int, wait: float) -> dict[int, Taken]:
        if sought or partitions != self._next.keys():
            self._next = {partition: sought.get(partition, self._next.get(partition, 0)) for partition in partitions}
            kept = partitions - sought.keys()
            self._archived = {partition: batches for partition, batches in self._archived.items() if partition in kept}
            self._assigned = False
        try:
            before = self._take_archived()
            taken = self._fetch(most, 0 if before else wait)
        except BaseException:
            # what came with the error is not handed out: all of it comes again
            self._archived.clear()
            self._assigned = False
            raise
        self._next |= {number: one.records[-1].offset + 1 for number, one in taken.items()}
        self._next |= {number: after for number, (_, after) in before.items()}
        return taken | {number: Taken(records, 0) for number, (records, _) in before.items() if records}

    def _take_archived(self) -> dict[int, tuple[list[Record], int]]:
        """Of each partition that is in the archive still, a batch and the offset after it."""
        taken = {}
        for number, batches in list(self._archived.items()):
            if (batch := next(batches, None)) is not None:
                taken[number] = batch
            else:
                del self._archived[number]
                self._assigned = False
        return taken

    def _fetch(self, most: int, wait: float) -> dict[int, Taken]:
        """What Kafka has."""
        if not self._assigned:
            # all of them anew: a `seek` fails while librdkafka has not begun to fetch
            here = [(number, offset) for number, offset in self._next.items() if number not in self._archived]
            clients.assign(self._consumer, [TopicPartition(self._topic, number, offset) for number, offset in here])
            self._assigned = True
        # consume(n) waits for all n: ask for one first, then for what is there
        messages = self._consumer.consume(1, wait)
        if messages:
            messages += self._consumer.consume(most, 0)
        records: dict[int, list[Record]] = {}
        new = tuple.__new__  # what Record() comes to, in half the time
        tracing_them = tracing.recording()
        for message in messages:
            number = message.partition()
            if (error := message.error()) is not None:
                if not is_not_held(error):
                    raise named(self._settings, self._topic, number, self._next.get(number, 0), error)
                self._archived.setdefault(number, archived(self._settings, self._topic, number, self._next[number]))
                continue
            mine = records.get(number)
            if mine is None:
                mine = records[number] = []
            mine.append(new(Record, (number, message.offset(), message.timestamp()[1], message.key(), message.value())))
            if tracing_them and (headers := message.headers()):
                mine[-1] = tracing.Traced.of(mine[-1], headers)
        taken = {}
        for number, mine in records.items():
            _, end = self._consumer.get_watermark_offsets(TopicPartition(self._topic, number), cached=True)
            taken[number] = Taken(mine, max(end, 0))
        return taken
