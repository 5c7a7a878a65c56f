"""Rows of a view as server-sent events: all watched rows are read in one query after each batch of the view's agent.

A watcher holds the newest state only: a slow client misses those in between. One task reads all states one after the other, so no
client sees an older one after a newer one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.problems import Problem
from api.view_reader import Values, ViewNotLive, ViewReader, ViewStopped, parked_since, row_members, row_tag
from api.waits import Moved, Notifications
from domain.engine.personal.keys import KeysNotRead
from infra.access import Rows
from infra.database.connect import DatabaseUnavailable
from infra.errors import SamefoldError
from infra.log.clients import KafkaUnavailable
from projections.engine.views.queries import Found, Shape
from projections.engine.views.view import View

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Silence after which a comment is sent: proxies close connections that are silent for a minute or so."""
RETRY_MS = (500, 3_000)
"""How soon a client reconnects; spread, because many lose their connections at once."""
CHUNK = 1_000
"""Keys in one query."""
POLL_S = 1.0
"""A notification may be lost."""
PAUSE_S = 0.02
"""Between two rounds; notifications that come faster are merged."""
AGAIN_S = 1.0
PASSING = Problem, DatabaseUnavailable, KafkaUnavailable, KeysNotRead, ViewNotLive, ViewStopped


class EventStream(StreamingResponse):
    """Sends frames until there are none or the client has gone; `on_end` is called then, whatever happened."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(frames, headers={"X-Accel-Buffering": "no"})
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
            await self._frames.aclose()


class State(NamedTuple):
    """The state of a row; `tag` identifies it."""

    event: str
    tag: str
    members: dict[str, Any]

    def frame(self, position: str) -> bytes:
        body = msgspec.json.encode(self.members | {"position": position})
        return format_sse_event(event=self.event, id=self.tag, data_str=body.decode())


class Watched(NamedTuple):
    """A row as a caller sees it, for whom there are `only` those rows; None: all."""

    only: Rows | None
    key: Values


class Watcher:
    """One client's watch on one row. `tag` is that of the state that it has, or is about to get."""

    def __init__(self, key: Values, tag: str | None, only: Rows | None = None) -> None:
        self.watched = Watched(only, key)
        self.tag = tag
        self._newest: bytes | None = None
        self._wake = asyncio.Event()
        self._is_ended = False

    def send(self, tag: str, frame: bytes) -> None:
        self.tag, self._newest = tag, frame
        self._wake.set()

    def end(self) -> None:
        self._is_ended = True
        self._wake.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The newest state whenever it changes, and comments in between."""
        # sent at once, so that a client knows that it is connected
        yield format_sse_event(comment="samefold", retry=random.randint(*RETRY_MS))
        while not self._is_ended:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._wake.wait()
            if not self._wake.is_set():
                yield KEEPALIVE_COMMENT
            self._wake.clear()
            if self._newest is not None:
                frame, self._newest = self._newest, None
                yield frame


class RowFeed:
    """All watchers of one view. Its task runs while there are some."""

    def __init__(self, view: View, views: ViewReader, notifications: Notifications) -> None:
        self._view = view
        self._views = views.with_last_rows()
        self._watchers: dict[Watched, set[Watcher]] = {}
        self._task: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
        notifications.subscribe(self._notified)

    def watch(self, key: Values, tag: str | None, only: Rows | None = None) -> Watcher:
        """Watch a row from now on; `tag` is that of the state that the client has seen. Others than `only` are gone for it."""
        watcher = Watcher(key, tag, only)
        self._watchers.setdefault(watcher.watched, set()).add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._due.set()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        watchers = self._watchers[watcher.watched]
        watchers.discard(watcher)
        if not watchers:
            del self._watchers[watcher.watched]

    def end(self) -> None:
        """End all watches: the process is stopping."""
        self._end_all()
        if self._task is not None:
            self._task.cancel()

    def _end_all(self) -> None:
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.end()

    def _notified(self, agent: str, _moved: Moved) -> None:
        if agent in ("", self._view.agent):
            self._due.set()

    async def _run(self) -> None:
        try:
            while self._watchers:
                await asyncio.sleep(PAUSE_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._due.wait()
                self._due.clear()
                try:
                    await self._round()
                except PASSING as error:  # a store is unavailable, or a deployment is under way: watchers stay
                    log.debug("watching %s: %s", self._view.name, error)
                    await asyncio.sleep(AGAIN_S)
        except SamefoldError as error:
            log.warning("watching %s ends: %s", self._view.name, error)
            self._end_all()
        except Exception:
            log.exception("watching %s", self._view.name)
            self._end_all()
        finally:
            self._task = None

    async def _round(self) -> None:
        by_shape: defaultdict[Shape, list[Watched]] = defaultdict(list)
        for watched in self._watchers:
            by_shape[watched.only.shape if watched.only else ()].append(watched)
        for of_shape in by_shape.values():
            for start in range(0, len(of_shape), CHUNK):
                await self._read(of_shape[start : start + CHUNK])

    async def _read(self, some: Sequence[Watched]) -> None:
        """Read these rows, whose `only` are of one shape, with one query."""
        keys, only = [key for _, key in some], [rows for rows, _ in some if rows is not None]
        found = await self._views.by_keys(self._view, keys, only)
        shown = await self._views.shown(found)
        rows = {row.number: json for row, json in zip(found.rows, shown, strict=True)}
        for number, watched in enumerate(some, start=1):
            state = self._state(found, watched, rows.get(number))
            if news := [one for one in self._watchers.get(watched, ()) if one.tag != state.tag]:
                frame = state.frame(str(found.position))
                for watcher in news:
                    watcher.send(state.tag, frame)

    def _state(self, found: Found, watched: Watched, row: msgspec.Raw | None) -> State:
        if found.stopped is not None:  # for all watchers alike: it says nothing about a row
            code, at = found.stopped
            return State("stopped", f"stopped-{at}", {"code": code, "since": at})
        if row is None and watched.only:  # also where it is parked: that would reveal the row
            return State("gone", "gone", {})
        if (since := parked_since(self._view, found, watched.key)) is not None:
            return State("parked", f"parked-{since}", {"since_version": since})
        if row is None:
            return State("gone", "gone", {})
        return State("row", row_tag(self._view, found, row), row_members(self._view, found, row))
