"""Parked streams in the database: the streams that a table leaves out, and from which event on.

Only the first parked event is recorded. All later ones of the stream are parked with it, and the log has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from infra.database.connect import Connection
from projections.engine.fold.fold import Parked
from projections.engine.store.positions import LIVE


@dataclass(frozen=True, slots=True)
class ParkedStream:
    """A stream that a table leaves out from `since_version` on. `live` is whether the table is the live one, or a policy's."""

    view: str
    table: str
    stream: str
    partition: int
    since_offset: int
    since_version: int
    error: str
    parked_at: datetime
    live: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """An event that a view, or a policy, leaves out for good: the `version`th of its stream. `error` is why it was parked."""

    view: str
    stream: str
    version: int
    error: str
    at: datetime


def insert_parked(connection: Connection, tables: Mapping[str, str], parked: Iterable[Parked]) -> None:
    """Record the streams that a fold parked, in the transaction that writes its rows. Streams parked earlier stay as they are.

    `tables` are by view.
    """
    for one in parked:
        connection.execute(
            "insert into parked (table_name, stream, view, partition, since_offset, since_version, error) "
            "values (%s, %s, %s, %s, %s, %s, %s) on conflict (table_name, stream) do nothing",
            (tables[one.view], one.stream, one.view, one.partition, one.offset, one.version, one.error),
        )


def parked_streams(connection: Connection, *, live_only: bool = False) -> list[ParkedStream]:
    """All parked streams, by view, table and stream."""
    return [ParkedStream(*row) for row in connection.execute(_PARKED, (live_only,))]


def parked_in(connection: Connection, view: str, stream: str) -> ParkedStream | None:
    """The stream as it is parked in the view's live table, or in the policy of that agent."""
    row = connection.execute(_PARKED_IN, (view, stream)).fetchone()
    return ParkedStream(*row) if row else None


def dropped_events(connection: Connection) -> list[Dropped]:
    """All of them, by view and stream."""
    rows = connection.execute("select view, stream, version, reason, at from skips order by view, stream, version")
    return [Dropped(*row) for row in rows]


_COLUMNS = "p.view, p.table_name, p.stream, p.partition, p.since_offset, p.since_version, p.error, p.parked_at"
_PARKED_IN = f"""
select {_COLUMNS}, true from {LIVE} l join parked p using (table_name) where l.view = %s and p.stream = %s
"""  # noqa: S608
_PARKED = f"""
select {_COLUMNS}, l.table_name is not null
  from parked p left join {LIVE} l using (table_name)
 where l.table_name is not null or not %s order by p.view, p.table_name, p.stream
"""  # noqa: S608
