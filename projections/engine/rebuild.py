"""Rebuilding views from the log, beside live traffic: load, index, catch up, switch (DESIGN §4).

Killed at any moment it does no harm: what readers see changes in the switch's one transaction. The next run abandons what
the dead one left.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg

from infra.database.connect import Connection, connect, naming
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.builds import Build, Pin, State, abandon, begin, builds_of, by_id, claim, index, make_ready
from projections.engine.careful import load_carefully
from projections.engine.contract import require_contract
from projections.engine.engines import EngineFor, Local
from projections.engine.local import RowsRefused, load, parts
from projections.engine.progress import Progress, Silent
from projections.engine.switch import Pointer, Switched, leader_of, plan_move, pointers, switch
from projections.engine.system import code_set
from projections.engine.view import View


class UnknownView(SamefoldError):
    """No view has that name."""

    exit_code = 2


class NoBuild(SamefoldError):
    """There is no table to switch to."""


@dataclass(slots=True)
class Rebuilt:
    """What a rebuild did. `rows` is by view; without `switched`, the builds are ready."""

    tables: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    commits: int = 0
    events: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    engine: str = ""
    """What the load ran on."""
    load_ms: float = 0
    index_ms: float = 0
    switched: Switched | None = None


def needed(live: Mapping[str, Pointer], views: Mapping[str, View]) -> list[str]:
    """The views of this code that are not live as this code has them."""
    return [
        name
        for name, view in views.items()
        if name not in live or (live[name].agent, live[name].version) != (view.agent, view.version)
    ]


def rebuild(
    settings: Settings,
    names: Iterable[str],
    views: Mapping[str, View],
    *,
    make_live: bool = True,
    engine_for: EngineFor | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Rebuilt:
    """Rebuild these views, or without names all that this code needs, and make them live; `views` are all of this code's.

    The load runs on `engine_for(records)`, by default on `processes` of this machine, which also do the switch's part.

    Views that this code no longer has leave with the switch; those that have a build that is ready and that this code needs
    come along. Raises UnknownView, SetDiffers, BuildAlive, SwitchTimedOut and what folding raises.
    """
    progress = progress or Silent()
    engine_for = engine_for or (lambda _records: Local(processes))
    with naming(settings), connect(settings, "samefold rebuild", statement_timeout_ms=0) as connection:
        require_contract(settings, connection)
        live = pointers(connection)
        wanted = _wanted(names, live, views)
        along: list[Build] = []
        if make_live:
            along = _ready(connection, [name for name in needed(live, views) if name not in wanted], views)
            move = plan_move(live, [*wanted, *(build.view for build in along)], views)
            if not wanted and not along and not move.removed:
                return Rebuilt()
        result = Rebuilt()
        job = _Job(settings, connection, views, live, engine_for, progress, result)
        made = job.build([views[name] for name in wanted])
        if make_live:
            for build in along:
                claim(connection, build.view)
            progress.begin("switch")
            result.switched = switch(settings, connection, [*made, *along], views, processes=processes)
            result.tables = dict(result.switched.tables)
            result.removed = list(result.switched.removed)
        return result


def go_to(
    settings: Settings, names: Iterable[str], views: Mapping[str, View], *, processes: int | None = None
) -> Switched:
    """Make existing builds of this code's versions live: of these views, or without names of all that this code needs.

    A ready build is taken first, else the old one that is the furthest: going back. Raises NoBuild, UnknownView and what
    `switch` raises.
    """
    with naming(settings), connect(settings, "samefold switch", statement_timeout_ms=0) as connection:
        require_contract(settings, connection)
        live = pointers(connection)
        wanted = _wanted(names, live, views)
        for name in wanted:
            claim(connection, name)
        found = [_existing(connection, views[name]) for name in wanted]
        if not found and not plan_move(live, [], views).removed:
            return Switched({}, (), 0, 0, 0, 0, 0)
        return switch(settings, connection, found, views, processes=processes)


def _wanted(names: Iterable[str], live: Mapping[str, Pointer], views: Mapping[str, View]) -> list[str]:
    """Names of views of this code. One that is only live leaves by itself, so it may be named too."""
    asked = sorted(set(names))
    if unknown := [name for name in asked if name not in views and name not in live]:
        raise UnknownView(
            f"There is no view {', '.join(repr(name) for name in unknown)}.",
            f"The views are {', '.join(sorted(views))}.",
        )
    return [name for name in asked if name in views] if asked else needed(live, views)


@dataclass(frozen=True, slots=True)
class _Job:
    """What one run of `rebuild` works with."""

    settings: Settings
    connection: Connection
    views: Mapping[str, View]
    live: Mapping[str, Pointer]
    engine_for: EngineFor
    progress: Progress
    result: Rebuilt

    def build(self, wanted: Sequence[View]) -> list[Build]:
        """Load and index these views, agent by agent; their builds, ready."""
        made: list[Build] = []
        try:
            for agent in sorted({view.agent for view in wanted}):
                of_agent = {view.name: view for view in wanted if view.agent == agent}
                whole = code_set({name: view for name, view in self.views.items() if view.agent == agent})
                topic, leader = self.settings.events_topic, leader_of(agent, self.live)
                fresh, pin = begin(self.connection, list(of_agent.values()), topic, whole, leader)
                made += fresh
                self._load(fresh, pin, of_agent)
            self.result.tables = {build.view: build.table for build in made}
            return by_id(self.connection, [build.id for build in made])
        except BaseException:
            # for a tidy database only: without it, the next run does the same
            with suppress(psycopg.Error, SamefoldError):
                for build in made:
                    abandon(self.connection, build)
            raise

    def _load(self, fresh: Sequence[Build], pin: Pin, views: Mapping[str, View]) -> None:
        """Fill the tables, make their keys, and declare them ready."""
        careful: set[str] = set()
        while True:
            quick = [build for build in fresh if build.view not in careful]
            try:
                self._load_quickly(quick, pin, views)
                self._index(quick, views)
                break
            except RowsRefused as refused:
                careful.add(refused.view)
        for build in fresh:
            if build.view in careful:
                self.progress.begin("careful", self._records(pin))
                self.result.rows[build.view] = load_carefully(
                    self.settings, self.connection, build, views[build.view], pin, self.progress.advance
                )
        for build in fresh:
            make_ready(self.connection, build, len(pin.readings))

    def _load_quickly(self, quick: Sequence[Build], pin: Pin, views: Mapping[str, View]) -> None:
        if not quick:
            return
        engine = self.engine_for(self._records(pin))
        self.progress.begin("load", self._records(pin))
        began = time.monotonic()
        some = {build.view: views[build.view] for build in quick}
        work = parts(self.settings, self.settings.events_topic, quick, some, pin)
        done = engine.run(load, work, self._records(pin), self.progress.advance)
        result = self.result
        result.engine = engine.name
        result.commits = max(result.commits, sum(part.commits for part in done))
        result.events = max(result.events, sum(part.events for part in done))
        result.rows |= {name: sum(part.rows[name] for part in done) for name in some}
        result.load_ms += 1000 * (time.monotonic() - began)

    def _index(self, quick: Sequence[Build], views: Mapping[str, View]) -> None:
        self.progress.begin("index", len(quick))
        began = time.monotonic()
        for build in quick:
            try:
                index(self.connection, build, views[build.view])
            except psycopg.errors.UniqueViolation as error:
                raise RowsRefused(build.view, error) from error
            self.progress.advance(1)
        self.result.index_ms += 1000 * (time.monotonic() - began)

    @staticmethod
    def _records(pin: Pin) -> int:
        return sum(reading.next_offset for reading in pin.readings.values())


def _ready(connection: Connection, names: Sequence[str], views: Mapping[str, View]) -> list[Build]:
    """Builds of these views that are ready and of this code."""
    fitting = [b for b in builds_of(connection, names) if b.state is State.READY and _fits(b, views[b.view])]
    return list({build.view: build for build in fitting}.values())


def _existing(connection: Connection, view: View) -> Build:
    fitting = [build for build in builds_of(connection, [view.name]) if _fits(build, view)]
    candidates = [build for build in fitting if build.state is State.READY] or sorted(
        (build for build in fitting if build.state is State.OLD),
        key=lambda build: sum(reading.next_offset for reading in build.positions.values()),
    )
    if not candidates:
        raise NoBuild(
            f"View '{view.name}' has no other table of version {view.version}, which is this code's, to switch to.",
            f"`samefold rebuild {view.name}` makes one; to go back to another version, run that version's code.",
        )
    return candidates[-1]


def _fits(build: Build, view: View) -> bool:
    return (build.version, build.agent, build.shape) == (view.version, view.agent, view.shape)


def old_builds(connection: Connection, views: Iterable[View]) -> list[Build]:
    """Tables of exactly these versions and shapes that a switch could go back to without a rebuild."""
    by_name = {view.name: view for view in views}
    return [b for b in builds_of(connection, by_name) if b.state is State.OLD and _fits(b, by_name[b.view])]
