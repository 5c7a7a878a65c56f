"""Filling builds from the log: the local engine, without a JVM.

One pass over each partition folds all views of a rebuild. What is only ever added (journals, outcomes) streams out by COPY
while the fold goes on; entity rows, sums and states are kept until the part ends, so memory holds a partition's rows of
those, never its events. A part is one transaction per table, with its entry in `build_parts`: written wholly and once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Copy, sql

from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log.rule import START, Reading, read
from infra.log.source import read_range
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.fold.errors import LogChanged
from projections.engine.fold.fold import Blocked, Parked
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.build_sessions import loading
from projections.engine.rebuild.builds import FILLING, Build, BuildAbandoned, Pin, loader_name
from projections.engine.rebuild.folded import Folded, StoredRow, added_rows
from projections.engine.rebuild.stalled_loaders import OtherAttempt
from projections.engine.rebuild.workers import Advance
from projections.engine.store.commit import Batch
from projections.engine.store.parking import insert_parked
from projections.engine.store.writing import is_refusal
from projections.engine.views.columns import PARTITION
from projections.engine.views.view import Kind, View


class RowsRefused(SamefoldError):
    """Rows of a view can't be stored. Whoever loads finds out whose they are, row by row: see `careful`."""

    def __init__(self, view: str, error: Exception) -> None:
        super().__init__(f"View '{view}' makes rows that can't be stored: {' '.join(str(error).split())}")
        self.view = view


@dataclass(frozen=True, slots=True)
class Part:
    """One partition's share of a load: what a worker is told."""

    settings: Settings
    topic: str
    partition: int
    end: Reading | Cut
    """The pin, which the fold must reach exactly, or where it is cut."""
    builds: tuple[Build, ...]
    views: Mapping[str, View]
    skips: Blocked


@dataclass(slots=True)
class Loaded:
    """What a part came to, and how far. `rows` is by view."""

    partition: int
    end: Reading = START
    commits: int = 0
    events: int = 0
    rows: dict[str, int] = field(default_factory=dict)


def parts(settings: Settings, topic: str, builds: Iterable[Build], views: Mapping[str, View], pin: Pin) -> list[Part]:
    """A load's parts, the largest first."""
    by_size = sorted(pin.ends.items(), key=lambda at: -at[1].next_offset)
    return [Part(settings, topic, partition, end, tuple(builds), views, pin.skips) for partition, end in by_size]


def load(part: Part, advance: Advance = lambda _count: None) -> Loaded:
    """Fold a partition from its beginning to its end and write its rows. Tables that have the part already are left alone.

    Raises what folding raises, RowsRefused, LogChanged, BuildAbandoned, KafkaAway, DatabaseAway.
    """
    loaded = Loaded(part.partition)
    plan = Plan(part.views)
    folded = Folded(plan, part.skips)
    with loading(part.settings, [build.id for build in part.builds]), ExitStack() as stack:
        streams = {
            build.view: stack.enter_context(_Table(part, build))
            for build in part.builds
            if part.views[build.view].kind in (Kind.JOURNAL, Kind.OUTCOMES)
        }
        for batch in counted_to(part.settings, part.topic, part.partition, part.end):
            changes = folded.fold(batch)
            for view, stream in streams.items():
                stream.write(added_rows(part.views[view], changes))
            loaded.end = batch.next
            loaded.commits += len(batch.counted)
            loaded.events += sum(len(one.commit.events) for one in batch.counted)
            advance(batch.next.next_offset - batch.was.next_offset)
        for view, stream in streams.items():
            loaded.rows[view] = stream.finish(folded.parked_of(view))
        for build in part.builds:
            if build.view not in streams:
                with _Table(part, build) as stream:
                    stream.write(folded.kept_rows(part.views[build.view], part.partition))
                    loaded.rows[build.view] = stream.finish(folded.parked_of(build.view))
    return loaded


def counted_to(
    settings: Settings, topic: str, partition: int, end: Reading | Cut, start: Reading = START
) -> Iterator[Batch]:
    """What counts from `start` up to exactly `end`, in batches: whoever reads up to a recorded position reads by this.

    The last batch arrives at `end`; only at a time it may stop before, at the first later record. Raises LogChanged when the log
    leads elsewhere.
    """
    reading = start
    for records in read_range(settings, topic, partition, start.next_offset, end.next_offset):
        was = reading
        taken = end.before(records) if isinstance(end, Cut) else records
        reading, counted, _ = read(was, taken)
        yield Batch(partition, was, reading, counted)
        if len(taken) < len(records):
            return
    if isinstance(end, Cut):
        # offsets without a record may lie before it
        yield Batch(partition, reading, reading._replace(next_offset=end.next_offset), [])
    else:
        require_arrival(topic, partition, end, reading, start)


def require_arrival(topic: str, partition: int, end: Reading | Cut, reached: Reading, start: Reading = START) -> None:
    """Raises LogChanged unless what was `reached` is where it was to lead."""
    if not (end.is_reached(reached) if isinstance(end, Cut) else reached == end):
        raise LogChanged(topic, partition, start, reached, end)


class _Table:
    """One table's share of a part: a transaction that enters the part and copies its rows, on a connection of its own.

    Nothing is written if the part is there already.
    """

    def __init__(self, part: Part, build: Build) -> None:
        self.build = build
        self.view = part.views[build.view]
        self.partition = part.partition
        self.rows = 0
        self._copying: AbstractContextManager[Copy] | None = None
        self._copy: Copy | None = None
        # the name by which whoever abandons the build finds and ends this session
        self._connection = connect(part.settings, loader_name(build.id, part.partition), statement_timeout_ms=0)

    def __enter__(self) -> _Table:
        twin = OtherAttempt(self.build.id, self.partition)
        try:
            while (entered := self._try()) is None:
                twin.wait(self._connection)
            if entered:
                self._copying = self._connection.cursor().copy(copy_into(self.view, self.build.table))
                self._copy = self._copying.__enter__()
                self._copy.set_types(copy_types(self.view))
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        if self._copying is not None:
            with suppress(psycopg.Error):
                self._copying.__exit__(*error)
        self._connection.close()

    def _try(self) -> bool | None:
        """Begin, and `_enter`; None where another attempt holds the part."""
        self._connection.execute("begin")
        try:
            return self._enter()
        except psycopg.errors.LockNotAvailable:
            self._connection.execute("rollback")
            return None

    def _enter(self) -> bool:
        """Whether this is the one that writes the part. Raises BuildAbandoned."""
        row = self._connection.execute("select state from builds where id = %s", (self.build.id,)).fetchone()
        if row is None or row[0] not in FILLING:
            raise BuildAbandoned(f"Build {self.build.table} was abandoned while it was made.", "Run the command again.")
        entered = self._connection.execute(
            "insert into build_parts (build, partition, rows) values (%s, %s, 0) on conflict do nothing",
            (self.build.id, self.partition),
        )
        if entered.rowcount == 1:
            return True
        there = self._connection.execute(
            "select rows from build_parts where build = %s and partition = %s", (self.build.id, self.partition)
        ).fetchone()
        self.rows = int(there[0]) if there else 0
        return False

    def write(self, rows: Iterable[StoredRow]) -> None:
        if self._copy is not None:
            with self._refusing():
                write = self._copy.write_row
                for row in rows:
                    write(row)
                    self.rows += 1

    def finish(self, parked: Iterable[Parked]) -> int:
        """Commit the rows, and what the fold parked; the number of rows."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            with self._refusing():
                copying.__exit__(None, None, None)
            self._connection.execute(
                "update build_parts set rows = %s where build = %s and partition = %s",
                (self.rows, self.build.id, self.partition),
            )
            insert_parked(self._connection, self.build.table, parked)
        reach("build part written")
        self._connection.execute("commit")
        reach("build part committed")
        return self.rows

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A value that can't be stored is a fault of the view's, whoever refuses it: PostgreSQL, psycopg or Python."""
        try:
            yield
        except Exception as error:
            if isinstance(error, psycopg.Error) and not is_refusal(error):
                raise
            raise RowsRefused(self.build.view, error) from error


def copy_into(view: View, table: str) -> sql.Composed:
    names = [sql.Identifier(column.name) for column in view.columns]
    return sql.SQL("copy {} ({}) from stdin (format binary)").format(
        sql.Identifier(table), sql.SQL(", ").join([*names, sql.Identifier(PARTITION)])
    )


def copy_types(view: View) -> list[str]:
    """PostgreSQL's types of the values that are copied: the columns' and the partition's."""
    return [*(column.type.copied_as or column.type.sql_name for column in view.columns), "int2"]
