"""Fill builds' tables from the log on an engine, without a JVM by default, then create their keys and indexes.

One pass over each partition folds all views of a rebuild, or one for each of its shares (`shares`). Rows that are only ever added
(journals, outcomes) stream out by COPY during the fold. Entity rows, sums and states are kept until the partition ends: memory
holds those rows of one task, never its events. A part, one share of a partition of a table, is one transaction with its entry in
`build_parts`: written completely, and once.

Where rows can't be stored, their view is filled again by itself, in a slow load, which finds the stream that they come from.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import Copy, errors, sql

from infra.archive import marks
from infra.database.connect import Connection, as_login, connect
from infra.errors import SamefoldError
from infra.log.rule import START, Reading
from infra.processes.engines import Engine, EngineFor, Progress
from infra.processes.faultpoints import reach
from infra.processes.workers import Advance
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.fold.fold import Blocked, Parked, RowCache, decode
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.builds import FILLING, Build, Pin, drop_keys, loader_name, with_lock_retry
from projections.engine.rebuild.claims import TERMINATE_MS, build_abandoned, loading
from projections.engine.rebuild.folded import Folded, StoredRow, added_rows, counted_to, require_arrival
from projections.engine.rebuild.shares import Share, split
from projections.engine.store.parking import insert_parked, parked_streams
from projections.engine.store.positions import read_positions
from projections.engine.store.writing import fold_and_write, is_refusal
from projections.engine.views.columns import AGGREGATES, PARTITION, place_name
from projections.engine.views.tables import to_index
from projections.engine.views.view import CORE, Kind, View

FROZEN_S = 60.0
"""A loader that copied nothing for so long is ended when another attempt waits for its part."""


class RowsRefused(SamefoldError):
    """Rows of a view can't be stored. `_load_slowly` finds the stream that they come from."""

    def __init__(self, view: str, error: Exception) -> None:
        super().__init__(f"View '{view}' makes rows that can't be stored: {' '.join(str(error).split())}")
        self.view = view


@dataclass(slots=True)
class Filled:
    """What was filled. `rows` is by view; commits and events are the log's, whatever the views use of them."""

    commits: int = 0
    events: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    parked: dict[str, int] = field(default_factory=dict)
    """By view, how many streams its table leaves out; views without such streams are not listed."""
    engine: str = ""
    """The engine of the load."""
    start_up_ms: float = 0
    """The engine's start."""
    load_ms: float = 0
    index_ms: float = 0


@dataclass(frozen=True, slots=True)
class Filling:
    """Fills tables for one run, and adds to `filled`."""

    settings: Settings
    connection: Connection
    engine_for: EngineFor
    progress: Progress
    filled: Filled
    tasks: int | None = None

    def fill(self, builds: Sequence[Build], pin: Pin, views: Mapping[str, View]) -> dict[int, Reading]:
        """Fill the tables and create their keys; how far each partition was folded. `views` are the builds', by name.

        Raises LogChanged unless that is the pin, and what folding raises.
        """
        quick, slow, began = list(builds), list[Build](), time.monotonic()
        self.progress.begin("start")
        engine = self.engine_for(_records(pin))
        self.filled.start_up_ms += 1000 * (time.monotonic() - began)
        sizes = {partition: end.next_offset for partition, end in pin.ends.items()}
        pin = replace(pin, shares=split(sizes, engine, self.tasks))  # once, so that no part is written twice
        while True:
            try:
                reached = self._load(engine, quick, pin, views)
                self._index(quick, views, pin)
            except RowsRefused as refused:
                slow += [build for build in quick if build.view == refused.view]
                quick = [build for build in quick if build.view != refused.view]
                continue
            for build in slow:
                self.progress.begin("slow load", _records(pin))
                reached = self._load_slowly(build, views[build.view], pin)
            tables = {build.table: build.view for build in builds}
            self.filled.parked |= Counter(
                tables[one.table] for one in parked_streams(self.connection) if one.table in tables
            )
            return reached

    def _load(self, engine: Engine, quick: Sequence[Build], pin: Pin, views: Mapping[str, View]) -> dict[int, Reading]:
        if not quick:
            return {}
        some = {build.view: views[build.view] for build in quick}
        work = parts(self.settings, self.settings.events_topic, quick, some, pin)
        filled, started = self.filled, time.monotonic()
        self.progress.begin("load", _records(pin))
        done = engine.run(load, work, _records(pin), self.progress.advance)
        reached = {part.partition: part.end for part in done}
        for part, one in zip(work, done, strict=True):  # whatever code the tasks ran
            require_arrival(part.topic, part.partition, part.end, one.end)
        if at := read_positions(self.connection, CORE, self.settings.events_topic):
            marked = [(part.partition, reading) for part in done for reading in part.marks]
            marks.write(self.connection, at.topic, at.topic_id, marked)
        filled.engine = engine.name
        filled.commits = max(filled.commits, sum(part.commits for part in done))
        filled.events = max(filled.events, sum(part.events for part in done))
        filled.rows |= {name: sum(part.rows[name] for part in done) for name in some}
        filled.load_ms += 1000 * (time.monotonic() - started)
        return reached

    def _index(self, quick: Sequence[Build], views: Mapping[str, View], pin: Pin) -> None:
        self.progress.begin("index", len(quick))
        began = time.monotonic()
        for build in quick:
            try:
                if views[build.view].kind is Kind.SUMMARY and any(len(one) > 1 for one in pin.shares.values()):
                    self.filled.rows[build.view] = add_up_shares(self.connection, build, views[build.view])
                index(self.connection, build, views[build.view])
            except errors.UniqueViolation as error:
                raise RowsRefused(build.view, error) from error
            self.progress.advance(1)
        self.filled.index_ms += 1000 * (time.monotonic() - began)

    def _load_slowly(self, build: Build, view: View, pin: Pin) -> dict[int, Reading]:
        """Empty the table, create its keys, and write the fold batch by batch, as an agent does; how far each partition was folded.

        A refused row is then refused at once, and its stream is parked. Raises PoisonEvent where the view does not park, and what
        folding raises.
        """
        connection, settings = self.connection, self.settings
        table = sql.Identifier(build.table)

        def empty() -> None:
            connection.execute(sql.SQL("truncate {}").format(table))
            connection.execute("delete from build_parts where build = %s", (build.id,))
            connection.execute("delete from parked where table_name = %s", (build.table,))

        with_lock_retry(connection, empty)
        index(connection, build, view)
        plan, tables = Plan({view.name: view}), {view.name: build.table}
        reached = dict.fromkeys(pin.ends, START)
        self.filled.rows[view.name] = 0
        for partition, end in sorted(pin.ends.items()):
            held, blocked = {partition: RowCache(plan)}, pin.skips
            for batch in counted_to(settings, settings.events_topic, partition, end):
                decoded = [decode(plan, partition, batch.counted)]
                with connection.transaction():
                    [changes], parked = fold_and_write(connection, plan, tables, decoded, held=held, blocked=blocked)
                held[partition].merge(changes)
                blocked = blocked.and_parked(parked)
                reached[partition] = batch.next
                self.progress.advance(batch.next.next_offset - batch.was.next_offset)
            count = sql.SQL("select %s, %s, count(*) from {} where _partition = %s").format(table)
            [(rows,)] = connection.execute(
                sql.SQL("insert into build_parts (build, partition, rows) {} returning rows").format(count),
                (build.id, partition, partition),
            )
            self.filled.rows[view.name] += rows
        return reached


def add_up_shares(connection: Connection, build: Build, view: View) -> int:
    """Replace rows of one key that several shares loaded by their sum; the number of rows. Raises BuildAbandoned."""
    comma, table, values = sql.SQL(", "), sql.Identifier(build.table), [sql.Identifier(one.name) for one in view.values]
    keys = comma.join(map(sql.Identifier, [*(column.name for column in view.key), PARTITION]))
    sums = comma.join(
        sql.SQL(AGGREGATES[one.role]).format(name, sql.Identifier(place_name(one.name)))
        for one, name in zip(view.values, values, strict=True)
    )
    names = {"table": table, "keys": keys, "values": comma.join(values), "sums": sums}
    try:
        connection.execute(sql.SQL(_ADD_UP).format(**names))
        [(rows,)] = connection.execute(sql.SQL("select count(*) from {}").format(table))
    except errors.UndefinedTable as error:
        raise build_abandoned(build.table) from error
    return int(rows)


_ADD_UP = """
with apart as (
  delete from {table} where ({keys}) in (select {keys} from {table} group by {keys} having count(*) > 1) returning *)
insert into {table} ({keys}, {values}) select {keys}, {sums} from apart group by {keys}
"""


def index(connection: Connection, build: Build, view: View) -> None:
    """Create a loaded table's keys and indexes, again if they exist.

    Raises UniqueViolation where a key is there twice, BuildAbandoned.
    """
    try:
        with_lock_retry(connection, lambda: drop_keys(connection, build.table))
        for statement in to_index(view, build.table):
            connection.execute(statement)
        connection.execute(sql.SQL("analyze {}").format(sql.Identifier(build.table)))
    except errors.UndefinedTable as error:
        raise build_abandoned(build.table) from error


def _records(pin: Pin) -> int:
    return sum(end.next_offset for end in pin.ends.values())


# ── a task: one partition, or a share of it ──


@dataclass(frozen=True, slots=True)
class Part:
    """What a task loads: one partition, or the share of its streams."""

    settings: Settings
    topic: str
    partition: int
    end: Reading | Cut
    """The pin, which the fold must reach exactly, or where it is cut."""
    builds: tuple[Build, ...]
    views: Mapping[str, View]
    skips: Blocked
    share: Share


@dataclass(slots=True)
class Loaded:
    """What a task loaded, and up to where. `rows` is by view."""

    partition: int
    end: Reading = START
    commits: int = 0
    events: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    marks: list[Reading] = field(default_factory=list)
    """Of a partition's first share."""


def parts(settings: Settings, topic: str, builds: Iterable[Build], views: Mapping[str, View], pin: Pin) -> list[Part]:
    """A load's parts, the largest first."""
    found = [
        Part(settings, topic, partition, end, tuple(builds), views, pin.skips, share)
        for partition, end in pin.ends.items()
        for share in pin.shares.get(partition, [Share()])
    ]
    return sorted(found, key=lambda part: -part.end.next_offset / part.share.of)


def load(part: Part, advance: Advance = lambda _count: None) -> Loaded:
    """Fold a part from the log's beginning to its end and write its rows, except to tables that have it already.

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
        where, decode = (part.settings, part.topic, part.partition, part.end), part.share.decoder(plan.decode)
        for every in counted_to(*where, decode=decode):
            if part.share.number == 0 and every.has_mark(every.was):
                loaded.marks.append(every.next)
            batch = part.share.own(every)
            changes = folded.fold(batch)
            for view, stream in streams.items():
                stream.write(added_rows(part.views[view], changes))
            loaded.end = batch.next
            loaded.commits += len(batch.counted)
            loaded.events += sum(len(one.commit.events) for one in batch.counted)
            advance(part.share.progress(batch))
        for view, stream in streams.items():
            loaded.rows[view] = stream.finish(folded.parked_of(view))
        for build in part.builds:
            if build.view not in streams:
                with PartWriter(part, build) as stream:
                    stream.write(folded.kept_rows(part.views[build.view], part.partition))
                    loaded.rows[build.view] = stream.finish(folded.parked_of(build.view))
    return loaded


class PartWriter:
    """Writes one table's rows of a part, in one transaction on a connection of its own; nothing if the part is there already.

    Spark may start a second attempt at a part when it takes the first for lost or slow. The second waits for the first one's
    transaction. PostgreSQL has no timeout for a session inside COPY, so it would keep that of a frozen loader for ever: a
    session that has copied nothing for `FROZEN_S` is ended.
    """

    def __init__(self, part: Part, build: Build) -> None:
        self.build = build
        self.view = part.views[build.view]
        self.rows = 0
        self._key = (build.id, part.partition, *part.share)
        self._copying: AbstractContextManager[Copy] | None = None
        self._copy: Copy | None = None
        # abandoning a build ends its loaders by this name
        self._name = loader_name(build.id, part.partition, part.share.number)
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
                self._copy.set_types([*(one.type.copied_as or one.type.sql_name for one in self.view.stored), "int2"])
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
            "insert into build_parts (build, partition, share, shares, rows) values (%s, %s, %s, %s, 0) on conflict do nothing",
            self._key,
        )
        if entered.rowcount == 1:
            return True
        there = self._connection.execute(
            f"select rows from build_parts where {_PART}",  # noqa: S608
            self._key,
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
                f"update build_parts set rows = %s where {_PART}",  # noqa: S608
                (self.rows, *self._key),
            )
            insert_parked(self._connection, {self.view.name: self.build.table}, parked)
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


_PART = "(build, partition, share, shares) = (%s, %s, %s, %s)"
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
    names = [sql.Identifier(column.name) for column in view.stored]
    return sql.SQL("copy {} ({}) from stdin (format binary)").format(
        sql.Identifier(table), sql.SQL(", ").join([*names, sql.Identifier(PARTITION)])
    )
