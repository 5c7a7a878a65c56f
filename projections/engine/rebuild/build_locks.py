"""Who builds what: one builder per view, known by a lock that its database session holds and that ends with the session."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from infra.database.connect import Connection
from infra.errors import SamefoldError

CLAIM_S = 5.0
"""A builder that was killed still holds its claim until PostgreSQL notices."""
TERMINATE_MS = 5_000


_claimed: WeakKeyDictionary[Connection, list[str]] = WeakKeyDictionary()


class BuildAlive(SamefoldError):
    """Somebody else is building the same view."""


def session_name(command: str) -> str:
    """The `application_name` of a connection that claims views: tells people whose it is."""
    return f"samefold {command}, pid {os.getpid()} on {socket.gethostname()}"


def claim(connection: Connection, view: str) -> None:
    """One builder per view; the claim ends with the connection, however that ends. Raises BuildAlive."""
    deadline = time.monotonic() + CLAIM_S
    while not try_claim(connection, view):
        if time.monotonic() > deadline:
            raise BuildAlive(
                f"View '{view}' is being built or switched by another process{by_whom(connection, view)}.",
                f"Wait until it has ended, or end it: `samefold rebuild {view} --abandon`.",
            )
        time.sleep(0.1)


def try_claim(connection: Connection, what: str) -> bool:
    """Claim a view, or a look at the past by its id, unless somebody else has."""
    row = connection.execute("select pg_try_advisory_lock(hashtextextended(%s, 0))", (_lock(what),)).fetchone()
    if is_mine := bool(row and row[0]):
        claims_of(connection).append(what)
    return is_mine


def claims_of(connection: Connection) -> list[str]:
    """What a connection has claimed; of one that has ended, what it had."""
    return _claimed.setdefault(connection, [])


def release(connection: Connection, what: str) -> None:
    """Give a claim up before the connection ends."""
    connection.execute("select pg_advisory_unlock(hashtextextended(%s, 0))", (_lock(what),))
    claims_of(connection).remove(what)


def end_builders(connection: Connection, views: Iterable[str]) -> None:
    """End the sessions that have claimed these views, and with them their transactions. Raises BuildAlive when one does not end."""
    for view in views:
        ended = connection.execute(
            f"select pg_terminate_backend(a.pid, {TERMINATE_MS}) {_HOLDER}", (_lock(view),)
        ).fetchone()
        if ended and not ended[0]:
            raise BuildAlive(
                f"What builds or switches view '{view}' did not end in {TERMINATE_MS / 1000:.0f} s"
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
    """Who has claimed a view, to end a sentence with; "" for nobody but this connection."""
    found = connection.execute(
        f"select a.application_name, host(a.client_addr), a.backend_start, a.pid {_HOLDER}", (_lock(view),)
    ).fetchone()
    if found is None:  # it has just ended
        return ""
    name, address, since, session = found
    began = f", since {since:%Y-%m-%d %H:%M:%S} UTC" if since else ""  # of another role's session nobody is told
    return f": {name}{f' ({address})' if address else ''}{began}, session {session}"
