"""The rows of a view that somebody watches: read together, in one query for all of them, after each batch of the view's agent.

A watcher holds the newest state and nothing else: what he is too slow for is never sent. States come out of one task that reads one
after the other, so nobody sees an older one after a newer one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from api.due import Due
from api.event_stream import Signal, first_frame
from api.pulse import Pulse
from api.reading import Values, ViewReader
from api.rows import row_tag, stream_of, tells_stream
from infra.errors import SamefoldError
from projections.engine.views.queries import Found
from projections.engine.views.view import View

log = logging.getLogger(__name__)

CHUNK = 1_000
"""Keys in one query."""
AGAIN_S = 1.0


class State(NamedTuple):
    """What a row is now; `tag` is another one for each other state."""

    event: str
    tag: str
    members: dict[str, Any]

    def frame(self, position: str) -> bytes:
        body = msgspec.json.encode(self.members | {"position": position})
        return format_sse_event(event=self.event, id=self.tag, data_str=body.decode())


class Watcher:
    """One client's watch on one row. `tag` names the state that it has, or is about to be sent."""

    def __init__(self, key: Values, tag: str | None) -> None:
        self.key = key
        self.tag = tag
        self._newest: bytes | None = None
        self._signal = Signal()
        self._is_ended = False

    def tell(self, tag: str, frame: bytes) -> None:
        self.tag, self._newest = tag, frame
        self._signal.set()

    def end(self) -> None:
        self._is_ended = True
        self._signal.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The newest state whenever it is another one, and comments where there is none."""
        yield first_frame()
        while not self._is_ended:
            if not await self._signal.wait():
                yield KEEPALIVE_COMMENT
            elif self._newest is not None:
                frame, self._newest = self._newest, None
                yield frame


class RowFeed:
    """All watchers of one view. Its task runs while there are some."""

    def __init__(self, view: View, views: ViewReader, pulse: Pulse) -> None:
        self._view = view
        self._views = views
        self._due = Due(pulse, view.agent)
        self._watchers: dict[Values, set[Watcher]] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self, key: Values, tag: str | None) -> Watcher:
        """Watch a row from now on; `tag` names the state that the client has seen."""
        watcher = Watcher(key, tag)
        self._watchers.setdefault(key, set()).add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._due.now()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        watchers = self._watchers[watcher.key]
        watchers.discard(watcher)
        if not watchers:
            del self._watchers[watcher.key]

    async def close(self) -> None:
        self._end_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _end_all(self) -> None:
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.end()

    async def _run(self) -> None:
        try:
            while self._watchers:
                await self._due.wait()
                try:
                    await self._round()
                except SamefoldError as error:  # away, or in the midst of a deployment: watchers stay
                    log.debug("watching %s: %s", self._view.name, error)
                    await asyncio.sleep(AGAIN_S)
        except Exception:
            log.exception("watching %s", self._view.name)
            self._end_all()
        finally:
            self._task = None

    async def _round(self) -> None:
        keys = list(self._watchers)
        for start in range(0, len(keys), CHUNK):
            some = keys[start : start + CHUNK]
            streams = [stream for key in some if (stream := stream_of(self._view, key)) is not None]
            found = await self._views.by_keys(self._view, some, streams)
            rows = {row.number: row.json for row in found.rows}
            for number, key in enumerate(some, start=1):
                state = self._state(found, key, rows.get(number))
                if news := [one for one in self._watchers.get(key, ()) if one.tag != state.tag]:
                    frame = state.frame(str(found.position))
                    for watcher in news:
                        watcher.tell(state.tag, frame)

    def _state(self, found: Found, key: Values, row: msgspec.Raw | None) -> State:
        stream = stream_of(self._view, key)
        if stream is not None and (since := found.parked_since.get(stream)) is not None:
            return State("parked", f"parked-{since}", {"since_version": since})
        if row is None:
            return State("gone", "gone", {})
        parked = {} if tells_stream(self._view) else {"parked": found.parked}
        return State("row", row_tag(self._view, found, row), {"row": row} | parked)
