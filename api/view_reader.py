"""Reads views: from the table that is live at that moment, and no older than what the caller has seen."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import msgspec
from fastapi import Request
from psycopg import errors, sql

from api.problems import STOPPING, kind
from api.requests import watched
from api.waits import Moved, Notifications, Slots
from domain.engine.personal.keys import Keys
from domain.engine.personal.tokens import key_ids, opened
from infra.access import BadAccess, Rows
from infra.database.connect import ValueRefused, named_errors
from infra.database.deadline import Connection, Pool
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.live.lag import VIEWS
from projections.engine.live.startup import HOW_IT_GOES_LIVE
from projections.engine.queries.query import BadQuery, QueryFailed
from projections.engine.queries.query import Query as AuthorQuery
from projections.engine.queries.statement import Answer, Behind, answer, described, require_types, statement
from projections.engine.views import queries
from projections.engine.views.pages import Page, page_query
from projections.engine.views.queries import Found, Query, Shape
from projections.engine.views.sql_views import STOPPED
from projections.engine.views.token import Token
from projections.engine.views.view import View

READ_AGAIN_S = 1.0
"""A waiting request reads again after so long without a notification: one may be lost."""

ESTIMATE_S = 60.0
"""How long an estimate of a table's rows is believed."""
GATHER_S = 0.02
"""A read waits no longer for a query that was sent before; on an idle machine one takes a millisecond."""
MOST_GATHERED = 100
"""Rows in one query."""

CORRECT_IT = "Its code must be corrected: `samefold views` says why it stopped."
TOO_MANY_READERS = kind(429, "too-many-readers", "Too many readers wait for the read model already.", 1)

F = TypeVar("F", Found, Answer)
Values: TypeAlias = tuple[Any, ...]
"""A key: values of a view's key columns, in their order."""


class ViewNotLive(SamefoldError):
    """The view is not live, or not in this code's version."""

    is_public = True


class ViewStopped(SamefoldError):
    """The view has stopped at an event that it can't fold."""

    is_public = True


class PositionNotReached(SamefoldError):
    """The read model has not yet reached the position that the caller has seen."""

    is_public = True


class ViewReader:
    """Reads rows together with their position."""

    def __init__(
        self, settings: Settings, pool: Pool, places: Slots, positions: PositionWaits, keys: Keys | None
    ) -> None:
        self._settings = settings
        self._keys = keys
        """None where no context has personal fields."""
        self.small_view = settings.api_small_view
        self._topic = settings.events_topic
        self._pool = pool
        self._places = places
        """In the pool."""
        self._positions = positions
        self._tables: dict[str, str] = {}
        self._estimates: dict[str, tuple[float, int]] = {}
        """By view, how many rows the planner expects, and until when that is believed, in the loop's time."""
        self._described: set[str] = set()
        """Queries whose columns PostgreSQL has said to be of the declared types."""
        self._takes_last_rows = False
        self._gathering: WeakValueDictionary[tuple[str, Shape, bool], Gathering] = WeakValueDictionary()
        """By view, shape of `only` and whether last rows are taken, as long as some are read."""

    def with_last_rows(self) -> ViewReader:
        """The same, but of a stopped view it reads the last rows."""
        reader = copy(self)
        reader._takes_last_rows = True
        return reader

    async def by_keys(self, view: View, keys: Sequence[Values], only: Sequence[Rows] = ()) -> Found:
        """The rows with these keys, and which of their streams are parked. Raises ViewNotLive, DatabaseUnavailable.

        `only`: see `queries.by_keys`. Raises BadAccess. Single rows that are asked for at the same time are read by one query.
        """
        if len(keys) != 1:
            return await self._by_keys(view, keys, only)
        kind = view.name, only[0].shape if only else (), self._takes_last_rows
        if (gathering := self._gathering.get(kind)) is None:
            gathering = self._gathering[kind] = Gathering(view, partial(self._by_keys, view))
        return await gathering.read(keys[0], *only)

    async def _by_keys(self, view: View, keys: Sequence[Values], only: Sequence[Rows]) -> Found:
        streams = [stream for key in keys if (stream := stream_of(view, key)) is not None]
        return await self._ask(view, lambda table: queries.by_keys(view, table, self._topic, keys, streams, only))

    async def page(self, view: View, page: Page, only: Rows | None = None) -> Found:
        """The page, of those rows only. Raises ViewNotLive, DatabaseUnavailable, BadAccess."""
        return await self._ask(view, lambda table: page_query(view, table, self._topic, page, only))

    async def is_small(self, view: View) -> bool:
        """Whether a search of the whole table is nothing. Raises ViewNotLive, ViewStopped, DatabaseUnavailable."""
        now = asyncio.get_running_loop().time()
        until, rows = self._estimates.get(view.name, (now, 0))
        if until <= now:
            # the table may be dropped meanwhile: a page that follows tells that
            with named_errors(self._settings), suppress(errors.UndefinedTable):
                table = self._tables.get(view.name) or await self._live_table(view)
                async with self._connection() as connection:
                    cursor = await connection.execute(_ESTIMATE.format(sql.Identifier(table)))
                    [[[explained]]] = await cursor.fetchall()
                rows = explained["Plan"]["Plan Rows"]
            self._estimates[view.name] = now + ESTIMATE_S, rows
        return rows <= self.small_view

    async def answer(
        self,
        query: AuthorQuery,
        values: Mapping[str, Any],
        most: int,
        only: Rows | None = None,
        behind: Behind | None = None,
    ) -> Answer:
        """The first `most` rows of a query of the author's. Raises BadQuery, QueryFailed, ViewNotLive, DatabaseUnavailable, …"""
        views, tables = query.views, dict[str, str]()
        with named_errors(self._settings):
            while True:
                before = tables
                tables = {one.name: self._tables.get(one.name) or await self._live_table(one) for one in views}
                try:
                    async with self._connection() as connection:
                        if query.name not in self._described:
                            cursor = await connection.execute(*described(query, tables))
                            require_types(query, cursor.description, connection.adapters.types)
                            self._described.add(query.name)
                        asked = statement(query, tables, self._topic, values, most, only, behind)
                        [value] = await (await connection.execute(*asked)).fetchone() or ("",)
                except errors.UndefinedTable:
                    if tables == before:
                        raise
                except errors.InsufficientPrivilege:  # of ours: the author's are checked
                    raise
                except (errors.DataError, errors.ProgramLimitExceeded) as error:  # its text may quote a value
                    hint = "Let the SQL have an answer there, as with `nullif(…, 0)` below a division."
                    raise QueryFailed(f"{query.file}: {type(error).__name__}.", hint) from None
                except (errors.ProgrammingError, errors.NotSupportedError) as error:
                    raise BadQuery(f"{query.file}: {error.diag.message_primary}.", "Correct the SQL.") from error
                else:
                    found = answer(query, value)
                    if found.live == {one.name: (one.version, tables[one.name]) for one in views}:
                        return found
                for one in views:
                    self._tables.pop(one.name, None)

    async def shown(self, found: Found) -> list[msgspec.Raw]:
        """Its rows as clients may see them: personal values, or what is shown for a forgotten one. Raises DatabaseUnavailable, …"""
        return await self.opened([row.json for row in found.rows], found.has_personal)

    async def opened(self, rows: Sequence[msgspec.Raw], has_personal: bool) -> list[msgspec.Raw]:
        """The rows as clients may see them; whether any may hold a personal value. Raises DatabaseUnavailable, …"""
        if self._keys is None or not has_personal:
            return list(rows)
        ids = {ident for row in rows for ident in key_ids(bytes(row))}
        with named_errors(self._settings):
            async with self._connection() as connection:
                keys = await self._keys.keys_for_async(connection, ids)
        return [msgspec.Raw(opened(bytes(row), keys)) for row in rows]

    async def require_live(self, view: View) -> None:
        """Reads as live updates will. Raises ViewNotLive, ViewStopped, DatabaseUnavailable, DatabaseRefused."""
        if (await self.with_last_rows().by_keys(view, ())).stopped:
            with named_errors(self._settings):
                await self._live_table(view)

    async def left_out(self) -> dict[str, tuple[int, str | None]]:
        """By view, how many streams it leaves out from some event on, and why it is stopped. Raises DatabaseUnavailable."""
        with named_errors(self._settings):
            async with self._connection() as connection:
                cursor = await connection.execute(VIEWS)
                return {view: (streams, stopped) for view, streams, stopped in await cursor.fetchall()}

    async def no_older(
        self, seen: Token, agents: Collection[str], wait_s: float, request: Request, read: Callable[[], Awaitable[F]]
    ) -> F:
        """What `read` finds, as soon as that is no older than `seen`. Raises PositionNotReached after `wait_s`, ClientGone."""

        def is_reached(found: F) -> bool:
            if (covered := seen.covered_by(found.position)) or found.stopped is None:
                return covered
            # it does not move, and requests that wait take places from other views' readers
            raise PositionNotReached(f"The view has stopped: it is at {found.position}.", CORRECT_IT)

        found = await read()
        if is_reached(found):
            return found
        deadline = asyncio.get_running_loop().time() + wait_s
        with self._positions.waiting(agents, seen) as waiter:
            while True:
                found = await read()
                if is_reached(found):
                    return found
                with watched(request):
                    if not await waiter.after(found.position, deadline):
                        raise PositionNotReached(
                            f"After {wait_s:g} s the read model has not reached the position token: it is at {found.position}.",
                            "Try again. If this goes on, check that an agent is running: `samefold views`.",
                        )

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Raises Problem 429."""
        async with self._places, self._pool.connection() as connection:
            yield connection

    async def _ask(self, view: View, query: Callable[[str], Query]) -> Found:
        """Query the table that the same statement finds live: if a switch came in between, once more from the other table."""
        with named_errors(self._settings):
            table = self._tables.get(view.name) or await self._live_table(view)
            while True:
                try:
                    found = await self._execute(query(table))
                except errors.UndefinedTable:
                    if (now := await self._live_table(view)) == table:
                        raise
                    table = now
                    continue
                if found is not None and (found.table, found.version) == (table, view.version):
                    return found
                table = await self._live_table(view)

    async def _execute(self, query: Query) -> Found | None:
        """None where the view is not live, nor stopped where last rows are taken."""
        text = query.if_stopped if self._takes_last_rows else query.text
        async with self._connection() as connection:
            row = await (await connection.execute(text, query.parameters)).fetchone()
        return row and queries.found(row[0])

    async def _live_table(self, view: View) -> str:
        """Of this code's version, whose columns a query can name. Raises ViewNotLive, ViewStopped where no last rows are taken."""
        async with self._connection() as connection:
            cursor = await connection.execute(_LIVE_TABLE, (view.name, view.name))
            version, table, stopped, since = await cursor.fetchone() or (None, None, None, None)
        if stopped or version != view.version:
            self._tables.pop(view.name, None)
        if stopped and not (self._takes_last_rows and version == view.version):
            raise ViewStopped(
                f"View '{view.name}' has not been kept up to date since {since:%Y-%m-%dT%H:%M:%S%z}: {stopped}.",
                CORRECT_IT,
            )
        if version is None:
            raise ViewNotLive(f"View '{view.name}' is not live yet.", HOW_IT_GOES_LIVE)
        if version != view.version:
            raise ViewNotLive(
                f"View '{view.name}' is live as version {version}, and this code has version {view.version}.",
                "A deployment is under way, or was never finished: `samefold views` and `samefold rebuild`.",
            )
        if not stopped:
            self._tables[view.name] = str(table)
        return str(table)


class _Read(NamedTuple):
    key: Values
    only: tuple[Rows, ...]
    """One, or none."""
    found: asyncio.Future[Found]


class Gathering:
    """Reads of single rows: those that begin while a query is under way are answered by the next one, never by that one.

    So each sees what was committed before it began.
    """

    def __init__(self, view: View, read: Callable[[Sequence[Values], Sequence[Rows]], Awaitable[Found]]) -> None:
        self._view = view
        self._read = read
        self._waiting: list[_Read] = []
        self._queries: set[asyncio.Task[None]] = set()

    async def read(self, key: Values, *only: Rows) -> Found:
        """What a query for this row alone would find, and raise."""
        loop = asyncio.get_running_loop()
        self._waiting.append(read := _Read(key, only, loop.create_future()))
        if len(self._waiting) == 1:
            # also without a query under way not at once: the requests that came together are yet to be begun
            self._due = loop.call_later(GATHER_S if self._queries else 0, self._send)
        return await read.found

    def _send(self) -> None:
        self._due.cancel()
        reads, self._waiting = self._waiting, []
        for start in range(0, len(reads), MOST_GATHERED):
            query = asyncio.create_task(self._answer(reads[start : start + MOST_GATHERED]))
            self._queries.add(query)
            query.add_done_callback(self._answered)

    def _answered(self, query: asyncio.Task[None]) -> None:
        self._queries.discard(query)
        if self._waiting:
            self._send()

    async def _answer(self, reads: Sequence[_Read]) -> None:
        """In a task of its own: a read that is cancelled ends no other."""
        try:
            found = await self._read([read.key for read in reads], [rows for read in reads for rows in read.only])
        except Exception as error:
            if len(reads) > 1 and isinstance(error, ValueRefused | BadAccess):  # of one of them, perhaps
                await asyncio.gather(*(self._answer([read]) for read in reads))
            for read in reads:
                if not read.found.done():
                    read.found.set_exception(error)
            return
        for number, read in enumerate(reads, start=1):
            if not read.found.done():
                read.found.set_result(found if len(reads) == 1 else found.of(number, stream_of(self._view, read.key)))


_ESTIMATE = sql.SQL("explain (format json) select from {}")
_LIVE_TABLE = f"""
select version, table_name, null, null from live where view = %s
union all select version, table_name, code, stopped_at from {STOPPED} s where view = %s
"""  # noqa: S608


class Waiter:
    """One request that waits for the positions of these agents, entered before its first read."""

    def __init__(self, agents: Collection[str], seen: Token) -> None:
        self._agents = agents
        self._wanted = _offsets(seen)
        self._missing = self._wanted
        """What the last read had not reached."""
        self._wake = asyncio.Event()
        self._is_over = False

    def give_up(self) -> None:
        self._is_over = True
        self._wake.set()

    def notified(self, agent: str, moved: Moved) -> None:
        if (not agent or agent in self._agents) and (
            moved is None or any(self._missing.get(partition, at + 1) <= at for partition, at in moved.items())
        ):
            self._wake.set()

    async def after(self, position: Token, deadline: float) -> bool:
        """Wait until another read is worth it, after one at `position`. False past `deadline`, in the loop's time.

        Raises Problem 503 where the process is stopping.
        """
        at = _offsets(position)
        self._missing = {
            partition: offset for partition, offset in self._wanted.items() if at.get(partition, 0) < offset
        }
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left, READ_AGAIN_S)):
                await self._wake.wait()  # at once where it was notified during the read
        if self._is_over:
            raise STOPPING()
        self._wake.clear()
        return True


class PositionWaits:
    """The requests that wait for positions, at most `most` at once. Notifications wake them: they poll only once a second."""

    def __init__(self, notifications: Notifications, most: int) -> None:
        self._most = most
        self._waiters: set[Waiter] = set()
        self._gave_up = False
        notifications.subscribe(self._notified)

    def __len__(self) -> int:
        return len(self._waiters)

    @contextmanager
    def waiting(self, agents: Collection[str], seen: Token) -> Iterator[Waiter]:
        """Raises Problem 429, 503."""
        if self._gave_up:  # its place in the pool was another's until now
            raise STOPPING()
        if len(self) >= self._most:
            raise TOO_MANY_READERS()
        waiter = Waiter(agents, seen)
        self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            self._waiters.discard(waiter)

    def give_up(self) -> None:
        """All waiting requests end with a Problem, and those to come: the process is stopping."""
        self._gave_up = True
        for waiter in self._waiters:
            waiter.give_up()

    def _notified(self, agent: str, moved: Moved) -> None:
        for waiter in self._waiters:
            waiter.notified(agent, moved)


def _offsets(token: Token) -> dict[int, int]:
    return {partition: offset for offsets in token.positions.values() for partition, offset in offsets.items()}


# ── rows and their tags, as reads and live updates send them ──


def stream_of(view: View, key: Values) -> str | None:
    """The stream that the row with this key is folded from, if the key is the stream's id."""
    return f"{view.contexts[0]}/{key[0]}" if view.tells_stream else None


def parked_since(view: View, found: Found, key: Values) -> int | None:
    """The first version that the row with this key leaves out; None where it leaves out none."""
    stream = stream_of(view, key)
    return None if stream is None else found.parked_since.get(stream)


def row_members(view: View, found: Found, row: msgspec.Raw) -> dict[str, Any]:
    """An answer with this row, with the number of parked streams where the key is not the stream's id."""
    return {"row": row} if view.tells_stream else {"row": row, "parked": found.parked}


def row_tag(view: View, found: Found, row: msgspec.Raw) -> str:
    """The tag of an answer with this row."""
    return content_tag(row) if view.tells_stream else content_tag(row, b"%a" % found.parked)


def content_tag(*parts: bytes) -> str:
    """The tag of an answer with these parts. The position is not one of them, so an ETag of it is a weak one."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return base64.urlsafe_b64encode(digest.digest()[:15]).decode()
