"""Pages that no key leads to: few at once, or they would hold all connections that others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from itertools import takewhile

from api.problems import kind
from projections.engine.views.view import View

PATIENCE_S = 2.0
"""How long to wait for others to end."""

TOO_MANY_SEARCHES = kind(
    429,
    "too-many-searches",
    "Too many lists are being searched.",
    "A list is found by its key, or searched row by row where other columns are asked for. Come back after `Retry-After` seconds.",
)


class Searches:
    """Half of the connections are for them."""

    def __init__(self, connections: int) -> None:
        self._free = asyncio.Semaphore(connections // 2)

    @asynccontextmanager
    async def place(self, view: View, filtered: Collection[str]) -> AsyncIterator[None]:
        """While a page is read that is filtered by these columns. Raises Problem 429."""
        if not is_search(view, filtered):
            yield
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._free.acquire()
        except TimeoutError:
            raise TOO_MANY_SEARCHES(headers={"Retry-After": "1"}) from None
        try:
            yield
        finally:
            self._free.release()


def is_search(view: View, filtered: Collection[str]) -> bool:
    """Whether a page is filtered by other columns than the first of the key, which its index leads to."""
    return not set(filtered) <= set(takewhile(lambda name: name in filtered, (column.name for column in view.key)))
