"""Readers: the SQL view for people, and the statement that asks pointer and rows together."""

from __future__ import annotations

import re
from typing import Any

from proofs.model_read.catalogue import reads, shape, writes
from proofs.model_read.postgres import Lock, Result, Statement, Steps


@writes("select pg_advisory_xact_lock(hashtextextended(%s, 0))")
def one_at_a_time(statement: Statement, parameters: Any) -> Steps:
    yield from statement.lock(("claims", tuple(parameters)), Lock.UPDATE)
    return Result([(None,)])


@reads(
    "select table_name from builds where view = %s and state in ('ready', 'live', 'old') "
    "and to_regclass(quote_ident(table_name)) is not null order by version desc, created_at desc, table_name"
)
def could_be_live(statement: Statement, parameters: Any) -> Result:
    rows = [row for row in statement.where("builds", view=parameters[0]) if row["state"] in ("ready", "live", "old")]
    rows = [row for row in rows if row["table_name"] in statement.snapshot]
    rows.sort(key=lambda row: row["table_name"])
    rows.sort(key=lambda row: (row["version"], row["created_at"]), reverse=True)
    return Result([(row["table_name"],) for row in rows])


@reads(
    "select attname, format_type(atttypid, atttypmod), col_description(attrelid, attnum) from pg_attribute "
    "where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped and attname <> %s order by attnum",
    local=True,
)
def columns(_statement: Statement, _parameters: Any) -> Result:
    return Result([("a", "text", None)])


_BRANCH = re.compile(r"from \"(\w+)\" where \(select table_name from live where view = '(\w+)'\) = '(\w+)'")


@shape(r'create(?: or replace)? view "(\w+)" as (.+)')
def create_view(statement: Statement, _parameters: Any, view: str, query: str) -> Steps:
    branches = _BRANCH.findall(query)
    assert len(branches) == query.count(" union all ") + 1, "each branch asks the pointer"
    assert all((table, of) == (guard, view) for table, of, guard in branches), "and is of the table it asks for"
    tables = tuple(table for table, _, _ in branches)
    for table in tables:
        yield from statement.use(table)
    yield from statement.use(f"view {view}", Lock.EXCLUSIVE)
    yield from statement.upsert("people", (view,), {"view": view, "tables": tables})
    return Result()


@shape(r'drop view (?:if exists )?"(\w+)"')
def drop_view(statement: Statement, _parameters: Any, view: str) -> Steps:
    yield from statement.use(f"view {view}", Lock.EXCLUSIVE)
    count = yield from statement.delete("people", lambda row: row["view"] == view)
    return Result(count=count)


@reads(
    "select 1 from pg_depend d join pg_rewrite r on r.oid = d.objid "
    "where d.classid = 'pg_rewrite'::regclass and r.ev_class = to_regclass(%s) and d.refobjid = to_regclass(%s)"
)
def is_in_view(statement: Statement, parameters: Any) -> Result:
    view, table = (name.strip('"') for name in parameters)
    row = statement.one("people", (view,))
    return Result([(1,)] if row is not None and table in row["tables"] else [])


@shape(r"select \* from balances")
def ask_people_view(statement: Statement, _parameters: Any) -> Steps:
    """As `projections/engine/views/sql_views.py` made it: of its tables, the one that the pointer names."""
    yield from statement.use("view balances")
    row = statement.one("people", ("balances",))
    assert row is not None
    for table in row["tables"]:
        yield from statement.use(table)
    live = [one["table_name"] for one in statement.where("live", view="balances") if one["table_name"] in row["tables"]]
    rows = [one for table in live for one in statement.where(table)]
    return Result([(one["account"], one["trail"]) for one in rows])


@shape(r"select l.table_name, b.account, b.trail from live l left join (\w+) b on true where l.view = 'balances'")
def ask_with_pointer(statement: Statement, _parameters: Any, table: str) -> Steps:
    """As readers ask: the pointer and the rows of the table that they think it names."""
    yield from statement.use(table)
    rows = statement.where(table)
    live = next(one["table_name"] for one in statement.where("live", view="balances"))
    return Result([(live, one["account"], one["trail"]) for one in rows] or [(live, None, None)])
