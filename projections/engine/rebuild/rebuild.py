"""Rebuild views from the log during live traffic: load, index, catch up, switch.

It does no harm to kill it at any moment: what readers see changes in the switch's one transaction, and the next run abandons what a
killed one left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from infra.database.connect import Connection, session
from infra.errors import SamefoldError
from infra.log.contract import require_contract
from infra.processes.engines import SILENT, EngineFor, Progress, local
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.live.startup import check_shapes
from projections.engine.rebuild.builds import (
    Build,
    BuildState,
    abandoned_after_errors,
    begin,
    builds_of,
    by_id,
    finish_loading,
)
from projections.engine.rebuild.claims import builder, claim, end_builders
from projections.engine.rebuild.load import Filled, Filling
from projections.engine.rebuild.switch import Pointer, Switched, leader_of, plan_move, pointers, switch
from projections.engine.store.positions import stopped_views
from projections.engine.views.core_views import code_set, states_told_to
from projections.engine.views.sql_views import STOPPED, WAIT_S, replace_sql_view
from projections.engine.views.view import View


class UnknownView(SamefoldError):
    """No view has that name."""

    exit_code = 2


class NotStopped(SamefoldError):
    """Only a stopped view can be resumed."""

    exit_code = 2


class NoBuild(SamefoldError):
    """There is no table to switch to."""


@dataclass(slots=True)
class Rebuilt(Filled):
    """What a rebuild did. Without `switched`, the builds are ready."""

    tables: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    switched: Switched | None = None


def needed(live: Mapping[str, Pointer], views: Mapping[str, View]) -> list[str]:
    """The views that are not live in this code's agent and version."""
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
    end_others: bool = False,
    tasks: int | None = None,
    engine_for: EngineFor = local,
    progress: Progress = SILENT,
    wait_s: float = WAIT_S,
) -> Rebuilt:
    """Rebuild these views, or without names all that this code needs, and make them live; `views` are all of this code's.

    The load runs in `tasks` (`shares.split`) on `engine_for(records)`, by default on local processes. `end_others` first
    ends processes that build or switch one of the views. `wait_s` is for sessions that lock a view's SQL view; the builds are
    kept where they go on.

    A journal brings its contexts' states. Views that this code no longer has are removed by the switch; other views that this code
    needs and whose build is ready are switched too.

    Raises UnknownView, ShapeChanged, SetDiffers, BuildAlive, BuildAbandoned, SwitchTimedOut, ViewInUse and what folding raises.
    """
    result = Rebuilt()
    made: list[UUID] = []
    with builder(settings, "rebuild", made) as connection:
        require_contract(settings, connection)
        if end_others:
            end_builders(connection, _wanted(names, pointers(connection), views))
        live = pointers(connection)
        wanted = _wanted(names, live, views)
        if make_live:
            check_shapes(connection, {name: views[name] for name in wanted}, "live")
        along: list[Build] = []
        if make_live:
            others = [views[name] for name in needed(live, views) if name not in wanted]
            # no journals, which need states that are not ahead of them
            there = _fitting(connection, [view for view in others if not states_told_to(view)], BuildState.READY)
            along = list({build.view: build for build in there}.values())
            move = plan_move(live, [*wanted, *(build.view for build in along)], views)
            if not wanted and not along and not move.removed:
                return result
        filling = Filling(settings, connection, engine_for, progress, result, tasks)
        ready = _build(filling, [views[name] for name in wanted], views, live, made)
        result.tables = {build.view: build.table for build in ready}
        if make_live:
            for build in along:
                claim(connection, build.view)
            result.switched = switch(settings, connection, [*ready, *along], views, progress=progress, wait_s=wait_s)
            result.tables = dict(result.switched.tables)
            result.removed = list(result.switched.removed)
        else:
            for build in ready:
                replace_sql_view(connection, build.view, wait_s=wait_s)
    return result


def _build(
    filling: Filling, wanted: Sequence[View], views: Mapping[str, View], live: Mapping[str, Pointer], made: list[UUID]
) -> list[Build]:
    """Fill the wanted views' tables, agent by agent; their builds, ready. Those that are made are added to `made`."""
    connection, topic = filling.connection, filling.settings.events_topic
    with abandoned_after_errors(connection, made):
        for agent in sorted({view.agent for view in wanted}):
            of_agent = {view.name: view for view in wanted if view.agent == agent}
            whole = code_set({name: view for name, view in views.items() if view.agent == agent})
            fresh, pin = begin(connection, list(of_agent.values()), topic, whole, leader_of(agent, live))
            made.extend(build.id for build in fresh)
            filling.fill(fresh, pin, of_agent)
            for build in fresh:
                finish_loading(connection, build, BuildState.READY, len(pin.ends))
                reach("build ready")
        return by_id(connection, made)


def go_to(
    settings: Settings,
    names: Iterable[str],
    views: Mapping[str, View],
    *,
    progress: Progress = SILENT,
    wait_s: float = WAIT_S,
) -> Switched:
    """Make existing builds of this code's versions live: of these views, or without names of all that this code needs.

    A ready build is preferred, then the old one with the highest positions: going back. A journal brings its contexts' states.
    Raises NoBuild, UnknownView, ShapeChanged of a stopped view, and what `switch` raises.
    """
    with builder(settings, "switch") as connection:
        require_contract(settings, connection)
        live = pointers(connection)
        wanted = _wanted(names, live, views)
        for name in wanted:
            claim(connection, name)
        check_shapes(connection, {name: views[name] for name in wanted}, STOPPED)
        found = _existing(connection, [views[name] for name in wanted])
        if not found and not plan_move(live, [], views).removed:
            return Switched()
        return switch(settings, connection, found, views, progress=progress, wait_s=wait_s)


def resume(
    settings: Settings, names: Iterable[str], views: Mapping[str, View], *, progress: Progress = SILENT
) -> Switched:
    """Catch stopped views up from where they stopped and make them live again: a switch to their own tables.

    By default all that can be: those of this code, in their version, but journals, whose rows need the states of then.

    Raises NotStopped, PoisonEvent where this code can't fold the event either, and what `go_to` raises.
    """
    with session(settings, "samefold views") as connection:
        stopped = {one.view: one.version for one in stopped_views(connection)}
    fitting = [name for name, version in stopped.items() if name in views and views[name].version == version]
    asked = sorted(set(names)) or [name for name in fitting if not states_told_to(views[name])]
    _require_known(asked, views)
    if running := [name for name in asked if name not in stopped]:
        raise NotStopped(
            f"{', '.join(running)} is not stopped.", f"Stopped are {', '.join(stopped)}." if stopped else "No view is."
        )
    return go_to(settings, asked, views, progress=progress) if asked else Switched()


def views_named(names: Iterable[str], views: Mapping[str, View]) -> list[View]:
    """These views of this code. Raises UnknownView."""
    asked = sorted(set(names))
    _require_known(asked, views)
    return [views[name] for name in asked]


def _wanted(names: Iterable[str], live: Mapping[str, Pointer], views: Mapping[str, View]) -> list[str]:
    """This code's views among the names, with the states of journals. A view that is only live may be named: switches remove it."""
    asked = sorted(set(names))
    _require_known([name for name in asked if name not in live], views)
    wanted = [name for name in asked if name in views] if asked else needed(live, views)
    return sorted({*wanted, *(states for name in wanted for states in states_told_to(views[name]))})


def _require_known(names: Iterable[str], views: Mapping[str, View]) -> None:
    if unknown := [name for name in names if name not in views]:
        raise UnknownView(
            f"There is no view {', '.join(repr(name) for name in unknown)}.",
            f"The views are {', '.join(sorted(views))}.",
        )


def _existing(connection: Connection, views: Sequence[View]) -> list[Build]:
    """A build of each of these views; of a journal's states, one that is not ahead of the journal's in any partition."""
    found: dict[str, Build] = {}
    for view in sorted(views, key=lambda view: not states_told_to(view)):
        journals = [found[other.name] for other in views if view.name in states_told_to(other)]
        fitting = [
            build
            for build in _fitting(connection, [view], BuildState.READY, BuildState.OLD)
            if all(_is_not_ahead(build, journal) for journal in journals)
        ]
        candidates = [build for build in fitting if build.state is BuildState.READY] or sorted(
            fitting, key=lambda build: sum(reading.next_offset for reading in build.positions.values())
        )
        if not candidates:
            raise NoBuild(
                f"View '{view.name}' has no other table of version {view.version} with this code's columns to switch to"
                f"{f' together with {journals[0].table}' if journals else ''}.",
                f"`samefold rebuild {journals[0].view if journals else view.name}` makes one; to go back to another version, run "
                "that version's code.",
            )
        found[view.name] = candidates[-1]
    return list(found.values())


def _is_not_ahead(build: Build, other: Build) -> bool:
    at = other.positions
    return all(p in at and reading.next_offset <= at[p].next_offset for p, reading in build.positions.items())


def _fitting(connection: Connection, views: Iterable[View], *states: BuildState) -> list[Build]:
    """The builds in these states of exactly these versions and shapes, by view and then in the order they were made."""
    shapes = {view.name: (view.version, view.agent, view.shape) for view in views}
    builds = (build for build in builds_of(connection, shapes) if build.state in states)
    return [build for build in builds if (build.version, build.agent, build.shape) == shapes[build.view]]


def old_builds(connection: Connection, views: Iterable[View]) -> list[Build]:
    """Old builds of exactly these versions and shapes, which a switch can go back to without a rebuild."""
    return _fitting(connection, views, BuildState.OLD)
