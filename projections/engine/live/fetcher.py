"""Fetches an agent's records in a thread, with librdkafka.

Faust's own client could fetch them too, but a record takes four times as much of the interpreter's lock, which is an agent's
bottleneck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from infra.log import clients
from infra.log.records import Record
from infra.settings import Settings
from projections.engine.live.log_reader import LogReader

T = TypeVar("T")


class Thread:
    """One thread, which makes calls in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self, last: Callable[[], None]) -> None:
        """End after this last call, without waiting for it."""
        self._pool.submit(last)
        self._pool.shutdown(wait=False)


class Fetcher:
    """Records of the agent's partitions. Each needs a `seek` before its first `take`."""

    def __init__(self, settings: Settings) -> None:
        self._log = LogReader(settings, settings.events_topic, clients.agent_consumer(settings))
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
