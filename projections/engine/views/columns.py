"""The columns of a view, read from its row class.

`Key[str]` is `str` to the type checker and a key column to the engine. `Sum`, `Min`, `Max`, `Latest` and `First` mark how a
summary's columns combine; all give the same result in any order and grouping, so each partition can keep its own subtotal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic.json_schema import GenerateJsonSchema

from domain.engine.storable import NotExact, require_plain
from infra.errors import SamefoldError
from projections.engine.views.column_types import SCALARS, BadRow, ColumnType, Scalar, is_storable, type_of
from projections.engine.views.nested_types import nested_type

T = TypeVar("T")

PARTITION = "_partition"
"""The hidden column of every view's table: the partition of the log that the row was folded from."""


MOST_NAME_BYTES = 60
"""Of a column's name. PostgreSQL would cut it after 63."""
_SYSTEM_COLUMNS = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}
"""Every table of PostgreSQL has these."""


class Role(StrEnum):
    PLAIN = "plain"
    KEY = "key"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LATEST = "latest"
    FIRST = "first"


Key = Annotated[T, Role.KEY]
Sum = Annotated[T, Role.SUM]
Min = Annotated[T, Role.MIN]
Max = Annotated[T, Role.MAX]
Latest = Annotated[T, Role.LATEST]
First = Annotated[T, Role.FIRST]

AGGREGATES: Mapping[str, str] = {
    Role.SUM: "sum({0})",
    Role.MIN: "min({0})",
    Role.MAX: "max({0})",
    Role.LATEST: "(array_agg({0} order by {1} desc nulls last))[1]",
    Role.FIRST: "(array_agg({0} order by {1} nulls last))[1]",
}
"""SQL that combines the subtotals of a summary's column {0}. {1} is the column of its places (`place_name`)."""


class BadView(SamefoldError):
    """A module in `projections/` is not a valid view."""


class BadValue(SamefoldError):
    """A text is not a value of a view's column."""

    is_public = True


_COMBINABLE = {
    Role.SUM: (Scalar.INT, Scalar.DECIMAL),
    Role.MIN: (Scalar.INT, Scalar.DECIMAL, Scalar.DATE, Scalar.DATETIME),
    Role.MAX: (Scalar.INT, Scalar.DECIMAL, Scalar.DATE, Scalar.DATETIME),
}


@dataclass(frozen=True)
class Column:
    """One column: its name, what it stores, whether it may be null, and its part in the key or in a summary.

    A column with parts has a column for each: for the items of a list, the values of a dict, the fields of a record.
    """

    name: str
    scalar: Scalar
    optional: bool = False
    role: Role = Role.PLAIN
    enum: type[Enum] | None = None
    parts: tuple[Column, ...] = ()
    record: type | None = None
    """A NamedTuple or dataclass."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the type, which may have functions that no other process knows."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def is_key(self) -> bool:
        return self.role is Role.KEY

    @cached_property
    def type(self) -> ColumnType:
        if self.parts or self.record:
            return nested_type(self)
        return type_of(self.scalar, self.enum, is_key=self.is_key, is_sum=self.role is Role.SUM)

    @property
    def place(self) -> Column | None:
        """Of a Latest or First: the hidden column of the place in the log that its value comes from; null while it has none."""
        extreme = {Role.LATEST: Role.MAX, Role.FIRST: Role.MIN}.get(self.role)
        return Column(place_name(self.name), Scalar.DECIMAL, self.optional, extreme) if extreme else None

    @property
    def shape(self) -> str:
        parts = f"({','.join(part.shape for part in self.parts)})" if self.parts else ""
        return f"{self.name}:{self.scalar}{parts}{'?' if self.optional else ''}:{self.role}"

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of its values in a row."""
        plain = dict(self.type.schema)
        return {"anyOf": [plain, {"type": "null"}]} if self.optional else plain

    def exact(self, value: Any) -> Any:
        """The value as the database returns it. Raises BadRow."""
        if value is None and self.optional:
            return None
        try:
            return self.type.exact(value)
        except BadRow as error:
            name = self.enum.__name__ if self.enum else self.scalar
            where = f"{self.name}{error.path}: " if error.path else ""
            raise BadRow(
                f"column '{self.name}' ({name}) can't hold this {type(value).__name__}: {where}{error}"
            ) from None

    def are_exact(self, values: Sequence[Any]) -> bool:
        """Whether `exact` would return each value unchanged."""
        kinds = set(map(type, values))
        if self.optional and NoneType in kinds:
            values = [value for value in values if value is not None]
            kinds.remove(NoneType)
        return not values or (kinds == {self.type.python} and self.type.are_exact(values))


def place_name(column: str) -> str:
    """No author's column begins with an underscore, and `_partition` has only one."""
    return f"__{column}"


def value_of(column: Column, text: str) -> Any:
    """The column's value that a text in a URL stands for. Raises BadValue, which does not quote the text."""
    try:
        return column.type.parse(text)
    except ValueError as error:
        raise BadValue(f"This is not a value of column '{column.name}'.", f"Send {column.type.form}.") from error


def schema_of(column: Column) -> dict[str, Any]:
    """JSON schema of the column's values in a row."""
    return column.schema


class AsInRows(GenerateJsonSchema):
    """The JSON schema of a fact, with the forms that rows have: pydantic's say RFC 3339's time, which has a zone, and no base64."""

    def bytes_schema(self, _: object) -> dict[str, Any]:
        return dict(type_of(Scalar.BYTES).schema)

    def time_schema(self, _: object) -> dict[str, Any]:
        return dict(type_of(Scalar.TIME).schema)

    def timedelta_schema(self, _: object) -> dict[str, Any]:
        return dict(type_of(Scalar.TIMEDELTA).schema)


def columns_of(row: type, view: str) -> tuple[Column, ...]:
    """The columns that a row class declares, in order. Raises BadView."""
    hints = hints_of(row, f"View '{view}'", BadView)
    # a class derived from a NamedTuple may annotate more fields than its rows hold
    if not issubclass(row, tuple) or getattr(row, "_fields", None) != tuple(hints):
        raise BadView(
            f"View '{view}': its row {row.__name__} is not a NamedTuple.",
            f"Write `class {row.__name__}(NamedTuple):`, with a line like `cents: int` for each column.",
        )
    return tuple(_column(view, name, hint) for name, hint in hints.items())


def hints_of(declared: Any, of: str, bad: type[SamefoldError]) -> dict[str, Any]:
    """The annotations of a class or function of a view or policy. Raises `bad`."""
    try:
        return get_type_hints(declared, include_extras=isinstance(declared, type))
    except NameError as error:
        raise bad(
            f"{of}: an annotation of {declared.__name__} can't be resolved: {error}.",
            "Import the names of annotations at the top of the module (not under TYPE_CHECKING).",
        ) from error


def _column(view: str, name: str, hint: Any) -> Column:
    if name != name.lower() or len(name.encode()) > MOST_NAME_BYTES or name in _SYSTEM_COLUMNS:
        raise BadView(
            f"View '{view}': '{name}' can't be the name of a column.",
            "Use lower case letters, digits and underscores, a letter first, at most 60 characters, and none of PostgreSQL's own: "
            f"{', '.join(sorted(_SYSTEM_COLUMNS))}.",
        )
    role, plain = _unwrap(hint)
    try:
        column = dataclasses.replace(_typed(name, plain, name), role=role)
    except NotExact as error:
        raise BadView(
            f"View '{view}': column '{name}' has the type {hint}, which no column can store: {error}", error.hint
        ) from error
    if role in (Role.LATEST, Role.FIRST) and column.parts:
        raise BadView(
            f"View '{view}': column '{name}' is a {role} of {column.scalar}.",
            f"Use a {role} of values without parts, such as str or int: a column for each.",
        )
    if column.optional and role not in (Role.PLAIN, Role.LATEST, Role.FIRST):
        raise BadView(f"View '{view}': {role} column '{name}' can't be None.", "Remove `| None`.")
    if role is Role.KEY and (column.scalar is Scalar.FLOAT or not column.type.is_filterable):
        raise BadView(
            f"View '{view}': column '{name}' is a key of {column.scalar}, which is no value to find a row by.",
            "Use a column of another type, such as str, int or Decimal, as the key.",
        )
    if role in _COMBINABLE and (column.scalar not in _COMBINABLE[role] or column.enum is not None):
        allowed = ", ".join(_COMBINABLE[role])
        why = " Floats add up to another sum in another order." if column.scalar is Scalar.FLOAT else ""
        raise BadView(
            f"View '{view}': column '{name}' is a {role} of {column.scalar}.", f"Use a {role} of {allowed}.{why}"
        )
    return column


_OF_MANY: dict[Any, Scalar] = {list: Scalar.LIST, tuple: Scalar.TUPLE, dict: Scalar.DICT}


def _typed(name: str, hint: Any, path: str, within: tuple[type, ...] = ()) -> Column:
    """A column of this type, or a part of one at the path. Raises NotExact."""
    role, plain = _unwrap(hint)
    members = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
    present = [member for member in members if member is not NoneType]
    optional = len(present) < len(members)
    inner, plain = _unwrap(present[0]) if len(present) == 1 else (role, None)
    if {role, inner} != {Role.PLAIN}:
        raise NotExact(
            path,
            "has the mark of a column inside.",
            "Write it around the column's whole type, such as `Latest[int | None]`.",
        )
    scalar, enum = _scalar(plain)
    if scalar is not None:
        return Column(name, scalar, optional, enum=enum)
    origin, arguments = get_origin(plain), get_args(plain)
    of_many = _OF_MANY.get(origin)
    if origin is tuple and arguments[1:] == (...,):
        arguments = arguments[:1]
    if origin is dict and _scalar(_unwrap(arguments[0])[1]) == (Scalar.STR, None):
        arguments = arguments[1:]
    if of_many is not None and len(arguments) == 1:
        return Column(name, of_many, optional, parts=(_typed("[]", arguments[0], f"{path}[]", within),))
    if isinstance(plain, type) and plain not in within:
        fields = [_typed(one, kind, f"{path}.{one}", (*within, plain)) for one, kind in _fields(plain, path)]
        if fields:
            return Column(name, Scalar.RECORD, optional, parts=tuple(fields), record=plain)
    raise NotExact(
        path,
        f"is a {plain.__name__} within a {plain.__name__}." if plain in within else f"is {hint}.",
        "Use bool, int, float, str, date, datetime, time, timedelta, Decimal, UUID, bytes, an Enum or Literal of strings, "
        "list[…], tuple[…, ...], dict[str, …], a NamedTuple or a fact of these, or one of these `| None`.",
    )


def _fields(record: type, path: str) -> list[tuple[str, Any]]:
    """The fields of a NamedTuple or dataclass; another class has none. Raises NotExact, BadView."""
    if dataclasses.is_dataclass(record):
        require_plain(record, path)
        names = tuple(field.name for field in dataclasses.fields(record))
    else:
        names = getattr(record, "_fields", ()) if issubclass(record, tuple) else ()
    hints = hints_of(record, f"Column '{path}'", BadView) if names else {}
    return [(name, hints[name]) for name in names] if hints.keys() >= {*names} else []


def _unwrap(hint: Any) -> tuple[Role, Any]:
    """The role among a hint's annotations, and the hint without Annotated and NewType."""
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
        # a member is stored as its value, and looked up by it
        fits = all(type(one.value) is str and is_storable(one.value) and plain(one.value) is one for one in plain)
        return (Scalar.STR, plain) if fits and len(plain) else (None, None)
    return SCALARS.get(plain), None
