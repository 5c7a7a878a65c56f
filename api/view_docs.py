"""What `/openapi.json` says of the routes that read: parameters and schemas, from the views' own columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from api.read_docs import (
    AFTER,
    IF_NONE_MATCH,
    LAST_EVENT_ID,
    NUMBER,
    PARKED,
    POSITION,
    PREFER,
    SEEN,
    TEXT,
    answer,
    events,
    json_object,
    problems,
)
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import Column
from projections.engine.views.values import schema_of
from projections.engine.views.view import View

MOST_ROWS = 1_000
FEW_ROWS = 100
PAGING = ("limit", "cursor", "after")
"""Names of parameters; a column of the same name can't be filtered by."""

_NOT_EMPTY = {"minLength": 1}
"""An empty segment is none; numbers take no notice of it."""


def row(view: View, parked: bool) -> dict[str, Any]:
    """Of `GET /views/{view}/{key…}`; `parked` says whether its answer counts parked streams."""
    return {
        "summary": f"One row of {view.name}",
        "description": view.question,
        "parameters": [*_key(view), AFTER, PREFER, IF_NONE_MATCH],
        "responses": {
            "200": answer("The row.", answer_schema(view, parked), SEEN),
            "304": {"description": "The row is as it was.", "headers": SEEN},
            **problems(404, 409, 422, 429, 503),
        },
    }


def page(view: View) -> dict[str, Any]:
    """Of `GET /views/{view}`."""
    filters = [_filter(column) for column in view.columns if column.name not in PAGING]
    schema = json_object(
        f"{_title(view)}Page",
        {
            "items": {"type": "array", "items": row_schema(view)},
            "next": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "description": "The path of the next page, null on the last.",
            },
            "position": POSITION,
            "parked": PARKED,
        },
    )
    limit = {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST_ROWS, "default": FEW_ROWS},
    }
    cursor = {
        "name": "cursor",
        "in": "query",
        "description": "Where the page before ended; it is part of `next`.",
        "schema": {"type": "string"},
    }
    return {
        "summary": f"Rows of {view.name}, by key",
        "description": view.question,
        "parameters": [*filters, limit, cursor, AFTER, PREFER, IF_NONE_MATCH],
        "responses": {
            "200": answer("Rows in the order of their keys.", schema, SEEN),
            "304": {"description": "The page is as it was.", "headers": SEEN},
            **problems(409, 422, 429, 503),
        },
    }


def live_row(view: View, parked: bool) -> dict[str, Any]:
    """Of `GET /views/{view}/{key…}/live`."""
    return {
        "summary": f"One row of {view.name}, whenever it changes",
        "description": "Server-sent events: `row` with the row as it is now, `gone` when there is none, `parked` when it is not "
        "kept up to date. Only the newest state is sent: changes that follow each other faster than they are read are one.",
        "parameters": [*_key(view), LAST_EVENT_ID],
        "responses": {
            "200": events("States of the row.", _state_schema(view, parked)),
            **problems(422, 429, 503),
        },
    }


def row_schema(view: View) -> dict[str, Any]:
    return json_object(f"{_title(view)}Row", {column.name: schema_of(column) for column in view.columns})


def answer_schema(view: View, parked: bool) -> dict[str, Any]:
    counted = {"parked": PARKED} if parked else {}
    return json_object(f"{_title(view)}Answer", {"row": row_schema(view), "position": POSITION} | counted)


def _state_schema(view: View, parked: bool) -> dict[str, Any]:
    """`gone` has no row, and `parked` says since which version of the stream."""
    answer = answer_schema(view, parked)
    more = {"since_version": NUMBER | {"description": "The stream's first version that the row leaves out."}}
    return answer | {
        "title": f"{_title(view)}State",
        "required": ["position"],
        "properties": answer["properties"] | more,
    }


def views() -> dict[str, Any]:
    """Of `GET /views`."""
    view = json_object(
        "ViewDescription",
        {
            "name": TEXT,
            "question": TEXT,
            "kind": {"type": "string", "enum": ["entity", "journal", "summary"]},
            "version": NUMBER,
            "agent": TEXT,
            "parked": PARKED,
            "key": {"type": "array", "items": TEXT},
            "columns": {"type": "object", "description": "The JSON schema of each column."},
            "href": TEXT,
        },
    )
    schema = json_object("Views", {"views": {"type": "array", "items": view}})
    return {
        "summary": "The views",
        "description": "What may be asked: each view's name, question, key and columns.",
        "responses": {"200": answer("All views, by name.", schema), **problems(422, 503)},
    }


def _key(view: View) -> list[dict[str, Any]]:
    return [
        {"name": column.name, "in": "path", "required": True, "schema": _NOT_EMPTY | schema_of(column)}
        for column in view.key
    ]


def _filter(column: Column) -> dict[str, Any]:
    said, schema = "Only rows with this value", schema_of(replace(column, optional=False))
    if is_nullable(column):
        said, schema = f"{said}; empty: those without one", {"anyOf": [schema, {"const": ""}]}
    return {"name": column.name, "in": "query", "description": f"{said}.", "schema": schema}


def is_nullable(column: Column) -> bool:
    """Whether an empty text asks for rows without a value: to a column of texts it is one."""
    return column.optional and column.scalar is not Scalar.STR


def _title(view: View) -> str:
    return "".join(part.capitalize() for part in view.name.split("_"))
