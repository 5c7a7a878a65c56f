"""What `access.py` imports: the caller, and the rows that an answer depends on.

def may_send(caller: Caller, stream: str, command: object) -> bool | Row
def may_read(caller: Caller, view: str) -> bool | Rows
def may_operate(caller: Caller, right: Right) -> bool    # only where the console is on
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias

from infra.errors import SamefoldError

MODULE = "access"


class BadAccess(SamefoldError):
    """The rules of who may do what are missing, or can't be applied."""

    is_defect = True


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller: the token's subject, its roles, its scopes, and all its claims."""

    subject: str
    roles: frozenset[str] = frozenset()
    scopes: frozenset[str] = frozenset()
    claims: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Rows:
    """The rows whose columns have these values: `Rows(owner="ada")`. `Rows(owner="ada") | Rows(branch=7)` are those of either."""

    __slots__ = ("any_of",)

    def __init__(self, **columns: Any) -> None:
        """Values are of the column's own type. With None there are no rows: a row without a value has no owner."""
        if not columns:
            raise ValueError("Rows() names no column: return True for all rows")
        is_nobodys = any(value is None for value in columns.values())
        self.any_of: tuple[tuple[tuple[str, Any], ...], ...] = () if is_nobodys else (tuple(sorted(columns.items())),)

    def __bool__(self) -> bool:
        """Whether there can be any."""
        return bool(self.any_of)

    def __or__(self, other: Rows) -> Rows:
        both = object.__new__(Rows)
        both.any_of = self.any_of + other.any_of
        return both

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.any_of == other.any_of

    def __hash__(self) -> int:
        return hash(self.any_of)

    def __repr__(self) -> str:
        found = (f"Rows({', '.join(f'{name}={value!r}' for name, value in one)})" for one in self.any_of)
        return " | ".join(found) or "no rows"

    @property
    def shape(self) -> tuple[tuple[str, ...], ...]:
        """The columns, without their values: what the SQL depends on."""
        return tuple(tuple(name for name, _ in one) for one in self.any_of)


class Row:
    """Allowed if the view has this row: `Row("purses", purse="7", owner="ada")`. Its key must be among the columns."""

    __slots__ = ("columns", "view")

    def __init__(self, view: str, /, **columns: Any) -> None:
        self.view = view
        self.columns = columns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and (self.view, self.columns) == (other.view, other.columns)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Row({', '.join([repr(self.view), *(f'{name}={value!r}' for name, value in self.columns.items())])})"


Right: TypeAlias = Literal["look", "change", "see personal values"]
"""In the console: at its pages, by its buttons, and what is sealed elsewhere."""
MaySend: TypeAlias = Callable[[Caller, str, object], bool | Row]
MayRead: TypeAlias = Callable[[Caller, str], bool | Rows]
MayOperate: TypeAlias = Callable[[Caller, Right], bool]


class Access(NamedTuple):
    """The functions of the service's `access.py`. Without `may_operate` nobody may use the console."""

    may_send: MaySend
    may_read: MayRead
    may_operate: MayOperate = lambda _caller, _right: False


@cache
def access() -> Access:
    """The service's own. Raises BadAccess; whatever the file itself raises."""
    try:
        module = import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            raise
        raise BadAccess(
            f"There is no {MODULE}.py, which says who may send and read what.",
            "Write it next to domain/: docs/access.md.",
        ) from None
    found = []
    for name, parameters in (("may_send", 3), ("may_read", 2), ("may_operate", 2)):
        function = getattr(module, name, None)
        if function is None and name in Access._field_defaults:
            continue
        if not callable(function) or len(inspect.signature(function).parameters) != parameters:
            raise BadAccess(
                f"{MODULE}.py has no function {name} with {parameters} parameters.",
                "What it must look like: docs/access.md.",
            )
        found.append(function)
    return Access(*found)
