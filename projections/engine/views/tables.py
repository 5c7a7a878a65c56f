"""The table of a view, as SQLAlchemy declares it and Alembic writes the migration.

Every view's table has a hidden column `_partition`: the partition of the log that the row was folded from. So each row is
covered by exactly one position, and rebuild and verify work partition by partition. A summary keeps one subtotal per
partition, and its readers add them up; beside each Latest and First column, another hidden one has the place of its value.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import AddConstraint, CreateIndex, CreateTable, ExecutableDDLElement, SetColumnComment
from sqlalchemy.types import TypeEngine

from projections.engine.views.column_types import ColumnType
from projections.engine.views.columns import PARTITION
from projections.engine.views.indexes import Part, index_name
from projections.engine.views.view import Kind, View

_TYPES: dict[str, TypeEngine[Any]] = {
    "bool": sa.Boolean(),
    "bytea": sa.LargeBinary(),
    "date": sa.Date(),
    "float8": sa.Double(),
    "int8": sa.BigInteger(),
    "interval": postgresql.INTERVAL(),
    "json": sa.JSON(),
    "jsonb": postgresql.JSONB(),
    "numeric": sa.Numeric(),
    "time": sa.Time(),
    "timestamptz": sa.DateTime(timezone=True),
    "uuid": sa.Uuid(),
}
"""By PostgreSQL's names; `text` may have a collation."""


def table_of(view: View, table_name: str | None = None, metadata: sa.MetaData | None = None) -> sa.Table:
    """The table of a view, under the name of its version or of one of its builds."""
    name, options = table_name or view.table_name, dict[str, Any]()
    if view.kind in (Kind.ENTITY, Kind.SNAPSHOT):
        # leaves room for a row's new version on the same page: such updates need no new index entry
        options["postgresql_with"] = {"fillfactor": "70"}
    return sa.Table(
        name,
        metadata if metadata is not None else sa.MetaData(),
        *(
            sa.Column(
                column.name,
                _declared(column.type),
                primary_key=column.is_key,
                autoincrement=False if column.is_key else "auto",
                nullable=column.optional,
                # the SQL view adds up subtotals of older versions too, whose code is gone
                comment=str(column.role) if view.kind is Kind.SUMMARY and not column.is_key else None,
            )
            for column in view.stored
        ),
        sa.Column(PARTITION, sa.SmallInteger, primary_key=view.kind is Kind.SUMMARY, nullable=False),
        *(sa.Index(index_name(name, order), *map(_indexed, order)) for order in view.indexes),
        comment=view.comment,
        **options,
    )


def to_make(view: View, table_name: str) -> list[sql.SQL]:
    """The statements that make the table, without rows."""
    table = table_of(view, table_name)
    return _compiled(CreateTable(table), *(SetColumnComment(column) for column in table.columns if column.comment))


def to_index(view: View, table_name: str) -> list[sql.SQL]:
    """The statements that add its keys and indexes."""
    key = AddConstraint(table_of(view, table_name).primary_key, isolate_from_table=False)
    return [*_compiled(key), *to_add_indexes(view, table_name).values()]


def to_add_indexes(view: View, table_name: str, *, concurrently: bool = False) -> dict[str, sql.SQL]:
    """By the index's name, the statement that makes it unless it is there."""
    indexes = sorted(table_of(view, table_name).indexes, key=lambda index: str(index.name))
    for index in indexes:
        index.dialect_kwargs["postgresql_concurrently"] = concurrently
    made = _compiled(*(CreateIndex(index, if_not_exists=True) for index in indexes))
    return {str(index.name): statement for index, statement in zip(indexes, made, strict=True)}


def _indexed(part: Part) -> sa.TextClause | str:
    """In a migration, a name alone reads best."""
    name = sql.SQL("{}").format(sql.Identifier(part.column.name))
    value = part.column.type.ordered(name)
    if value == name and not part.descending:
        return part.column.name
    return sa.text(f"{value.as_string()}{' desc' if part.descending else ''}")


def _declared(kind: ColumnType) -> TypeEngine[Any]:
    return sa.Text(collation=kind.collation) if kind.sql_name == "text" else _TYPES[kind.sql_name]


def _compiled(*statements: ExecutableDDLElement) -> list[sql.SQL]:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    return [sql.SQL(str(statement.compile(dialect=dialect))) for statement in statements]
