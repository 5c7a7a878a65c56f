"""Reads views: from whichever table is live at that moment, and no older than what the caller has seen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import psycopg
from fastapi import Request
from psycopg import errors
from psycopg_pool import AsyncConnectionPool

from api.notifications import Moved, Notifications
from api.problems import ClientGone, kind
from api.requests import watched
from infra.database.connect import named
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.views import queries
from projections.engine.views.queries import Found, Query
from projections.engine.views.token import Token
from projections.engine.views.view import View

LOOK_AGAIN_S = 1.0
"""Whoever waits reads again after so long without a notification: the connection that listens may be lost."""

TOO_MANY_READERS = kind(429, "too-many-readers", "Too many readers wait for the read model already.")

Values: TypeAlias = tuple[Any, ...]
"""A key: values of a view's key columns, in their order."""


class ViewNotLive(SamefoldError):
    """The view is not live, or not in this code's version."""

    is_public = True


class PositionNotReached(SamefoldError):
    """The read model has not yet come as far as the caller has seen."""

    is_public = True


class ViewReader:
    """Reads rows with the position they are of. Errors of the database come out as named ones."""

    def __init__(self, settings: Settings, pool: AsyncConnectionPool[Any], positions: PositionWaits) -> None:
        self._settings = settings
        self._topic = settings.events_topic
        self._pool = pool
        self._positions = positions
        self._tables: dict[str, str] = {}

    async def by_keys(self, view: View, keys: Sequence[Values], streams: Sequence[str] = ()) -> Found:
        """The rows with these keys, and which of the streams are parked. Raises ViewNotLive, DatabaseAway."""
        return await self._ask(view, lambda table: queries.by_keys(view, table, self._topic, keys, streams))

    async def page(self, view: View, filters: Mapping[str, Any], after: Values | None, most: int) -> Found:
        """The first `most` rows by key, after a key, with these values. Raises ViewNotLive, DatabaseAway."""
        return await self._ask(view, lambda table: queries.page(view, table, self._topic, filters, after, most))

    async def require_live(self, view: View) -> None:
        """Raises ViewNotLive, DatabaseAway."""
        try:
            await self._live_table(view)
        except psycopg.Error as error:
            raise named(error, self._settings) from error

    async def parked(self) -> dict[str, int]:
        """How many streams each live view leaves out from some event on. Raises DatabaseAway."""
        try:
            async with self._pool.connection() as connection:
                cursor = await connection.execute(
                    "select l.view, count(k.stream) from live l left join parked k using (table_name) group by l.view"
                )
                return dict(await cursor.fetchall())
        except psycopg.Error as error:
            raise named(error, self._settings) from error

    async def no_older(
        self, seen: Token, agent: str, wait_s: float, request: Request, read: Callable[[], Awaitable[Found]]
    ) -> Found:
        """What `read` finds, as soon as that is no older than `seen`. Raises PositionNotReached after `wait_s`, ClientGone."""
        found = await read()
        if seen.covered_by(found.position):
            return found
        deadline = asyncio.get_running_loop().time() + wait_s
        with self._positions.waiting(agent, seen) as waiter, watched(request, waiter.gone):
            while True:
                found = await read()
                if seen.covered_by(found.position):
                    return found
                if not await waiter.after(found.position, deadline):
                    raise PositionNotReached(
                        f"After {wait_s:g} s the read model has not come as far as the position token says: it stands at "
                        f"{found.position}.",
                        "Ask again. Where that goes on, look whether an agent is running: `samefold views`.",
                    )

    async def _ask(self, view: View, query: Callable[[str], Query]) -> Found:
        """From the table that the same statement says is live: after a switch, asked for once more from the other table."""
        try:
            table = self._tables.get(view.name) or await self._live_table(view)
            while True:
                try:
                    found = await self._execute(view, query(table))
                except errors.UndefinedTable:
                    if (now := await self._live_table(view)) == table:
                        raise
                    table = now
                    continue
                if (found.table, found.version) == (table, view.version):
                    return found
                table = await self._live_table(view)
        except psycopg.Error as error:
            raise named(error, self._settings) from error

    async def _execute(self, view: View, query: Query) -> Found:
        async with self._pool.connection() as connection:
            row = await (await connection.execute(query.text, query.parameters)).fetchone()
        if row is None:
            self._tables.pop(view.name, None)
            raise _not_live(view, None)
        return queries.found(row[0])

    async def _live_table(self, view: View) -> str:
        """Of this code's version, whose columns a query can name."""
        async with self._pool.connection() as connection:
            cursor = await connection.execute("select version, table_name from live where view = %s", (view.name,))
            row = await cursor.fetchone()
        if row is None or row[0] != view.version:
            self._tables.pop(view.name, None)
            raise _not_live(view, row and row[0])
        self._tables[view.name] = row[1]
        return str(row[1])


def _not_live(view: View, version: int | None) -> ViewNotLive:
    if version is None:
        return ViewNotLive(f"View '{view.name}' is not live yet.", "Start an agent: `samefold run agent`.")
    return ViewNotLive(
        f"View '{view.name}' is live as version {version}, and this code has version {view.version}.",
        "A deployment is under way, or was never ended: `samefold views` and `samefold rebuild`.",
    )


class Waiter:
    """One who waits for an agent, from before the first read on."""

    def __init__(self, seen: Token) -> None:
        self._wanted = _offsets(seen)
        self._pending = dict(self._wanted)
        """What no notification has reported that would bring it."""
        self._wake = asyncio.Event()
        self._is_gone = False

    def gone(self) -> None:
        """The client has gone."""
        self._is_gone = True
        self._wake.set()

    def notified(self, moved: Moved) -> None:
        if moved is None:
            self._wake.set()
            return
        for partition, offset in moved.items():
            if self._pending.get(partition, offset + 1) <= offset:
                del self._pending[partition]
        if not self._pending:
            self._wake.set()

    async def after(self, position: Token, deadline: float) -> bool:
        """Wait until another read is worth it, after one that saw `position`. False when the loop's clock is past `deadline`.

        Raises ClientGone.
        """
        at = _offsets(position)
        short = {partition: offset for partition, offset in self._wanted.items() if at.get(partition, 0) < offset}
        self._pending = {partition: offset for partition, offset in self._pending.items() if partition in short}
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        if self._pending:  # else it was committed meanwhile
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_AGAIN_S)):
                    await self._wake.wait()
        if self._is_gone:
            raise ClientGone
        self._wake.clear()
        self._pending = short
        return True


class PositionWaits:
    """Those who wait for read models to come as far as a token says, at most `most` at once, without a query while they wait."""

    def __init__(self, notifications: Notifications, most: int) -> None:
        self._most = most
        self._waiting: dict[str, set[Waiter]] = {}
        notifications.subscribe(self._notified)

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

    def _notified(self, agent: str, moved: Moved) -> None:
        for name, waiters in self._waiting.items():
            if agent in ("", name):
                for waiter in waiters:
                    waiter.notified(moved)


def _offsets(token: Token) -> dict[int, int]:
    return {partition: offset for offsets in token.positions.values() for partition, offset in offsets.items()}
