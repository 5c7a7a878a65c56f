"""The columns of a view, read from its row class.

`Key[str]` is `str` to the type checker and a key column to the engine. `Sum`, `Min` and `Max` mark how a summary's
columns combine; all three give the same result in any order and grouping, which lets each partition keep its own share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from infra.errors import SamefoldError

T = TypeVar("T")

PARTITION = "_partition"
"""The hidden column of every view's table: the partition of the log its row was folded from."""


class Role(StrEnum):
    PLAIN = "plain"
    KEY = "key"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


Key = Annotated[T, Role.KEY]
Sum = Annotated[T, Role.SUM]
Min = Annotated[T, Role.MIN]
Max = Annotated[T, Role.MAX]


class BadView(SamefoldError):
    """A module in `projections/` is not a view as the engine understands one."""


class Scalar(StrEnum):
    """What a column stores; the value is the name used in shapes."""

    BOOL = "bool"
    INT = "int"
    STR = "str"
    DATE = "date"
    DATETIME = "datetime"
    DECIMAL = "decimal"
    UUID = "uuid"
    BYTES = "bytes"
    JSON = "json"


_SCALARS: dict[type, Scalar] = {
    bool: Scalar.BOOL,
    int: Scalar.INT,
    str: Scalar.STR,
    date: Scalar.DATE,
    datetime: Scalar.DATETIME,
    Decimal: Scalar.DECIMAL,
    UUID: Scalar.UUID,
    bytes: Scalar.BYTES,
}

SQL_TYPES = {
    Scalar.BOOL: "bool",
    Scalar.INT: "int8",
    Scalar.STR: "text",
    Scalar.DATE: "date",
    Scalar.DATETIME: "timestamptz",
    Scalar.DECIMAL: "numeric",
    Scalar.UUID: "uuid",
    Scalar.BYTES: "bytea",
}
"""PostgreSQL's names of what authors' columns store; sums are `numeric` whatever they add up."""

_COMBINABLE = {
    Role.SUM: (Scalar.INT, Scalar.DECIMAL),
    Role.MIN: (Scalar.INT, Scalar.DECIMAL, Scalar.DATE, Scalar.DATETIME),
    Role.MAX: (Scalar.INT, Scalar.DECIMAL, Scalar.DATE, Scalar.DATETIME),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, what it stores, whether it may be null, and its part in the key or in a summary."""

    name: str
    scalar: Scalar
    optional: bool = False
    role: Role = Role.PLAIN
    enum: type[Enum] | None = None

    @property
    def is_key(self) -> bool:
        return self.role is Role.KEY

    @property
    def numeric(self) -> bool:
        """Stored as PostgreSQL's `numeric`: sums, which have no bound, and decimals."""
        return self.role is Role.SUM or self.scalar is Scalar.DECIMAL

    @property
    def to_database(self) -> Callable[[Any], Any] | None:
        """Turns the row's value into the stored one; None where they are the same. Neither is called with None."""
        return _value_of if self.enum is not None else None

    @property
    def from_database(self) -> Callable[[Any], Any] | None:
        """Turns a stored value, as psycopg loads it, into the row's; None where they are the same."""
        if self.enum is not None:
            return self.enum
        return int if self.role is Role.SUM and self.scalar is Scalar.INT else None

    @property
    def shape(self) -> str:
        return f"{self.name}:{self.scalar}{'?' if self.optional else ''}:{self.role}"


def _value_of(member: Enum) -> Any:
    return member.value


def columns_of(row: type, view: str) -> tuple[Column, ...]:
    """The columns a row class declares, in order. Raises BadView naming the field and what is wrong with it."""
    hints = get_type_hints(row, include_extras=True)
    # a class derived from one may annotate more than its rows hold
    if not issubclass(row, tuple) or getattr(row, "_fields", None) != tuple(hints):
        raise BadView(
            f"View '{view}': its row {row.__name__} is not a NamedTuple.",
            f"Write `class {row.__name__}(NamedTuple):`, with a line like `cents: int` for each column.",
        )
    return tuple(_column(view, name, hint) for name, hint in hints.items())


def _column(view: str, name: str, hint: Any) -> Column:
    if name != name.lower() or len(name) > 60:
        raise BadView(
            f"View '{view}': column '{name}' has a name that PostgreSQL or the engine needs otherwise.",
            "Use lower case letters, digits and underscores, a letter first, at most 60 characters.",
        )
    role, plain = _unwrap(hint)
    optional = False
    if get_origin(plain) in (Union, UnionType):
        members = [member for member in get_args(plain) if member is not NoneType]
        if len(members) != 1 or len(members) == len(get_args(plain)):
            raise _unknown(view, name, hint)
        optional = True
        _, plain = _unwrap(members[0])
    scalar, enum = _scalar(plain)
    if scalar is None:
        raise _unknown(view, name, hint)
    if optional and role is not Role.PLAIN:
        raise BadView(f"View '{view}': {role} column '{name}' can't be None.", "Leave out `| None`.")
    if role in _COMBINABLE and (scalar not in _COMBINABLE[role] or enum is not None):
        allowed = ", ".join(_COMBINABLE[role])
        raise BadView(f"View '{view}': column '{name}' is a {role} of {scalar}.", f"A {role} is one of {allowed}.")
    return Column(name, scalar, optional, role, enum)


def _unwrap(hint: Any) -> tuple[Role, Any]:
    """A hint without Annotated and NewType, and the role that was among the annotations."""
    role = Role.PLAIN
    while True:
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            role = next((extra for extra in extras if isinstance(extra, Role)), role)
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        else:
            return role, hint


def _scalar(plain: Any) -> tuple[Scalar | None, type[Enum] | None]:
    if get_origin(plain) is Literal and all(type(value) is str for value in get_args(plain)):
        return Scalar.STR, None
    if isinstance(plain, type) and issubclass(plain, Enum):
        # a member is stored as its value, and read back by it
        fits = all(type(one.value) is str and is_storable(one.value) and plain(one.value) is one for one in plain)
        return (Scalar.STR, plain) if fits and len(plain) else (None, None)
    return _SCALARS.get(plain), None


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can hold it: no NUL, and no lone half of a surrogate pair, which is no character."""
    if "\0" in text:
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _unknown(view: str, name: str, hint: Any) -> BadView:
    return BadView(
        f"View '{view}': column '{name}' has the type {hint}, for which there is no column.",
        "A column is bool, int, str, date, datetime, Decimal, UUID, bytes, an Enum or Literal of strings, "
        "or one of these `| None`.",
    )
