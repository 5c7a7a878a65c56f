"""Fetch the records that an agent folds, with librdkafka in a thread of its own, from the positions in the database.

Faust's own client could fetch them too, but a record takes four times as much of the interpreter's lock, which is an agent's
bottleneck (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from infra.log import clients
from infra.log.records import Record
from infra.settings import Settings
from projections.engine.live.log_reader import LogReader


class Taken(NamedTuple):
    """Records of one partition in offset order, and the partition's end as last reported by the broker, or 0."""

    records: list[Record]
    end: int


class Fetcher:
    """Records of a topic by partition. Each partition needs a `seek` before its first `take`."""

    def __init__(self, settings: Settings) -> None:
        self._log = LogReader(settings, settings.events_topic, clients.agent_consumer(settings))
        """Used only in the thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._sought: dict[int, int] = {}
        """Offsets to seek at the next take."""

    def seek(self, partition: int, offset: int) -> None:
        """Continue at this offset. Records that were fetched before are not returned any more."""
        self._sought[partition] = offset

    async def take(self, partitions: Collection[int], most: int, wait: float) -> Mapping[int, Taken]:
        """About `most` records of these partitions; waits for the first one up to `wait` seconds.

        Raises the errors of `LogReader.take`.
        """
        sought, self._sought = self._sought, {}
        loop = asyncio.get_running_loop()
        taken = await loop.run_in_executor(self._thread, self._take, frozenset(partitions), sought, most, wait)
        # records of partitions that were sought meanwhile are outdated
        return {partition: one for partition, one in taken.items() if partition not in self._sought}

    def close(self) -> None:
        self._thread.submit(self._log.close)
        self._thread.shutdown(wait=False)

    def _take(self, partitions: frozenset[int], sought: Mapping[int, int], most: int, wait: float) -> dict[int, Taken]:
        if sought or partitions != self._log.next.keys():
            self._log.go_on(
                {partition: sought.get(partition, self._log.next.get(partition, 0)) for partition in partitions}
            )
        taken = self._log.take(most, wait)
        return {partition: Taken(records, self._log.end_of(partition)) for partition, records in taken.items()}
