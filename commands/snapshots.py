"""Reads the write model: positions, versions, states and outcomes in one snapshot of the primary (rules 1 and 10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import msgspec
import psycopg
from psycopg import sql

from commands.decision import Versioned
from commands.writer import Snapshot
from infra.contexts import contexts
from infra.log.rule import Reading
from projections.engine.arrays import texts
from projections.engine.commit import prepare
from projections.engine.system import OUTCOMES, snapshot_view_name

AGENT = "core"

Cursor = psycopg.Cursor[tuple[Any, ...]]


class SnapshotReader:
    """Reads snapshots over one connection. Not thread-safe."""

    def __init__(self, connection: psycopg.Connection[Any], events_topic: str) -> None:
        prepare(connection)
        self.connection = connection
        self.events_topic = events_topic
        self._tables: dict[str, str] = {}

    def read(self) -> Snapshot:
        """The snapshot without any state or outcome. Raises psycopg.Error."""
        return self.answer(self.ask((), ()))

    def ask(self, streams: Iterable[tuple[str, str]], outcomes: Iterable[tuple[str, str]]) -> Question:
        """Have the server read the states of these (context, stream), and which of these (stream, command id) have an outcome.

        Does not wait for it. The connection is of no other use before `answer`. Raises psycopg.Error, there too; what may
        pass is for the caller to wait out.
        """
        by_context: dict[str, list[str]] = defaultdict(list)
        for context, stream in streams:
            by_context[context].append(stream)
        return self._ask(by_context, list(outcomes))

    def answer(self, question: Question) -> Snapshot:
        """What the server found, all of it in one snapshot."""
        snapshot = self._answer(question)
        if snapshot is None:  # a switch moved a table since the names were read
            snapshot = self._answer(self._ask(question.streams, question.outcomes))
        return snapshot or Snapshot({}, "", fits=False)

    def _ask(self, streams: Mapping[str, list[str]], outcomes: Sequence[tuple[str, str]]) -> Question:
        execute = self.connection.execute
        pipeline = self.connection.pipeline()
        pipeline.__enter__()  # `_answer` leaves it: until then the server works, and nobody waits for it
        execute("begin isolation level repeatable read, read only")
        positions = execute(_POSITIONS, (AGENT, self.events_topic))
        live = execute(_LIVE, (AGENT,))
        states = {
            context: execute(_states(self._tables[snapshot_view_name(context)]), (texts(names),), binary=True)
            for context, names in streams.items()
            if snapshot_view_name(context) in self._tables
        }
        answered = None
        if outcomes and OUTCOMES in self._tables:
            pairs = [texts([stream for stream, _ in outcomes]), texts([command_id for _, command_id in outcomes])]
            answered = execute(_outcomes(self._tables[OUTCOMES]), pairs)
        execute("commit")
        return Question(streams, outcomes, pipeline, positions, live, states, answered)

    def _answer(self, question: Question) -> Snapshot | None:
        """None when the table names known here are not those of the snapshot."""
        question.pipeline.__exit__(None, None, None)
        at = question.positions.fetchall()
        found = {partition: Reading(*reading) for partition, _, *reading in at}
        generations = {str(row[1]) for row in at}
        versions = {view: (version, table) for view, version, table in question.live.fetchall()}
        tables = {view: table for view, (_, table) in versions.items()}
        if any(self._tables.get(view) != tables.get(view) for view in _wanted()):
            self._tables = tables
            return None
        rows: dict[str, Versioned] = {}
        for context, cursor in question.states.items():
            decode = _decoder(contexts()[context].state)
            for stream, version, state in cursor.fetchall():
                rows[stream] = Versioned(version, decode(state))
        answered = frozenset(question.answered.fetchall()) if question.answered else frozenset()
        fits = bool(found) and all(
            view in versions and versions[view][0] == version for view, version in _wanted().items()
        )
        return Snapshot(found, generations.pop() if len(generations) == 1 else "", fits, rows, answered)


class Question(NamedTuple):
    """What was asked for, and where the answers will be."""

    streams: Mapping[str, list[str]]
    """By context."""
    outcomes: Sequence[tuple[str, str]]
    pipeline: AbstractContextManager[Any]
    positions: Cursor
    live: Cursor
    states: Mapping[str, Cursor]
    """By context."""
    answered: Cursor | None


@cache
def _decoder(state: type) -> Callable[[str], Any]:
    return msgspec.json.Decoder(state).decode


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
        "select o.stream, o.command_id from unnest(%s, %s) as asked(stream, command_id) "
        'join {} o on (o.stream, o.command_id) = (asked.stream collate "C", asked.command_id collate "C")'
    ).format(sql.Identifier(table))
