"""Builds: every table of a view is one fold of one version, and has a row here.

    loading → ready → live → old        a new table: filled, caught up, switched to, switched away from
          ↘      ↘            ↘
              abandoned                 its builder died, another build took its place, or an event was dropped

    past-loading → past                 a look at the past: never live, moved on or replaced; it stays until it is dropped

No table serves two builds, not even one after the other, so whatever is late can only ever reach its own table. An
abandoned table is emptied or dropped at once, except where readers may still ask it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID, uuid4

from psycopg import errors, sql
from psycopg.types.json import Jsonb
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import AddConstraint, CreateIndex, CreateTable, ExecutableDDLElement, SetColumnComment

from infra.database.connect import Connection, DatabaseBehind
from infra.errors import SamefoldError
from infra.log.rule import Reading
from infra.processes.faultpoints import reach
from projections.engine.fold.as_of import Cut
from projections.engine.fold.fold import Blocked
from projections.engine.rebuild.build_locks import TERMINATE_MS, claim, release, try_claim
from projections.engine.store.positions import by_column, skips_of
from projections.engine.views.sql_views import replace_sql_view
from projections.engine.views.tables import comment_of, table_of
from projections.engine.views.view import View

T = TypeVar("T")

DDL_LOCK_TIMEOUT_MS = 200
GIVE_UP_S = 60.0


class BuildState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    LIVE = "live"
    OLD = "old"
    ABANDONED = "abandoned"
    PAST_LOADING = "past-loading"
    PAST = "past"


FILLING = (BuildState.LOADING, BuildState.PAST_LOADING)
"""While rows are loaded, which is then only."""


class BuildAbandoned(SamefoldError):
    """A build was abandoned while this process worked on it."""


class NotStarted(SamefoldError):
    """An agent has no positions yet, so there is nothing to build up to."""


class TableBusy(SamefoldError):
    """A table is in use and can't be altered or dropped."""


@dataclass(frozen=True, slots=True)
class Build:
    """One table of a view. `positions` is by partition: while loading the pin, then how far the table is folded."""

    id: UUID
    view: str
    version: int
    agent: str
    table: str
    state: BuildState
    shape: str
    created_at: datetime
    as_of: str | None
    """Of a look at the past: which moment."""
    positions: Mapping[int, Reading]


_SELECT = """
select b.id, b.view, b.version, b.agent, b.table_name, b.state, b.shape, b.created_at, b.as_of,
       (select json_agg(json_build_array(p.partition, p.next_offset, p.epoch, p.seq, p.command_offset))
          from build_positions p where p.build = b.id)
  from builds b
"""


def builds_of(connection: Connection, views: Iterable[str] | None = None) -> list[Build]:
    """The builds of these views (of all without), by view and then in the order they were made."""
    where = "" if views is None else "where b.view = any(%s)"
    arguments = () if views is None else (list(views),)
    return _builds(connection, f"{where} order by b.view, b.created_at, b.table_name", arguments)


def lock_builds(connection: Connection, ids: Sequence[UUID]) -> list[Build]:
    """The builds, locked until the transaction ends, in view order; what they say is read after the lock was taken."""
    connection.execute("select from builds where id = any(%s) order by view, id for update", (list(ids),))
    return by_id(connection, ids)


def by_id(connection: Connection, ids: Sequence[UUID]) -> list[Build]:
    """The builds as they are now, in view order."""
    return _builds(connection, "where b.id = any(%s) order by b.view, b.id", (list(ids),))


def _builds(connection: Connection, rest: str, arguments: Sequence[Any]) -> list[Build]:
    found = connection.execute(_SELECT + rest, arguments)
    return [
        Build(build, view, version, agent, table, BuildState(state), shape, created, as_of, _readings(at))
        for build, view, version, agent, table, state, shape, created, as_of, at in found
    ]


def _readings(rows: list[list[int]] | None) -> dict[int, Reading]:
    return {partition: Reading(*reading) for partition, *reading in rows or ()}


# ── making one ──


@dataclass(frozen=True, slots=True)
class Pin:
    """What a load folds: everything up to these ends, without these events."""

    ends: Mapping[int, Reading | Cut]
    skips: Blocked


def begin(
    connection: Connection, views: Sequence[View], topic: str, code_set: Mapping[str, int], leader: str
) -> tuple[list[Build], Pin]:
    """Claim the views, abandon their unfinished builds, make an empty table for each, and pin the leader's positions.

    `views` are of one agent, and `leader` is the one whose positions they follow. The claim lasts as long as the
    connection. Raises BuildAlive, NotStarted, TableBusy.
    """
    views = sorted(views, key=lambda view: view.name)
    names = [view.name for view in views]
    for name in names:
        claim(connection, name)
    for build in builds_of(connection, names):
        if build.state in (BuildState.LOADING, BuildState.READY):
            abandon(connection, build)
    ids = [_create(connection, view, code_set) for view in views]
    return _pin(connection, ids, names, leader, topic)


def _create(connection: Connection, view: View, code_set: Mapping[str, int]) -> UUID:
    def create() -> UUID:
        table, is_new = _free_table(connection, view)
        build = uuid4()
        connection.execute(
            "insert into builds (id, view, version, agent, table_name, state, code_set, shape) "
            "values (%s, %s, %s, %s, %s, 'loading', %s, %s)",
            (build, view.name, view.version, view.agent, table, Jsonb(dict(code_set)), view.shape),
        )
        if is_new:
            _make_table(connection, view, table)
        drop_keys(connection, table)
        return build

    return with_lock_retry(connection, create)


def _free_table(connection: Connection, view: View) -> tuple[str, bool]:
    """The table of the version's migration if no build ever had it, else a name that none ever had, and whether to make it."""
    used = {table for (table,) in connection.execute("select table_name from builds where view = %s", (view.name,))}
    if view.table_name not in used:
        if not exists(connection, view.table_name):
            raise DatabaseBehind(
                f"View '{view.name}' has no table {view.table_name} yet.",
                "Run `samefold db revision -m '…'` if its migration is not written, then `samefold db upgrade`.",
            )
        return view.table_name, False
    number = 2
    while (table := f"{view.table_name}_r{number}") in used or exists(connection, table):
        number += 1
    return table, True


def _make_table(connection: Connection, view: View, table: str) -> None:
    template = connection.execute(
        "select reloptions from pg_class where oid = to_regclass(quote_ident(%s))", (view.table_name,)
    ).fetchone()
    if template is None:  # dropped since
        make_declared_table(connection, view, table)
    else:
        options = template[0] or []
        connection.execute(
            sql.SQL("create table {} (like {} including all) {}").format(
                sql.Identifier(table),
                sql.Identifier(view.table_name),
                sql.SQL("with ({})").format(sql.SQL(", ").join(map(sql.SQL, options))) if options else sql.SQL(""),
            )
        )
    connection.execute(
        sql.SQL("comment on table {} is {}").format(sql.Identifier(table), sql.Literal(comment_of(view)))
    )


def make_declared_table(connection: Connection, view: View, table: str) -> None:
    """An empty table as this code declares the view."""
    declared = table_of(view, table)
    comments = [SetColumnComment(column) for column in declared.columns if column.comment]
    statements: list[ExecutableDDLElement] = [CreateTable(declared), *comments]
    for statement in statements:
        connection.execute(_compiled(statement))


def drop_keys(connection: Connection, table: str) -> None:
    """Rows are loaded without keys and indexes, which are made at the end, all at once."""
    name = sql.Identifier(table)
    for (constraint,) in connection.execute(
        "select conname from pg_constraint where conrelid = to_regclass(quote_ident(%s)) and contype in ('p', 'u')",
        (table,),
    ).fetchall():
        connection.execute(sql.SQL("alter table {} drop constraint {}").format(name, sql.Identifier(constraint)))
    for (index,) in connection.execute(
        "select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid "
        "where i.indrelid = to_regclass(quote_ident(%s))",
        (table,),
    ).fetchall():
        connection.execute(sql.SQL("drop index {}").format(sql.Identifier(index)))


def _pin(
    connection: Connection, ids: list[UUID], views: Sequence[str], agent: str, topic: str
) -> tuple[list[Build], Pin]:
    with connection.transaction():
        lock_skips(connection, views)
        builds = lock_builds(connection, ids)
        found = connection.execute(
            "select partition, next_offset, epoch, seq, command_offset from positions "
            "where agent = %s and topic = %s order by partition",
            (agent, topic),
        )
        readings = {partition: Reading(*reading) for partition, *reading in found}
        if not readings:
            raise NotStarted(
                f"Agent '{agent}' has not started yet, so there is nothing to build.",
                "Start it first: `samefold run agent`.",
            )
        for build in builds:
            write_positions(connection, build.id, topic, readings)
        skips = read_skips(connection, views)
        pinned = lock_builds(connection, ids), Pin(readings, skips)
    reach("build pinned")
    return pinned


def lock_skips(connection: Connection, views: Iterable[str]) -> None:
    """Pin or drop, one at a time per view until the transaction ends: a drop sees the pin, or its skip is seen by the pin.

    The rows of the builds would not do: a drop can't lock a build that is made after it looked for builds.
    """
    for view in sorted(views):
        connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"samefold skips {view}",))


def read_skips(connection: Connection, views: Iterable[str]) -> Blocked:
    """The events that these views leave out for good."""
    found = connection.execute("select view, stream, version, through from skips where view = any(%s)", (list(views),))
    return Blocked({}, skips_of(found.fetchall()))


def write_positions(connection: Connection, build: UUID, topic: str, readings: Mapping[int, Reading]) -> None:
    """Record how far a build's table is folded."""
    connection.execute(
        "insert into build_positions (build, topic, partition, next_offset, epoch, seq, command_offset) "
        "select %s, %s, * from unnest(%s::int[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) "
        "on conflict (build, topic, partition) do update set next_offset = excluded.next_offset, "
        "epoch = excluded.epoch, seq = excluded.seq, command_offset = excluded.command_offset",
        (build, topic, *by_column(readings)),
    )


def index(connection: Connection, build: Build, view: View) -> None:
    """Make a loaded table's keys and indexes, anew if they are there.

    Raises UniqueViolation where a key is there twice, BuildAbandoned.
    """
    table = table_of(view, build.table)
    statements: list[ExecutableDDLElement] = [
        AddConstraint(table.primary_key, isolate_from_table=False),
        *map(CreateIndex, table.indexes),
    ]
    try:
        with_lock_retry(connection, lambda: drop_keys(connection, build.table))
        for statement in statements:
            connection.execute(_compiled(statement))
        connection.execute(sql.SQL("analyze {}").format(sql.Identifier(build.table)))
    except errors.UndefinedTable as error:
        raise build_abandoned(build) from error


def make_ready(connection: Connection, build: Build, partitions: int) -> None:
    """`loading` → `ready`, when all parts are there; then people's SQL view learns of it. Raises BuildAbandoned."""
    with connection.transaction():
        require_parts(connection, build, partitions)
        moved = connection.execute(
            "update builds set state = 'ready' where id = %s and state = 'loading'", (build.id,)
        ).rowcount
        if moved != 1:
            raise build_abandoned(build)
    reach("build ready")
    replace_sql_view(connection, build.view)


def require_parts(connection: Connection, build: Build, partitions: int) -> None:
    """Raises BuildAbandoned unless all parts are there."""
    row = connection.execute("select count(*) from build_parts where build = %s", (build.id,)).fetchone()
    if row is None or row[0] != partitions:
        raise build_abandoned(build)


def build_abandoned(build: Build, by_whom: str = "") -> BuildAbandoned:
    return BuildAbandoned(
        f"Build {build.table} was abandoned while it was made: another took its place, or an event was dropped{by_whom}.",
        "Run the command again.",
    )


# ── parting from one ──


def abandon(connection: Connection, build: Build) -> None:
    """Give a build up that readers never saw: end whoever still loads it, then take its table away. Raises TableBusy."""
    moved = connection.execute(
        "update builds set state = 'abandoned' where id = %s and state in ('loading', 'ready')", (build.id,)
    ).rowcount
    if moved != 1:
        return
    end_loaders(connection, build.id)
    remove_table(connection, build)


def abandon_past(connection: Connection, build: Build) -> None:
    """Give a table of the past up: end whoever still loads it, and drop it. Raises TableBusy."""
    connection.execute(
        "update builds set state = 'abandoned' where id = %s and state in ('past-loading', 'past')", (build.id,)
    )
    end_loaders(connection, build.id)
    drop_table(connection, build.table)


def abandon_dead(connection: Connection, builds: Iterable[Build]) -> None:
    """Abandon those of these builds that are being made by nobody: a builder's claim ends with its session, however that ended.

    Raises TableBusy.
    """
    for build in builds:
        if build.state in FILLING and try_claim(connection, what := claim_of(build)):
            if [now.state for now in by_id(connection, [build.id])] == [build.state]:  # not finished since
                (abandon if build.state is BuildState.LOADING else abandon_past)(connection, build)
            release(connection, what)


def claim_of(build: Build) -> str:
    """What whoever makes the build has claimed before anybody can see it."""
    return build.view if build.state is not BuildState.PAST_LOADING else str(build.id)


def loader_name(build: UUID, part: int) -> str:
    """The `application_name` of the connection that loads a part."""
    return f"samefold build {build}/{part}"


def end_loaders(connection: Connection, build: UUID) -> None:
    """End the sessions that load a build: one that froze inside COPY would keep its locks for ever."""
    connection.execute(
        "select pg_terminate_backend(pid, %s) from pg_stat_activity "
        "where datname = current_database() and starts_with(application_name, %s)",
        (TERMINATE_MS, f"samefold build {build}/"),
    )


def remove_table(connection: Connection, build: Build, *, keep: bool | None = None) -> None:
    """Drop a table that is not live, out of people's SQL view first. Raises TableBusy.

    With `keep` it is only emptied: a migration made it, and later builds of the version are made like it. By default
    that is so for every table whose name has no build number.
    """
    replace_sql_view(connection, build.view, without=build.table)
    drop_table(connection, build.table, keep=build.table == f"{build.view}_v{build.version}" if keep is None else keep)


def drop_table(connection: Connection, table: str, *, keep: bool = False) -> None:
    """Drop, or only empty, a table that no view of people's reads, with what is parked of it. Raises TableBusy."""
    statement = sql.SQL("truncate {}" if keep else "drop table {}").format(sql.Identifier(table))

    def remove() -> None:
        if exists(connection, table):
            connection.execute(statement)
        connection.execute("delete from parked where table_name = %s", (table,))

    with_lock_retry(connection, remove)


def with_lock_retry(connection: Connection, ddl: Callable[[], T]) -> T:
    """Run DDL in a transaction whose locks are asked for in short tries, so that nobody queues up behind it.

    Raises TableBusy after a minute.
    """
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        try:
            with connection.transaction():
                connection.execute(f"set local lock_timeout = {DDL_LOCK_TIMEOUT_MS}")
                return ddl()
        except errors.LockNotAvailable as error:
            if time.monotonic() > deadline:
                raise TableBusy(
                    f"A table was in use for {GIVE_UP_S:.0f} s without a gap: {' '.join(str(error).split())}",
                    "End the long query that reads it, and run the command again.",
                ) from error
            time.sleep(0.05)


def exists(connection: Connection, table: str) -> bool:
    return (connection.execute("select to_regclass(quote_ident(%s))", (table,)).fetchone() or (None,))[0] is not None


def _compiled(statement: ExecutableDDLElement) -> sql.SQL:
    return sql.SQL(str(statement.compile(dialect=postgresql.dialect())))  # type: ignore[no-untyped-call]
