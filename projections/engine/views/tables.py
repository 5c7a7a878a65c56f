"""The table of a view, as SQLAlchemy declares it and Alembic writes the migration.

Every view's table has a hidden column `_partition`: the partition of the log that the row was folded from. So each row is
covered by exactly one position, and rebuild and verify work partition by partition. A summary keeps one subtotal per
partition, and its readers add them up.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from projections.engine.views.columns import PARTITION
from projections.engine.views.view import Kind, View


def table_of(view: View, table_name: str | None = None, metadata: sa.MetaData | None = None) -> sa.Table:
    """The table of a view, under the name of its version or of one of its builds."""
    options: dict[str, Any] = {}
    if view.kind in (Kind.ENTITY, Kind.SNAPSHOT):
        # leaves room for a row's new version on the same page: such updates need no new index entry
        options["postgresql_with"] = {"fillfactor": "70"}
    return sa.Table(
        table_name or view.table_name,
        metadata if metadata is not None else sa.MetaData(),
        *(
            sa.Column(
                column.name,
                column.type.declared,
                primary_key=column.is_key,
                autoincrement=False if column.is_key else "auto",
                nullable=column.optional,
                # the SQL view adds up subtotals of older versions too, whose code is gone
                comment=str(column.role) if view.kind is Kind.SUMMARY and not column.is_key else None,
            )
            for column in view.columns
        ),
        sa.Column(PARTITION, sa.SmallInteger, primary_key=view.kind is Kind.SUMMARY, nullable=False),
        comment=comment_of(view),
        **options,
    )


def comment_of(view: View) -> str:
    """The table's comment. It shows Alembic's autogenerate a changed key or state, which it would not see."""
    key = ", ".join(column.name for column in view.key)
    return f"view {view.name}, version {view.version}, {view.kind} by ({key}), shape {view.shape}"
