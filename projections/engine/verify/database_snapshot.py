"""One moment of the database that several sessions look at: exported by one, imported by those who copy rows.

The exporting session must stay in its transaction until the last one has imported, and not a moment longer: while it is
there, PostgreSQL keeps every row version that has died since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from psycopg import errors, sql

from infra.database.connect import Connection, connect, patient_ms
from infra.errors import SamefoldError
from infra.settings import Settings

SIGN_OF_LIFE_S = 1.0
"""A process that froze holds its snapshot for no longer than `patient_ms`; one that lives gives a sign every second."""
LOOK_S = 0.2


class SnapshotGone(SamefoldError):
    """The moment that rows were to be copied from was let go of before this task had it."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What an importer is told."""

    snapshot: str
    channel: str


class Snapshot:
    """The exporting side, for a `with`. What `connection` reads is of that moment. Raises psycopg.Error, DatabaseAway."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting_for: set[int] | None = None
        self._next_look = self._next_sign = 0.0

    def __enter__(self) -> Snapshot:
        channel = f"samefold_snapshot_{uuid4().hex}"
        self._listening = connect(self._settings, "samefold verify")
        self._listening.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        self.connection = connect(self._settings, "samefold verify", statement_timeout_ms=0)
        self.connection.execute(f"set idle_in_transaction_session_timeout = {patient_ms(self._settings)}")
        self.connection.execute("begin isolation level repeatable read, read only")
        row = self.connection.execute("select pg_export_snapshot()").fetchone()
        assert row is not None, "it returns one row"
        self.shared = Shared(row[0], channel)
        return self

    def __exit__(self, *_error: object) -> None:
        self.connection.close()
        self._listening.close()

    def expect(self, importers: int) -> None:
        """Importers 0, 1, … up to so many will come; when the last one has, the moment is let go of."""
        self._waiting_for = set(range(importers))

    def watch(self) -> None:
        """To be called several times a second, while importers are on their way."""
        now = time.monotonic()
        if self.connection.closed or self._waiting_for is None or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        self._waiting_for -= {int(note.payload) for note in self._listening.notifies(timeout=0)}
        if not self._waiting_for:
            self.connection.close()
        elif now >= self._next_sign:
            self._next_sign = now + SIGN_OF_LIFE_S
            self.connection.execute("select")


@contextmanager
def imported(settings: Settings, shared: Shared, importer: int) -> Iterator[Connection]:
    """A connection in a transaction that sees that very moment. Raises SnapshotGone, DatabaseAway."""
    with connect(settings, "samefold verify", statement_timeout_ms=0) as connection:
        connection.execute("begin isolation level repeatable read, read only")
        try:
            connection.execute(sql.SQL("set transaction snapshot {}").format(sql.Literal(shared.snapshot)))
        except (errors.UndefinedObject, errors.InvalidParameterValue, errors.ObjectNotInPrerequisiteState) as error:
            raise SnapshotGone(
                "The database's moment that was to be compared is gone: this part began too late, or is done a second time.",
                "Run the command again.",
            ) from error
        with connect(settings, "samefold verify") as telling:
            telling.execute("select pg_notify(%s, %s)", (shared.channel, str(importer)))
        yield connection
        connection.execute("commit")
