"""psycopg's face, as far as the product uses it, over sessions of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from proofs.model_read.play import LOST, Play
from proofs.model_read.postgres import Call, Result, Session, Statement, Steps
from proofs.model_read.sql import call_of
from proofs.model_read.sql_rows import copied


class Cursor:
    """A statement's answer; in a pipeline there is none before the next sync."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.result: Result | None = None
        self._next = 0

    @property
    def rowcount(self) -> int:
        return self._answer().count

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._answer().rows)

    def fetchone(self) -> tuple[Any, ...] | None:
        rows = self._answer().rows
        self._next += 1
        return rows[self._next - 1] if self._next <= len(rows) else None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._answer().rows)

    def _answer(self) -> Result:
        if self.result is None:
            self.connection.sync()
        assert self.result is not None
        return self.result

    def copy(self, statement: sql.Composed) -> Copy:
        return Copy(self.connection, statement)


class Copy:
    """COPY from the client: the rows arrive together, at its end."""

    def __init__(self, connection: Connection, statement: sql.Composed) -> None:
        names = [
            part.as_string(None).strip('"') for part in statement if isinstance(part, sql.Composed | sql.Identifier)
        ]
        self.connection = connection
        self.statement = statement
        self.types: list[str] = []
        self.table = names[0]
        self.columns = [name.strip('" ') for name in names[1].split(",")]
        self.rows: list[Sequence[Any]] = []

    def __enter__(self) -> Copy:
        return self

    def _run(self, statement: Statement, _parameters: Any) -> Steps:
        return copied(statement, self.table, self.columns, self.rows)

    def set_types(self, types: Sequence[str]) -> None:
        """For a real server; the model's values have types of their own."""
        self.types = list(types)

    def write_row(self, row: Sequence[Any]) -> None:
        self.rows.append(row)

    def __exit__(self, error: Any, *_more: Any) -> None:
        if error is None:
            call = Call(f"copy {self.table}", None, self._run, sent=self)
            self.connection.send([(call, None)])


class Connection:
    """A connection in autocommit mode."""

    def __init__(self, play: Play, session: Session, call_of: Callable[[Any, Any], Call] = call_of) -> None:
        self.play = play
        self.call_of = call_of
        self.session = session
        self.adapters = self
        self.info = self
        self._closed = False
        self._piped: list[tuple[Call, Cursor]] | None = None
        self._depth = 0

    def register_dumper(self, *_: Any) -> None:
        """The model reads the product's arrays as they are."""

    def parameter_status(self, name: str) -> str | None:
        """What the server says of itself when a session begins."""
        return {"server_encoding": "UTF8"}.get(name)

    @property
    def broken(self) -> bool:
        """Whether the server has ended it."""
        return not self._closed and self.session.ended is not None

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self.session.cut:
                self.session.end(psycopg.OperationalError(LOST))

    def cursor(self) -> Cursor:
        return Cursor(self)

    def execute(self, query: str | bytes | sql.Composable, parameters: Any = None, **_how: Any) -> Cursor:
        cursor = Cursor(self)
        call = self.call_of(query, parameters)
        if self._piped is not None:
            self._piped.append((call, cursor))
        else:
            self.send([(call, cursor)])
        return cursor

    def rollback(self) -> None:
        if self.session.transaction is not None:
            self.execute("rollback")

    def send(self, calls: Iterable[tuple[Call, Cursor | None]]) -> None:
        """Send statements and wait for all answers; the first error, behind which nothing is carried out, is raised."""
        self.play.check_alive()
        if self._closed:
            raise psycopg.OperationalError("the connection is closed")
        waiting = list(calls)
        session = self.session
        self._look()
        try:
            while waiting and waiting[0][0].local:
                call, cursor = waiting.pop(0)
                self._tell(cursor, session.locally(call))
        except psycopg.Error:
            self._look()
            raise
        if not waiting:
            return
        session.todo = [call for call, _ in waiting]
        session.answers = []
        self.play.wait(session)
        if session.cut:
            self._closed = True
            raise psycopg.OperationalError(LOST)
        for (_, cursor), answer in zip(waiting, session.answers, strict=False):
            if isinstance(answer, psycopg.Error):
                self._closed = session.ended is not None
                raise answer
            self._tell(cursor, answer)

    def _look(self) -> None:
        if self.session.ended is not None:
            self._closed = True
            raise self.session.ended

    @staticmethod
    def _tell(cursor: Cursor | None, result: Result) -> None:
        if cursor is not None:
            cursor.result = result

    def sync(self) -> None:
        if self._piped is not None:
            calls, self._piped = self._piped, []
            self.send(calls)

    @contextmanager
    def pipeline(self) -> Iterator[Connection]:
        """Statements are queued until the next sync: what the client does in between, the server does not see."""
        if self._piped is not None:
            yield self
            return
        self._piped = []
        try:
            yield self
            self.sync()
        finally:
            self._piped = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        nested = self._depth > 0
        name = f"_pg3_{self._depth}"
        self.execute(f'savepoint "{name}"' if nested else "begin")
        self._depth += 1
        try:
            yield
        except BaseException:
            self._depth -= 1
            if not self._closed and self.session.ended is None:
                self.execute(f'rollback to "{name}"' if nested else "rollback")
                if nested:
                    self.execute(f'release "{name}"')
            raise
        self._depth -= 1
        self.execute(f'release "{name}"' if nested else "commit")
