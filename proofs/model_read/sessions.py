"""psycopg's connections as the actors of a run have them: real ones, and each exchange with the server is a step of a schedule."""

from __future__ import annotations

import re
import select
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors, pq, sql
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.waiting import Ready, Wait

from infra.database.connect import BEGIN

if TYPE_CHECKING:
    from proofs.model_read.play import Play

LOST = "server closed the connection unexpectedly"
_TIMEOUT = re.compile(r"\s*set (local )?\w+_timeout = ", re.IGNORECASE)
"""Time-outs are choices of the schedule, not the server's."""
_UNNOTICED = re.compile(r"\s*(begin|savepoint|set|select pg_backend_pid)\b", re.IGNORECASE)
"""Without effect on other sessions, and not affected by them: needs no step of its own in a schedule."""
_READS = re.compile(r"\s*(select|begin|savepoint|set|copy)\b", re.IGNORECASE)
_NAMES = {"_enter_gen": "begin", "_exit_gen": "end", "_commit_gen": "commit", "_rollback_gen": "rollback"}
"""What psycopg sends by itself, by the name of its generator."""
_EVENTS = {Wait.R: select.POLLIN, Wait.W: select.POLLOUT, Wait.RW: select.POLLIN | select.POLLOUT}


class Exchange:
    """Something sent in a session, and its answer: `result` or `error` once it is `done`."""

    def __init__(self, session: Session, steps: Generator[Any, Any, Any], text: str) -> None:
        self.session = session
        self.server = session.pgconn
        self.text = text
        self.began = self.done = False
        self.lost = False
        """The client has lost the connection while it was under way."""
        self.result: Any = None
        self.error: BaseException | None = None
        self._steps = steps
        self._wants: Any = None
        self._poll = select.poll()

    @classmethod
    def taken_over(cls, other: Exchange, heir: Session) -> Exchange:
        """The same, where the client that began it is gone, and has lost its answer."""
        found = cls(heir, other._steps, other.text)
        found.began, found._wants = other.began, other._wants
        other.lost = True
        return found

    @property
    def reads(self) -> bool:
        """Whether it can't have changed what is committed."""
        return bool(_READS.match(self.text))

    @property
    def seen(self) -> object:
        """What the client learns from the answer; hashable."""
        if self.error is not None or self.lost:
            return self.text, self.lost, repr(self.error)
        results = self.result if isinstance(self.result, list) else [self.result]
        return self.text, tuple(_values(one) if isinstance(one, pq.PGresult) else repr(one) for one in results)

    def go_on(self, seconds: float) -> bool:
        """Let it go on for so long; whether it is done."""
        if not self.began:
            self.began = True
            self._take(lambda: next(self._steps))
        while not self.done:
            self._poll.register(self.server.socket, _EVENTS[self._wants])
            found = self._poll.poll(seconds * 1000)
            if not found:
                break
            events = found[0][1]
            ready = (Ready.R if events & ~select.POLLOUT else 0) | (Ready.W if events & select.POLLOUT else 0)
            self._take(lambda ready=ready: self._steps.send(ready))  # type: ignore[misc]
        return self.done

    def _take(self, step: Callable[[], Any]) -> None:
        try:
            self._wants = step()
        except StopIteration as end:
            self.done, self.result = True, end.value
        except Exception as error:
            self.done, self.error = True, error

    def answer(self) -> Any:
        """Raises what the server's answer is to psycopg."""
        if self.lost:
            raise psycopg.OperationalError(LOST)
        if self.error is not None:
            raise self.error
        return self.result

    def time_out(self) -> None:
        """What `lock_timeout` would do, now."""
        self.session.play.database.cancel(self.server)
        while not self.go_on(1):
            pass
        if isinstance(self.error, errors.QueryCanceled):
            self.error = errors.LockNotAvailable("canceling statement due to lock timeout")


class Cursor(psycopg.Cursor[Any]):
    """A statement's answer; in a pipeline there is none before the next sync."""

    def fetchall(self) -> list[Any]:
        self._session.sync()
        return super().fetchall()

    def fetchone(self) -> Any:
        self._session.sync()
        return super().fetchone()

    @property
    def rowcount(self) -> int:
        self._session.sync()
        return super().rowcount

    def copy(self, statement: Any, *arguments: Any, **how: Any) -> Any:
        self._session.text = _text(statement)
        return super().copy(statement, *arguments, **how)

    @property
    def _session(self) -> Session:
        assert isinstance(self.connection, Session)
        return self.connection


class Session(psycopg.Connection[Any]):
    """A connection in autocommit mode. A pipeline's statements are sent one by one: others may come in between."""

    def __init__(self, play: Play, server: PGconn, owner: str) -> None:
        super().__init__(server)
        self._autocommit = True
        self.prepare_threshold = None
        self.cursor_factory = Cursor
        self.play = play
        self.owner = owner
        self.lost = False
        self.text = ""
        """What is sent."""
        self.queued: list[tuple[Cursor, Any, Any]] = []
        """Not sent yet, as the schedule has it: to psycopg's caller, it is."""
        self._piped = False

    @property
    def in_transaction(self) -> bool:
        return self.pgconn.transaction_status in (
            TransactionStatus.ACTIVE,
            TransactionStatus.INTRANS,
            TransactionStatus.INERROR,
        )

    @property
    def closed(self) -> bool:
        return self.lost or self._closed or super().closed

    @property
    def broken(self) -> bool:
        return (self.lost and not self._closed) or super().broken

    def wait(self, gen: Any, interval: float = 0, timeout: float | None = None) -> Any:
        self.play.check_alive()
        if self.closed:
            raise psycopg.OperationalError(LOST if self.lost else "the connection is closed")
        name = gen.__name__
        exchange = Exchange(self, gen, _NAMES.get(name, self.text))
        if _UNNOTICED.match(exchange.text) or name == "copy_to" or (name in _NAMES and not self.in_transaction):
            while not exchange.go_on(1):
                pass
        else:
            self.play.carry_out(exchange)
        return exchange.answer()

    def execute(self, query: Any, params: Any = None, **_how: Any) -> Cursor:
        cursor = self.cursor()
        if query == BEGIN:  # its time-outs are choices of the schedule too
            query, params = "select pg_backend_pid(), 0", None
        text = _text(query)
        if not _TIMEOUT.match(text):
            self.queued.append((cursor, query, params))
            if not self._piped:
                self.sync()
        return cursor

    def sync(self) -> None:
        """Send what is queued. The first error, behind which nothing is carried out, is raised."""
        try:
            while self.queued:
                cursor, query, parameters = self.queued.pop(0)
                self.text = _text(query)
                cursor.execute(query, parameters)
        finally:
            self.queued = []

    @contextmanager
    def pipeline(self) -> Iterator[Session]:  # type: ignore[override]
        if self._piped:
            yield self
            return
        self._piped = True
        try:
            yield self
            self.sync()
        finally:
            self._piped, self.queued = False, []

    def cursor(self, *_arguments: Any, **_how: Any) -> Cursor:  # type: ignore[override]
        return Cursor(self)

    def close(self) -> None:
        if not self.closed:
            self.play.end(self)
        self._closed = True

    def __del__(self, _warn: Any = None) -> None:
        """The server's session is another's by now."""

    def heir(self) -> Session:
        """The client is gone, and the server does not know it yet: the same session, for what was sent before."""
        other = Session(self.play, self.pgconn, "")
        other._adapters = self._adapters
        self.lost = True
        return other


def _values(result: Any) -> object:
    rows = [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
    return result.command_status, tuple(map(tuple, rows))


def _text(query: Any) -> str:
    if isinstance(query, sql.Composable):
        query = query.as_string(None)
    return " ".join((query.decode() if isinstance(query, bytes) else query).split())
