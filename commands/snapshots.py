"""Reads the write model: positions, live versions, states and outcomes, in one snapshot of the primary (rules 1 and 10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import msgspec
import psycopg
from psycopg import sql

from commands.decision import Versioned
from commands.writer import Snapshot
from domain.engine.contexts import contexts, unreadable_state
from domain.engine.storable import decoder
from infra.log.rule import Reading
from projections.engine.store.command_types import CommandType, live_types, own_types
from projections.engine.store.event_types import foldable_types, own_event_types
from projections.engine.store.positions import live_set
from projections.engine.views.binary_arrays import texts, uuids
from projections.engine.views.core_views import (
    OUTCOMES,
    OUTCOMES_VERSION,
    agent_views,
    code_set,
    command_key,
    snapshot_view_name,
)

AGENT = "core"


class SnapshotReader:
    """Reads snapshots over one connection. Not thread-safe."""

    def __init__(self, connection: psycopg.Connection[Any], events_topic: str) -> None:
        self.connection = connection
        self.events_topic = events_topic
        self._tables: dict[str, str] = {}
        self._versions: dict[str, int] = {}

    def read(self) -> Snapshot:
        """A snapshot without states and outcomes, but with the types of commands and events. Raises psycopg.Error."""
        snapshot = self.answer(self.ask((), ()))
        live, own = live_types(self.connection), own_types()
        others = {CommandType(name, "") for name in self.states.keys() - contexts().keys()}
        unknown = {one for one in live - own if one.context in contexts()} | others
        foldable, events = foldable_types(self.connection), own_event_types()
        newer = {one for one in foldable - events if one.partition(".")[0] in contexts()}
        return replace(
            snapshot,
            unknown=frozenset(unknown),
            unrecorded=own - live,
            newer=frozenset(newer),
            unfoldable=events - foldable,
        )

    def shows_this_code(self) -> bool:
        """Whether the live views are those of this code: then agents can fold all of its events. Raises psycopg.Error."""
        return live_set(self.connection, AGENT) == code_set(agent_views(AGENT))

    @property
    def states(self) -> dict[str, int]:
        """The live version of each context's states, as of the newest snapshot."""
        states = snapshot_view_name("")
        found = self._versions.items()
        return {view.removeprefix(states): version for view, version in found if view.startswith(states)}

    def ask(self, streams: Collection[tuple[str, str]], outcomes: Collection[tuple[str, str]]) -> Question:
        """Send the query for the states of these (context, stream), and for which of these (stream, command id) have an outcome.

        It does not wait for the result: use the connection for nothing else before `answer`. Both raise psycopg.Error.
        """
        by_context: dict[str, list[str]] = defaultdict(list)
        for context, stream in streams:
            if snapshot_view_name(context) in self._tables:
                by_context[context].append(stream)
        parameters: list[Any] = [texts(names) for names in by_context.values()]
        parameters += [AGENT, self.events_topic, AGENT]
        asked = list(outcomes)
        outcomes_table = self._tables.get(OUTCOMES) if asked else None
        if outcomes_table:
            parameters += [uuids([command_key(*one) for one in asked])]
        query = _query(tuple(self._tables[snapshot_view_name(context)] for context in by_context), outcomes_table)
        pipeline = self.connection.pipeline()
        pipeline.__enter__()  # `_answer` leaves it; until then the server works while the handler does
        cursor = self.connection.execute(query, parameters, binary=True)
        return Question(streams, asked, list(by_context), pipeline, cursor)

    def answer(self, question: Question) -> Snapshot:
        """The result of the query."""
        snapshot = self._answer(question)
        if snapshot is None:  # a switch changed a table since the names were read
            snapshot = self._answer(self.ask(question.streams, question.outcomes))
        return snapshot or Snapshot({}, "", fits=False)

    def _answer(self, question: Question) -> Snapshot | None:
        """None where the snapshot has other table names than those the query used."""
        question.pipeline.__exit__(None, None, None)
        row = question.cursor.fetchone()
        assert row is not None
        found = _decode_found(row[0])
        # of this code's versions: another version's columns may be others, too
        tables = {view: table for view, version, table in found.live or () if _wanted().get(view) == version}
        if any(self._tables.get(view) != tables.get(view) for view in _wanted()):
            self._tables = tables
            return None
        rows: dict[str, Versioned] = {}
        for context, states in zip(question.contexts, found.states, strict=True):
            decode = decoder(contexts()[context].state)
            for stream, version, state in states or ():
                try:
                    rows[stream] = Versioned(version, decode(state))
                except (msgspec.DecodeError, ValueError, TypeError) as error:
                    raise unreadable_state(stream, error) from error
        positions = {partition: Reading(*reading) for partition, _, *reading in found.positions or ()}
        generations = {position[1] for position in found.positions or ()}
        versions = self._versions = {view: version for view, version, _ in found.live or ()}
        return Snapshot(
            positions,
            generations.pop() if len(generations) == 1 else "",
            bool(positions) and all(versions.get(view) == version for view, version in _wanted().items()),
            rows,
            frozenset(question.outcomes[number - 1] for number in found.outcomes or ()),
        )


class Question(NamedTuple):
    """A query that was sent, and where its result will be."""

    streams: Collection[tuple[str, str]]
    outcomes: Sequence[tuple[str, str]]
    contexts: list[str]
    """Those whose table is known, in the order of the result's states."""
    pipeline: AbstractContextManager[Any]
    cursor: psycopg.Cursor[Any]


class _Found(msgspec.Struct, array_like=True):
    """The result. An aggregate over no rows is None."""

    states: list[list[tuple[str, int, msgspec.Raw]] | None]
    """By context: (stream, version, state)"""
    positions: list[tuple[int, str, int, int, int, int]] | None
    """(partition, generation, next_offset, epoch, seq, command_offset)"""
    live: list[tuple[str, int, str]] | None
    """(view, version, table)"""
    outcomes: list[int] | None
    """The place of each in the question, from 1."""


_decode_found: Callable[[str], _Found] = msgspec.json.Decoder(_Found).decode


@cache
def _wanted() -> dict[str, int]:
    """The versions of the write model that this code can decide on, by view."""
    return {OUTCOMES: OUTCOMES_VERSION} | {
        snapshot_view_name(context.name): context.state_version for context in contexts().values()
    }


@cache
def _query(state_tables: tuple[str, ...], outcomes_table: str | None) -> bytes:
    """One statement, and so one snapshot; one value, which msgspec decodes quickly."""
    states = [_STATES.format(sql.Identifier(table)) for table in state_tables]
    outcomes = _OUTCOMES.format(sql.Identifier(outcomes_table)) if outcomes_table else sql.SQL("null")
    return _FOUND.format(sql.SQL(", ").join(states), outcomes).as_bytes()


_FOUND = sql.SQL("""
select json_build_array(
  json_build_array({}),
  (select json_agg(json_build_array(partition, generation, next_offset, epoch, seq, command_offset))
     from positions where agent = %s and topic = %s),
  (select json_agg(json_build_array(view, version, table_name)) from live where agent = %s),
  {})::text
""")
_STATES = sql.SQL("(select json_agg(json_build_array(stream, version, state)) from {} where stream = any(%s))")
_OUTCOMES = sql.SQL("""
  (select json_agg(asked.number)
     from unnest(%s) with ordinality as asked(key, number) join {} o on o.command = asked.key)
""")
