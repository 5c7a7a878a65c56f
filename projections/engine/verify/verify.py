"""The proof: what readers see is the fold of the log, row for row.

Each partition is verified by itself: its rows and its position are read in one snapshot of the database, which ends before
anything is folded; then the partition's log is folded from its beginning to exactly this position, and rows, epoch, sequence number
and command offset are compared. Runs beside live traffic, at any time. Parked streams and skips are read in the same snapshot: what
a view leaves out on record is no difference.

A task holds the rows of one partition, in the views that it compares; see `memory` for what happens when they do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from psycopg import sql

from infra.database.connect import Connection, connect, naming
from infra.domain_model.contexts import contexts
from infra.domain_model.storable import comparable, decoder
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged
from projections.engine.fold.fold import Changes
from projections.engine.fold.plan import Plan
from projections.engine.live.startup import require_contract
from projections.engine.rebuild.engines import EngineFor, Local
from projections.engine.rebuild.folded import Folded, StoredRow, added_rows
from projections.engine.rebuild.load import counted_to
from projections.engine.rebuild.progress import Progress, Silent
from projections.engine.rebuild.workers import Advance
from projections.engine.store.positions import Positions, read_positions
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import PARTITION
from projections.engine.views.view import Kind, View, tuple_getter

SHOWN = 20
"""Differences of a view that are listed; all are counted."""
CHUNK = 5_000
"""Rows that are fetched together."""

What = Literal["missing", "extra", "changed", "position", "poison"]


class NotLive(SamefoldError):
    """The view that is live is not the one that this code has."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as the fold of the log has it.

    `missing`: a row that readers should see; `extra`: one they should not; `changed`: one with other values; `position`: what
    the database says about a partition; `poison`: an event that the fold can't take, and that is not on record as parked.
    """

    view: str
    what: What
    partition: int
    key: Mapping[str, Any]
    expected: Mapping[str, Any] | str | None
    found: Mapping[str, Any] | str | None


@dataclass(slots=True)
class Compared:
    """What came of one view. `differences` lists the first of `total`."""

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
    """What a run found: by view, and by agent and partition what the database says of positions that the log does not."""

    views: dict[str, Compared] = field(default_factory=dict)
    positions: list[Difference] = field(default_factory=list)
    commits: int = 0

    def add(self, other: Verified) -> None:
        """Count what another run found of other rows."""
        self.commits += other.commits
        self.positions += other.positions
        for name, found in other.views.items():
            if name in self.views:
                compared = self.views[name]
                compared.rows += found.rows
                compared.total += found.total
                compared.differences = (compared.differences + found.differences)[:SHOWN]
            else:
                self.views[name] = found

    @property
    def differences(self) -> int:
        return len(self.positions) + sum(compared.total for compared in self.views.values())


def verify(
    settings: Settings,
    views: Mapping[str, View],
    *,
    engine_for: EngineFor | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Compare these views, as they are live, with the log, on `engine_for(records)`, by default on `processes` of this machine.

    Raises NotLive, LogTrimmed and what folding raises.
    """
    progress = progress or Silent()
    engine_for = engine_for or (lambda _records: Local(processes))
    result = Verified()
    with naming(settings):
        with connect(settings, "samefold verify") as connection:
            require_contract(settings, connection)
        for agent in sorted({view.agent for view in views.values()}):
            of_agent = {name: view for name, view in views.items() if view.agent == agent}
            result.add(_verify_agent(settings, agent, of_agent, engine_for, progress))
    return result


def _verify_agent(
    settings: Settings, agent: str, views: Mapping[str, View], engine_for: EngineFor, progress: Progress
) -> Verified:
    result = Verified()
    with _snapshot(settings, agent, views) as (connection, positions):
        for name, view in views.items():
            result.views[name] = compared = Compared(name, positions.tables[name])
            for row in _rows(connection, view, compared.table, "<> all(%s)", list(positions.readings)):
                compared.rows += 1  # of a partition that there is not
                compared.add([_difference(view, "extra", row[-1], None, row)])
    by_size = sorted(positions.readings.items(), key=lambda at: -at[1].next_offset)
    tasks = [PartitionTask(settings, agent, partition, views) for partition, _ in by_size]
    records = sum(reading.next_offset for reading in positions.readings.values())
    engine = engine_for(records)
    progress.begin("verify", records)
    for found in engine.run(verify_partition, tasks, records, progress.advance):
        result.add(found)
    return result


@contextmanager
def _snapshot(settings: Settings, agent: str, views: Mapping[str, View]) -> Iterator[tuple[Connection, Positions]]:
    """A transaction that sees one moment of the database, and where the agent stood in it. Raises NotLive."""
    with connect(settings, "samefold verify", statement_timeout_ms=0) as connection:
        connection.execute("begin isolation level repeatable read, read only")
        positions = read_positions(connection, agent, settings.events_topic)
        live = positions.live if positions else {}
        wrong = [name for name, view in views.items() if name not in live or live[name].version != view.version]
        if positions is None or wrong:
            raise NotLive(
                f"What is live of {', '.join(wrong)} is not what this code has.",
                "Run verify with the code that is live (`samefold views`), or `samefold rebuild` to make this code's live.",
            )
        yield connection, positions
        connection.execute("commit")


def _rows(connection: Connection, view: View, table: str, of_partitions: str, argument: object) -> Iterator[StoredRow]:
    """Stored values in column order and the partition, of the rows whose partition is as the condition says."""
    columns = [
        # as it was stored, not parsed
        sql.SQL("convert_to({}::text, 'UTF8')" if column.scalar is Scalar.JSON else "{}").format(
            sql.Identifier(column.name)
        )
        for column in view.columns
    ]
    place = sql.Identifier(PARTITION)
    query = sql.SQL("select {}, {} from {} where {} {}").format(
        sql.SQL(", ").join(columns), place, sql.Identifier(table), place, sql.SQL(of_partitions)
    )
    with connection.cursor(name="rows") as cursor:
        cursor.itersize = CHUNK
        yield from cursor.execute(query, (argument,))


@dataclass(frozen=True, slots=True)
class PartitionTask:
    """One partition: what a task is told."""

    settings: Settings
    agent: str
    partition: int
    views: Mapping[str, View]


def verify_partition(task: PartitionTask, advance: Advance) -> Verified:
    """Read a partition's rows and position, then fold it and compare.

    Raises what folding raises, NotLive, LogTrimmed, KafkaAway, DatabaseAway.
    """
    result = Verified()
    comparisons = {name: _Comparison(view, task.partition) for name, view in task.views.items()}
    with naming(task.settings):
        with _snapshot(task.settings, task.agent, task.views) as (connection, positions):
            for name, comparison in comparisons.items():
                rows = _rows(connection, comparison.view, positions.tables[name], "= %s", task.partition)
                comparison.take(rows, advance)
        end = positions.readings[task.partition]
        folded = Folded(Plan(task.views), positions.blocked)
        try:
            for batch in counted_to(task.settings, positions.topic, task.partition, end):
                changes = folded.fold(batch)
                for comparison in comparisons.values():
                    comparison.added(changes)
                result.commits += len(batch.counted)
                advance(batch.next.next_offset - batch.was.next_offset)
        except LogChanged as changed:
            key, found = {"partition": task.partition}, changed.found._asdict()
            result.positions.append(Difference("positions", "position", task.partition, key, found, end._asdict()))
    for name, comparison in comparisons.items():
        comparison.end(folded)
        result.views[name] = comparison.result
    return result


class _Comparison:
    """One view's rows of one partition: those of the database are taken away one by one as the fold produces them."""

    def __init__(self, view: View, partition: int) -> None:
        self.view = view
        self.partition = partition
        self.result = Compared(view.name, "")
        self._key = tuple_getter(view.key_places)
        self._left: dict[tuple[Any, ...], StoredRow] = {}

    def take(self, rows: Iterable[StoredRow], advance: Advance) -> None:
        """The rows that the database has."""
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
        self.result.add(
            Difference(
                self.view.name,
                "poison",
                self.partition,
                {"stream": one.stream, "version": one.version},
                one.error,
                None,
            )
            for one in folded.parked_of(self.view.name)
        )

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
    """Whether only the bytes of two states differ: the members of a set are written in another order by each process."""
    if view.kind is not Kind.SNAPSHOT or found[:2] != expected[:2] or found[3:] != expected[3:]:
        return False
    decode = decoder(contexts()[view.contexts[0]].state)
    try:
        return bool(comparable(decode(found[2])) == comparable(decode(expected[2])))
    except (msgspec.DecodeError, ValueError, TypeError):
        return False


def _named(view: View, row: StoredRow | None, *, keys: bool = False) -> dict[str, Any]:
    """A row's values by column, json as text."""
    if row is None:
        return {}
    return {
        column.name: value.decode() if isinstance(value, bytes) and column.scalar == "json" else value
        for column, value in zip(view.columns, row, strict=False)
        if column.is_key or not keys
    }
