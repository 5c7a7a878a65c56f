"""Connections to PostgreSQL, and named errors for its errors.

Every session has timeouts of its own, so that a process that froze in the middle of a transaction can't block the next
one for longer than `idle_in_transaction_timeout_ms`. No message made here holds a password.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypedDict, Unpack

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from infra import tls
from infra.errors import SamefoldError
from infra.settings import Settings

Connection = psycopg.Connection[tuple[Any, ...]]
STATEMENT_TIMEOUT_MS = 30_000
"""Of one SQL statement. Long ones set their own."""
LOCK_TIMEOUT_MS = 5_000
"""Half of the time that a frozen process may keep its locks: a session that waits tries again."""


class DatabaseUnavailable(SamefoldError):
    """PostgreSQL is unavailable, perhaps for a moment. Processes wait, commands end."""


class SessionEnded(DatabaseUnavailable):
    """PostgreSQL ended this session by command: it is stopping, or an administrator ended the session."""


class TransactionTimedOut(DatabaseUnavailable):
    """PostgreSQL ended a transaction that held its locks for too long, and the session with it."""


class DatabaseRefused(SamefoldError):
    """PostgreSQL refuses: wrong name, password or rights. Waiting does not help."""


class TransactionPooling(DatabaseRefused):
    """A pooler gives a connection another backend for each transaction; locks, settings and notifications would be lost."""


class ValueRefused(SamefoldError):
    """PostgreSQL can't store a value that was sent, or a stored one can't be read."""


class DatabaseBehind(SamefoldError):
    """The database lacks tables that this code needs."""


_PASSING_CLASSES = (
    "08",  # the connection broke
    "53",  # no memory, disk or connection left
)
_PASSING = {
    "25006",  # read only: a standby, until it is promoted
    "25P03",  # idle in a transaction for too long: this process was frozen
    "25P04",  # a transaction that took too long
    *("40001", "40P01", "55P03"),  # conflicts and locks
    *("57014", "57P01", "57P02", "57P03", "57P05"),  # cancelled, stopped, starting, idle for too long
}
_NOT_FOR_US = (
    "password authentication failed",
    "no pg_hba.conf entry",
    "does not exist",
    "no password supplied",
    "is not permitted to log in",
    "permission denied for database",
    "certificate verify failed",
    "does not match host name",
    "server does not support SSL",
    "unsupported startup parameter",  # a pooler's
)


class Options(TypedDict, total=False):
    """What a session may want otherwise."""

    statement_timeout_ms: int
    """Instead of STATEMENT_TIMEOUT_MS; 0: none."""
    short_transactions: bool
    """For sessions that hold locks which others wait for: see `longest_transaction_ms`."""
    by_key: bool
    """For sessions that find rows by their keys only: see `BY_KEY`."""


def connect(settings: Settings, name: str, **options: Unpack[Options]) -> Connection:
    """A connection in autocommit mode whose `application_name` is `name`; times are UTC.

    Raises DatabaseUnavailable for an error that may pass, else DatabaseRefused; NotConfigured.
    """
    arguments = parameters(settings, name, **options)
    begin = arguments.pop("begin")
    try:
        connection = psycopg.connect(**arguments)
        try:
            [(backend, _)] = connection.execute(BEGIN, begin)
            if backend != connection.info.backend_pid:
                require_own_backend(settings.database)
            if (encoding := connection.info.parameter_status("server_encoding")) not in ("UTF8", None):
                raise DatabaseRefused(
                    f"The database holds texts in {encoding}, which lacks characters that events have.",
                    "Make one with `create database … encoding 'UTF8' template template0`.",
                )
        except BaseException:
            connection.close()
            raise
    except psycopg.Error as error:
        raise named_error(error, settings) from error
    return connection


def parameters(settings: Settings, name: str, **options: Unpack[Options]) -> dict[str, Any]:
    """The same connection as arguments of deadline.py's `Session`, secrets and all. Raises DatabaseRefused, NotConfigured."""
    target = settings.database
    try:
        conninfo_to_dict(target)
    except psycopg.Error:
        # `from None`: libpq's message quotes the string, password and all
        raise DatabaseRefused(
            "SAMEFOLD_DATABASE_URL is not a connection string.", "Write postgresql://user:password@host:5432/name."
        ) from None
    session = SESSION | {
        "statement_timeout": str(options.get("statement_timeout_ms", STATEMENT_TIMEOUT_MS)),
        "lock_timeout": str(LOCK_TIMEOUT_MS),
        "idle_in_transaction_session_timeout": str(settings.idle_in_transaction_timeout_ms),
        "transaction_timeout": str(longest_transaction_ms(settings) if options.get("short_transactions") else 0),
        **(BY_KEY if options.get("by_key") else {}),
    }
    return {
        "conninfo": target,
        "autocommit": True,
        "application_name": name[:63],
        "connect_timeout": 10,
        "keepalives": 1,
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        # keepalives pause while sent data is not acknowledged: without this, a vanished host is noticed after 15 minutes
        "tcp_user_timeout": 10_000,
        "begin": {"names": list(session), "values": list(session.values())},
    }


@cache
def require_own_backend(conninfo: str) -> None:
    """Raises TransactionPooling unless two connections through a pooler keep a backend each. Asked once in a process.

    A pooler of transactions lends the backends that are free, in either order: one to both, or others in turn.
    """
    with psycopg.connect(conninfo, autocommit=True) as one, psycopg.connect(conninfo, autocommit=True) as other:
        seen = {
            # not prepared: prepared statements stay with their backend
            (connection is one, connection.execute("select pg_backend_pid()", prepare=False).fetchone())
            for connection in (one, other, other, one) * 5
        }
    if len(seen) != 2 or len({backend for _, backend in seen}) != 2:
        raise TransactionPooling(
            "A pooler in front of PostgreSQL lends a connection another backend for each transaction or statement.",
            "Let it pool sessions (PgBouncer: `pool_mode = session`), or connect without it: docs/operating.md.",
        )


BEGIN = """
select pg_backend_pid(), count(set_config(name, value, false))
  from unnest(%(names)s::text[], %(values)s::text[]) t (name, value)
"""
"""A session's first statement. Options at the start would do, but no pooler forwards them. A pooler reports another pid."""
SESSION = {
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "array_nulls": "on",
    "client_encoding": "UTF8",
    "default_transaction_isolation": "read committed",
    "extra_float_digits": "1",
    "idle_session_timeout": "0",
    "quote_all_identifiers": "off",
    "restrict_nonsystem_relation_kind": "",
    "standard_conforming_strings": "on",
}
"""What each session depends on, whatever defaults its role and database have. A default to read only is meant: it stays."""
BY_KEY = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
"""A prepared statement keeps its first plan until the table is analyzed. If the table was small then, the plan scans
the whole table for every key, however large it has become: half of PostgreSQL's work for a command. Off means expensive, not
forbidden.
"""


def patient_ms(settings: Settings) -> int:
    """The `idle_in_transaction_session_timeout` of migrations, and of sessions that hold no lock which agents wait for.

    At least a minute.
    """
    return max(60_000, settings.idle_in_transaction_timeout_ms)


def longest_transaction_ms(settings: Settings) -> int:
    """The `transaction_timeout`. Only it frees the locks of a process that froze between two statements of a pipeline.

    For the other timeouts such a session is neither idle in its transaction nor executing a statement. PostgreSQL 17 or newer.
    """
    return STATEMENT_TIMEOUT_MS + settings.idle_in_transaction_timeout_ms


def is_transient(error: BaseException) -> bool:
    """Whether an error may pass by itself: connections refused or lost, start-up, locks, failover, a full disk."""
    if isinstance(error, DatabaseUnavailable):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    if state is None:  # no answer from a server at all, or one given before there was a session
        return isinstance(error, psycopg.OperationalError) and not any(text in str(error) for text in _NOT_FOR_US)
    return state in _PASSING or state.startswith(_PASSING_CLASSES)


def named_error(error: psycopg.Error, settings: Settings) -> SamefoldError:
    """The named error for one of psycopg's."""
    known = conninfo_to_dict(settings.database)
    place = f"PostgreSQL ({known.get('dbname') or 'default database'} at {known.get('host') or 'the local socket'})"
    text = " ".join(str(error).split()).rstrip(".") + "."
    if error.sqlstate == "57P01":
        return SessionEnded(
            f"{place} ended this session: {text}",
            "If it was stopped, start it (`samefold dev up` for the local one); then run the command again.",
        )
    if isinstance(error, errors.IdleInTransactionSessionTimeout | errors.TransactionTimeout):
        return TransactionTimedOut(
            f"{place} ended a transaction that took too long: {text}",
            "Run the command again. If the machine is always so slow, set SAMEFOLD_IDLE_IN_TRANSACTION_TIMEOUT_MS higher.",
        )
    if isinstance(error, errors.LockNotAvailable):
        return DatabaseUnavailable(
            f"{place}: another session holds a lock for too long: {text}", "Run the command again when it has ended."
        )
    if is_transient(error):
        return DatabaseUnavailable(
            f"{place} does not answer: {text}",
            "Start it (`samefold dev up` for the local one), or correct SAMEFOLD_DATABASE_URL.",
        )
    if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn):
        return DatabaseBehind(
            f"{place} lacks what this code needs: {error.diag.message_primary or text.rstrip('.')}.",
            "Run `samefold db upgrade`; before it `samefold db revision -m '…'` if a view's migration is not written yet.",
        )
    if isinstance(error, psycopg.DataError | psycopg.IntegrityError) or (error.sqlstate or "").startswith("54"):
        return ValueRefused(
            f"A value does not fit {place}: {text}",
            "If a row was written by hand or by an older release, correct it. "
            "`samefold rebuild` recreates a view's table.",
        )
    if isinstance(error, errors.InsufficientPrivilege):
        return DatabaseRefused(
            f"{place} refused this to {known.get('user') or 'this role'}: {text}",
            "Each process has a role of its own, and commands that change tables run as the migrator or the operator: "
            "docs/database-roles.md. `samefold db roles --apply` sets the rights again.",
        )
    if "certificate verify failed" in text or "does not match host name" in text:
        host, port, authorities = (str(known.get(key) or "") for key in ("host", "port", "sslrootcert"))
        wrong = tls.fault(host, int(port or 5432), authorities or None, tls.POSTGRESQL) if "," not in host else None
        return DatabaseRefused(
            f"The certificate of {place} is not accepted: {wrong or text.rstrip('.')}.",
            f"Its authority must be in sslrootcert ({authorities or 'not set'}), and '{host}' among its names.",
        )
    return DatabaseRefused(f"{place} refused: {text}", "Check the database's name, user, password and rights.")


@contextmanager
def as_login(connection: Connection) -> Iterator[None]:
    """As the role that logged in, not the one it took then: PostgreSQL shows and ends a session only to the role that began it.

    The connection must not be in a transaction.
    """
    with connection.transaction():
        connection.execute("set local role none")
        yield


def who(connection: Connection, pids: Sequence[int]) -> str:
    """The users of these sessions, and since when. PostgreSQL shows state and time only to roles with pg_read_all_stats."""
    with as_login(connection):
        found = connection.execute(
            "select pid, application_name, usename, state, coalesce(xact_start, backend_start) from pg_stat_activity "
            "where pid = any(%s) order by pid",
            (list(pids),),
        ).fetchall()
    return "; ".join(
        f"session {pid} ({name or 'without a name'}, user {user}{f', {state} since {since:%F %T} UTC' if since else ''})"
        for pid, name, user, state, since in found
    )


@contextmanager
def session(settings: Settings, name: str, **options: Unpack[Options]) -> Iterator[Connection]:
    """A connection while the block lasts, in which psycopg's errors become named ones."""
    with named_errors(settings), connect(settings, name, **options) as connection:
        yield connection


@contextmanager
def named_errors(settings: Settings) -> Iterator[None]:
    """Turn psycopg's errors into named ones: DatabaseUnavailable, DatabaseBehind, DatabaseRefused, ValueRefused."""
    try:
        yield
    except psycopg.Error as error:
        raise named_error(error, settings) from error
