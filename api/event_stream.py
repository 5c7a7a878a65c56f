"""Server-sent events on the wire: an answer without end, a comment where nothing happens, and room for so many at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable

from fastapi.sse import format_sse_event
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.problems import kind

HEARTBEAT_S = 15.0
"""Silence after which a comment is sent: proxies close what is silent for a minute or so."""
RETRY_MS = (500, 3_000)
"""How soon to come back when the connection is lost; not all at once, who lost theirs at once."""

TOO_MANY_SUBSCRIBERS = kind(
    429,
    "too-many-subscribers",
    "Too many clients are subscribed.",
    "One process serves so many and no more (the setting `api_max_live`). Come back after `Retry-After` seconds.",
)


def first_frame() -> bytes:
    """Sent at once, so that a client knows it is heard, and how soon to come back."""
    return format_sse_event(comment="samefold", retry=random.randint(*RETRY_MS))


class Room:
    """How many subscribers one process has, and may have."""

    def __init__(self, most: int) -> None:
        self.taken = 0
        self._most = most

    def enter(self) -> None:
        """Raises Problem 429."""
        if self.taken >= self._most:
            raise TOO_MANY_SUBSCRIBERS(headers={"Retry-After": "5"})
        self.taken += 1

    def leave(self) -> None:
        self.taken -= 1


class EventStream(StreamingResponse):
    """Sends frames until there are none or the client has gone; `on_end` is called then, whatever happened."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
            await self._frames.aclose()


class Signal:
    """Wakes the one who sends."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> bool:
        """True when it was set, False after a silence that is worth a comment."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True
