"""Compare what readers see with a fold of the log, row for row, during live traffic.

Each partition is a task of its own. It reads the partition's rows and position in one short snapshot of the database, folds the log
from its beginning to exactly that position, and compares rows, epoch, sequence number and command offset. Parked streams and
skips come from the same snapshot: what a view leaves out on record is no difference.

A task keeps one partition's rows of the compared views in memory; see `memory` for what happens when they do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from psycopg import errors, sql

from domain.engine.contexts import contexts
from domain.engine.storable import comparable, decoder
from infra.database.connect import Connection, connect, named_errors, patient_ms
from infra.errors import SamefoldError
from infra.log.contract import require_contract
from infra.processes.engines import SILENT, EngineFor, Progress, local
from infra.processes.workers import Advance
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged
from projections.engine.fold.fold import Changes
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.folded import Folded, StoredRow, added_rows, converted, counted_to
from projections.engine.store.positions import Positions, read_positions
from projections.engine.views.columns import PARTITION
from projections.engine.views.view import Kind, View, tuple_getter

SHOWN = 20
"""How many differences of a view are listed. All are counted."""
CHUNK = 5_000
"""Rows per fetch."""

What = Literal["missing", "extra", "changed", "position", "poison"]


class NotLive(SamefoldError):
    """The table that is live is not the one to work on."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the database and the fold of the log.

    `missing`: a row that readers should see; `extra`: one they should not; `changed`: other values; `position`: a position that
    the log does not lead to; `poison`: an event that the view can't fold and that is not recorded as parked.
    """

    view: str
    what: What
    partition: int
    key: Mapping[str, Any]
    expected: Mapping[str, Any] | str | None
    found: Mapping[str, Any] | str | None


@dataclass(slots=True)
class Compared:
    """The result for one view. `differences` lists the first of `total`."""

    view: str
    table: str
    rows: int = 0
    total: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, differences: Iterable[Difference]) -> None:
        for difference in differences:
            self.total += 1
            if len(self.differences) < SHOWN:
                self.differences.append(difference)


@dataclass(slots=True)
class Verified:
    """The result of a run: by view, and the positions that the log does not lead to."""

    views: dict[str, Compared] = field(default_factory=dict)
    positions: list[Difference] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    """Views that are stopped, so not compared."""
    commits: int = 0

    def add(self, other: Verified) -> None:
        self.commits += other.commits
        self.positions += other.positions
        self.stopped += other.stopped
        for name, found in other.views.items():
            compared = self.views.setdefault(name, Compared(found.view, found.table))
            compared.rows += found.rows
            compared.total += found.total
            compared.differences = (compared.differences + found.differences)[:SHOWN]

    @property
    def differences(self) -> int:
        return len(self.positions) + sum(compared.total for compared in self.views.values())


def verify(
    settings: Settings, views: Mapping[str, View], *, engine_for: EngineFor = local, progress: Progress = SILENT
) -> Verified:
    """Compare the live tables of these views with the log, on `engine_for(records)`, by default on local processes.

    Raises NotLive, LogTrimmed and what folding raises.
    """
    result = Verified()
    with named_errors(settings):
        with connect(settings, "samefold verify") as connection:
            require_contract(settings, connection)
        for agent in sorted({view.agent for view in views.values()}):
            of_agent = {name: view for name, view in views.items() if view.agent == agent}
            result.add(_verify_agent(settings, agent, of_agent, engine_for, progress))
    return result


def _verify_agent(
    settings: Settings, agent: str, views: Mapping[str, View], engine_for: EngineFor, progress: Progress
) -> Verified:
    tables, stopped = _live_tables(settings, agent, views)
    result = Verified({name: Compared(name, table) for name, table in tables.items()}, stopped=stopped)
    if not tables:
        return result
    views = {name: views[name] for name in tables}
    with _snapshot(settings, agent, tables) as (connection, positions):
        for name, compared in result.views.items():
            for row in _rows(connection, views[name], compared.table, "<> all(%s)", list(positions.readings)):
                compared.rows += 1  # of a partition that does not exist
                compared.add([_difference(views[name], "extra", row[-1], None, row)])
    by_size = sorted(positions.readings, key=lambda partition: -positions.readings[partition].next_offset)
    tasks = [PartitionTask(settings, agent, partition, views, tables) for partition in by_size]
    records = sum(reading.next_offset for reading in positions.readings.values())
    engine = engine_for(records)
    progress.begin("verify", records)
    for found in engine.run(verify_partition, tasks, records, progress.advance):
        result.add(found)
    return result


def _live_tables(settings: Settings, agent: str, views: Mapping[str, View]) -> tuple[dict[str, str], list[str]]:
    """The live tables of these views, and those of them that are stopped. Raises NotLive."""
    with connect(settings, "samefold verify") as connection:
        positions = read_positions(connection, agent, settings.events_topic)
    found = positions.live_set if positions else {}
    if wrong := [name for name, view in views.items() if found.get(name) != view.version]:
        raise NotLive(
            f"What is live of {', '.join(wrong)} is not this code's version.",
            "Run verify with the code that is live (`samefold views`), or `samefold rebuild` to make this code's live.",
        )
    assert positions is not None, "there is no agent without views"
    tables = {name: positions.tables[name] for name in views if name in positions.live}
    return tables, [name for name in views if name in positions.stopped]


@contextmanager
def _snapshot(settings: Settings, agent: str, tables: Mapping[str, str]) -> Iterator[tuple[Connection, Positions]]:
    """A transaction that sees one moment of the database, and the agent's positions in it. Raises NotLive after a switch."""
    with connect(settings, "samefold verify", statement_timeout_ms=0) as connection:
        connection.execute("begin isolation level repeatable read, read only")
        connection.execute(f"set local idle_in_transaction_session_timeout = {patient_ms(settings)}")
        positions = None
        names = sql.SQL(", ").join(map(sql.Identifier, tables.values()))
        with suppress(errors.UndefinedTable):
            # before the snapshot is taken: a table that is truncated later would look empty in it
            connection.execute(sql.SQL("lock table {} in access share mode").format(names))
            positions = read_positions(connection, agent, settings.events_topic)
        now = positions.tables if positions else {}
        moved = [name for name, table in tables.items() if now.get(name) != table]
        if positions is None or moved:
            raise NotLive(
                f"Another table went live during verification, for {', '.join(moved)}.", "Run the command again."
            )
        yield connection, positions
        connection.execute("commit")


def _rows(connection: Connection, view: View, table: str, of_partitions: str, argument: object) -> Iterator[StoredRow]:
    """Rows whose partition meets the condition: stored values in column order, then the partition."""
    columns = [sql.SQL(column.type.loaded).format(sql.Identifier(column.name)) for column in view.stored]
    converters = [(i, c) for i, column in enumerate(view.stored) if (c := column.type.as_stored) is not None]
    place = sql.Identifier(PARTITION)
    query = sql.SQL("select {}, {} from {} where {} {}").format(
        sql.SQL(", ").join(columns), place, sql.Identifier(table), place, sql.SQL(of_partitions)
    )
    with connection.cursor(name="rows") as cursor:
        cursor.itersize = CHUNK
        rows = cursor.execute(query, (argument,))
        yield from (converted(row, converters) for row in rows) if converters else rows


@dataclass(frozen=True, slots=True)
class PartitionTask:
    """What a task compares: one partition of these views. `tables` were live when the run began."""

    settings: Settings
    agent: str
    partition: int
    views: Mapping[str, View]
    tables: Mapping[str, str]


def verify_partition(task: PartitionTask, advance: Advance) -> Verified:
    """Read a partition's rows and position, then fold it and compare.

    Raises what folding raises, NotLive, LogTrimmed, KafkaUnavailable, DatabaseUnavailable.
    """
    comparisons = {name: _Comparison(view, task.tables[name], task.partition) for name, view in task.views.items()}
    result = Verified({name: comparison.result for name, comparison in comparisons.items()})
    with named_errors(task.settings):
        with _snapshot(task.settings, task.agent, task.tables) as (connection, positions):
            for name, comparison in comparisons.items():
                rows = _rows(connection, comparison.view, task.tables[name], "= %s", task.partition)
                comparison.take(rows, advance)
        end = positions.readings[task.partition]
        plan = Plan(task.views)
        folded = Folded(plan, positions.blocked)
        try:
            for batch in counted_to(task.settings, positions.topic, task.partition, end, decode=plan.decode):
                changes = folded.fold(batch)
                for comparison in comparisons.values():
                    comparison.added(changes)
                result.commits += len(batch.counted)
                advance(batch.next.next_offset - batch.was.next_offset)
        except LogChanged as changed:
            key, found = {"agent": task.agent, "partition": task.partition}, changed.found._asdict()
            result.positions.append(Difference("positions", "position", task.partition, key, found, end._asdict()))
    for comparison in comparisons.values():
        comparison.end(folded)
    return result


class _Comparison:
    """Compares one view's rows of one partition: each row that the fold produces is removed from the database's."""

    def __init__(self, view: View, table: str, partition: int) -> None:
        self.view = view
        self.partition = partition
        self.result = Compared(view.name, table)
        self._key = tuple_getter(view.key_places)
        self._left: dict[tuple[Any, ...], StoredRow] = {}

    def take(self, rows: Iterable[StoredRow], advance: Advance) -> None:
        """Keep the database's rows."""
        for row in rows:
            self._left[self._key(row)] = row
            self.result.rows += 1
            if self.result.rows % CHUNK == 0:
                advance(0)

    def added(self, changes: Changes) -> None:
        if self.view.kind in (Kind.JOURNAL, Kind.OUTCOMES):
            self._compare(added_rows(self.view, changes))

    def end(self, folded: Folded) -> None:
        if self.view.kind not in (Kind.JOURNAL, Kind.OUTCOMES):
            self._compare(folded.kept_rows(self.view, self.partition))
        self.result.add(_difference(self.view, "extra", self.partition, None, row) for row in self._left.values())
        for one in folded.parked_of(self.view.name):
            event = {"stream": one.stream, "version": one.version}
            self.result.add([Difference(self.view.name, "poison", self.partition, event, one.error, None)])

    def _compare(self, rows: Iterable[StoredRow]) -> None:
        for expected in rows:
            found = self._left.pop(self._key(expected), None)
            if found is None:
                self.result.add([_difference(self.view, "missing", self.partition, expected, None)])
            elif found != expected and not _same_states(self.view, found, expected):
                self.result.add([_difference(self.view, "changed", self.partition, expected, found)])


def _difference(
    view: View, what: What, partition: int, expected: StoredRow | None, found: StoredRow | None
) -> Difference:
    row = expected or found
    assert row is not None, "one of the two is there"
    keys = _named(view, row, keys=True)
    return Difference(view.name, what, partition, keys, _named(view, expected), _named(view, found))


def _same_states(view: View, found: StoredRow, expected: StoredRow) -> bool:
    """Whether only the bytes of two states differ: each process writes the members of a set in another order."""
    if view.kind is not Kind.SNAPSHOT or found[:2] != expected[:2] or found[3:] != expected[3:]:
        return False
    decode = decoder(contexts()[view.contexts[0]].state)
    try:
        return bool(comparable(decode(found[2])) == comparable(decode(expected[2])))
    except (msgspec.DecodeError, ValueError, TypeError):
        return False


def _named(view: View, row: StoredRow | None, *, keys: bool = False) -> dict[str, Any]:
    """A row's values by column, JSON as text."""
    if row is None:
        return {}
    return {
        column.name: value.lstrip(b"\1").decode() if isinstance(value, bytes) and column.type.as_stored else value
        for column, value in zip(view.stored, row, strict=False)
        if column.is_key or not keys
    }
