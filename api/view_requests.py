"""What a request for a view asks: key, filters, page, and how new the answer must be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastapi import Request

from api.cursors import BadCursor, values_of
from api.problems import INVALID, Kind, invalid, kind, logged
from api.reading import Values
from api.segments import segment
from api.view_docs import FEW_ROWS, MOST_ROWS, PAGING, is_nullable
from infra.errors import SamefoldError
from projections.engine.views.token import BadToken, OtherLog, Token
from projections.engine.views.values import BadValue, value_of
from projections.engine.views.view import View

_REFUSED: dict[type[SamefoldError], Kind] = {
    BadToken: kind(
        422,
        BadToken.code,
        "A position token that none of our answers held.",
        "Hand back what an answer's `position` or its header Samefold-Position held, unchanged.",
    ),
    BadCursor: kind(
        422,
        BadCursor.code,
        "A cursor of another question, or none at all.",
        "Follow an answer's `next` as it is, or begin without a cursor.",
    ),
    BadValue: kind(
        422, BadValue.code, "A text is no value of a view's column.", "`GET /views` has the schema of each column."
    ),
    OtherLog: kind(
        409,
        OtherLog.code,
        "A position token of another log.",
        "It was kept from before the log was made anew, or is another service's. Read without it.",
    ),
}
"""What is the caller's to put right; all else may pass."""


class Question(NamedTuple):
    """What a request for a page asks for."""

    filters: dict[str, Any]
    after_key: Values | None
    limit: int
    bound: list[str]
    """What a cursor of it is bound to."""
    rest: list[tuple[str, str]]
    """The parameters that the next page has too."""


def key_of(view: View, request: Request) -> Values:
    """The key in the path. Raises Problem 422."""
    values, errors = [], []
    for column in view.key:
        try:
            values.append(value_of(column, segment(request, column.name)))
        except BadValue as error:
            errors.append({"at": f"path.{column.name}", "problem": str(error)})
    if errors:
        raise INVALID(errors=errors)
    return tuple(values)


def question_of(view: View, request: Request) -> Question:
    """Which page is asked for. Raises Problem 422, BadCursor, BadToken."""
    columns = {column.name: column for column in view.columns if column.name not in PAGING}
    refuse_unknown(request, {*columns, *PAGING})
    given = dict(request.query_params)
    filters, errors = {}, []
    for name, text in given.items():
        if (column := columns.get(name)) is None:
            continue
        try:
            filters[name] = None if text == "" and is_nullable(column) else value_of(column, text)
        except BadValue as error:
            errors.append({"at": f"query.{name}", "problem": str(error)})
    limit = number_of(given.get("limit"), FEW_ROWS, MOST_ROWS)
    if limit is None:
        errors.append({"at": "query.limit", "problem": f"It is a number from 1 to {MOST_ROWS}."})
    if errors or limit is None:
        raise INVALID(errors=errors)
    asked = sorted((name, text) for name, text in given.items() if name in columns)
    bound = [view.name, view.shape, *(part for pair in asked for part in pair)]
    after_key = None
    if "cursor" in given:
        texts = values_of(given["cursor"], bound, len(view.key))
        after_key = tuple(value_of(column, text) for column, text in zip(view.key, texts, strict=True))
    rest = [(name, text) for name, text in given.items() if name in columns or name == "limit"]
    return Question(filters, after_key, limit, bound, rest)


def number_of(text: str | None, default: int, most: int) -> int | None:
    """A number from 1 to `most`, `default` where nothing was said; None for anything else."""
    if text is None:
        return default
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 and 0 < int(text) <= most else None


def seen_by(request: Request) -> Token:
    """What the caller has seen: all that `after` holds. Raises BadToken."""
    return Token.merged(Token.parse(text) for text in request.query_params.getlist("after"))


def refuse_unknown(request: Request, known: set[str]) -> None:
    """A filter with a typing error would be passed over in silence. Raises Problem 422."""
    errors = []
    names = [name for name, _ in request.query_params.multi_items()]
    for name in dict.fromkeys(names):
        if name not in known:
            errors.append((f"query.{name}", "There is no such parameter."))
        elif name != "after" and names.count(name) > 1:
            errors.append((f"query.{name}", "It may come once."))
    if errors:
        raise invalid(errors)


@contextmanager
def as_problems() -> Iterator[None]:
    """Named errors of reading as problems."""
    try:
        yield
    except SamefoldError as error:
        if refused := _REFUSED.get(type(error)):
            raise refused(error.message, cure=error.cure) from None
        raise logged(error) from error
