"""A column's values as text: how they are written in a URL, and the schema of how a row's JSON shows them."""

from __future__ import annotations

from typing import Any

from infra.errors import SamefoldError
from projections.engine.views.columns import Column


class BadValue(SamefoldError):
    """A text is no value of a view's column."""

    is_public = True


def value_of(column: Column, text: str) -> Any:
    """The column's value that `text` stands for, as psycopg sends it. Raises BadValue, which does not quote the text."""
    try:
        return column.type.parse(text)
    except ValueError as error:
        raise BadValue(f"That is no value of column '{column.name}'.", f"It is {column.type.form}.") from error


def schema_of(column: Column) -> dict[str, Any]:
    """JSON schema of the column's values in a row."""
    plain = dict(column.type.schema)
    return {"anyOf": [plain, {"type": "null"}]} if column.optional else plain
