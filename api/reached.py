"""Waits for read models to come as far as a token says: told by the pulse, for everybody at once, without a query."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from api.client import ClientGone
from api.problems import kind
from api.pulse import Moved, Pulse
from projections.engine.views.token import Token

LOOK_S = 1.0
"""Whoever was told nothing looks all the same: the connection that is listened on may be lost."""

TOO_MANY_READERS = kind(
    429,
    "too-many-readers",
    "Too many readers wait for the read model already.",
    "Come back after `Retry-After` seconds, a little later each time.",
)


class Waiter:
    """One who waits for an agent, from before his first look on."""

    def __init__(self, seen: Token) -> None:
        self._wanted = _offsets(seen)
        self._pending = dict(self._wanted)
        """What no batch has been told of that would bring it."""
        self._look = asyncio.Event()
        self._is_gone = False

    def gone(self) -> None:
        """Whoever waits has gone."""
        self._is_gone = True
        self._look.set()

    def heard(self, moved: Moved) -> None:
        if moved is None:
            self._look.set()
            return
        for partition, offset in moved.items():
            if self._pending.get(partition, offset + 1) <= offset:
                del self._pending[partition]
        if not self._pending:
            self._look.set()

    async def after(self, position: Token, deadline: float) -> bool:
        """Wait until another look is worth it, after one that saw `position`. False when the loop's clock is past `deadline`.

        Raises ClientGone.
        """
        at = _offsets(position)
        short = {partition: offset for partition, offset in self._wanted.items() if at.get(partition, 0) < offset}
        self._pending = {partition: offset for partition, offset in self._pending.items() if partition in short}
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        if self._pending:  # else it was committed while we looked
            try:
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._look.wait()
            except TimeoutError:
                pass
        if self._is_gone:
            raise ClientGone
        self._look.clear()
        self._pending = short
        return True


class Reached:
    """Those who wait, at most `most` at once."""

    def __init__(self, pulse: Pulse, most: int) -> None:
        self._most = most
        self._waiting: dict[str, set[Waiter]] = {}
        pulse.tell(self._heard)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def waiting(self, agent: str, seen: Token) -> Iterator[Waiter]:
        """Raises Problem 429."""
        if len(self) >= self._most:
            raise TOO_MANY_READERS(headers={"Retry-After": "1"})
        waiter = Waiter(seen)
        self._waiting.setdefault(agent, set()).add(waiter)
        try:
            yield waiter
        finally:
            self._waiting[agent].discard(waiter)

    def _heard(self, agent: str, moved: Moved) -> None:
        for name, waiters in self._waiting.items():
            if agent in ("", name):
                for waiter in waiters:
                    waiter.heard(moved)


def _offsets(token: Token) -> dict[int, int]:
    return {partition: offset for offsets in token.positions.values() for partition, offset in offsets.items()}
