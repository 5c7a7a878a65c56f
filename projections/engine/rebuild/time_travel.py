"""Time travel: views as they were at a moment of the log, each in a table of its own to query.

Such a table is folded like any build (skips are left out, poison is parked or stops it), but never goes live: no switch takes it,
no rebuild abandons it, nothing moves it on. It stays until it is dropped. Its builder claims it by its id, so that other
processes may build the view meanwhile. What a killed builder left is removed by the next time travel of the same view.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

from infra.database.connect import Connection
from infra.log.contract import require_contract
from infra.log.rule import START
from infra.processes.engines import SILENT, EngineFor, Progress, local
from infra.settings import Settings
from projections.engine.fold.as_of import AsOf, cuts, in_words
from projections.engine.rebuild.builds import (
    BuildState,
    Pin,
    abandon_dead,
    abandoned_after_errors,
    builds_of,
    by_id,
    comment_on,
    create,
    finish_loading,
    read_skips,
)
from projections.engine.rebuild.claims import builder, try_claim
from projections.engine.rebuild.load import Filled, Filling
from projections.engine.store.positions import write_build_positions
from projections.engine.views.columns import AGGREGATES, Column, place_name
from projections.engine.views.core_views import code_set
from projections.engine.views.view import Kind, View


@dataclass(slots=True)
class LookedBack(Filled):
    """Tables of the past. `as_of` is the moment, `positions` the next offset of each partition: all below was folded."""

    as_of: str = ""
    positions: dict[int, int] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    """SQL that shows each view's rows."""


def look_back(
    settings: Settings,
    views: Iterable[View],
    as_of: AsOf,
    *,
    tasks: int | None = None,
    engine_for: EngineFor = local,
    progress: Progress = SILENT,
) -> LookedBack:
    """Fold the log up to a moment into new tables, in `tasks` on `engine_for(records)`, by default on local processes.

    The moment may be beyond the agent's position, but not beyond the log's end. Raises BadMoment, ContractBroken, BuildAbandoned
    and what folding raises.
    """
    by_name = {view.name: view for view in sorted(views, key=lambda view: view.name)}
    result = LookedBack(as_of=in_words(as_of))
    ids = [uuid4() for _ in by_name]
    with builder(settings, "rebuild", ids) as connection:
        topic = require_contract(settings, connection)
        ends = cuts(settings, topic, as_of, datetime.now(UTC))
        abandon_dead(
            connection, [build for build in builds_of(connection, by_name) if build.state is BuildState.PAST_LOADING]
        )
        with abandoned_after_errors(connection, ids):
            for build_id, view in zip(ids, by_name.values(), strict=True):
                try_claim(connection, str(build_id))  # before other sessions see the build
                create(connection, build_id, view, code_set({view.name: view}), as_of=result.as_of)
            builds = by_id(connection, ids)
            pin = Pin(ends, read_skips(connection, by_name))
            filling = Filling(settings, connection, engine_for, progress, result, tasks)
            reached = dict.fromkeys(ends, START) | filling.fill(builds, pin, by_name)
            for build in builds:
                with connection.transaction():
                    finish_loading(connection, build, BuildState.PAST, len(reached))
                    write_build_positions(connection, build.id, settings.events_topic, reached)
                    text = f"view {build.view}, version {build.version}, as of {build.as_of}"
                    comment_on(connection, build.table, text)
        result.positions = {partition: reading.next_offset for partition, reading in sorted(reached.items())}
        result.tables = {build.view: build.table for build in builds}
        result.queries = {build.view: query_of(connection, by_name[build.view], build.table) for build in builds}
    return result


def query_of(connection: Connection, view: View, table: str) -> str:
    """SQL that shows a table's rows as readers of the view see them: without partitions, a summary's shares added up."""
    names = [table, *(column.name for column in view.stored)]
    found = connection.execute("select n, quote_ident(n) from unnest(%s::text[]) n", (names,))
    quoted: dict[str, str] = dict(found.fetchall())

    def shown(column: Column) -> str:
        name, place = quoted[column.name], quoted.get(place_name(column.name))
        return f"{AGGREGATES[column.role].format(name, place)} as {name}" if column.role in AGGREGATES else name

    query = f"select {', '.join(map(shown, view.columns))} from {quoted[table]}"  # noqa: S608
    keys = ", ".join(quoted[column.name] for column in view.key)
    return f"{query} group by {keys}" if view.kind is Kind.SUMMARY else query
