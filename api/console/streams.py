"""`/console/streams`: find a stream, and its page: state, rows and history."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Request
from psycopg import sql
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse

from api.console import site
from api.console.history import SHOWN, Change, Entry
from api.permissions import may_operate
from api.services import Services, services_of
from commands.intake import bad_name
from commands.outcomes import Outcome, outcomes_of
from domain.engine.contexts import contexts
from domain.engine.personal.tokens import hidden_value, key_ids, opened_value
from infra.database.connect import Connection, session
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.rebuild.switch import pointers
from projections.engine.views.column_types import Scalar
from projections.engine.views.core_views import all_views, snapshot_view_name
from projections.engine.views.view import Kind, View

FOUND = 50
"""Streams that a search shows, and rows of a view."""
AT_ONCE = threading.BoundedSemaphore(2)
"""Histories that are read at once: each is a process, and reads a whole partition."""
LAST = "\U0010ffff"
"""No name has this character, and all others come before it."""
LONGEST_S = 120.0
"""For one page: others wait for its place."""
CHUNK = 2_000
"""Characters that are sent together."""


class Busy(SamefoldError):
    """Too many histories are being read."""


class HistoryEnded(SamefoldError):
    """The history can't be read on."""


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
        begin = text if slash and name == context else f"{context}/{'' if context.startswith(text) else text}"
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
    last = now.outcome.version + SHOWN // 2 if now.outcome else now.version
    first = int(given[:18]) if given.isascii() and given.isdecimal() else max(1, min(last, now.version) - SHOWN + 1)
    values: dict[str, Any] = site.values_of(request, "streams") | {
        "name": name,
        "now": replace(now, state=await site.opened(request, now.state), rows=await site.opened(request, now.rows)),
        "message": await site.opened(request, now.outcome.message if now.outcome else ""),
        "database": found.error,
        "command": command,
        "first": first,
        "earlier": max(1, first - SHOWN) if first > 1 else None,
        "later": first + SHOWN if first + SHOWN <= now.version else None,
    }
    history = _told(services, name, first, may_open=may_operate(request, "see personal values"))
    pieces = cast(Generator[str], site.TEMPLATES.get_template("stream.html").generate(values | {"history": history}))
    body = _sent(_chunks(pieces), pieces, history)
    return StreamingResponse(body, 200, {"Content-Security-Policy": site.POLICY}, "text/html; charset=utf-8")


async def _sent(chunks: Iterator[str], pieces: Generator[str], history: Generator[object]) -> AsyncIterator[str]:
    """The page as it is made in another thread. The history ends with it, also where the client has gone, or reads nothing."""
    task = asyncio.current_task()
    assert task is not None
    ending = asyncio.get_running_loop().call_later(LONGEST_S, task.cancel)
    try:
        async for chunk in iterate_in_threadpool(chunks):
            yield chunk
    finally:
        ending.cancel()
        history.close()
        pieces.close()  # else they keep the page's values until a collection, which is rare


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
    rows, parked = [], _parked(connection, [one.table for one in live.values()], name)
    for view in all_views().values():
        pointer = live.get(view.name)
        if pointer and pointer.version == view.version and context in view.contexts and _is_of_one_stream(view):
            of_it = sql.SQL("select to_jsonb(t)::text from {} t where {} in (%s, %s) order by {} limit %s")
            key = sql.Identifier(view.key[0].name)
            order = sql.SQL(", ").join(sql.Identifier(column.name) for column in view.key)
            made = connection.execute(
                of_it.format(sql.Identifier(pointer.table), key, order), (ident, name, FOUND + 1)
            ).fetchall()
            since = parked.get(pointer.table)
            if made or since:
                names = [column.name for column in view.columns]
                found = [{name: row[name] for name in names} for row in map(exact, made[:FOUND])]
                rows.append({"view": view.name, "rows": found, "more": len(made) > FOUND, "parked": since})
    outcome = outcomes_of(connection, [(name, command)]).get((name, command)) if command else None
    return Now(version, state if not isinstance(state, str) else json.loads(state), rows, outcome)


def _parked(connection: Connection, tables: list[str], name: str) -> dict[str, int]:
    """By table, the version from which on it lacks the stream's events."""
    query = "select table_name, since_version from parked where table_name = any(%s) and stream = %s"
    return dict(connection.execute(query, (tables, name)).fetchall())


def exact(row: tuple[str]) -> dict[str, Any]:
    """A row's values. A number that is not whole is a text: a float may be another one."""
    found: dict[str, Any] = json.loads(row[0], parse_float=str)
    return found


def _is_of_one_stream(view: View) -> bool:
    """Whether the first column of the view's key is its stream's id or name."""
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
            for entry in _read(settings, name, first):
                if not isinstance(entry, Entry) or keys is None or not (ids := key_ids(msgspec.json.encode(entry))):
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


def _read(settings: Settings, name: str, first: int) -> Iterator[Entry | SamefoldError | None]:
    """What a process of its own reads and folds: an author's code that never ends, or ends its process, harms no request."""
    process = subprocess.Popen(
        [sys.executable, "-m", "api.console.history", "--", name, str(first)],
        env=os.environ | settings.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    try:
        for line in process.stdout:
            if line.startswith(b"["):
                yield HistoryEnded(*msgspec.json.decode(line))
            else:
                yield msgspec.json.decode(line, type=Entry | None)
        if code := process.wait():
            yield HistoryEnded(f"The process that reads it has ended ({code}).", "The API's log may say why.")
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def _changed(entry: Entry, show: Callable[[Any], Any]) -> Entry:
    def as_json(text: str | None) -> str | None:
        return text and json.dumps(show(json.loads(text)), ensure_ascii=False)

    def shown(changes: Iterable[Change]) -> tuple[Change, ...]:
        return tuple(Change(one.part, as_json(one.before), as_json(one.after)) for one in changes)

    rows = tuple((show(row), shown(changes)) for row, changes in entry.rows)
    return replace(
        entry,
        data=show(entry.data),
        message=show(entry.message),
        problem=show(entry.problem),
        state=show(entry.state),
        changes=shown(entry.changes),
        rows=rows,
    )


def add_to(router: APIRouter) -> None:
    site.add(router, "/streams", streams)
