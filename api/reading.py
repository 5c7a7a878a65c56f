"""Reads views: from whichever table is live at that moment, and no older than what the caller has seen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import psycopg
from psycopg import errors
from psycopg_pool import AsyncConnectionPool

from api.client import Client
from api.reached import Reached
from infra.database.connect import named
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.views import queries
from projections.engine.views.queries import Found, Query
from projections.engine.views.token import Token
from projections.engine.views.view import View

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

    def __init__(self, settings: Settings, pool: AsyncConnectionPool[Any], reached: Reached) -> None:
        self._settings = settings
        self._topic = settings.events_topic
        self._pool = pool
        self._reached = reached
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

    async def as_of(
        self, seen: Token, agent: str, wait_s: float, client: Client, read: Callable[[], Awaitable[Found]]
    ) -> Found:
        """What `read` finds, as soon as that is no older than `seen`.

        Raises PositionNotReached after `wait_s` seconds, ClientGone.
        """
        found = await read()
        if seen.covered_by(found.position):
            return found
        deadline = asyncio.get_running_loop().time() + wait_s
        with self._reached.waiting(agent, seen) as waiter, client.watched(waiter.gone):
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
