"""Builds: each table of a view is one fold of one version of it, and has a row in `builds`.

    loading → ready → live → old        a new table: filled, caught up, switched to, switched away from
          ↘      ↘            ↘
              abandoned                 its builder died, another build took its place, or an event was dropped

    past-loading → past                 a table of the past: never live, caught up or replaced; stays until it is dropped

No table serves two builds, not even one after the other, so a late write can only reach its own table. An abandoned table is
emptied or dropped at once, unless readers may still query it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from infra.database.connect import Connection, DatabaseBehind, as_login, session
from infra.database.roles import settle
from infra.errors import SamefoldError
from infra.log.rule import Reading
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.fold.fold import Blocked
from projections.engine.rebuild.claims import (
    TERMINATE_MS,
    BuildAlive,
    build_abandoned,
    builder,
    claim,
    release,
    try_claim,
)
from projections.engine.rebuild.shares import Share
from projections.engine.store.positions import Positions, read_positions, skips_of, stopped_views, write_build_positions
from projections.engine.views.sql_views import is_in_sql_view, replace_sql_view
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
"""The states in which rows are loaded."""
OF_THE_PAST = (BuildState.PAST, BuildState.PAST_LOADING)
LEFT = (BuildState.OLD, BuildState.ABANDONED)


class NotStarted(SamefoldError):
    """An agent has no positions yet, so there is nothing to build up to."""


class TableBusy(SamefoldError):
    """A table is in use and can't be altered or dropped."""


class NotDroppable(SamefoldError):
    """A table is live, or does not exist."""


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
    """The moment that a table of the past shows."""
    positions: Mapping[int, Reading]


_SELECT = """
select b.id, b.view, b.version, b.agent, b.table_name, b.state, b.shape, b.created_at, b.as_of,
       (select json_agg(json_build_array(p.partition, p.next_offset, p.epoch, p.seq, p.command_offset))
          from build_positions p where p.build = b.id)
  from builds b
"""


def builds_of(connection: Connection, views: Iterable[str] | None = None) -> list[Build]:
    """The builds of these views, by default of all, by view and then in the order they were made."""
    names = None if views is None else list(views)
    where = "where %s::text[] is null or b.view = any(%s) order by b.view, b.created_at, b.table_name"
    return _builds(connection, where, (names, names))


def lock_builds(connection: Connection, ids: Sequence[UUID]) -> list[Build]:
    """The builds in view order, locked until the transaction ends and read after the lock was taken."""
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
    """What a load folds: the log up to these ends, without these events."""

    ends: Mapping[int, Reading | Cut]
    skips: Blocked
    shares: Mapping[int, Sequence[Share]] = field(default_factory=dict)
    """Of partitions that several tasks fold."""


def begin(
    connection: Connection, views: Sequence[View], topic: str, code_set: Mapping[str, int], leader: str
) -> tuple[list[Build], Pin]:
    """Claim the views, abandon their unfinished builds, create an empty table for each, and pin the leader's positions.

    `views` belong to one agent; `leader` is the agent whose positions they follow. Raises BuildAlive, NotStarted.
    """
    views = sorted(views, key=lambda view: view.name)
    names = [view.name for view in views]
    for name in names:
        claim(connection, name)
    for build in builds_of(connection, names):
        if build.state in (BuildState.LOADING, BuildState.READY):
            abandon(connection, build)
    positions_of(connection, leader, topic)  # before a table is taken that the first start wants
    ids = [create(connection, uuid4(), view, code_set) for view in views]
    with connection.transaction():
        lock_skips(connection, names)
        builds = lock_builds(connection, ids)
        ends = positions_of(connection, leader, topic).readings
        for build in builds:
            write_build_positions(connection, build.id, topic, ends)
        pinned = by_id(connection, ids), Pin(ends, read_skips(connection, names))
    reach("build pinned")
    return pinned


def create(
    connection: Connection, build: UUID, view: View, code_set: Mapping[str, int], *, as_of: str | None = None
) -> UUID:
    """A build with an empty table; with `as_of` one of the past. Raises DatabaseBehind."""
    state = BuildState.LOADING if as_of is None else BuildState.PAST_LOADING

    def make() -> UUID:
        # one at a time: two builders of the past would choose the same name
        connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"samefold table {view.name}",))
        table, is_new = _free_table(connection, view, of_the_past=as_of is not None)
        connection.execute(
            "insert into builds (id, view, version, agent, table_name, state, code_set, shape, as_of) "
            "values (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (build, view.name, view.version, view.agent, table, state, Jsonb(dict(code_set)), view.shape, as_of),
        )
        if is_new:
            if as_of is None and _is_made_for(connection, view):
                _make_table_alike(connection, view, table)
            else:
                from projections.engine.views.tables import to_make  # SQLAlchemy, which only a rebuild imports

                for statement in to_make(view, table):
                    connection.execute(statement)
            comment_on(connection, table, view.comment)
            settle(connection, table)
        drop_keys(connection, table)
        return build

    return with_lock_retry(connection, make)


def _free_table(connection: Connection, view: View, *, of_the_past: bool) -> tuple[str, bool]:
    """A table's name that no build ever had, and whether to create it: the first build gets the table of the migration."""
    used = {table for (table,) in connection.execute("select table_name from builds where view = %s", (view.name,))}
    if view.table_name not in used and not of_the_past:
        if not exists(connection, view.table_name):
            raise DatabaseBehind(
                f"View '{view.name}' has no table {view.table_name} yet.",
                "Run `samefold db revision -m '…'` if its migration is not written, then `samefold db upgrade`.",
            )
        return view.table_name, False
    suffix, number = ("asof_", 1) if of_the_past else ("r", 2)  # migrations ignore tables with these names
    while (table := f"{view.table_name}_{suffix}{number}") in used or exists(connection, table):
        number += 1
    return table, True


def _is_made_for(connection: Connection, view: View) -> bool:
    """Whether the table of the view's migration is there and has its shape, which the comment tells."""
    found = connection.execute(
        "select obj_description(to_regclass(quote_ident(%s)), 'pg_class') = %s", (view.table_name, view.comment)
    ).fetchone()
    return found == (True,)


def _make_table_alike(connection: Connection, view: View, table: str) -> None:
    """An empty table like that of the view's migration, which may have been tuned."""
    [(options,)] = connection.execute(
        "select reloptions from pg_class where oid = to_regclass(quote_ident(%s))", (view.table_name,)
    )
    connection.execute(
        sql.SQL("create table {} (like {} including all) {}").format(
            sql.Identifier(table),
            sql.Identifier(view.table_name),
            sql.SQL("with ({})").format(sql.SQL(", ").join(map(sql.SQL, options))) if options else sql.SQL(""),
        )
    )


def comment_on(connection: Connection, table: str, text: str) -> None:
    connection.execute(sql.SQL("comment on table {} is {}").format(sql.Identifier(table), sql.Literal(text)))


def drop_keys(connection: Connection, table: str) -> None:
    """Drop a table's keys and indexes. Rows are loaded without them, and `index` makes them at the end, all at once."""
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


def positions_of(connection: Connection, agent: str, topic: str) -> Positions:
    """An agent's positions. Raises NotStarted."""
    positions = read_positions(connection, agent, topic)
    if positions is None:
        raise NotStarted(
            f"Agent '{agent}' has not started yet, so there is nothing to build.",
            "Start it first: `samefold run agent`.",
        )
    return positions


def lock_skips(connection: Connection, views: Iterable[str]) -> None:
    """Let one transaction at a time pin a build of these views, or drop an event: the drop sees the pin, or the pin the skip.

    Locking the builds' rows is not enough: a drop can't lock a build that is made after it read the builds.
    """
    for view in sorted(views):
        connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"samefold skips {view}",))


def read_skips(connection: Connection, views: Iterable[str]) -> Blocked:
    """The events that these views leave out for good."""
    found = connection.execute("select view, stream, version, through from skips where view = any(%s)", (list(views),))
    return Blocked({}, skips_of(found.fetchall()))


def finish_loading(connection: Connection, build: Build, state: BuildState, partitions: int) -> None:
    """Set the state that follows loading, when each partition's shares are written, all of one split. Raises BuildAbandoned."""
    moved = connection.execute(
        "update builds set state = %s where id = %s and state = %s and (select count(*) from (select from build_parts p "
        "where p.build = builds.id group by partition having count(*) = min(shares) and min(shares) = max(shares)) whole) = %s",
        (state, build.id, build.state, partitions),
    ).rowcount
    if moved != 1:
        raise build_abandoned(build.table)


# ── abandoning ──


def abandon(connection: Connection, build: Build) -> None:
    """Abandon a build that never was live, or of the past: end its loaders, then remove its table."""
    moved = connection.execute(
        "update builds set state = 'abandoned' where id = %s and state in ('loading', 'ready', 'past-loading', 'past')",
        (build.id,),
    ).rowcount
    if moved == 1:
        end_loaders(connection, build.id)
        remove_table(connection, build)


@contextmanager
def abandoned_after_errors(connection: Connection, made: list[UUID]) -> Iterator[None]:
    """Abandon these builds when the block fails. That only tidies up: otherwise the next run does it."""
    try:
        yield
    except BaseException:
        with suppress(psycopg.Error, SamefoldError):
            for build in by_id(connection, made):
                abandon(connection, build)
            made.clear()  # no other process abandoned them
        raise


def abandon_dead(connection: Connection, builds: Iterable[Build]) -> None:
    """Abandon those of these builds whose builder has ended: its claim ended with its session."""
    for build in builds:
        if build.state in FILLING and try_claim(connection, what := claim_of(build)):
            if [now.state for now in by_id(connection, [build.id])] == [build.state]:  # not finished since
                abandon(connection, build)
            release(connection, what)


def claim_of(build: Build) -> str:
    """What a builder claims before other sessions can see the build."""
    return str(build.id) if build.state in OF_THE_PAST else build.view


def loader_name(build: UUID, partition: int, share: int) -> str:
    """The `application_name` of the connection that loads a part, of at most 63 characters."""
    return f"samefold build {build}/{partition}.{share}"


def end_loaders(connection: Connection, build: UUID) -> None:
    """End the sessions that load a build: one that is frozen inside COPY would keep its locks for ever."""
    with as_login(connection):
        connection.execute(
            "select pg_terminate_backend(pid, %s) from pg_stat_activity "
            "where datname = current_database() and starts_with(application_name, %s)",
            (TERMINATE_MS, f"samefold build {build}/"),
        )


def remove_table(connection: Connection, build: Build, *, keep: bool | None = None) -> None:
    """Drop a table that is not live, after the SQL view excludes it, with its parked streams. Raises TableBusy.

    With `keep` the table is only emptied: a migration made it, and later builds of the version are made like it. By default
    that is every table whose name has no build number.
    """
    if is_in_sql_view(connection, build.view, build.table, is_right=False):
        replace_sql_view(connection, build.view, without=build.table)
    keep = build.table == f"{build.view}_v{build.version}" if keep is None else keep
    statement = sql.SQL("truncate {}" if keep else "drop table {}").format(sql.Identifier(build.table))

    def remove() -> None:
        if exists(connection, build.table):
            connection.execute(statement)
        connection.execute("delete from parked where table_name = %s", (build.table,))

    with_lock_retry(connection, remove)


def with_lock_retry(connection: Connection, ddl: Callable[[], T]) -> T:
    """Run DDL in a transaction that requests its locks in short tries, so that other sessions don't queue up behind it.

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


# ── dropping ──


def droppable(settings: Settings, view: str, which: str) -> list[Build]:
    """A version's (`2`) old and abandoned builds, or the build of one table that is not live, whose tables exist.

    Raises NotDroppable.
    """
    with session(settings, "samefold views") as connection:
        of_view = [build for build in builds_of(connection, [view]) if exists(connection, build.table)]
        stopped = {one.table for one in stopped_views(connection)}
    named = [build for build in of_view if which in (build.table, str(build.version), f"v{build.version}")]
    found = [b for b in named if b.state in LEFT or (b.table == which and b.state is not BuildState.LIVE)]
    found = [build for build in found if build.table not in stopped]
    if not found:
        states = {b.table: "stopped" if b.table in stopped else b.state for b in named or of_view}
        there = ", ".join(f"{table} is {state}" for table, state in states.items())
        raise NotDroppable(
            f"View '{view}' has no table {which} that could be dropped{f': {there}' if there else ''}.",
            "Drop old and abandoned tables by version or name, others that are not live by name: `samefold views` lists them.",
        )
    return found


def drop_tables(settings: Settings, builds: Sequence[Build], view: View | None) -> None:
    """Drop these tables; no switch can go back to them afterwards. `view` is this code's version of the view.

    The table that this code's version got from its migration is emptied, not dropped: rebuilds are made like it.
    Raises NotDroppable when one has gone live, BuildAlive while a process builds or switches one.
    """
    past = [build for build in builds if build.state in OF_THE_PAST]
    left = [build for build in builds if build.state not in OF_THE_PAST]
    was = {build.id: build.state for build in left}
    with builder(settings, "views drop") as connection:
        for build in past:
            if not try_claim(connection, str(build.id)):
                raise BuildAlive(f"{build.table} is still being made.", "Wait until it is ready, or end its process.")
        for name in sorted({build.view for build in left}):
            claim(connection, name)
        with connection.transaction():
            for build in lock_builds(connection, list(was)):
                if build.state not in (*LEFT, was[build.id]):
                    raise NotDroppable(f"{build.table} is {build.state} by now.", "Nothing was dropped.")
            connection.execute("update builds set state = 'abandoned' where id = any(%s)", (list(was),))
        for build in left:
            end_loaders(connection, build.id)
            remove_table(connection, build, keep=view is not None and build.table == view.table_name)
        for build in past:
            abandon(connection, build)


def exists(connection: Connection, table: str) -> bool:
    return (connection.execute("select to_regclass(quote_ident(%s))", (table,)).fetchone() or (None,))[0] is not None
