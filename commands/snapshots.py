"""Reads the write model: positions, live versions, states and outcomes, in one snapshot of the primary (rules 1 and 10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from infra.database.connect import Connection, DatabaseUnavailable, connect, named_errors
from infra.log.contract import Contract, check_contract
from infra.log.rule import Reading
from infra.log.topics import Topic
from infra.observability.logs import StatusLog
from infra.settings import Settings
from projections.engine.store.command_types import CommandType, live_types, own_types
from projections.engine.store.event_types import foldable_types, own_event_types
from projections.engine.views.binary_arrays import texts, uuids
from projections.engine.views.core_views import OUTCOMES, OUTCOMES_VERSION, command_key, snapshot_view_name
from projections.engine.views.view import CORE


class SnapshotReader:
    """Reads snapshots over one connection, which is replaced when it was lost. Not thread-safe.

    All its methods raise DatabaseUnavailable while PostgreSQL is, and other named errors.
    """

    def __init__(self, settings: Settings, name: str, log: Sequence[Topic], status: StatusLog) -> None:
        self._settings = settings
        self._name = name
        self._log = log
        self._events_topic = settings.events_topic
        self._status = status
        self._connection: Connection | None = None
        self._tables: dict[str, str] = {}
        self._versions: dict[str, int] = {}

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """The connection, while no question is pending."""
        try:
            with named_errors(self._settings):
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._settings, self._name, short_transactions=True, by_key=True)
                    for topic in self._log:
                        check_contract(self._connection, Contract.of(topic))
                    self._status.well("database", "PostgreSQL answers again")
                yield self._connection
        except DatabaseUnavailable:
            self.close()
            self._status.wrong("database", "PostgreSQL does not answer; waiting for it")
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read(self) -> Snapshot:
        """A snapshot without states and outcomes, but with the types of commands and events."""
        snapshot = self.answer(self.ask((), ()))
        if not snapshot.fits:  # it may with the tables' names that this one found
            snapshot = self.answer(self.ask((), ()))
        with self.session() as db:
            live, foldable = live_types(db), foldable_types(db)
        own, events = own_types(), own_event_types()
        others = {CommandType(name, "") for name in self.states.keys() - contexts().keys()}
        unknown = {one for one in live - own if one.context in contexts()} | others
        newer = {one for one in foldable - events if one.partition(".")[0] in contexts()}
        return replace(
            snapshot,
            unknown=frozenset(unknown),
            unrecorded=own - live,
            newer=frozenset(newer),
            unfoldable=events - foldable,
        )

    @property
    def states(self) -> dict[str, int]:
        """The live version of each context's states, as of the newest snapshot."""
        states = snapshot_view_name("")
        found = self._versions.items()
        return {view.removeprefix(states): version for view, version in found if view.startswith(states)}

    def ask(self, streams: Collection[tuple[str, str]], outcomes: Collection[tuple[str, str]]) -> Question:
        """Send the query for the states of these (context, stream), and for which of these (stream, command id) have an outcome.

        It does not wait for the result: use the connection for nothing else before `answer`.
        """
        by_context: dict[str, list[str]] = defaultdict(list)
        for context, stream in streams:
            if snapshot_view_name(context) in self._tables:
                by_context[context].append(stream)
        parameters: list[Any] = [texts(names) for names in by_context.values()]
        parameters += [CORE, self._events_topic, CORE]
        asked = list(outcomes)
        outcomes_table = self._tables.get(OUTCOMES) if asked else None
        if outcomes_table:
            parameters += [uuids([command_key(*one) for one in asked])]
        query = _query(tuple(self._tables[snapshot_view_name(context)] for context in by_context), outcomes_table)
        with self.session() as db:
            pipeline = db.pipeline()
            pipeline.__enter__()  # `answer` leaves it; until then the server works while the handler does
            cursor = db.execute(query, parameters, binary=True)
        return Question(asked, list(by_context), pipeline, cursor)

    def answer(self, question: Question) -> Snapshot:
        """The result. It does not fit where a switch changed a table since the names for the query were read."""
        with self.session():
            try:
                question.pipeline.__exit__(None, None, None)
                row = question.cursor.fetchone()
            except psycopg.errors.UndefinedTable:  # as before a rebuild: the database was restored
                self._tables = {}
                return Snapshot({}, "", fits=False)
        assert row is not None
        found = _decode_found(row[0])
        positions = {partition: Reading(*reading) for partition, _, *reading in found.positions or ()}
        generations = {position[1] for position in found.positions or ()}
        generation = generations.pop() if len(generations) == 1 else ""
        versions = self._versions = {view: version for view, version, _ in found.live or ()}
        # of this code's versions: another version's columns may be others, too
        tables = {view: table for view, version, table in found.live or () if _wanted().get(view) == version}
        if tables != self._tables:
            self._tables = tables
            return Snapshot(positions, generation, fits=False)
        rows: dict[str, Versioned] = {}
        for context, states in zip(question.contexts, found.states, strict=True):
            decode = decoder(contexts()[context].state)
            for stream, version, state in states or ():
                try:
                    rows[stream] = Versioned(version, decode(state))
                except (msgspec.DecodeError, ValueError, TypeError) as error:
                    raise unreadable_state(stream, error) from error
        return Snapshot(
            positions,
            generation,
            bool(positions) and all(versions.get(view) == version for view, version in _wanted().items()),
            rows,
            frozenset(question.outcomes[number - 1] for number in found.outcomes or ()),
        )


class Question(NamedTuple):
    """A query that was sent, and where its result will be."""

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
