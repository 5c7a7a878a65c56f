"""Rows copied out of the database, by view and partition, in files of a temporary folder until they have been compared."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg import sql

from infra.database.connect import Connection
from infra.errors import SamefoldError
from projections.engine.rebuild.folded import StoredRow
from projections.engine.rebuild.workers import Advance
from projections.engine.views.columns import PARTITION, Scalar
from projections.engine.views.view import View

CHUNK = 5_000


class SpoolFull(SamefoldError):
    """There is no room, or no right, to keep the rows that are to be compared."""


class Spool:
    """A folder that is gone when the `with` ends."""

    def __init__(self) -> None:
        """Raises SpoolFull."""
        with _naming():
            self._folder = tempfile.TemporaryDirectory(prefix="samefold-verify-")
        self.path = Path(self._folder.name)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_error: object) -> None:
        self._folder.cleanup()

    def copy(
        self, connection: Connection, view: View, table: str, partitions: Collection[int], advance: Advance
    ) -> int:
        """Copy a table's rows of these partitions out, in the caller's transaction; how many there are. Raises SpoolFull."""
        count = 0
        waiting: dict[int, list[StoredRow]] = {}
        with connection.cursor(name="rows") as cursor:
            cursor.itersize = CHUNK
            cursor.execute(select_rows(view, table, sql.SQL("= any(%s)")), (list(partitions),))
            for row in cursor:
                rows = waiting.setdefault(row[-1], [])
                rows.append(row)
                if len(rows) == CHUNK:
                    self._append(view.name, row[-1], rows)
                    rows.clear()
                    advance(0)
                count += 1
        for partition, rows in waiting.items():
            self._append(view.name, partition, rows)
        return count

    def _append(self, view: str, partition: int, rows: list[StoredRow]) -> None:
        # opened anew each time: views times partitions may be more files than a process may hold open
        with _naming(), _file(self.path, view, partition).open("ab") as file:
            pickle.dump(rows, file)


@contextmanager
def _naming() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpoolFull(
            f"The rows that verify compares can't be kept in {tempfile.gettempdir()}: {error.strerror or error}.",
            "Make room there, or name another folder: TMPDIR, or on executors SPARK_LOCAL_DIRS. It takes as much as the tables.",
        ) from error


def spooled(folder: Path, view: str, partition: int) -> Iterator[list[StoredRow]]:
    """The rows that were copied out, some at a time."""
    path = _file(folder, view, partition)
    if not path.exists():
        return
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)  # noqa: S301  # written by this command, a moment ago
            except EOFError:
                return


def _file(folder: Path, view: str, partition: int) -> Path:
    return folder / f"{view}.{partition}"


def select_rows(view: View, table: str, partition: sql.SQL) -> sql.Composed:
    """Stored values in column order and the partition, of rows whose partition is as the condition says."""
    columns = [
        # as it was stored, not parsed
        sql.SQL("convert_to({}::text, 'UTF8')" if column.scalar is Scalar.JSON else "{}").format(
            sql.Identifier(column.name)
        )
        for column in view.columns
    ]
    place = sql.Identifier(PARTITION)
    return sql.SQL("select {}, {} from {} where {} {}").format(
        sql.SQL(", ").join(columns), place, sql.Identifier(table), place, partition
    )
