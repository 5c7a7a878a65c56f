"""Server-sent events of what changes: a feed reads what its clients watch after each batch of the view's agent.

A watcher holds the newest state only: a slow client misses those in between. One task reads all states one after the other, so no
client sees an older one after a newer one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.problems import Problem
from api.view_reader import ViewNotLive, ViewReader, ViewStopped
from api.waits import Moved, Notifications
from domain.engine.personal.keys import KeysNotRead
from infra.database.connect import DatabaseUnavailable
from infra.errors import SamefoldError
from infra.log.clients import KafkaUnavailable
from projections.engine.views.queries import Found
from projections.engine.views.view import View

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Silence after which a comment is sent: proxies close connections that are silent for a minute or so."""
RETRY_MS = (500, 3_000)
"""How soon a client reconnects; spread, because many lose their connections at once."""
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

    async def stream_response(self, send: Send) -> None:
        # the task group keeps the error of a task that it cancels, and that would keep the frames: a cycle with all rows in it
        with suppress(asyncio.CancelledError):
            await super().stream_response(send)


Places: TypeAlias = tuple[bytes, ...] | None
"""Digests of the rows of a list; None: there is none."""


class State:
    """The state of what is watched; `tag` identifies it."""

    places: Places = None
    """Of a list. Watchers keep those of the list that their clients have, and not its rows."""

    def __init__(self, found: Found, event: str, tag: str, **members: Any) -> None:
        self.tag = tag
        self._position = str(found.position)
        self._event, self._members = event, members
        self._frames: dict[Places, bytes] = {}

    def frame(self, before: Places) -> bytes:
        """What a client is sent that has the list with these places; encoded once for all of them."""
        if before not in self._frames:
            event, members = self.news(before)
            data = msgspec.json.encode({**members, "position": self._position}).decode()
            self._frames[before] = format_sse_event(event=event, id=self.tag, data_str=data)
        return self._frames[before]

    def news(self, before: Places) -> tuple[str, Mapping[str, Any]]:  # noqa: ARG002
        return self._event, self._members


def stopped(found: Found, **members: Any) -> State:
    assert found.stopped is not None
    code, since = found.stopped
    return State(found, "stopped", f"stopped-{since}", code=code, since=since, **members)


class Watcher:
    """One client's watch. `tag` is that of the state that it has."""

    def __init__(self, tag: str | None) -> None:
        self._tag = tag
        self._places: Places = None
        self._newest: State | None = None
        self._wake = asyncio.Event()
        self.is_ended = False

    def offer(self, state: State) -> None:
        """It is sent where the client has another one."""
        if state.tag == self._tag:
            self._newest, self._places = None, state.places
        else:
            self._newest = state
            self._wake.set()

    def end(self) -> None:
        self.is_ended = True
        self._wake.set()

    def take(self) -> bytes | None:
        """The frame with what is new, once."""
        if (state := self._newest) is None:
            return None
        frame = state.frame(self._places)
        self._newest, self._tag, self._places = None, state.tag, state.places
        return frame

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """What is new, whenever there is something, and comments in between."""
        # sent at once, so that a client knows that it is connected
        yield format_sse_event(comment="samefold", retry=random.randint(*RETRY_MS))
        loop = asyncio.get_running_loop()
        silent_until = loop.time() + HEARTBEAT_S
        while not self.is_ended:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(silent_until):
                    await self._wake.wait()
            self._wake.clear()
            # woken, too, there may be nothing for this client: the silence goes on
            if (frame := self.take() or (KEEPALIVE_COMMENT if loop.time() >= silent_until else None)) is not None:
                yield frame
                silent_until = loop.time() + HEARTBEAT_S


Watched = TypeVar("Watched", bound=Hashable)


class Feed(Generic[Watched]):
    """All watchers of one view, by what they watch. Its task runs while there are some. A subclass says what a round is."""

    def __init__(self, view: View, views: ViewReader, notifications: Notifications) -> None:
        self.view = view
        self.views = views.with_last_rows()
        self.watchers: dict[Watched, set[Watcher]] = {}
        self._task: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
        notifications.subscribe(self._notified)

    async def round(self) -> None:
        """Read what is watched, and send what is new. Raises whatever reading raises."""
        raise NotImplementedError

    def enter(self, watched: Watched, watcher: Watcher) -> Watcher:
        self.watchers.setdefault(watched, set()).add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._due.set()
        return watcher

    def leave(self, watched: Watched, watcher: Watcher) -> None:
        watchers = self.watchers[watched]
        watchers.discard(watcher)
        if not watchers:
            del self.watchers[watched]

    def end(self) -> None:
        """End all watches: the process is stopping."""
        self._end_all()
        if self._task is not None:
            self._task.cancel()

    def _end_all(self) -> None:
        for watchers in self.watchers.values():
            for watcher in watchers:
                watcher.end()

    def _notified(self, agent: str, _moved: Moved) -> None:
        if agent in ("", self.view.agent):
            self._due.set()

    async def _run(self) -> None:
        try:
            while self.watchers:
                await asyncio.sleep(PAUSE_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._due.wait()
                self._due.clear()
                try:
                    await self.round()
                except PASSING as error:  # a store is unavailable, or a deployment is under way: watchers stay
                    log.debug("watching %s: %s", self.view.name, error)
                    await asyncio.sleep(AGAIN_S)
        except SamefoldError as error:
            log.warning("watching %s ends: %s", self.view.name, error)
            self._end_all()
        except Exception:
            log.exception("watching %s", self.view.name)
            self._end_all()
        finally:
            self._task = None
