"""Fetching what an agent folds: librdkafka, in a thread of its own, from the offsets that the database told.

Faust's own client could fetch too, and does divide the partitions; but a record costs it four times as much of the interpreter's
lock, which is what an agent runs out of first (docs/benchmarks.md).
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
    """Records of one partition in offset order, and the partition's end as the broker last told it; 0 where it has not."""

    records: list[Record]
    end: int


class Fetcher:
    """Records of a topic by partition. `seek` each partition before it is first taken from."""

    def __init__(self, settings: Settings) -> None:
        self._log = LogReader(settings, settings.events_topic, clients.agent_consumer(settings))
        """The thread's own."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._sought: dict[int, int] = {}
        """Where partitions are to go on from, once the next take begins."""

    def seek(self, partition: int, offset: int) -> None:
        """Go on from there: no record that was fetched before is handed out any more."""
        self._sought[partition] = offset

    async def take(self, partitions: Collection[int], most: int, wait: float) -> Mapping[int, Taken]:
        """What has come of these partitions, about `most` records; waits so many seconds for the first.

        Raises what `LogReader.take` raises.
        """
        sought, self._sought = self._sought, {}
        loop = asyncio.get_running_loop()
        taken = await loop.run_in_executor(self._thread, self._take, frozenset(partitions), sought, most, wait)
        # sought again meanwhile: these are of before
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
