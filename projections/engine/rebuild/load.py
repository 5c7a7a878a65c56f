"""Load builds from the log with local processes, without a JVM.

One pass over each partition folds all views of a rebuild. Rows that are only ever added (journals, outcomes) stream out by COPY
during the fold. Entity rows, sums and states are kept until the partition ends: memory holds those rows of one partition, never
its events. A part, one partition of a table, is one transaction with its entry in `build_parts`: written completely, and once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Copy, sql

from infra.database.connect import as_login, connect
from infra.errors import SamefoldError
from infra.log.records import Commit, Opening, decode_value
from infra.log.rule import START, Reading, read
from infra.log.source import read_range
from infra.processes.faultpoints import reach
from infra.processes.workers import Advance
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.fold.errors import LogChanged
from projections.engine.fold.fold import Blocked, Parked
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.builds import FILLING, Build, Pin, loader_name
from projections.engine.rebuild.claims import TERMINATE_MS, build_abandoned, loading
from projections.engine.rebuild.folded import Folded, StoredRow, added_rows
from projections.engine.store.commit import Batch
from projections.engine.store.parking import insert_parked
from projections.engine.store.writing import is_refusal
from projections.engine.views.columns import PARTITION
from projections.engine.views.view import Kind, View

FROZEN_S = 60.0
"""A loader that copied nothing for so long is ended when another attempt waits for its part."""


class RowsRefused(SamefoldError):
    """Rows of a view can't be stored. `_load_slowly` finds the stream that they come from."""

    def __init__(self, view: str, error: Exception) -> None:
        super().__init__(f"View '{view}' makes rows that can't be stored: {' '.join(str(error).split())}")
        self.view = view


@dataclass(frozen=True, slots=True)
class Part:
    """What a task loads: one partition."""

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
    """What a task loaded, and up to where. `rows` is by view."""

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
    """Fold a partition from its beginning to its end and write its rows, except to tables that have the part already.

    Raises what folding raises, RowsRefused, LogChanged, BuildAbandoned, KafkaUnavailable, DatabaseUnavailable.
    """
    loaded = Loaded(part.partition)
    plan = Plan(part.views)
    folded = Folded(plan, part.skips)
    with loading(part.settings, [build.id for build in part.builds]), ExitStack() as stack:
        streams = {
            build.view: stack.enter_context(PartWriter(part, build))
            for build in part.builds
            if part.views[build.view].kind in (Kind.JOURNAL, Kind.OUTCOMES)
        }
        for batch in counted_to(part.settings, part.topic, part.partition, part.end, decode=plan.decode):
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
                with PartWriter(part, build) as stream:
                    stream.write(folded.kept_rows(part.views[build.view], part.partition))
                    loaded.rows[build.view] = stream.finish(folded.parked_of(build.view))
    return loaded


def counted_to(
    settings: Settings,
    topic: str,
    partition: int,
    end: Reading | Cut,
    start: Reading = START,
    decode: Callable[[bytes], Commit | Opening] = decode_value,
) -> Iterator[Batch]:
    """The commits that count from `start` up to exactly `end`, in batches.

    The last batch arrives at `end`; a cut at a time may stop earlier, at the first later record. Raises LogChanged when the log
    leads elsewhere.
    """
    reading = start
    for records in read_range(settings, topic, partition, start.next_offset, end.next_offset):
        was = reading
        taken = end.before(records) if isinstance(end, Cut) else records
        reading, counted, _ = read(was, taken, decode)
        yield Batch(partition, was, reading, counted)
        if len(taken) < len(records):
            return
    if isinstance(end, Cut):
        # offsets without a record may lie before it
        yield Batch(partition, reading, reading._replace(next_offset=end.next_offset), [])
    else:
        require_arrival(topic, partition, end, reading, start)


def require_arrival(topic: str, partition: int, end: Reading | Cut, reached: Reading, start: Reading = START) -> None:
    """Raises LogChanged unless reading `reached` its end."""
    if not (end.is_reached(reached) if isinstance(end, Cut) else reached == end):
        raise LogChanged(topic, partition, start, reached, end)


class PartWriter:
    """Writes one table's rows of a part, in one transaction on a connection of its own; nothing if the part is there already.

    Spark may start a second attempt at a part when it takes the first for lost or slow. The second waits for the first one's
    transaction. PostgreSQL has no timeout for a session inside COPY, so it would keep that of a frozen loader for ever: a
    session that has copied nothing for `FROZEN_S` is ended.
    """

    def __init__(self, part: Part, build: Build) -> None:
        self.build = build
        self.view = part.views[build.view]
        self.partition = part.partition
        self.rows = 0
        self._copying: AbstractContextManager[Copy] | None = None
        self._copy: Copy | None = None
        # abandoning a build ends its loaders by this name
        self._name = loader_name(build.id, part.partition)
        self._connection = connect(part.settings, self._name, statement_timeout_ms=0)

    def __enter__(self) -> PartWriter:
        copied, since = -1, time.monotonic()
        try:
            while (entered := self._try()) is None:
                was, copied = copied, self._copied_by_the_other()
                if copied != was:
                    since = time.monotonic()
                elif time.monotonic() - since > FROZEN_S:
                    with as_login(self._connection):
                        self._connection.execute(_END_THE_OTHER, (TERMINATE_MS, self._name))
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
        """Begin, and `enter_part`; None while another attempt holds the part."""
        self._connection.execute("begin")
        try:
            return self.enter_part()
        except psycopg.errors.LockNotAvailable:
            self._connection.execute("rollback")
            return None

    def enter_part(self) -> bool:
        """Whether this attempt writes the part. Raises BuildAbandoned."""
        row = self._connection.execute("select state from builds where id = %s", (self.build.id,)).fetchone()
        if row is None or row[0] not in FILLING:
            raise build_abandoned(self.build.table)
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

    def _copied_by_the_other(self) -> int:
        """Bytes that the other attempt has copied by now."""
        with as_login(self._connection):
            row = self._connection.execute(_COPIED, (self._name,)).fetchone()
        return int(row[0]) if row else 0

    def write(self, rows: Iterable[StoredRow]) -> None:
        if self._copy is not None:
            with self._refusing():
                write = self._copy.write_row
                for row in rows:
                    write(row)
                    self.rows += 1

    def finish(self, parked: Iterable[Parked]) -> int:
        """Commit the rows and what the fold parked; returns the number of rows."""
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
        """Turn the refusal of a value, by PostgreSQL, psycopg or Python, into RowsRefused."""
        try:
            yield
        except Exception as error:
            if isinstance(error, psycopg.Error) and not is_refusal(error):
                raise
            raise RowsRefused(self.build.view, error) from error


_COPIED = """
select coalesce(sum(c.bytes_processed), 0)
  from pg_stat_activity a left join pg_stat_progress_copy c using (pid)
 where a.datname = current_database() and a.application_name = %s
"""
_END_THE_OTHER = """
select pg_terminate_backend(pid, %s) from pg_stat_activity
 where datname = current_database() and application_name = %s and pid <> pg_backend_pid()
   and wait_event_type is distinct from 'Lock'
"""


def copy_into(view: View, table: str) -> sql.Composed:
    names = [sql.Identifier(column.name) for column in view.columns]
    return sql.SQL("copy {} ({}) from stdin (format binary)").format(
        sql.Identifier(table), sql.SQL(", ").join([*names, sql.Identifier(PARTITION)])
    )


def copy_types(view: View) -> list[str]:
    """PostgreSQL's types of the values that are copied: the columns' and the partition's."""
    return [*(column.type.copied_as or column.type.sql_name for column in view.columns), "int2"]
