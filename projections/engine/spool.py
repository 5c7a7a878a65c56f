"""Rows copied out of the database, by view and partition, in files of a temporary folder until they have been compared."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

from psycopg import sql

from infra.database.connect import Connection
from projections.engine.columns import PARTITION, Scalar
from projections.engine.folded import StoredRow
from projections.engine.view import View

CHUNK = 5_000


class Spool:
    """A folder that is gone when the `with` ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="samefold-verify-")
        self.path = Path(self._folder.name)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_error: object) -> None:
        self._folder.cleanup()

    def copy(self, connection: Connection, view: View, table: str) -> dict[int, int]:
        """Copy a table's rows out, in the caller's transaction; how many there are, by partition."""
        counts: dict[int, int] = {}
        waiting: dict[int, list[StoredRow]] = {}
        with connection.cursor(name="rows") as cursor:
            cursor.itersize = CHUNK
            cursor.execute(_select(view, table))
            for row in cursor:
                rows = waiting.setdefault(row[-1], [])
                rows.append(row)
                if len(rows) == CHUNK:
                    self._append(view.name, row[-1], rows)
                    rows.clear()
                counts[row[-1]] = counts.get(row[-1], 0) + 1
        for partition, rows in waiting.items():
            self._append(view.name, partition, rows)
        return counts

    def _append(self, view: str, partition: int, rows: list[StoredRow]) -> None:
        # opened anew each time: views times partitions may be more files than a process may hold open
        with _file(self.path, view, partition).open("ab") as file:
            pickle.dump(rows, file)


def spooled(folder: Path, view: str, partition: int) -> Iterator[StoredRow]:
    """The rows that were copied out, also in another process."""
    path = _file(folder, view, partition)
    if not path.exists():
        return
    with path.open("rb") as file:
        while True:
            try:
                yield from pickle.load(file)  # noqa: S301  # written by this command, a moment ago
            except EOFError:
                return


def _file(folder: Path, view: str, partition: int) -> Path:
    return folder / f"{view}.{partition}"


def _select(view: View, table: str) -> sql.Composed:
    columns = [
        # as it was stored, not parsed
        sql.SQL("convert_to({}::text, 'UTF8')" if column.scalar is Scalar.JSON else "{}").format(
            sql.Identifier(column.name)
        )
        for column in view.columns
    ]
    return sql.SQL("select {}, {} from {}").format(
        sql.SQL(", ").join(columns), sql.Identifier(PARTITION), sql.Identifier(table)
    )
