"""Reads streams out of the log, a few at once: each reads a whole partition, in a thread that the others of the process feel."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from confluent_kafka import KafkaError

from api.problems import kind
from infra.log import clients
from infra.log.history import Page, Wanted, page_of
from infra.log.rule import Reading
from infra.settings import Settings

AT_ONCE = 2
SECONDS = 5.0
"""After which a page is answered with what was found."""
KAFKA_S = 5.0
"""Beyond that, a thread that has nothing to tell waits for Kafka."""
PATIENCE_S = 2.0
"""How long to wait for others to end."""
MOST_BYTES = 262_144
"""Of events in a page, and one commit more."""

TOO_MANY_SCANS = kind(
    429,
    "too-many-scans",
    "Too many histories are being read.",
    "Each is found by reading its part of the log, so only a few are read at once. Come back after `Retry-After` seconds.",
)


class Scans:
    """Shared by all who read histories."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="history")
        self._free = asyncio.Semaphore(AT_ONCE)
        self._stopped = False

    async def page(self, wanted: Wanted, at: Reading, stop: int, most: int, *, patiently: bool = False) -> Page:
        """See `page_of`; waits for others to end, a little while or `patiently`. Raises Problem 429, and what `page_of` raises."""
        try:
            async with asyncio.timeout(None if patiently else PATIENCE_S):
                await self._free.acquire()
        except TimeoutError:
            raise TOO_MANY_SCANS(headers={"Retry-After": "1"}) from None
        scan = partial(
            page_of,
            self._settings,
            wanted,
            at,
            stop,
            most=most,
            most_bytes=MOST_BYTES,
            seconds=SECONDS,
            is_stopped=lambda: self._stopped,
        )
        reading = asyncio.get_running_loop().run_in_executor(self._threads, scan)
        # the thread works on when the caller has gone: its place is free when it has ended
        reading.add_done_callback(self._end)
        try:
            async with asyncio.timeout(SECONDS + KAFKA_S):
                return await asyncio.shield(reading)
        except TimeoutError:
            raise clients.away(self._settings, KafkaError(KafkaError._TIMED_OUT)) from None

    def close(self) -> None:
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, reading: asyncio.Future[Page]) -> None:
        self._free.release()
        if not reading.cancelled():
            reading.exception()  # whoever asked has it, or has gone
