"""A column's values as text: how they are written in a URL, and how a row's JSON and its schema show them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from infra.errors import SamefoldError
from projections.engine.views.columns import Column, Role, Scalar, is_storable

LARGEST_INT = 2**63 - 1

_WHOLE = re.compile(r"-?[0-9]{1,1000}")
_NUMBER = re.compile(r"-?[0-9]{1,1000}(\.[0-9]{1,1000})?")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})", re.IGNORECASE
)


class BadValue(SamefoldError):
    """A text is no value of a view's column."""

    is_public = True


def value_of(column: Column, text: str) -> Any:
    """The column's value that `text` stands for, as psycopg sends it. Raises BadValue, which does not quote the text."""
    try:
        return _READ[column.scalar](column, text)
    except ValueError as error:
        raise BadValue(f"That is no value of column '{column.name}'.", f"It is {_FORMS[column.scalar]}.") from error


def schema_of(column: Column) -> dict[str, Any]:
    """JSON schema of the column's values in a row."""
    plain = dict(_SCHEMAS[column.scalar])
    if column.enum is not None:
        plain = {"type": "string", "enum": [member.value for member in column.enum]}
    if column.role is Role.SUM and column.scalar is Scalar.INT:
        plain = {"type": "integer"}  # has no bound
    return {"anyOf": [plain, {"type": "null"}]} if column.optional else plain


def _text(column: Column, text: str) -> str:
    if not is_storable(text):
        raise ValueError
    if column.enum is not None:
        column.enum(text)
    return text


def _int(column: Column, text: str) -> int:
    number = int(_like(_WHOLE, text))
    if column.role is not Role.SUM and not -LARGEST_INT - 1 <= number <= LARGEST_INT:
        raise ValueError
    return number


def _decimal(_column: Column, text: str) -> Decimal:
    return Decimal(_like(_NUMBER, text))


def _bool(_column: Column, text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _date(_column: Column, text: str) -> date:
    return date.fromisoformat(_like(_DAY, text))


def _datetime(_column: Column, text: str) -> datetime:
    return datetime.fromisoformat(_like(_MOMENT, text))


def _uuid(_column: Column, text: str) -> UUID:
    return UUID(text)


def _bytes(_column: Column, text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _like(form: re.Pattern[str], text: str) -> str:
    """Python's own readers take spaces, underscores, weeks, and every alphabet's digits."""
    if form.fullmatch(text) is None:
        raise ValueError
    return text


def _never(_column: Column, _text: str) -> Any:
    raise AssertionError("no author's view has such a column")


_READ: dict[Scalar, Callable[[Column, str], Any]] = {
    Scalar.BOOL: _bool,
    Scalar.INT: _int,
    Scalar.STR: _text,
    Scalar.DATE: _date,
    Scalar.DATETIME: _datetime,
    Scalar.DECIMAL: _decimal,
    Scalar.UUID: _uuid,
    Scalar.BYTES: _bytes,
    Scalar.JSON: _never,
}

_FORMS: dict[Scalar, str] = {
    Scalar.BOOL: "true or false",
    Scalar.INT: "a whole number between -2**63 and 2**63 - 1",
    Scalar.STR: "a text without U+0000, or one of the column's own words",
    Scalar.DATE: "a day: 2026-11-21",
    Scalar.DATETIME: "a time with its zone: 2026-11-21T19:00:00Z",
    Scalar.DECIMAL: "a decimal number: 12.50",
    Scalar.UUID: "a UUID",
    Scalar.BYTES: "base64 of the bytes",
    Scalar.JSON: "JSON",
}

_SCHEMAS: dict[Scalar, dict[str, Any]] = {
    Scalar.BOOL: {"type": "boolean"},
    Scalar.INT: {"type": "integer", "minimum": -LARGEST_INT - 1, "maximum": LARGEST_INT},
    Scalar.STR: {"type": "string", "pattern": r"^[^\x00]*$"},
    Scalar.DATE: {"type": "string", "format": "date"},
    Scalar.DATETIME: {"type": "string", "format": "date-time"},
    Scalar.DECIMAL: {"type": "string", "pattern": r"^-?[0-9]+(\.[0-9]+)?$"},
    Scalar.UUID: {"type": "string", "format": "uuid"},
    Scalar.BYTES: {"type": "string", "contentEncoding": "base64"},
    Scalar.JSON: {},
}
