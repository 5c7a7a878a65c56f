"""The proof: what readers see is the fold of the log, row for row (DESIGN §5).

Rows and positions are copied out of one snapshot of the database, which is then closed; the log is folded from its beginning to
exactly these positions, and rows, epochs, sequence numbers and command offsets are compared. Runs beside live traffic, at
any time. Parked streams and skips are taken from the same snapshot: what a view leaves out on record is no difference.

A process holds the rows of one partition of the views that are compared, as they are in the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from infra.database.connect import connect, naming
from infra.errors import SamefoldError
from infra.log.rule import START, Reading, read
from infra.log.source import read_range
from infra.settings import Settings
from projections.engine.commit import Batch
from projections.engine.contract import require_contract
from projections.engine.engines import EngineFor, Local
from projections.engine.fold import Blocked, Changes
from projections.engine.folded import Folded, StoredRow, added_rows
from projections.engine.plan import Plan, tuple_getter
from projections.engine.positions import Positions, read_positions
from projections.engine.progress import Progress, Silent
from projections.engine.spool import Spool, spooled
from projections.engine.view import Kind, View
from projections.engine.workers import Advance

SHOWN = 20
"""Differences of a view that are listed; all are counted."""

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
            with Spool() as spool:
                positions = _copy(settings, agent, of_agent, spool, result)
                _compare(settings, positions, of_agent, spool.path, engine_for, progress, result)
    return result


def _copy(settings: Settings, agent: str, views: Mapping[str, View], spool: Spool, result: Verified) -> Positions:
    """Rows and positions of one moment."""
    with connect(settings, "samefold verify", statement_timeout_ms=0) as connection, connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        positions = read_positions(connection, agent, settings.events_topic)
        live = positions.live if positions else {}
        if positions is None or (
            wrong := [n for n, v in views.items() if n not in live or live[n].version != v.version]
        ):
            names = ", ".join(wrong) if positions else ", ".join(views)
            raise NotLive(
                f"What is live of {names} is not what this code has.",
                "Run verify with the code that is live (`samefold views`), or `samefold rebuild` to make this code's live.",
            )
        for name, view in views.items():
            counts = spool.copy(connection, view, live[name].table)
            compared = result.views[name] = Compared(name, live[name].table, sum(counts.values()))
            for stray in set(counts) - set(positions.readings):
                compared.add(
                    Difference(name, "extra", stray, _named(view, row, keys=True), None, _named(view, row))
                    for row in spooled(spool.path, name, stray)
                )
        return positions


@dataclass(frozen=True, slots=True)
class _Part:
    settings: Settings
    topic: str
    partition: int
    end: Reading
    blocked: Blocked
    views: Mapping[str, View]
    folder: Path


@dataclass(slots=True)
class _PartCompared:
    commits: int
    position: Difference | None
    totals: dict[str, int]
    differences: dict[str, list[Difference]]


def _compare(
    settings: Settings,
    positions: Positions,
    views: Mapping[str, View],
    folder: Path,
    engine_for: EngineFor,
    progress: Progress,
    result: Verified,
) -> None:
    records = sum(reading.next_offset for reading in positions.readings.values())
    engine = engine_for(records)
    progress.begin("verify", records)
    largest_first = sorted(positions.readings.items(), key=lambda at: -at[1].next_offset)
    parts = [
        _Part(settings, positions.topic, partition, end, positions.blocked, views, folder)
        for partition, end in largest_first
    ]
    for part in engine.run(_compare_part, parts, records, progress.advance):
        result.commits += part.commits
        if part.position is not None:
            result.positions.append(part.position)
        for name, differences in part.differences.items():
            compared = result.views[name]
            compared.differences = (compared.differences + differences)[:SHOWN]
            compared.total += part.totals[name]


def _compare_part(part: _Part, advance: Advance) -> _PartCompared:
    comparisons = {name: _Comparison(view, part) for name, view in part.views.items()}
    folded = Folded(Plan(part.views), part.blocked)
    reading, commits = START, 0
    for records in read_range(part.settings, part.topic, part.partition, 0, part.end.next_offset):
        was = reading
        reading, counted, _ = read(was, records)
        changes = folded.fold(Batch(part.partition, was, reading, counted))
        for comparison in comparisons.values():
            comparison.added(changes)
        commits += len(counted)
        advance(reading.next_offset - was.next_offset)
    for name, comparison in comparisons.items():
        comparison.end(folded)
        comparison.result.add(
            Difference(name, "poison", part.partition, {"stream": one.stream, "version": one.version}, one.error, None)
            for one in folded.parked_of(name)
        )
    return _PartCompared(
        commits,
        None if reading == part.end else _position(part, reading),
        {name: comparison.result.total for name, comparison in comparisons.items()},
        {name: comparison.result.differences for name, comparison in comparisons.items()},
    )


def _position(part: _Part, reading: Reading) -> Difference:
    return Difference(
        "positions", "position", part.partition, {"partition": part.partition}, reading._asdict(), part.end._asdict()
    )


class _Comparison:
    """One view's rows of one partition: those of the database are taken away one by one as the fold produces them."""

    def __init__(self, view: View, part: _Part) -> None:
        self.view = view
        self.partition = part.partition
        self.result = Compared(view.name, "")
        self._key = tuple_getter(view.key_places)
        self._left = {self._key(row): row for row in spooled(part.folder, view.name, part.partition)}

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
            elif found != expected:
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


def _named(view: View, row: StoredRow | None, *, keys: bool = False) -> dict[str, Any]:
    """A row's values by column, json as text."""
    if row is None:
        return {}
    return {
        column.name: value.decode() if isinstance(value, bytes) and column.scalar == "json" else value
        for column, value in zip(view.columns, row, strict=False)
        if column.is_key or not keys
    }
