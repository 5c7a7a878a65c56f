"""Sessions that build, switch or drop, and the locks by which one builder owns a view.

A builder claims a view by an advisory lock, which its database session holds and which ends with the session. When another
process ends such a session, the error says that, and does not blame PostgreSQL.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from uuid import UUID
from weakref import WeakKeyDictionary

import psycopg

from infra.database.connect import (
    Connection,
    DatabaseRefused,
    DatabaseUnavailable,
    TransactionTimedOut,
    as_login,
    connect,
    named_errors,
    session,
    who,
)
from infra.errors import SamefoldError
from infra.settings import Settings

CLAIM_S = 5.0
"""A builder that was killed keeps its claim until PostgreSQL notices."""
TERMINATE_MS = 5_000
ENDED_S = 2.0
"""A process that ends a builder's session abandons its builds, or claims its views, within this time."""


class BuildAlive(SamefoldError):
    """Another process is building the same view."""


class BuildAbandoned(SamefoldError):
    """A build was abandoned while this process worked on it."""


def build_abandoned(table: str, by_whom: str = "") -> BuildAbandoned:
    return BuildAbandoned(
        f"Build {table} was abandoned while it was made: another took its place, or an event was dropped{by_whom}.",
        "Run the command again.",
    )


# ── sessions ──


@contextmanager
def builder(settings: Settings, command: str, made: Sequence[UUID] = ()) -> Iterator[Connection]:
    """A connection that may claim views; `made` are the builds it has made so far. psycopg's errors become named ones.

    Raises BuildAbandoned where another process ended the session, DatabaseUnavailable, DatabaseRefused.
    """
    server, claimed = None, list[str]()
    try:
        with session(settings, session_name(command), statement_timeout_ms=0) as connection:
            found, claimed = _server(connection), claims_of(connection)
            try:
                yield connection
            finally:
                if connection.broken:
                    server = found
    except DatabaseUnavailable as error:
        _raise_if_ended(error, settings, server, claimed, made)
        raise


@contextmanager
def loading(settings: Settings, builds: Sequence[UUID]) -> Iterator[None]:
    """Names the errors of sessions that only load into these builds' tables."""
    try:
        with named_errors(settings):
            yield
    except DatabaseUnavailable as error:
        _raise_if_ended(error, settings, None, (), builds)
        raise


def session_name(command: str) -> str:
    """The `application_name` of a connection that claims views."""
    return f"samefold {command}, pid {os.getpid()} on {socket.gethostname()}"


def _server(connection: Connection) -> object:
    """A value that changes when PostgreSQL restarts or another server takes over."""
    row = connection.execute("select pg_postmaster_start_time()").fetchone()
    return row and row[0]


def _raise_if_ended(
    error: DatabaseUnavailable, settings: Settings, server: object, claimed: Sequence[str], made: Sequence[UUID]
) -> None:
    """Raises BuildAbandoned when another process ended this session; nothing when the database was unavailable."""
    if isinstance(error, TransactionTimedOut):
        return
    deadline = time.monotonic() + ENDED_S
    with (
        suppress(psycopg.Error, DatabaseUnavailable, DatabaseRefused),
        connect(settings, "samefold rebuild") as connection,
    ):
        # the reason may be lost with the session, but a server that still runs did not end it by itself
        on_purpose = server is not None and _server(connection) == server
        while True:
            others = next(filter(None, (by_whom(connection, name) for name in claimed)), "")
            lost = connection.execute(
                "select table_name from builds where id = any(%s) and state = 'abandoned' order by view", (list(made),)
            ).fetchone()
            is_over = time.monotonic() > deadline
            if lost is not None:
                raise build_abandoned(lost[0], others) from error
            if on_purpose and (others or is_over):
                raise BuildAbandoned(f"Another process ended this one{others}.", "Run the command again.") from error
            if is_over:
                return
            time.sleep(0.05)


# ── locks ──

_claimed: WeakKeyDictionary[Connection, list[str]] = WeakKeyDictionary()


def claim(connection: Connection, view: str) -> None:
    """Claim a view until the connection ends. Raises BuildAlive."""
    deadline = time.monotonic() + CLAIM_S
    while not try_claim(connection, view):
        if time.monotonic() > deadline:
            raise BuildAlive(
                f"View '{view}' is being built or switched by another process{by_whom(connection, view)}.",
                f"Wait until it has ended, or end it: `samefold rebuild {view} --abandon`.",
            )
        time.sleep(0.1)


def try_claim(connection: Connection, what: str) -> bool:
    """Claim a view, or a table of the past by its build's id, unless another session has."""
    row = connection.execute("select pg_try_advisory_lock(hashtextextended(%s, 0))", (_lock(what),)).fetchone()
    if is_mine := bool(row and row[0]):
        claims_of(connection).append(what)
    return is_mine


def claims_of(connection: Connection) -> list[str]:
    """The claims of a connection, also after it has ended."""
    return _claimed.setdefault(connection, [])


def release(connection: Connection, what: str) -> None:
    """Release a claim before the connection ends."""
    connection.execute("select pg_advisory_unlock(hashtextextended(%s, 0))", (_lock(what),))
    claims_of(connection).remove(what)


def end_builders(connection: Connection, views: Iterable[str]) -> None:
    """End the sessions that have claimed these views, with their transactions. Raises BuildAlive when one does not end."""
    for view in views:
        with as_login(connection):
            ended = connection.execute(
                f"select pg_terminate_backend(a.pid, {TERMINATE_MS}) {_HOLDER}", (_lock(view),)
            ).fetchone()
        if ended and not ended[0]:
            raise BuildAlive(
                f"The session that builds or switches view '{view}' did not end in {TERMINATE_MS / 1000:.0f} s"
                f"{by_whom(connection, view)}.",
                "Run the command again.",
            )


def _lock(what: str) -> str:
    return f"samefold build {what}"


_HOLDER = """
  from pg_locks l join pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.pid <> pg_backend_pid()
   and l.database = (select oid from pg_database where datname = current_database())
   and (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended(%s, 0)
"""


def by_whom(connection: Connection, view: str) -> str:
    """The other session that has claimed a view, as the end of a sentence; "" when there is none."""
    found = connection.execute(f"select a.pid {_HOLDER}", (_lock(view),)).fetchall()
    sessions = who(connection, [pid for (pid,) in found])  # none where they have ended since
    return f": {sessions}" if sessions else ""
