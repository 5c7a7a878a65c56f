"""Parses a request for a view: its key, or filters and a page, and how new the answer must be."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import Request

from api.problems import callers_fault, invalid, kind
from api.requests import refuse_unknown, segment
from api.view_reader import Values
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import BadValue, Column, value_of
from projections.engine.views.token import BadToken, OtherLog, Token
from projections.engine.views.view import View, fingerprint

MOST_ROWS = 1_000
FEW_ROWS = 100
PAGING = ("limit", "cursor", "after")
"""Names of parameters; a column of the same name can't be filtered by."""
IF_STOPPED, LAST_ROWS = "if-stopped", "last-rows"
"""A parameter, whose name no column can have, and its only value."""


BAD_CURSOR = kind(422, "bad-cursor", "The cursor is invalid, or of another query.")
BAD_TOKEN = callers_fault(BadToken, 422, "The position token is invalid.")
OTHER_LOG = callers_fault(OtherLog, 409, "The position token is of another log.")
callers_fault(BadValue, 422, "A text is no value of a view's column.")


class Question(NamedTuple):
    """The page that a request asks for."""

    filters: dict[str, Any]
    after_key: Values | None
    limit: int
    bound: list[str]
    """View and filters, which its cursors are bound to."""
    rest: list[tuple[str, str]]
    """The parameters that the next page has too."""

    def cursor_after(self, values: Sequence[str]) -> str:
        """The cursor of the page after the key with these texts."""
        place = msgspec.json.encode(_Place(_name(self.bound), list(values)))
        return base64.urlsafe_b64encode(place).rstrip(b"=").decode()


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    question: str
    values: list[str]


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


def question_of(view: View, request: Request) -> Question:
    """The page that is asked for. Raises Problem 422, BadValue."""
    columns = {column.name: column for column in view.columns if column.name not in PAGING}
    refuse_unknown(request, {*columns, *PAGING, IF_STOPPED})
    given = dict(request.query_params)
    filters, errors = {}, []
    for name, text in given.items():
        if (column := columns.get(name)) is None:
            continue
        try:
            filters[name] = None if text == "" and is_nullable(column) else value_of(column, text)
        except BadValue as error:
            errors.append((f"query.{name}", str(error)))
    text = given.get("limit", str(FEW_ROWS))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 0 < int(text) <= MOST_ROWS):
        errors.append(("query.limit", f"It is a number from 1 to {MOST_ROWS}."))
    if errors:
        raise invalid(errors)
    asked = sorted((name, text) for name, text in given.items() if name in columns)
    bound = [view.name, view.shape, *(part for pair in asked for part in pair)]
    after_key = _after(view, given["cursor"], bound) if "cursor" in given else None
    rest = [(name, text) for name, text in given.items() if name in columns or name in ("limit", IF_STOPPED)]
    return Question(filters, after_key, int(text), bound, rest)


def _after(view: View, cursor: str, bound: Sequence[str]) -> Values:
    """The key that a cursor was made with. Raises Problem 422, BadValue."""
    try:
        place = msgspec.json.decode(
            base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True), type=_Place
        )
    except (ValueError, msgspec.DecodeError):
        place = None
    if place is None or place.question != _name(bound) or len(place.values) != len(view.key):
        hint = "Use an answer's `next` unchanged, or start without a cursor."
        raise BAD_CURSOR("The cursor is of another query.", hint=hint)
    return tuple(value_of(column, text) for column, text in zip(view.key, place.values, strict=True))


def _name(question: Sequence[str]) -> str:
    return fingerprint(msgspec.json.encode(list(question)).decode())


def is_nullable(column: Column) -> bool:
    """Whether an empty text asks for rows without a value; in a column of texts it is a value."""
    return column.optional and column.scalar is not Scalar.STR


def seen_by(request: Request) -> Token:
    """The positions that the caller has seen: all of `after`. Raises BadToken."""
    return Token.merged(Token.parse(text) for text in request.query_params.getlist("after"))
