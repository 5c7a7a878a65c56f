"""The SQL view of each view, under the view's own name, for people: it shows the live table, or the last rows of a stopped view.

It is a `union all` over all tables that could be live, each branch guarded by the view's row in `live` or `stopped_views`. So a
switch needs no DDL, and a query sees exactly one table. It is replaced when a build ends or a table is removed, and a switch
requires that it has the table. Alembic compares tables only and never sees it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from psycopg import errors, sql

from infra.database.connect import Connection, who
from infra.database.roles import settle
from infra.errors import SamefoldError
from projections.engine.views.columns import AGGREGATES, place_name

STOPPED = "(select * from stopped_views s where not exists (select from live l where l.view = s.view))"
"""The views that are stopped, in SQL. Of one that is live again, an older release's switch may have left the row."""
LOCK_TIMEOUT_MS = 100
WAIT_S = 60.0
PAUSE_S = 0.05


class ViewInUse(SamefoldError):
    """A SQL view can't be replaced."""


class _Column(NamedTuple):
    name: str
    type: str
    combine: str | None
    """In a summary: one of AGGREGATES."""


def replace_sql_view(
    connection: Connection, view: str, *, without: str | None = None, first: str | None = None, wait_s: float = WAIT_S
) -> None:
    """Make the SQL view over all tables of `view` that are ready, live or old, but `without` a table that will be dropped.

    Over the table `first` where the view has no build yet.

    It has the newest version's columns; an older table shows NULL for those it lacks. It never blocks readers for long: it waits
    for the lock 100 ms at a time. Raises ViewInUse when something depends on the SQL view, or it is locked for so long.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with connection.transaction():
                connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
                _replace(connection, view, without, first)
            return
        except errors.LockNotAvailable as error:
            if time.monotonic() > deadline:
                raise ViewInUse(
                    f"The SQL view '{view}' was locked for {wait_s:.0f} s by {_lockers(connection, view)}.",
                    "End these sessions (`select pg_terminate_backend(…)`), and run the command again. A table that a rebuild has "
                    f"finished is kept: `samefold switch {view}` does the rest, and waits longer with `--wait SECONDS`.",
                ) from error
            time.sleep(PAUSE_S)
        except errors.DependentObjectsStillExist as error:
            raise ViewInUse(
                f"Something in the database depends on the SQL view '{view}', whose columns change: "
                f"{' '.join(str(error).split())}",
                "Drop what depends on it, run the command again, and recreate it.",
            ) from error


def ensure_sql_views(connection: Connection, tables: Mapping[str, str]) -> None:
    """Make the SQL views that lack their live table, or the given one, by view, where the view has never had a build.

    So an agent, which may not make any, finds them at its first start. Raises ViewInUse.
    """
    found = connection.execute(
        "select t.view, coalesce(l.table_name, t.table_name), l.table_name is null "
        "from unnest(%s::text[], %s::text[]) t (view, table_name) left join live l using (view) "
        "where l.view is not null or not exists (select from builds b where b.view = t.view) "
        "and to_regclass(quote_ident(t.table_name)) is not null order by t.view",
        (list(tables), list(tables.values())),
    ).fetchall()
    for view, table, is_first in found:
        if not all(is_in_sql_view(connection, view, one) for one in (table, "stopped_views")):
            replace_sql_view(connection, view, first=table if is_first else None)


def _lockers(connection: Connection, view: str) -> str:
    found = connection.execute(
        "select pid from pg_locks where relation = to_regclass(quote_ident(%s)) and granted and pid is not null",
        (view,),
    ).fetchall()
    return who(connection, [pid for (pid,) in found]) or "short queries"


def is_in_sql_view(connection: Connection, view: str, table: str, *, is_right: bool = True) -> bool:
    """Whether the SQL view of `view` reads that table, and shows no hidden columns, as that of a release that knew none may.

    Without `is_right`, only whether it reads the table.
    """
    found = connection.execute(
        "select 1 from pg_depend d join pg_rewrite r on r.oid = d.objid "
        "where d.classid = 'pg_rewrite'::regclass and r.ev_class = to_regclass(quote_ident(%s)) "
        "and d.refobjid = to_regclass(quote_ident(%s)) "
        "and not (%s and exists (select from pg_attribute where attrelid = r.ev_class and attname ~ '^_'))",
        (view, table, is_right),
    )
    return found.fetchone() is not None


def _replace(connection: Connection, view: str, without: str | None, first: str | None) -> None:
    # one at a time: of two processes, each would miss the other's table
    connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"samefold people {view}",))
    found = connection.execute(
        "select table_name from builds where view = %s and state in ('ready', 'live', 'old') "
        "and to_regclass(quote_ident(table_name)) is not null order by version desc, created_at desc, table_name",
        (view,),
    )
    tables = [table for (table,) in found if table != without] or ([first] if first else [])
    name = sql.Identifier(view)
    if not tables:
        connection.execute(sql.SQL("drop view if exists {}").format(name))
        return
    columns = {table: _columns(connection, table) for table in tables}
    branches = (_branch(view, table, columns[tables[0]], columns[table]) for table in tables)
    query = sql.SQL(" union all ").join(branches)
    try:
        with connection.transaction():
            connection.execute(sql.SQL("create or replace view {} as {}").format(name, query))
    except errors.InvalidTableDefinition:  # `or replace` can't change columns
        connection.execute(sql.SQL("drop view {}").format(name))
        connection.execute(sql.SQL("create view {} as {}").format(name, query))
    settle(connection, view)


def _columns(connection: Connection, table: str) -> dict[str, _Column]:
    found = connection.execute(
        "select attname, format_type(atttypid, atttypmod), col_description(attrelid, attnum) from pg_attribute "
        "where attrelid = to_regclass(quote_ident(%s)) and attnum > 0 and not attisdropped and attname !~ '^_' order by attnum",
        (table,),
    )
    return {name: _Column(name, kind, AGGREGATES.get(comment)) for name, kind, comment in found}


def _branch(view: str, table: str, wanted: dict[str, _Column], has: dict[str, _Column]) -> sql.Composed:
    """One table's rows while it is live. `live` is read once per query, and tables that are not live are not even opened."""
    grouped = [sql.Identifier(column.name) for column in has.values() if column.combine is None]
    is_summary = len(grouped) < len(has)
    return sql.SQL("(select {columns} from {table} where {shown} = {name}{group_by})").format(
        columns=sql.SQL(", ").join(_value(column, has.get(column.name)) for column in wanted.values()),
        table=sql.Identifier(table),
        shown=_SHOWN.format(sql.Literal(view)),
        name=sql.Literal(table),
        group_by=sql.SQL(" group by {}").format(sql.SQL(", ").join(grouped)) if is_summary else sql.SQL(""),
    )


_SHOWN = sql.SQL(
    "coalesce((select table_name from live where view = {0}), (select table_name from stopped_views where view = {0}))"
)
"""The table that is live, or, of a stopped view, that was."""


def _value(column: _Column, has: _Column | None) -> sql.Composed:
    name = sql.Identifier(column.name)
    kind = sql.SQL(column.type)  # as PostgreSQL spelled it
    if has is None:
        return sql.SQL("null::{} as {}").format(kind, name)
    place = sql.Identifier(place_name(column.name))
    value: Any = name if has.combine is None else sql.SQL(has.combine).format(name, place)
    if has.type != column.type:
        # through text, any type can be cast to any other; a value that does not fit fails when it is read
        value = sql.SQL("({})::text::{}").format(value, kind)
    return sql.SQL("{} as {}").format(value, name)
