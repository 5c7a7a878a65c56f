"""Time travel: views as they were at a moment of the log, each in a table of its own to query.

Such a table is folded like any build (skips are left out, poison is parked or stops it) and never goes live: no switch takes it, no
rebuild abandons it, nobody moves it on. It stays until it is dropped. Its builder claims it by its id, so that others may
build the view meanwhile; what a dead one left unfinished goes with the next look at the same view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log.rule import START, Reading
from infra.settings import Settings
from projections.engine.fold.as_of import AsOf, cuts, in_words
from projections.engine.live.startup import require_contract
from projections.engine.rebuild.build_locks import try_claim
from projections.engine.rebuild.build_sessions import builder
from projections.engine.rebuild.builds import (
    Build,
    BuildState,
    Pin,
    abandon_dead,
    abandon_past,
    build_abandoned,
    builds_of,
    by_id,
    drop_keys,
    exists,
    make_declared_table,
    read_skips,
    require_parts,
    with_lock_retry,
    write_positions,
)
from projections.engine.rebuild.engines import EngineFor, Local
from projections.engine.rebuild.filling import Filled, Filling
from projections.engine.rebuild.progress import Progress, Silent
from projections.engine.views.columns import Role
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
    engine_for: EngineFor | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> LookedBack:
    """Fold the log up to a moment into new tables, on `engine_for(records)`, by default on `processes` of this machine.

    The moment may be beyond the agent's position, but not beyond the log. Raises BadMoment, ContractBroken, BuildAbandoned and
    what folding raises.
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
        try:
            builds = [_create(connection, *one, result.as_of) for one in zip(ids, by_name.values(), strict=True)]
            pin = Pin(ends, read_skips(connection, by_name))
            filling = Filling(
                settings, connection, engine_for or (lambda _: Local(processes)), progress or Silent(), result
            )
            reached = dict.fromkeys(ends, START) | filling.fill(builds, pin, by_name)
            for build in builds:
                _finish(connection, build, settings.events_topic, reached)
        except BaseException:
            # for a tidy database only: without it, the next look does the same
            with suppress(psycopg.Error, SamefoldError):
                for build in by_id(connection, ids):
                    abandon_past(connection, build)
            raise
        result.positions = {partition: reading.next_offset for partition, reading in sorted(reached.items())}
        result.tables = {build.view: build.table for build in builds}
        result.queries = {build.view: query_of(connection, by_name[build.view], build.table) for build in builds}
    return result


def query_of(connection: Connection, view: View, table: str) -> str:
    """SQL that shows a table's rows as readers of the view see them: without partitions, a summary's shares added up."""
    names = [table, *(column.name for column in view.columns)]
    quoted = connection.execute(
        "select quote_ident(n) from unnest(%s::text[]) with ordinality u(n, i) order by i", (names,)
    )
    source, *columns = (name for (name,) in quoted)
    roles = [column.role for column in view.columns]
    if view.kind is not Kind.SUMMARY:
        return f"select {', '.join(columns)} from {source}"  # noqa: S608, quoted above
    keys = ", ".join(name for name, role in zip(columns, roles, strict=True) if role is Role.KEY)
    shown = (
        name if role is Role.KEY else f"{role}({name}) as {name}" for name, role in zip(columns, roles, strict=True)
    )
    return f"select {', '.join(shown)} from {source} group by {keys}"  # noqa: S608


def _create(connection: Connection, build: UUID, view: View, as_of: str) -> Build:
    """An empty table, claimed before anybody can see it."""
    try_claim(connection, str(build))

    def create() -> None:
        # one at a time: two would choose the same name
        connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"samefold past {view.name}",))
        table = _free_name(connection, view)
        connection.execute(
            "insert into builds (id, view, version, agent, table_name, state, code_set, shape, as_of) "
            "values (%s, %s, %s, %s, %s, 'past-loading', %s, %s, %s)",
            (
                build,
                view.name,
                view.version,
                view.agent,
                table,
                Jsonb(code_set({view.name: view})),
                view.shape,
                as_of,
            ),
        )
        make_declared_table(connection, view, table)
        drop_keys(connection, table)

    with_lock_retry(connection, create)
    [made] = by_id(connection, [build])
    return made


def _free_name(connection: Connection, view: View) -> str:
    """One that no build ever had. What it matches, no migration takes for a table of its own."""
    used = {table for (table,) in connection.execute("select table_name from builds where view = %s", (view.name,))}
    number = 1
    while (table := f"{view.table_name}_asof_{number}") in used or exists(connection, table):
        number += 1
    return table


def _finish(connection: Connection, build: Build, topic: str, reached: Mapping[int, Reading]) -> None:
    """`past-loading` → `past`. Raises BuildAbandoned."""
    with connection.transaction():
        require_parts(connection, build, len(reached))
        write_positions(connection, build.id, topic, reached)
        moved = connection.execute(
            "update builds set state = 'past' where id = %s and state = 'past-loading'", (build.id,)
        ).rowcount
        if moved != 1:
            raise build_abandoned(build)
        comment = sql.SQL("comment on table {} is {}")
        text = f"view {build.view}, version {build.version}, as of {build.as_of}"
        connection.execute(comment.format(sql.Identifier(build.table), sql.Literal(text)))
