"""The indexes that tables have, beside those that their views declare. Names are compared: they hold a digest of the definition.

An index is missing on a table that a release without its declaration loaded, and invalid where PostgreSQL was interrupted when it
made or dropped it concurrently. Upgrades and switches mend that in turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from psycopg import sql

from infra.database.connect import Connection
from projections.engine.rebuild.claims import by_whom, release, try_claim
from projections.engine.views.indexes import Order, digest_in, index_name, line_for
from projections.engine.views.view import View

log = logging.getLogger(__name__)

HINT = (
    "Run `samefold db upgrade`, which makes and drops them beside live traffic. It leaves alone what no migration of this code "
    "names: unless newer code has made it, declare it, or `drop index concurrently`."
)
_TURN = "all indexes"
"""What upgrades claim in turn; no view has such a name. To wait for a lock would hold a snapshot, for which others would wait."""
_PAUSE_S = 0.5


class Difference(NamedTuple):
    """A declared index that a table does not have, or has as an invalid one; or one that a former declaration made."""

    view: View
    table: str
    name: str
    order: Order | None
    """None: it is not declared."""
    is_there: bool

    def __str__(self) -> str:
        return f"{self.name} is {'not declared' if not self.order else 'invalid' if self.is_there else 'missing'}"


def compare(connection: Connection, views: Iterable[View]) -> list[Difference]:
    """What differs in all tables of these versions of the views. Indexes that somebody made by hand are no difference.

    Tables that are being loaded are left out: they get theirs at the end.
    """
    of_comment = {view.comment: view for view in views}
    found = list[Difference]()
    for table, comment, indexes in connection.execute(_INDEXES, (list(of_comment),)).fetchall():
        view = of_comment[comment]
        wanted: dict[str, Order | None] = {index_name(table, order): order for order in view.indexes}
        former = {name: None for name in indexes if name not in wanted and digest_in(table, name)}
        for name, order in (wanted | former).items():
            if not (order and indexes.get(name)):
                found.append(Difference(view, table, name, order, name in indexes))
    return found


_INDEXES = """
select t.relname, obj_description(t.oid, 'pg_class'),
       coalesce(jsonb_object_agg(i.relname, x.indisvalid) filter (where i.oid is not null), '{}')
  from pg_class t left join pg_index x on x.indrelid = t.oid left join pg_class i on i.oid = x.indexrelid
 where t.relkind = 'r' and t.relnamespace = (select oid from pg_namespace where nspname = current_schema())
   and obj_description(t.oid, 'pg_class') = any(%s)
   and not exists (select from builds b where b.table_name = t.relname and b.state in ('loading', 'past-loading'))
 group by t.oid, t.relname order by t.relname
"""
"""A table's comment names its view, version and shape."""


def make_missing(connection: Connection, views: Collection[View], tables: Collection[str]) -> None:
    """Make what these tables lack. Writers of a table wait meanwhile: no other process writes to one that is not live."""

    def lacking() -> list[Difference]:
        return [one for one in compare(connection, views) if one.table in tables and one.order]

    if lacking():
        with turn(connection):
            for one in lacking():
                mend(connection, one)


@contextmanager
def turn(connection: Connection) -> Iterator[None]:
    """Others that make or drop indexes wait meanwhile: one that is being made is invalid."""
    is_told = False
    while not try_claim(connection, _TURN):
        if not is_told:
            log.warning("another command makes indexes; this one waits for it%s", by_whom(connection, _TURN))
            is_told = True
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        if not connection.broken:
            release(connection, _TURN)


def mend(connection: Connection, one: Difference, *, concurrently: bool = False) -> None:
    """Drop the index if it is there; make it if it is declared, and let the planner know the values of its expressions."""
    from projections.engine.views.tables import to_add_indexes  # SQLAlchemy, which only builders import

    if one.is_there:
        # those who read the SQL view have locked the tables that are not live, too
        connection.execute(sql.SQL("drop index concurrently if exists {}").format(sql.Identifier(one.name)))
    if one.order:
        connection.execute(to_add_indexes(one.view, one.table, concurrently=concurrently)[one.name])
        connection.execute(sql.SQL("analyze {}").format(sql.Identifier(one.table)))


def hand_made(connection: Connection, tables: Iterable[str]) -> list[str]:
    """What was added to these tables by hand, such as indexes, constraints and triggers. Other tables of the views lack it.

    Of an index, with the line that declares it.
    """
    found = connection.execute(_HAND_MADE, (list(tables),)).fetchall()
    return [
        what + (f" (drop it, or declare it in its view's file: `{line_for(columns)}`)" if columns else "")
        for what, table, name, columns in found
        if not (name and digest_in(table, name))
    ]


_HAND_MADE = """
select distinct pg_describe_object(classid, objid, 0), t.relname, i.relname,
       (select array_agg(case when x.indoption[n - 1] & 1 = 1 then '-' else '' end || attname order by n)
          from unnest(x.indkey::int2[]) with ordinality k (number, n)
          join pg_attribute on attrelid = x.indrelid and attnum = number
         where n <= x.indnkeyatts and 0 <> all (x.indkey::int2[]) and x.indpred is null and not x.indisunique)
  from pg_depend d join pg_class t on t.oid = refobjid
  left join pg_constraint c on classid = 'pg_constraint'::regclass and c.oid = objid
  left join pg_index x on classid = 'pg_class'::regclass and x.indexrelid = objid
  left join pg_class i on i.oid = x.indexrelid
 where refclassid = 'pg_class'::regclass and deptype = 'a' and classid <> 'pg_attrdef'::regclass
   and refobjid in (select to_regclass(quote_ident(name)) from unnest(%s::text[]) name)
   and coalesce(contype not in ('p', 'n'), true) order by 1
"""
