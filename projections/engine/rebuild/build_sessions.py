"""Sessions of those who build, switch or drop. One that another process ended says so: PostgreSQL is not to blame."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from uuid import UUID

import psycopg

from infra.database.connect import Connection, DatabaseAway, TransactionTimedOut, connect, naming
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.rebuild.build_locks import by_whom, claims_of, session_name
from projections.engine.rebuild.builds import BuildAbandoned, BuildState, build_abandoned, by_id

LOOK_S = 2.0
"""Whoever ends a builder abandons its builds, or claims its views, a moment later."""


@contextmanager
def builder(settings: Settings, command: str, made: Sequence[UUID] = ()) -> Iterator[Connection]:
    """A connection that may claim views; `made` are the builds it has made so far. Whatever psycopg raises becomes a named error.

    Raises BuildAbandoned where another process ended the session, at whatever statement, DatabaseAway, DatabaseRefused.
    """
    server, claimed = None, list[str]()
    try:
        with naming(settings), connect(settings, session_name(command), statement_timeout_ms=0) as connection:
            found, claimed = _server(connection), claims_of(connection)
            try:
                yield connection
            finally:
                if connection.broken:
                    server = found
    except DatabaseAway as error:
        if (ended := _ended(error, settings, server, claimed, made)) is not None:
            raise ended from error
        raise


@contextmanager
def loading(settings: Settings, builds: Sequence[UUID]) -> Iterator[None]:
    """For who only loads into these builds' tables: the same errors."""
    try:
        with naming(settings):
            yield
    except DatabaseAway as error:
        if (ended := _ended(error, settings, None, (), builds)) is not None:
            raise ended from error
        raise


def _server(connection: Connection) -> object:
    """Another value after PostgreSQL was started again, or where another server has taken over."""
    row = connection.execute("select pg_postmaster_start_time()").fetchone()
    return row and row[0]


def _ended(
    error: DatabaseAway, settings: Settings, server: object, claimed: Sequence[str], made: Sequence[UUID]
) -> BuildAbandoned | None:
    """What to say where it was a process that ended this one's session, and not the database that went away."""
    if isinstance(error, TransactionTimedOut):
        return None
    deadline = time.monotonic() + LOOK_S
    with suppress(psycopg.Error, SamefoldError), connect(settings, "samefold rebuild") as connection:
        # why a session ended may be lost with it; that the server still is the one it was says enough
        on_purpose = server is not None and _server(connection) == server
        while True:
            others = next(filter(None, (by_whom(connection, name) for name in claimed)), "")
            lost = next((build for build in by_id(connection, made) if build.state is BuildState.ABANDONED), None)
            if lost is not None:
                return build_abandoned(lost, others)
            if on_purpose and (others or time.monotonic() > deadline):
                return BuildAbandoned(f"Another process ended this one{others}.", "Run the command again.")
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
    return None
