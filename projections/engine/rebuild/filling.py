"""Filling builds' tables: the log folded into them on an engine, then their keys and indexes.

Where rows can't be stored, their view is filled again, slowly and by itself, which finds the stream they come from.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psycopg

from infra.database.connect import Connection
from infra.log.rule import START, Reading
from infra.settings import Settings
from projections.engine.rebuild.builds import Build, Pin, index
from projections.engine.rebuild.engines import EngineFor
from projections.engine.rebuild.load import RowsRefused, load, parts, require_arrival
from projections.engine.rebuild.progress import Progress
from projections.engine.rebuild.slow_load import load_slowly
from projections.engine.store.parking import parked_streams
from projections.engine.views.view import View


@dataclass(slots=True)
class Filled:
    """What filling came to. `rows` is by view; commits and events are those of the log, whatever the views take of them."""

    commits: int = 0
    events: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    parked: dict[str, int] = field(default_factory=dict)
    """By view, how many streams its table leaves out; views that leave out none are not here."""
    engine: str = ""
    """What the load ran on."""
    start_up_ms: float = 0
    """Until the engine was there."""
    load_ms: float = 0
    index_ms: float = 0


@dataclass(frozen=True, slots=True)
class Filling:
    """What one run fills tables with; `filled` is added to."""

    settings: Settings
    connection: Connection
    engine_for: EngineFor
    progress: Progress
    filled: Filled

    def fill(self, builds: Sequence[Build], pin: Pin, views: Mapping[str, View]) -> dict[int, Reading]:
        """Fill the tables and make their keys; how far each partition was folded. `views` are the builds', by name.

        Raises LogChanged unless that is where the pin says, and what folding raises.
        """
        quick, careful = list(builds), list[Build]()
        while True:
            try:
                reached = self._load(quick, pin, views)
                self._index(quick, views)
            except RowsRefused as refused:
                careful += [build for build in quick if build.view == refused.view]
                quick = [build for build in quick if build.view != refused.view]
                continue
            for build in careful:
                self.progress.begin("careful", _records(pin))
                self.filled.rows[build.view], reached = load_slowly(
                    self.settings, self.connection, build, views[build.view], pin, self.progress.advance
                )
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
        for partition, end in pin.ends.items():  # wherever the tasks ran, and whatever code was there
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
            except psycopg.errors.UniqueViolation as error:
                raise RowsRefused(build.view, error) from error
            self.progress.advance(1)
        self.filled.index_ms += 1000 * (time.monotonic() - began)


def _records(pin: Pin) -> int:
    return sum(end.next_offset for end in pin.ends.values())
