"""`/console/streams`: find a stream, its history, and what each of its events made in every view."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request
from psycopg import sql
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse

from api.console import site
from api.permissions import may_operate
from api.services import Services, services_of
from commands.intake import bad_name
from commands.outcomes import Outcome, outcomes_of
from domain.engine.contexts import contexts
from domain.engine.personal.tokens import hidden_value, key_ids, opened_value
from infra.archive.whole_log import read_range
from infra.database.connect import Connection, session
from infra.errors import SamefoldError
from infra.log.partitioner import partition_of
from infra.log.records import Commit, decode_event, decode_head, time_of
from infra.log.rule import START, Counted, read
from infra.log.topics import describe
from infra.settings import Settings
from projections.engine.fold.fold import RowCache, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.switch import pointers
from projections.engine.views.column_types import Scalar
from projections.engine.views.core_views import all_views, snapshot_view_name
from projections.engine.views.view import Kind, View

FOUND = 50
"""Streams that a search shows, and rows of a view."""
SHOWN = 100
"""Versions on one page."""
MOST_ENTRIES = 1_000
"""On one page, with rejections."""
MOST_CHANGES = 40
LARGE = 100_000
"""Bytes of a state or row beyond which its parts are not compared one by one."""
AT_ONCE = threading.BoundedSemaphore(2)
"""Histories that are read in one process: each reads a whole partition."""
LAST = "\U0010ffff"
"""No name has this character, and all others come before it."""
CHUNK = 2_000
"""Characters that are sent together."""


class Busy(SamefoldError):
    """Too many histories are being read."""


class Change(NamedTuple):
    """A part of a state or a row, before and after an event; None where it was not there, or is there no more."""

    part: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """An event of the history, or a rejection, which has no event."""

    version: int
    partition: int
    offset: int
    at: datetime
    command_id: str
    by: str
    type: str
    data: Any
    code: str
    message: str
    is_void: str
    """Why the record has no effect; "" where it has one."""
    state: Any = None
    changes: tuple[Change, ...] = ()
    rows: tuple[tuple[str, tuple[Change, ...]], ...] = ()
    """By view and key, as this code folds it."""
    problem: str = ""
    """Why this code can't fold it."""


# ── the search ──


async def streams(request: Request) -> Response:
    query = request.query_params
    if query.get("stream"):
        return await stream(request, query["stream"])
    text = query.get("begins", "").strip()
    found = (
        await site.console_of(request).ask(lambda connection: _search(connection, text)) if "begins" in query else None
    )
    values = {
        "text": text,
        "found": found and found.found,
        "database": found and found.error,
        "most": FOUND,
        "wrong": None,
    }
    return site.page(request, "streams.html", 200, contexts=sorted(contexts()), **values)


def _search(connection: Connection, text: str) -> list[tuple[str, int]]:
    """Streams whose name, or whose id in any context, begins with the text, and their versions: by the keys of their states."""
    live, found = pointers(connection), list[tuple[str, int]]()
    if "\0" in text:  # no name has it, nor can PostgreSQL compare it
        return found
    name, slash, _ = text.partition("/")
    for context in sorted(contexts()):
        if (pointer := live.get(snapshot_view_name(context))) is None or (
            slash and name in contexts() and context != name
        ):
            continue
        begin = text if slash and name == context else f"{context}/{text}"
        query = sql.SQL("select stream, version from {} where stream >= %s and stream < %s order by stream limit %s")
        rows = connection.execute(
            query.format(sql.Identifier(pointer.table)), (begin, begin + LAST, FOUND + 1 - len(found))
        )
        found += rows.fetchall()
    return found


# ── one stream ──


async def stream(request: Request, name: str) -> Response:
    """The page is sent as far as it is known: the log's partition is read meanwhile."""
    services, query = services_of(request), request.query_params
    command = query.get("command", "").strip()
    wrong = bad_name(name, command or "id")
    if wrong is None and name.partition("/")[0] not in contexts():
        wrong = f"there is no context '{name.partition('/')[0]}'; this code has {', '.join(contexts())}"
    if wrong is not None:
        return site.page(
            request, "streams.html", 422, text=name, found=None, database=None, most=FOUND, wrong=wrong, contexts=[]
        )
    found = await site.console_of(request).ask(lambda connection: _now(connection, name, command))
    now = found.found or Now(0, None, [], None)
    given = query.get("from", "")
    first = int(given[:18]) if given.isdecimal() else max(1, now.version - SHOWN + 1)
    values: dict[str, Any] = site.values_of(request, "streams") | {
        "name": name,
        "now": replace(now, state=await site.opened(request, now.state), rows=await site.opened(request, now.rows)),
        "database": found.error,
        "command": command,
        "first": first,
        "earlier": max(1, first - SHOWN) if first > 1 else None,
        "later": first + SHOWN if first + SHOWN <= now.version else None,
    }
    history = _told(services, name, first, may_open=may_operate(request, "see personal values"))
    pieces = site.TEMPLATES.get_template("stream.html").generate(values | {"history": history})
    body = _sent(_chunks(pieces), history)
    return StreamingResponse(body, 200, {"Content-Security-Policy": site.POLICY}, "text/html; charset=utf-8")


async def _sent(chunks: Iterator[str], history: Generator[object]) -> AsyncIterator[str]:
    """The page as it is made in another thread. The history ends with it, also where the client has gone."""
    try:
        async for chunk in iterate_in_threadpool(chunks):
            yield chunk
    finally:
        history.close()


def _chunks(pieces: Iterator[str]) -> Iterator[str]:
    waiting: list[str] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(map(len, waiting)) >= CHUNK or piece.endswith("<!-- so far -->\n"):
            yield "".join(waiting)
            waiting.clear()
    yield "".join(waiting)


@dataclass(frozen=True, slots=True)
class Now:
    """A stream as the read side has it."""

    version: int
    state: Any
    rows: list[dict[str, Any]]
    """Of each view that has any: its name as `view`, its `rows`, and whether there are `more`."""
    outcome: Outcome | None
    """Of the command that was asked for."""


def _now(connection: Connection, name: str, command: str) -> Now:
    context, _, ident = name.partition("/")
    live = pointers(connection)
    version, state = 0, None
    if pointer := live.get(snapshot_view_name(context)):
        query = sql.SQL("select version, state from {} where stream = %s").format(sql.Identifier(pointer.table))
        for version, state in connection.execute(query, (name,)):  # noqa: B007
            pass
    rows = []
    for view in all_views().values():
        pointer = live.get(view.name)
        if pointer and pointer.version == view.version and context in view.contexts and _is_of_one_stream(view):
            of_it = sql.SQL("select to_jsonb(t) from {} t where {} = %s order by {} limit %s")
            key = sql.Identifier(view.key[0].name)
            order = sql.SQL(", ").join(sql.Identifier(column.name) for column in view.key)
            made = connection.execute(
                of_it.format(sql.Identifier(pointer.table), key, order), (ident, FOUND + 1)
            ).fetchall()
            if made:
                names = [column.name for column in view.columns]
                found = [{name: row[name] for name in names} for (row,) in made[:FOUND]]
                rows.append({"view": view.name, "rows": found, "more": len(made) > FOUND})
    outcome = outcomes_of(connection, [(name, command)]).get((name, command)) if command else None
    return Now(version, state if not isinstance(state, str) else json.loads(state), rows, outcome)


def _is_of_one_stream(view: View) -> bool:
    """Whether the first column of the view's key is its stream's id."""
    return view.kind in (Kind.ENTITY, Kind.JOURNAL) and view.key[0].scalar is Scalar.STR


# ── its history, from the log ──


def _told(services: Services, name: str, first: int, *, may_open: bool) -> Generator[Entry | SamefoldError | None]:
    """The history as it may be shown; None while it is read, so that what there is is sent; an error where it can't be read on."""
    yield None
    settings, keys = services.settings, services.keys
    if not AT_ONCE.acquire(blocking=False):
        yield Busy("Other histories are being read.", "Look again in a moment.")
        return
    try:
        with ExitStack() as stack:
            connection: Connection | None = None
            for entry in _history(settings, name, first):
                if (
                    keys is None
                    or entry is None
                    or not (
                        ids := key_ids(json.dumps([entry.data, entry.changes, entry.state, entry.rows], default=str))
                    )
                ):
                    yield entry
                elif not may_open:
                    yield _changed(entry, hidden_value)
                else:
                    if connection is None:
                        connection = stack.enter_context(session(settings, "samefold console"))
                    known = keys.keys_for(connection, ids)
                    yield _changed(entry, lambda value, known=known: opened_value(value, known))  # type: ignore[misc]
    except SamefoldError as error:
        yield error.with_traceback(None)
    finally:
        AT_ONCE.release()


def _changed(entry: Entry, show: Callable[[Any], Any]) -> Entry:
    def as_json(text: str | None) -> str | None:
        return text and json.dumps(show(json.loads(text)), ensure_ascii=False)

    def shown(changes: Iterable[Change]) -> tuple[Change, ...]:
        return tuple(Change(one.part, as_json(one.before), as_json(one.after)) for one in changes)

    rows = tuple((show(row), shown(changes)) for row, changes in entry.rows)
    return replace(entry, data=show(entry.data), state=show(entry.state), changes=shown(entry.changes), rows=rows)


def _history(settings: Settings, name: str, first: int) -> Iterator[Entry | None]:
    """The entries from a version on, each folded as agents fold it, and None after each batch of records.

    Reads the stream's partition from its beginning.
    """
    topic = describe(settings, settings.events_topic)
    partition, key = partition_of(name, topic.partitions), name.encode()
    context = name.partition("/")[0]
    views = {view.name: view for view in all_views().values() if context in view.contexts}
    fold_on = _Fold(Plan(views), partition)
    reading, shown = START, 0
    for records in read_range(settings, topic.name, partition, 0, topic.end[partition]):
        reading, _, voids = read(reading, records, decode_head)
        void = {one.offset: one.reason for one in voids}
        for record in records:
            if record.key != key or void.get(record.offset) == "garbage":
                continue
            commit = decode_event(record)
            if not isinstance(commit, Commit) or commit.stream != name:
                continue
            for entry in fold_on.entries(commit, record.offset, record.time_ms, void.get(record.offset, ""), first):
                yield entry
                shown += 1
            if shown >= MOST_ENTRIES or commit.version >= first + SHOWN - 1:
                return
        yield None


class _Fold:
    """Folds one stream's commits, event by event."""

    def __init__(self, plan: Plan, partition: int) -> None:
        self.plan = plan
        self.partition = partition
        self.held = RowCache(plan)
        self.problem = ""
        """Why the stream can't be folded further."""

    def entries(self, commit: Commit, offset: int, time_ms: int, void: str, first: int) -> Iterator[Entry]:
        reason = commit.reason
        entry = Entry(
            version=commit.version,
            partition=self.partition,
            offset=offset,
            at=time_of(time_ms),
            command_id=commit.command_id,
            by=commit.by or "",
            type="",
            data=None,
            code=reason.code if reason else "",
            message=reason.message if reason else "",
            is_void=void,
        )
        if not commit.events and commit.version >= first:
            yield entry
        for version, event in enumerate(commit.events, commit.version - len(commit.events) + 1):
            one = replace(entry, version=version, type=event.type, data=msgspec.json.decode(event.data))
            alone = msgspec.structs.replace(commit, events=[event], version=version)
            if not void:
                one = self._folded(one, Counted(offset, time_ms, alone), is_shown=version >= first)
            if version >= first:
                yield one

    def _folded(self, entry: Entry, counted: Counted, *, is_shown: bool) -> Entry:
        if self.problem:
            return replace(entry, problem=self.problem)
        try:
            changes = fold(self.plan, decode(self.plan, self.partition, [counted]), self.held)
        except SamefoldError as error:
            self.problem = error.message
            return replace(entry, problem=self.problem)
        if is_shown:
            entry = self._compared(
                entry, counted.commit.stream, changes.states, changes.rows, changes.added, changes.sums
            )
        self.held.merge(changes)
        return entry

    def _compared(
        self,
        entry: Entry,
        stream: str,
        states: Mapping[str, Mapping[str, Any]],
        entities: Mapping[str, Mapping[Any, Any]],
        added: Mapping[str, list[Any]],
        sums: Mapping[str, Mapping[Any, Any]],
    ) -> Entry:
        state: Any = None
        changed: tuple[Change, ...] = ()
        for name, moved in states.items():
            if stream in moved:
                _, before = self.held.rows[name].get(stream) or (0, None)
                state = _plain(moved[stream][1])
                changed = _changes(_plain(before), state)
        rows: list[tuple[str, tuple[Change, ...]]] = []
        views = self.plan.views
        for name, by_key in entities.items():
            for key, row in by_key.items():
                before = self.held.rows[name].get(key)
                rows.append((f"{name} {key}", _changes(_row(views[name], before), _row(views[name], row))))
        rows += [
            (f"{name}, a new line", _changes(None, _row(views[name], row)))
            for name, lines in added.items()
            for row in lines
        ]
        for name, by_key in sums.items():
            columns = [column.name for column in views[name].columns if not column.is_key]
            for key, increments in by_key.items():
                told = dict(zip(columns, _plain(increments), strict=False))
                rows.append((f"{name} {', '.join(map(str, key))}, adds", _changes(None, told)))
        return replace(entry, state=state, changes=changed, rows=tuple(rows))


def _row(view: View, row: Any) -> Any:
    return None if row is None else dict(zip((column.name for column in view.columns), map(_plain, row), strict=False))


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    return None if value is None else msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def _changes(before: Any, after: Any) -> tuple[Change, ...]:
    """What differs, part by part."""
    if before == after:
        return ()
    if max(len(json.dumps(one)) for one in (before, after)) > LARGE:
        return (
            Change("", None if before is None else json.dumps(before), None if after is None else json.dumps(after)),
        )
    was, now = dict(_parts(before)), dict(_parts(after))
    found = [Change(part, was.get(part), now.get(part)) for part in {**was, **now} if was.get(part) != now.get(part)]
    more = len(found) - MOST_CHANGES
    return (*found[:MOST_CHANGES], *((Change(f"and {more} more", None, None),) if more > 0 else ()))


def _parts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Each value that has no parts, as JSON, with its place: `lines[2].cents`."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _parts(one, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from _parts(one, f"{place}[{number}]")
    elif value is not None or place:
        yield place, json.dumps(value, ensure_ascii=False)


def add_to(router: APIRouter) -> None:
    site.add(router, "/streams", streams)
