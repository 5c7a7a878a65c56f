"""Reads the write model: positions, versions, states and outcomes in one snapshot of the primary (rules 1 and 10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from commands.decision import Versioned
from commands.writer import Snapshot
from infra.contexts import contexts
from infra.log.rule import Reading
from projections.engine.system import OUTCOMES, snapshot_view_name

AGENT = "core"


class SnapshotReader:
    """Reads snapshots over one connection. Not thread-safe."""

    def __init__(self, connection: psycopg.Connection[Any], events_topic: str) -> None:
        self.connection = connection
        self.events_topic = events_topic
        self._tables: dict[str, str] = {}

    def read(self, streams: Iterable[tuple[str, str]] = (), outcomes: Iterable[tuple[str, str]] = ()) -> Snapshot:
        """The snapshot with these streams' states and with which of these (stream, command id) have an outcome.

        Raises psycopg.Error; what may pass is for the caller to wait out.
        """
        by_context = defaultdict(list)
        for context, stream in streams:
            by_context[context].append(stream)
        pairs = list(outcomes)
        snapshot = self._read(by_context, pairs)
        if snapshot is None:  # a switch moved a table since the names were read
            snapshot = self._read(by_context, pairs)
        if snapshot is None:
            return Snapshot({}, "", fits=False)
        return snapshot

    def _read(self, by_context: dict[str, list[str]], pairs: list[tuple[str, str]]) -> Snapshot | None:
        """None when the table names known here are not those of the snapshot."""
        connection = self.connection
        rows: dict[str, Versioned] = {}
        answered: frozenset[tuple[str, str]] = frozenset()
        with connection.transaction(), connection.pipeline():
            connection.execute("set transaction isolation level repeatable read, read only")
            positions = connection.execute(_POSITIONS, (AGENT, self.events_topic))
            live = connection.execute(_LIVE, (AGENT,))
            state_cursors = {
                context: connection.execute(_states(self._tables[snapshot_view_name(context)]), (names,), binary=True)
                for context, names in by_context.items()
                if snapshot_view_name(context) in self._tables
            }
            outcome_cursor = None
            if pairs and OUTCOMES in self._tables:
                arguments = ([stream for stream, _ in pairs], [command_id for _, command_id in pairs])
                outcome_cursor = connection.execute(_outcomes(self._tables[OUTCOMES]), arguments)
            at = positions.fetchall()
            found = {partition: Reading(*reading) for partition, _, *reading in at}
            generations = {str(row[1]) for row in at}
            versions = {view: (version, table) for view, version, table in live.fetchall()}
            tables = {view: table for view, (_, table) in versions.items()}
            same = all(self._tables.get(view) == tables.get(view) for view in _wanted())
            for context, cursor in state_cursors.items():
                kind = contexts()[context].state
                for stream, version, state in cursor.fetchall():
                    rows[stream] = Versioned(version, msgspec.json.decode(state, type=kind))
            if outcome_cursor is not None:
                answered = frozenset((stream, command_id) for stream, command_id in outcome_cursor.fetchall())
        if not same:
            self._tables = tables
            return None
        fits = bool(found) and all(
            view in versions and versions[view][0] == version for view, version in _wanted().items()
        )
        return Snapshot(found, generations.pop() if len(generations) == 1 else "", fits, rows, answered)


@cache
def _wanted() -> dict[str, int]:
    """The versions of the write model that this code can decide on, by view."""
    from projections.engine.system import OUTCOMES_VERSION

    return {OUTCOMES: OUTCOMES_VERSION} | {
        snapshot_view_name(context.name): context.state_version for context in contexts().values()
    }


_POSITIONS = """
select partition, generation, next_offset, epoch, seq, command_offset
  from positions where agent = %s and topic = %s
"""
_LIVE = "select view, version, table_name from live where agent = %s"


@cache
def _states(table: str) -> sql.Composed:
    return sql.SQL("select stream, version, state::text from {} where stream = any(%s)").format(sql.Identifier(table))


@cache
def _outcomes(table: str) -> sql.Composed:
    return sql.SQL(
        "select o.stream, o.command_id from unnest(%s::text[], %s::text[]) as asked(stream, command_id) "
        'join {} o on (o.stream, o.command_id) = (asked.stream collate "C", asked.command_id collate "C")'
    ).format(sql.Identifier(table))
