"""The indexes that tables have, beside those that their views declare. Names are compared: they hold a digest of the definition.

An index is missing on a table that a release without its declaration loaded, and invalid where PostgreSQL was interrupted when it
made or dropped it concurrently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from psycopg import sql

from infra.database.connect import Connection
from projections.engine.views.indexes import Order, index_name, is_index_name, line_for
from projections.engine.views.view import View

HINT = "Run `samefold db upgrade`, which makes and drops them beside live traffic."


class Missing(NamedTuple):
    """A declared index that a table does not have, or has as an invalid one."""

    view: View
    table: str
    order: Order

    @property
    def name(self) -> str:
        return index_name(self.table, self.order)


class Undeclared(NamedTuple):
    """An index that a former declaration made."""

    view: View
    table: str
    name: str


@dataclass(frozen=True, slots=True)
class Differences:
    """What a comparison finds. Indexes that somebody made by hand are no difference."""

    missing: list[Missing] = field(default_factory=list)
    undeclared: list[Undeclared] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """As the end of a sentence; "" if there are none."""
        missing = sorted({one.name for one in self.missing} - {*self.invalid})
        found = {"missing": missing, "invalid": self.invalid, "not declared": [one.name for one in self.undeclared]}
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)


def compare(connection: Connection, views: Iterable[View]) -> Differences:
    """The indexes of all tables of these versions of the views, except those that are being loaded: they get theirs at the end."""
    of_comment = {view.comment: view for view in views}
    found = Differences()
    for table, comment, indexes in connection.execute(_INDEXES, (list(of_comment),)).fetchall():
        view = of_comment[comment]
        ours = {name: is_valid for name, is_valid in indexes.items() if is_index_name(table, name)}
        found.invalid.extend(name for name, is_valid in ours.items() if not is_valid)
        found.missing.extend(
            Missing(view, table, order) for order in view.indexes if not ours.get(index_name(table, order))
        )
        declared = {index_name(table, order) for order in view.indexes}
        found.undeclared.extend(Undeclared(view, table, name) for name in ours if name not in declared)
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


def make_missing(connection: Connection, views: Iterable[View], tables: Collection[str]) -> None:
    """Make what these tables lack. Writers of a table wait meanwhile: no other process writes to one that is not live."""
    for one in compare(connection, views).missing:
        if one.table in tables:
            make(connection, one)


def make(connection: Connection, missing: Missing, *, concurrently: bool = False) -> None:
    """Make an index, and let the planner know the values of its expressions."""
    from projections.engine.views.tables import to_add_indexes  # SQLAlchemy, which only builders import

    connection.execute(to_add_indexes(missing.view, missing.table, concurrently=concurrently)[missing.name])
    connection.execute(sql.SQL("analyze {}").format(sql.Identifier(missing.table)))


def hand_made(connection: Connection, tables: Iterable[str]) -> list[str]:
    """What was added to these tables by hand, such as indexes, constraints and triggers. Other tables of the views lack it.

    Of an index, with the line that declares it.
    """
    found = connection.execute(_HAND_MADE, (list(tables),)).fetchall()
    return [
        what + (f" (drop it, or declare it in its view's file: `{line_for(columns)}`)" if columns else "")
        for what, table, name, columns in found
        if not (name and is_index_name(table, name))
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
