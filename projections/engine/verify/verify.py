"""The proof: what readers see is the fold of the log, row for row.

Rows and positions are copied out of one snapshot of the database, which is then let go of; the log is folded from its beginning to
exactly these positions, and rows, epochs, sequence numbers and command offsets are compared. Runs beside live traffic, at
any time. Parked streams and skips are taken from the same snapshot: what a view leaves out on record is no difference.

A part is some partitions: its task imports the snapshot, copies their rows to its own disk, then folds one after the other,
holding the rows of that one. Locally there are as many parts as processes, so that all copy at once and the snapshot is
short; on a cluster a part is a partition, and the snapshot lasts until the last one has found a free core.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from psycopg import sql

from infra.database.connect import connect, naming
from infra.domain_model.contexts import contexts
from infra.domain_model.storable import comparable, decoder
from infra.errors import SamefoldError
from infra.log.rule import Reading
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged
from projections.engine.fold.fold import Blocked, Changes
from projections.engine.fold.plan import Plan
from projections.engine.live.contract import require_contract
from projections.engine.rebuild.engines import EngineFor, Local
from projections.engine.rebuild.folded import Folded, StoredRow, added_rows
from projections.engine.rebuild.load import counted_to
from projections.engine.rebuild.progress import Progress, Silent
from projections.engine.rebuild.workers import Advance
from projections.engine.store.positions import Positions, read_positions
from projections.engine.verify.database_snapshot import Shared, Snapshot, SnapshotGone, imported
from projections.engine.verify.row_files import Spool, select_rows, spooled
from projections.engine.views.view import Kind, View, tuple_getter

log = logging.getLogger(__name__)

SHOWN = 20
"""Differences of a view that are listed; all are counted."""
TRIES = 3
"""A task that is lost and done again, by Spark, finds that its snapshot is gone: then all begins again."""

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
    for _ in range(TRIES - 1):
        try:
            return _try(settings, agent, views, engine_for, progress)
        except SnapshotGone:
            log.warning("A part of verify was lost after its snapshot was let go of; beginning again")
    return _try(settings, agent, views, engine_for, progress)


def _try(
    settings: Settings, agent: str, views: Mapping[str, View], engine_for: EngineFor, progress: Progress
) -> Verified:
    with connect(settings, "samefold verify") as connection:
        seen = read_positions(connection, agent, settings.events_topic)
    # before the snapshot is taken: an engine may take a while to start
    engine = engine_for(_records(seen) if seen else 0)
    result = Verified()
    with Snapshot(settings) as snapshot:
        positions = read_positions(snapshot.connection, agent, settings.events_topic)
        tables = _tables(positions, views)
        assert positions is not None, "or nothing would be live"
        for name, view in views.items():
            result.views[name] = compared = Compared(name, tables[name])
            _strays(snapshot, view, positions, compared)
        records = _records(positions)
        shares = _shares(positions.readings, engine.at_once(len(positions.readings), records))
        parts = [
            _Part(settings, positions.topic, number, share, positions.blocked, views, tables, snapshot.shared)
            for number, share in enumerate(shares)
        ]
        snapshot.expect(len(parts))

        def advance(count: int) -> None:
            progress.advance(count)
            snapshot.watch()

        progress.begin("verify", records)
        for part in engine.run(_compare_part, parts, records, advance):
            result.add(part)
    return result


def _records(positions: Positions) -> int:
    return sum(reading.next_offset for reading in positions.readings.values())


def _shares(readings: Mapping[int, Reading], count: int) -> list[dict[int, Reading]]:
    """The partitions, dealt out so that the shares are about equally long; the largest partition first in each."""
    shares: list[dict[int, Reading]] = [{} for _ in range(max(min(count, len(readings)), 1))]
    for partition, end in sorted(readings.items(), key=lambda at: -at[1].next_offset):
        shortest = min(shares, key=lambda share: sum(reading.next_offset for reading in share.values()))
        shortest[partition] = end
    return [share for share in shares if share]


def _tables(positions: Positions | None, views: Mapping[str, View]) -> dict[str, str]:
    """The live tables of these views. Raises NotLive."""
    live = positions.live if positions else {}
    if wrong := [name for name, view in views.items() if name not in live or live[name].version != view.version]:
        raise NotLive(
            f"What is live of {', '.join(wrong)} is not what this code has.",
            "Run verify with the code that is live (`samefold views`), or `samefold rebuild` to make this code's live.",
        )
    return {name: live[name].table for name in views}


def _strays(snapshot: Snapshot, view: View, positions: Positions, compared: Compared) -> None:
    """Rows of partitions that there are not."""
    query = select_rows(view, compared.table, sql.SQL("<> all(%s)"))
    for row in snapshot.connection.execute(query, (list(positions.readings),)):
        compared.rows += 1
        key = _named(view, row, keys=True)
        compared.add([Difference(view.name, "extra", row[-1], key, None, _named(view, row))])


@dataclass(frozen=True, slots=True)
class _Part:
    """Some partitions: what a task is told."""

    settings: Settings
    topic: str
    number: int
    ends: Mapping[int, Reading]
    blocked: Blocked
    views: Mapping[str, View]
    tables: Mapping[str, str]
    shared: Shared


def _compare_part(part: _Part, advance: Advance) -> Verified:
    """Copy the rows of some partitions, then fold and compare one after the other.

    Raises what folding raises, SnapshotGone, LogTrimmed, KafkaAway, DatabaseAway.
    """
    result = Verified({name: Compared(name, part.tables[name]) for name in part.views})
    with naming(part.settings), Spool() as spool:
        with imported(part.settings, part.shared, part.number) as connection:
            for name, view in part.views.items():
                result.views[name].rows += spool.copy(connection, view, part.tables[name], list(part.ends), advance)
        for partition, end in part.ends.items():
            result.add(_compare_partition(part, partition, end, spool.path, advance))
    return result


def _compare_partition(part: _Part, partition: int, end: Reading, folder: Path, advance: Advance) -> Verified:
    comparisons = {name: _Comparison(view, partition, folder, advance) for name, view in part.views.items()}
    folded = Folded(Plan(part.views), part.blocked)
    result = Verified()
    try:
        for batch in counted_to(part.settings, part.topic, partition, end):
            changes = folded.fold(batch)
            for comparison in comparisons.values():
                comparison.added(changes)
            result.commits += len(batch.counted)
            advance(batch.next.next_offset - batch.was.next_offset)
    except LogChanged as changed:
        key, found = {"partition": partition}, changed.found._asdict()
        result.positions.append(Difference("positions", "position", partition, key, found, end._asdict()))
    for name, comparison in comparisons.items():
        comparison.end(folded)
        comparison.result.add(
            Difference(name, "poison", partition, {"stream": one.stream, "version": one.version}, one.error, None)
            for one in folded.parked_of(name)
        )
        result.views[name] = comparison.result
    return result


class _Comparison:
    """One view's rows of one partition: those of the database are taken away one by one as the fold produces them."""

    def __init__(self, view: View, partition: int, folder: Path, advance: Advance) -> None:
        self.view = view
        self.partition = partition
        self.result = Compared(view.name, "")
        self._key = tuple_getter(view.key_places)
        self._left: dict[tuple[Any, ...], StoredRow] = {}
        for rows in spooled(folder, view.name, partition):
            self._left.update((self._key(row), row) for row in rows)
            advance(0)

    def added(self, changes: Changes) -> None:
        if self.view.kind in (Kind.JOURNAL, Kind.OUTCOMES):
            self.result.add(self._against(added_rows(self.view, changes)))

    def end(self, folded: Folded) -> None:
        if self.view.kind not in (Kind.JOURNAL, Kind.OUTCOMES):
            self.result.add(self._against(folded.kept_rows(self.view, self.partition)))
        self.result.add(self._difference("extra", None, row) for row in self._left.values())

    def _against(self, rows: Iterable[StoredRow]) -> Iterator[Difference]:
        for expected in rows:
            found = self._left.pop(self._key(expected), None)
            if found is None:
                yield self._difference("missing", expected, None)
            elif found != expected and not _same_states(self.view, found, expected):
                yield self._difference("changed", expected, found)

    def _difference(self, what: What, expected: StoredRow | None, found: StoredRow | None) -> Difference:
        row = expected or found
        assert row is not None, "one of the two is there"
        return Difference(
            self.view.name,
            what,
            self.partition,
            _named(self.view, row, keys=True),
            _named(self.view, expected),
            _named(self.view, found),
        )


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
