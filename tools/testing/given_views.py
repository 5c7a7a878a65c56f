"""What a query answers over given rows of its views, in a real PostgreSQL, without a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from psycopg import sql

from infra.database.connect import session
from infra.settings import Settings
from projections.engine.queries.query import discover
from projections.engine.queries.statement import answer, described, require_types, statement
from projections.engine.views.columns import PARTITION
from projections.engine.views.view import View

MOST = 1_000


def answered(
    world: Settings, name: str, rows: Mapping[str, Iterable[tuple[Any, ...]]] | None = None, **parameters: Any
) -> list[tuple[Any, ...]]:
    """The rows, their values as JSON has them: `answered(world, "largest_orders", {"orders": [Order(…)]}, at_least=1)`.

    Nothing of it stays in the database. Raises BadQuery where PostgreSQL gives a column another type than the query declares.
    """
    query = discover()[name]
    tables = {view.name: view.table_name for view in query.views}
    with session(world, "given rows") as db, db.transaction(force_rollback=True):
        for view in query.views:
            if given := [*(rows or {}).get(view.name, ())]:
                packed = [
                    one.type.pack(values) for one, values in zip(view.columns, zip(*given, strict=True), strict=True)
                ]
                db.execute(_insert(view), packed)
        cursor = db.execute(*described(query, tables))
        require_types(query, cursor.description, db.adapters.types)
        asked = statement(query, tables, world.events_topic, {**query.defaults, **parameters}, MOST, None)
        [(value,)] = db.execute(*asked).fetchall()
    return [tuple(msgspec.json.decode(row).values()) for row in answer(query, value).rows]


def _insert(view: View) -> sql.Composed:
    names = [sql.Identifier(one.name) for one in view.columns]
    values = [
        sql.SQL("{}::{}").format(name, sql.SQL(one.type.sql_name))
        for name, one in zip(names, view.columns, strict=True)
    ]
    return sql.SQL("insert into {} ({}, {}) select {}, 0 from unnest({}) given ({})").format(
        sql.Identifier(view.table_name),
        sql.SQL(", ").join(names),
        sql.Identifier(PARTITION),
        sql.SQL(", ").join(values),
        sql.SQL(", ").join(sql.Placeholder() * len(names)),
        sql.SQL(", ").join(names),
    )
