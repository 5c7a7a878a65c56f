"""A thread for what blocks, in a process that serves in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
