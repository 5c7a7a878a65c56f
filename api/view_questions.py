"""Parses a request for a view: its key, or filters, order and a page, and how new the answer must be."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from fastapi import Request

from api.cursors import named, place_of
from api.problems import callers_fault, invalid
from api.requests import refuse_unknown, segment
from api.view_reader import Values
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import BadValue, Column, value_of
from projections.engine.views.indexes import Order, Part
from projections.engine.views.pages import Filter, Op, Page, operators_of, order_of
from projections.engine.views.token import BadToken, OtherLog, Token
from projections.engine.views.view import View

MOST_ROWS = 1_000
FEW_ROWS = 100
MOST_VALUES = 100
"""In one filter."""
PAGING = ("limit", "cursor", "after", "sort", "count", "fields")
"""Names of parameters; a column of the same name can be filtered by with an operator only."""
IF_STOPPED, LAST_ROWS = "if-stopped", "last-rows"
"""A parameter, whose name no column can have, and its only value."""
IF_UNINDEXED, SEARCH = "if-unindexed", "search"
"""Another one."""
OTHERS = (*PAGING, IF_STOPPED, IF_UNINDEXED)
OF_LISTS = ("limit", "sort", "fields")
"""Those of a live list."""


BAD_TOKEN = callers_fault(BadToken, 422, "The position token is invalid.")
OTHER_LOG = callers_fault(OtherLog, 409, "The position token is of another log.")
callers_fault(BadValue, 422, "A text is no value of a view's column.")


class Question(NamedTuple):
    """The page that a request asks for: with one row more than it wants, to see whether there is a next page."""

    page: Page
    may_search: bool
    """Also where no index serves it."""
    bound: Mapping[str, str]
    """What its cursors are bound to."""
    given: Mapping[str, str]
    """All parameters."""


def key_of(view: View, request: Request) -> Values:
    """The key in the path. Raises Problem 422."""
    values, errors = [], []
    for column in view.key:
        try:
            values.append(value_of(column, segment(request, column.name)))
        except BadValue as error:
            errors.append((f"path.{column.name}", str(error)))
    if errors:
        raise invalid(errors)
    return tuple(values)


@cache
def filters_of(view: View) -> Mapping[str, tuple[Column, Op]]:
    """The parameters that filter: a column's name, and the name with an operator behind a dot."""
    return {
        f"{column.name}.{op}" if op else column.name: (column, op)
        for column in view.columns
        for op in operators_of(column)
        if op or column.name not in PAGING
    }


def question_of(view: View, request: Request, caller: str, others: Collection[str] = OTHERS) -> Question:
    """The page that is asked for, by filters and these parameters. Raises Problem 422."""
    filters = filters_of(view)
    plain, operators = ({name for name in filters if ("." in name) is dotted} for dotted in (False, True))
    no_filters = [column.name for column in view.columns if not column.type.is_filterable]
    refuse_unknown(request, {*plain, *others}, operators, no_filters)
    given = dict(request.query_params)
    errors: list[tuple[str, str]] = []
    found: dict[str, Any] = {}
    parsers: dict[str, Callable[[str], Any]] = {
        "limit": limit_of,
        "count": partial(_one_of, ("true", "false")),
        IF_UNINDEXED: partial(_one_of, (SEARCH,)),
        "sort": partial(_sort, view),
        "fields": partial(_fields, view),
    }
    for name, text in given.items():
        try:
            if name in filters:
                found[name] = _filter(*filters[name], text)
            elif name in parsers:
                found[name] = parsers[name](text)
        except (BadValue, ValueError) as error:
            errors.append((f"query.{name}", str(error)))
    if errors:
        raise invalid(errors)
    order = order_of(view, found.get("sort", ()))
    asked = [part for name in sorted(found.keys() & filters) for part in (name, given[name])]
    bound = {
        "view or release": named([view.name, view.shape]),
        "filters": named(asked),
        "sort": named(map(str, order)),
        "caller": named([caller]),
    }
    page = Page(
        filters=tuple(found[name] for name in filters if name in found),
        order=order,
        most=found.get("limit", FEW_ROWS) + 1,
        after=place_of(given["cursor"], bound, partial(_after, order)) if "cursor" in given else None,
        shown=found.get("fields"),
        is_counted=found.get("count") == "true",
    )
    return Question(page, IF_UNINDEXED in found, bound, given)


# Each of these parses a parameter. They raise ValueError, whose message does not quote the text, or BadValue.


def limit_of(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 0 < int(text) <= MOST_ROWS):
        raise ValueError(f"It is a number from 1 to {MOST_ROWS}.")
    return int(text)


def _one_of(words: Sequence[str], text: str) -> str:
    if text not in words:
        raise ValueError(f"It is {' or '.join(words)}.")
    return text


def _sort(view: View, text: str) -> Order:
    columns = {column.name: column for column in view.columns if column.type.index_bytes is not None}
    parts = [Part(columns[name], minus == "-") for minus, name in _names(columns, text, r"(-?)(.*)")]
    return tuple(parts)


def _fields(view: View, text: str) -> tuple[Column, ...]:
    columns = {column.name: column for column in view.columns}
    return tuple(columns[name] for _, name in _names(columns, text, r"()(.*)"))


def _names(columns: Collection[str], text: str, form: str) -> list[tuple[str, str]]:
    found = [(match[1], match[2]) for one in text.split(",") if (match := re.fullmatch(form, one, re.DOTALL))]
    names = [name for _, name in found]
    if not {*names} <= {*columns}:
        raise ValueError(f"It names columns, with commas between them: {', '.join(columns)}.")
    if len({*names}) < len(names):
        raise ValueError("It names a column twice.")
    return found


_VALUES = re.compile(r'(?:^|(?<=,))(?:(")((?:[^"]|"")*+)"|([^,]*))(?:,|$)', re.DOTALL).findall
"""With commas between them. As in CSV, one with a comma is quoted, and a quote in it is doubled."""


def _filter(column: Column, op: Op, text: str) -> Filter:
    match op:
        case Op.NULL:
            return Filter(column, Op.EQUAL if _one_of(("true", "false"), text) == "true" else Op.NOT, None)
        case Op.IN:
            found = _VALUES(text)
            if len(found) > MOST_VALUES or any(plain.startswith('"') for _, _, plain in found):
                raise ValueError(f"It has at most {MOST_VALUES} values, with commas between them; quotes are closed.")
            values = [quoted.replace('""', '"') if quote else plain for quote, quoted, plain in found]
            return Filter(column, op, tuple(value_of(column, one) for one in values))
        case Op.EQUAL | Op.NOT if text == "" and is_nullable(column):
            return Filter(column, op, None)
        case _:
            return Filter(column, op, value_of(column, text))


def _after(order: Order, values: Sequence[str | None]) -> Values:
    """The values of an order's columns that a cursor has. Raises ValueError, BadValue."""
    return tuple(_place_value(part.column, text) for part, text in zip(order, values, strict=True))


def _place_value(column: Column, text: str | None) -> Any:
    if text is not None:
        return value_of(column, text)
    if not column.optional:
        raise ValueError
    return None


def is_nullable(column: Column) -> bool:
    """Whether an empty text asks for rows without a value; in a column of texts it is a value."""
    return column.optional and column.scalar is not Scalar.STR


def seen_by(request: Request) -> Token:
    """The positions that the caller has seen: all of `after`. Raises BadToken."""
    return Token.merged(Token.parse(text) for text in request.query_params.getlist("after"))
