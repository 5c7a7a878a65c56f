"""Fill builds' tables: fold the log into them on an engine, then create their keys and indexes.

Where rows can't be stored, their view is filled again by itself, in a slow load, which finds the stream that they come from.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from psycopg import errors, sql

from infra.database.connect import Connection
from infra.log.rule import START, Reading
from infra.processes.engines import EngineFor, Progress
from infra.settings import Settings
from projections.engine.fold.fold import RowCache, decode
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.builds import Build, Pin, drop_keys, with_lock_retry
from projections.engine.rebuild.claims import build_abandoned
from projections.engine.rebuild.folded import blocking
from projections.engine.rebuild.load import RowsRefused, counted_to, load, parts, require_arrival
from projections.engine.store.parking import insert_parked, parked_streams
from projections.engine.store.writing import fold_and_write
from projections.engine.views.tables import to_index
from projections.engine.views.view import View


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

    def fill(self, builds: Sequence[Build], pin: Pin, views: Mapping[str, View]) -> dict[int, Reading]:
        """Fill the tables and create their keys; how far each partition was folded. `views` are the builds', by name.

        Raises LogChanged unless that is the pin, and what folding raises.
        """
        quick, slow = list(builds), list[Build]()
        while True:
            try:
                reached = self._load(quick, pin, views)
                self._index(quick, views)
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

    def _load(self, quick: Sequence[Build], pin: Pin, views: Mapping[str, View]) -> dict[int, Reading]:
        if not quick:
            return {}
        some = {build.view: views[build.view] for build in quick}
        work = parts(self.settings, self.settings.events_topic, quick, some, pin)
        filled, began = self.filled, time.monotonic()
        self.progress.begin("start")
        engine = self.engine_for(_records(pin))
        started = time.monotonic()
        self.progress.begin("load", _records(pin))
        done = engine.run(load, work, _records(pin), self.progress.advance)
        reached = {part.partition: part.end for part in done}
        for partition, end in pin.ends.items():  # whatever code the tasks ran
            require_arrival(self.settings.events_topic, partition, end, reached.get(partition, START))
        filled.engine = engine.name
        filled.commits = max(filled.commits, sum(part.commits for part in done))
        filled.events = max(filled.events, sum(part.events for part in done))
        filled.rows |= {name: sum(part.rows[name] for part in done) for name in some}
        filled.start_up_ms += 1000 * (started - began)
        filled.load_ms += 1000 * (time.monotonic() - started)
        return reached

    def _index(self, quick: Sequence[Build], views: Mapping[str, View]) -> None:
        self.progress.begin("index", len(quick))
        began = time.monotonic()
        for build in quick:
            try:
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
            held, blocked = RowCache(plan), pin.skips
            for batch in counted_to(settings, settings.events_topic, partition, end):
                decoded = [decode(plan, partition, batch.counted)]
                with connection.transaction():
                    changes, parked = fold_and_write(
                        connection, plan, tables, decoded, held={partition: held}, blocked=blocked
                    )
                    insert_parked(connection, build.table, parked)
                held.merge(changes[0])
                blocked = blocking(blocked, parked)
                reached[partition] = batch.next
                self.progress.advance(batch.next.next_offset - batch.was.next_offset)
            count = sql.SQL("select %s, %s, count(*) from {} where _partition = %s").format(table)
            [(rows,)] = connection.execute(
                sql.SQL("insert into build_parts (build, partition, rows) {} returning rows").format(count),
                (build.id, partition, partition),
            )
            self.filled.rows[view.name] += rows
        return reached


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
