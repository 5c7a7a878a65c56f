"""The parameters of pages, as the OpenAPI document has them; `view_questions.py` parses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from api.openapi import Json, parameter
from api.view_questions import FEW_ROWS, IF_UNINDEXED, MOST_ROWS, MOST_VALUES, SEARCH, filters_of, is_nullable
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import Column, schema_of
from projections.engine.views.pages import MOST_COUNTED, Op
from projections.engine.views.view import View


def parameters_of(view: View, *, is_live: bool = False) -> list[Json]:
    """Those of the view's pages, or of its live lists."""
    filters = [_filter(name, *one) for name, one in filters_of(view).items()]
    sortable = [one for one in view.columns if one.type.index_bytes is not None]
    sort = parameter(
        "query", "sort", "Columns, each descending with a minus; then by key.", _columns(sortable, "{}", "-{}")
    )
    of_fields = "Only these columns. The answer is of another media type then."
    fields = parameter("query", "fields", of_fields, _columns(view.columns, "{}"))
    return [*filters, sort | _WITH_COMMAS, fields | _WITH_COMMAS, LIMIT, *(() if is_live else _PAGE)]


_WITH_COMMAS: Json = {"style": "form", "explode": False}


def _filter(name: str, column: Column, op: Op) -> Json:
    schema = schema_of(replace(column, optional=False))
    about, more = _FILTERS[op], dict[str, Any]()
    match op:
        case Op.NULL:
            schema = {"type": "boolean"}
        case Op.IN if _may_have_commas(column):
            about, schema = f"{about}, with commas between them; {_QUOTED}", {"type": "string", "pattern": _TEXTS}
        case Op.IN:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MOST_VALUES}
            more = _WITH_COMMAS
        case Op.EQUAL | Op.NOT if is_nullable(column):
            about, schema = f"{about}; empty: NULL", {"anyOf": [schema, {"const": ""}]}
    return parameter("query", name, f"{about}.", schema) | more


_FILTERS = {
    Op.EQUAL: "Only rows with this value",
    Op.NOT: "Only rows with another value, or none",
    Op.IN: "Only rows with one of these values",
    Op.GTE: "Only rows with this value or a greater one",
    Op.GT: "Only rows with a greater value",
    Op.LTE: "Only rows with this value or a smaller one",
    Op.LT: "Only rows with a smaller value",
    Op.PREFIX: "Only rows with texts that begin so",
    Op.NULL: "Only rows without a value, or with one",
}


_QUOTED = "as in CSV, one that has a comma or begins with a quote is quoted"
_TEXT = r'(?:"(?:[^"\x00]|"")*"|[^",\x00][^,\x00]*)?'
_TEXTS = rf"^{_TEXT}(?:,{_TEXT}){{0,{MOST_VALUES - 1}}}$"


def _may_have_commas(column: Column) -> bool:
    """Then `.in` is one text: clients encode the commas within an array's values like those between them."""
    words = [member.value for member in column.enum] if column.enum else [","]
    return column.scalar is Scalar.STR and any("," in word or word.startswith('"') for word in words)


def _columns(columns: Sequence[Column], *forms: str) -> Json:
    names = [form.format(column.name) for column in columns for form in forms]
    return {"type": "array", "items": {"type": "string", "enum": names}, "minItems": 1, "uniqueItems": True}


_COUNT = f"Whether the answer has the number of rows with these filters: exact up to {MOST_COUNTED:,}."
_SEARCH = "Search the whole table where it is large and no index serves the question, instead of 422."
_ROWS = {"type": "integer", "minimum": 1, "maximum": MOST_ROWS, "default": FEW_ROWS}
LIMIT = parameter("query", "limit", "How many rows.", _ROWS)
CURSOR = parameter("query", "cursor", "Where the page before ended; it is part of `next`.", {"type": "string"})
_PAGE = (
    parameter("query", "count", _COUNT, {"type": "boolean", "default": False}),
    parameter("query", IF_UNINDEXED, _SEARCH, {"type": "string", "enum": [SEARCH]}),
    CURSOR,
)
