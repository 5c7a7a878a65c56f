"""Waits for outcomes, for everybody at once: one query per beat of the pulse, however many wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from psycopg_pool import AsyncConnectionPool

from commands.api.pulse import Pulse
from infra.settings import Settings


class Recorded(NamedTuple):
    """An outcome as it is recorded, and the position of its partition in the same snapshot."""

    outcome: str
    code: str | None
    message: str | None
    version: int
    fingerprint: str
    at: datetime
    topic_id: str
    partition: int
    next_offset: int


class Waits:
    """Who waits for which outcome."""

    def __init__(self, settings: Settings, pool: AsyncConnectionPool[Any], pulse: Pulse) -> None:
        self._settings = settings
        self._pool = pool
        self._pulse = pulse
        self._waiting: dict[tuple[str, str], list[asyncio.Future[Recorded]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def waiting(self, stream: str, command_id: str) -> Iterator[asyncio.Future[Recorded]]:
        """A future that gets the outcome. Enter this before the command is appended."""
        future: asyncio.Future[Recorded] = asyncio.get_running_loop().create_future()
        key = (stream, command_id)
        self._waiting.setdefault(key, []).append(future)
        try:
            yield future
        finally:
            self._waiting[key].remove(future)
            if not self._waiting[key]:
                del self._waiting[key]

    async def answer(self) -> None:
        """Until it is cancelled."""
        await asyncio.Event().wait()
