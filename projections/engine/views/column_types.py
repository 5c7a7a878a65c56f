"""The types that a column can have: one class per type, with everything that the engine knows about it.

A value is *exact* when the database returns it unchanged. `exact` makes one value exact, or refuses it with BadRow;
`are_exact` checks many values at once.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation
from enum import Enum, StrEnum
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, LiteralString
from uuid import UUID

import msgspec
from psycopg import sql

from domain.engine.value_limits import LARGEST_INT, MOST_DIGITS, SMALLEST_INT
from domain.language import in_utc
from projections.engine.views import binary_arrays
from projections.engine.views.binary_arrays import BinaryArray

Values = Sequence[Any]

MOST_LENGTH = 1 << 24
"""Longest text in characters, longest value of bytes."""

PREFIX_CHARS = 100
"""Of a text, an index has these, and pages are sorted by them."""
MOST_KEY_BYTES = 2_000
"""Most bytes that a key's texts, bytes and decimals may take together. An index entry has 2,704 for everything."""

EXACT = Context(prec=3 * MOST_DIGITS, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[Inexact, InvalidOperation])
"""For decimals. Python's own context rounds to 28 digits; `numeric` does not."""


class BadRow(ValueError):
    """A view's function made a row or key that the database can't hold, or would return changed.

    `path` leads from a column to the part of its value that is meant: `[3].price`.
    """

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.path = path


class Scalar(StrEnum):
    """The types by name, as they stand in a view's shape."""

    BOOL = "bool"
    INT = "int"
    STR = "str"
    DATE = "date"
    DATETIME = "datetime"
    DECIMAL = "decimal"
    UUID = "uuid"
    BYTES = "bytes"
    FLOAT = "float"
    TIME = "time"
    TIMEDELTA = "timedelta"
    JSON = "json"
    LIST = "list"
    TUPLE = "tuple"
    DICT = "dict"
    RECORD = "record"


class ColumnType:
    """One type. The defaults fit a type whose values are all exact when they are of its class."""

    python: type
    """The class of exact values."""
    sql_name: str
    """PostgreSQL's name of it."""
    collation: str | None = None
    """Of a text, where it is not the database's."""
    copied_as: str | None = None
    """PostgreSQL's name for binary COPY, where it is another."""
    sent_as_text: bool = False
    """Whether arrays of it travel as texts."""
    index_bytes: int | None = 0
    """Most bytes that a value takes in an index beyond the 16 that any value may; None where no index may have it."""
    is_cut = False
    """Whether an index has only the beginning of the value."""
    form: str
    """How a value is written, for error messages."""
    text: re.Pattern[str] | None = None
    """What a text in a URL must look like: Python's own parsers also take spaces, underscores, weeks and any alphabet's digits."""
    read: Callable[[str], Any]
    """Reads such a text. Raises ValueError."""
    schema: Mapping[str, Any]
    """JSON schema of a value in a row."""

    to_database: Callable[[Any], Any] | None = None
    """Turns a row's value into the stored one; None where they are the same. Not called with None."""
    loaded: LiteralString = "{}"
    """SQL that reads a column, where psycopg's own way would lose or cost something."""
    from_database: Callable[[Any], Any] | None = None
    """Turns what `loaded` gives into the row's value; None where they are the same. Raises ValueError. Not called with None."""
    as_stored: Callable[[Any], Any] | None = None
    """Turns what `loaded` gives into what `to_database` had made; None where they are the same. Not called with None."""
    is_filterable: bool = True
    """Whether a page can be filtered by a value, which is then a text in a URL."""

    to_json: Callable[[Any], Any] | None = None
    """Turns a value within a column of `nested_types` into what msgspec encodes; None where they are the same."""
    from_json: Callable[[Any], Any] | None = None
    """Turns what msgspec decodes as `json_type` into the value; None where they are the same."""
    json_type: Any = None
    """None where it is `python`."""
    copied: Callable[[Any], Any] | None = None
    """Copies what can be changed in place; None where nothing can be."""

    def exact(self, value: Any) -> Any:
        """The value as the database returns it. Raises BadRow."""
        _require(value, self.python)
        return value

    def are_exact(self, values: Values) -> bool:  # noqa: ARG002
        """Whether all of these, which are of exactly the class `python`, are exact."""
        return True

    def size(self, value: Any) -> int:  # noqa: ARG002
        """Bytes that a value takes in a key, beyond the 16 that any value may; or those of its JSON, if it has parts."""
        return 0

    def longest(self, values: Values) -> int:  # noqa: ARG002
        """An upper bound of these values' sizes."""
        return 0

    def pack(self, values: Values) -> BinaryArray:
        """Stored values, or None, as PostgreSQL's array."""
        raise NotImplementedError

    def parse(self, text: str) -> Any:
        """The value that a text in a URL stands for. Raises ValueError."""
        if self.text is not None and self.text.fullmatch(text) is None:
            raise ValueError
        return self.read(text)

    def shown(self, value: sql.Composed) -> sql.Composed:
        """SQL for the value in a row's JSON, without loss."""
        return value

    def ordered(self, value: sql.Composed) -> sql.Composed:
        """SQL for what indexes hold of the value, and pages are sorted by."""
        return value


class _Bool(ColumnType):
    python, sql_name = bool, "bool"
    form = "true or false"
    schema: Mapping[str, Any] = {"type": "boolean"}

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.fixed(binary_arrays.BOOL, 1, "?", values)

    def parse(self, text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError
        return text == "true"


class _Int(ColumnType):
    python, sql_name = int, "int8"
    form = "a whole number between -2**63 and 2**63 - 1"
    schema: Mapping[str, Any] = {"type": "integer", "minimum": SMALLEST_INT, "maximum": LARGEST_INT}
    bounds = SMALLEST_INT, LARGEST_INT
    text, read = re.compile(r"-?[0-9]{1,1000}"), int
    pack = staticmethod(binary_arrays.bigints)
    beyond = "it does not fit into 64 bits"

    def exact(self, value: Any) -> int:
        _require(value, int)
        exact = value if type(value) is int else int.__int__(value)
        if not self.bounds[0] <= exact <= self.bounds[1]:
            raise BadRow(self.beyond)
        return exact

    def are_exact(self, values: Values) -> bool:
        try:  # takes a quarter of the time of `min` and `max`
            return bool(struct.pack(f"{len(values)}q", *values))
        except struct.error:
            return bool(self.bounds[0] <= min(values) and max(values) <= self.bounds[1])

    def parse(self, text: str) -> int:
        number: int = super().parse(text)
        if not self.bounds[0] <= number <= self.bounds[1]:
            raise ValueError
        return number


class _Numeric(ColumnType):
    sql_name, sent_as_text = "numeric", True

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.texts([None if value is None else _number(value) for value in values])


class _SumOfInts(_Numeric, _Int):
    """The sum of whole numbers, which has no bound."""

    form = "a whole number"
    schema: Mapping[str, Any] = {"type": "integer"}
    bounds = 1 - 10**MOST_DIGITS, 10**MOST_DIGITS - 1
    beyond = f"it has more than {MOST_DIGITS} digits"
    from_database = int


class _Decimal(_Numeric):
    python = Decimal
    index_bytes = MOST_DIGITS + 16  # two bytes hold four digits, of which there are as many behind the point
    form = "a decimal number: 12.50"
    text, read = re.compile(r"-?[0-9]{1,1000}(\.[0-9]{1,1000})?"), Decimal
    schema: Mapping[str, Any] = {"type": "string", "pattern": r"^-?[0-9]+(\.[0-9]+)?$"}

    @staticmethod
    def to_json(value: Decimal) -> Decimal | str:
        """Without an exponent, as `shown`; of most numbers msgspec writes none."""
        return value if value.adjusted() >= -6 else f"{value:f}"

    def exact(self, value: Any) -> Decimal:
        _require(value, Decimal, int)
        exact = value if type(value) is Decimal else Decimal(value)
        exponent = exact.as_tuple().exponent
        if not isinstance(exponent, int):
            raise BadRow("it is not a finite number")
        if exact.adjusted() >= MOST_DIGITS or exponent < -MOST_DIGITS:
            raise BadRow(f"it has more than {MOST_DIGITS} digits before or after the point")
        if exponent > 0:
            exact = EXACT.quantize(exact, Decimal(1))
        return exact.copy_abs() if exact.is_signed() and not exact else exact

    def are_exact(self, values: Values) -> bool:
        try:
            return all(self.exact(value) is value for value in values)
        except BadRow:
            return False

    def size(self, value: Any) -> int:
        return len(str(value))

    def longest(self, values: Values) -> int:
        return max(map(len, map(str, values)))

    def shown(self, value: sql.Composed) -> sql.Composed:
        return sql.SQL("{}::text").format(value)


class _KeyDecimal(_Decimal):
    """Equal numbers are one key, so they must be one value: trailing zeros are dropped."""

    def exact(self, value: Any) -> Decimal:
        number = super().exact(value)
        normal = super().exact(EXACT.normalize(number))
        return number if number.as_tuple() == normal.as_tuple() else normal


class _Str(ColumnType):
    python: type = str
    sql_name = "text"
    index_bytes: int | None = 4 * PREFIX_CHARS + 4
    is_cut = True
    form = "a text without U+0000"
    schema: Mapping[str, Any] = {"type": "string", "pattern": r"^[^\x00]*$"}
    pack = staticmethod(binary_arrays.texts)

    def exact(self, value: Any) -> str:
        _require(value, str)
        exact = value if type(value) is str else str.__str__(value)
        if not is_storable(exact):
            raise BadRow("it contains a NUL or half a surrogate pair")
        if len(exact) > MOST_LENGTH:
            raise BadRow(f"it is longer than {MOST_LENGTH} characters")
        return exact

    def are_exact(self, values: Values) -> bool:
        together = "".join(values)
        return is_storable(together) and (len(together) <= MOST_LENGTH or max(map(len, values)) <= MOST_LENGTH)

    def size(self, value: Any) -> int:
        return len(value.encode())

    def longest(self, values: Values) -> int:
        return 4 * max(map(len, values))

    def parse(self, text: str) -> str:
        if not is_storable(text):
            raise ValueError
        return text

    def ordered(self, value: sql.Composed) -> sql.Composed:
        """In the order of code points, which is the same on every system."""
        return sql.SQL('left({}, {}) collate "C"').format(value, sql.Literal(PREFIX_CHARS))


class _KeyStr(_Str):
    """Sorted by bytes, as Python sorts, so that all batches lock rows in one order on every system."""

    collation = "C"
    is_cut, ordered = False, ColumnType.ordered


class _EnumOf(_Str):
    """An enum of texts, stored as the members' values."""

    exact, are_exact = ColumnType.exact, ColumnType.are_exact
    is_cut = False

    def __init__(self, enum: type[Enum], *, is_key: bool) -> None:
        words = [member.value for member in enum]
        self.python = self.from_database = enum
        self.to_database = attrgetter("value")
        self.collation = (_KeyStr if is_key else _Str).collation
        self.schema = {"type": "string", "enum": words}
        self.form = f"one of: {', '.join(words)}"
        self._longest = max(len(word.encode()) for word in words)
        self.index_bytes = self._longest

    def size(self, value: Any) -> int:  # noqa: ARG002
        return self._longest

    def longest(self, values: Values) -> int:  # noqa: ARG002
        return self._longest

    def ordered(self, value: sql.Composed) -> sql.Composed:
        return sql.SQL('{} collate "C"').format(value)

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.texts([None if value is None else value.value for value in values])

    def parse(self, text: str) -> str:
        word: str = self.python(text).value
        return word


class _Date(ColumnType):
    python, sql_name = date, "date"
    form = "a day: 2026-11-21"
    text, read = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"), date.fromisoformat
    schema: Mapping[str, Any] = {"type": "string", "format": "date"}

    def exact(self, value: Any) -> date:
        _require(value, date)
        return value if type(value) is date else date(value.year, value.month, value.day)

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.fixed(binary_arrays.DATE, 4, "i", values, lambda day: day.toordinal() - _EPOCH_DAY)


class _Datetime(ColumnType):
    python, sql_name = datetime, "timestamptz"
    form = "a time with its zone: 2026-11-21T19:00:00Z"
    text = re.compile(
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+ -][0-9]{2}:[0-9]{2})", re.IGNORECASE
    )
    schema: Mapping[str, Any] = {"type": "string", "format": "date-time"}

    @staticmethod
    def read(text: str) -> datetime:
        """In UTC: PostgreSQL takes offsets of less than 16 hours only. A space is what became of a plus in an address."""
        return in_utc(datetime.fromisoformat(text.replace(" ", "+")))

    def exact(self, value: Any) -> datetime:
        _require(value, datetime)
        try:
            utc = in_utc(value)
        except ValueError as error:
            raise BadRow(str(error)) from None
        if value is utc and type(value) is datetime and not value.fold:
            return value
        return datetime(utc.year, utc.month, utc.day, utc.hour, utc.minute, utc.second, utc.microsecond, UTC)

    def are_exact(self, values: Values) -> bool:
        in_utc = all(map(is_, map(attrgetter("tzinfo"), values), repeat(UTC)))
        return in_utc and not any(map(attrgetter("fold"), values))

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.fixed(
            binary_arrays.TIMESTAMPTZ, 8, "q", values, lambda time: (time - _EPOCH) // _MICROSECOND
        )


class _Time(ColumnType):
    python, sql_name = time, "time"
    form = "a time of day, without a zone: 19:00:00"
    text, read = re.compile(r"[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?"), time.fromisoformat
    schema: Mapping[str, Any] = {
        "type": "string",
        "pattern": r"^([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]{1,6})?)?$",
    }

    def exact(self, value: Any) -> time:
        _require(value, time)
        if value.tzinfo is not None:
            raise BadRow("it has a time zone, which a time of day can't have: use a datetime")
        return value if type(value) is time and not value.fold else time(*_parts_of(value))

    def are_exact(self, values: Values) -> bool:
        return not any(value.fold or value.tzinfo is not None for value in values)

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.fixed(binary_arrays.TIME, 8, "q", values, _microseconds)


class _Timedelta(ColumnType):
    """An interval of days and microseconds, never of months, whose lengths differ. In JSON as in events."""

    python, sql_name = timedelta, "interval"
    form = "an ISO 8601 duration without years, months and weeks: P1DT90.5S"
    text = re.compile(
        r"-?P(?=[0-9T])([0-9]{1,9}D)?(T(?=[0-9])([0-9]{1,9}H)?([0-9]{1,9}M)?([0-9]{1,14}(\.[0-9]{1,6})?S)?)?"
    )
    schema: Mapping[str, Any] = {"type": "string", "pattern": f"^{text.pattern}$"}

    def exact(self, value: Any) -> timedelta:
        _require(value, timedelta)
        return value if type(value) is timedelta else timedelta(value.days, value.seconds, value.microseconds)

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.intervals(values)

    def read(self, text: str) -> timedelta:
        return msgspec.convert(text, timedelta)

    def shown(self, value: sql.Composed) -> sql.Composed:
        return _DURATION.format(value)


_DURATION = sql.SQL(
    "(select case when s < 0 then '-P' else 'P' end"
    " || case when abs(s) between 0.000001 and 86399.999999 then '' else div(abs(s), 86400) || 'D' end"
    " || case when mod(s, 86400) = 0 then '' else 'T' || trim_scale(mod(abs(s), 86400)) || 'S' end"
    " from extract(epoch from {}) s)"
)
"""Of an interval without months, as msgspec writes it."""


class _Float(ColumnType):
    python, sql_name = float, "float8"
    form = "a number: 0.25"
    text, read = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?([eE][+-]?[0-9]{1,3})?"), float
    schema: Mapping[str, Any] = {"type": "number"}

    def exact(self, value: Any) -> float:
        """Of a whole number too, if a float can hold it."""
        _require(value, float, int)
        try:
            exact = float.__float__(value) if isinstance(value, float) else float(value)
        except OverflowError:
            exact = math.inf
        if not math.isfinite(exact):
            raise BadRow("it is not a finite number")
        if exact != value:
            raise BadRow("a float can't hold this whole number: it has too many digits")
        if not exact:
            return 0.0 if math.copysign(1, exact) < 0 or type(value) is not float else value
        return value if type(value) is float else exact

    def are_exact(self, values: Values) -> bool:
        return all(map(math.isfinite, values)) and not any(math.copysign(1, value) < 0 for value in values if not value)

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.fixed(binary_arrays.FLOAT8, 8, "d", values)

    def parse(self, text: str) -> float:
        if not math.isfinite(number := float(super().parse(text))):
            raise ValueError
        return number or 0.0


class _Uuid(ColumnType):
    python, sql_name = UUID, "uuid"
    form = "a UUID"
    read = UUID
    schema: Mapping[str, Any] = {"type": "string", "format": "uuid"}

    def exact(self, value: Any) -> UUID:
        _require(value, UUID)
        return value if type(value) is UUID else UUID(int=value.int)

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.variable(binary_arrays.UUID, [value if value is None else value.bytes for value in values])


class _Bytes(ColumnType):
    python, sql_name, index_bytes = bytes, "bytea", None
    form = "base64 of the bytes"
    schema: Mapping[str, Any] = {"type": "string", "contentEncoding": "base64"}

    def exact(self, value: Any) -> bytes:
        _require(value, bytes, bytearray, memoryview)
        exact = value if type(value) is bytes else bytes(value)
        if len(exact) > MOST_LENGTH:
            raise BadRow(f"it is longer than {MOST_LENGTH} bytes")
        return exact

    def are_exact(self, values: Values) -> bool:
        return max(map(len, values)) <= MOST_LENGTH

    def size(self, value: Any) -> int:
        return len(value)

    def longest(self, values: Values) -> int:
        return max(map(len, values))

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.variable(binary_arrays.BYTEA, values)

    def parse(self, text: str) -> bytes:
        return base64.b64decode(text, validate=True)

    def shown(self, value: sql.Composed) -> sql.Composed:
        """Base64 without line breaks."""
        return sql.SQL("translate(encode({}, 'base64'), E'\\n', '')").format(value)


class _Json(ColumnType):
    """A state as JSON text, for snapshot views only. Binary COPY sends it as bytes."""

    python, sql_name, copied_as, index_bytes = bytes, "json", "bytea", None
    loaded, as_stored = "{}::text", staticmethod(str.encode)
    form = "JSON"
    schema: Mapping[str, Any] = {}

    def pack(self, values: Values) -> BinaryArray:
        return binary_arrays.variable(binary_arrays.JSON, values)


_TYPES: dict[Scalar, ColumnType] = {
    Scalar.BOOL: _Bool(),
    Scalar.INT: _Int(),
    Scalar.STR: _Str(),
    Scalar.DATE: _Date(),
    Scalar.DATETIME: _Datetime(),
    Scalar.DECIMAL: _Decimal(),
    Scalar.UUID: _Uuid(),
    Scalar.BYTES: _Bytes(),
    Scalar.FLOAT: _Float(),
    Scalar.TIME: _Time(),
    Scalar.TIMEDELTA: _Timedelta(),
    Scalar.JSON: _Json(),
}
_OF_KEYS: dict[Scalar, ColumnType] = {Scalar.STR: _KeyStr(), Scalar.DECIMAL: _KeyDecimal()}
_OF_SUMS: dict[Scalar, ColumnType] = {Scalar.INT: _SumOfInts()}

SCALARS: dict[type, Scalar] = {one.python: scalar for scalar, one in _TYPES.items() if scalar is not Scalar.JSON}
"""The types by the class that an author writes."""


def type_of(
    scalar: Scalar, enum: type[Enum] | None = None, *, is_key: bool = False, is_sum: bool = False
) -> ColumnType:
    """The type of a column."""
    if enum is not None:
        return _EnumOf(enum, is_key=is_key)
    special = (is_key and _OF_KEYS.get(scalar)) or (is_sum and _OF_SUMS.get(scalar))
    return special or _TYPES[scalar]


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can hold the text: it has no NUL and no lone half of a surrogate pair."""
    if "\0" in text:
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _require(value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise BadRow("it is not declared as `… | None`" if value is None else "it is of another type")


def _number(value: Any) -> str:
    if type(value) is float:
        raise TypeError(f"{value!r} is a float, but sums and decimals are exact")
    return str(value)


def _parts_of(value: time) -> tuple[int, int, int, int]:
    return value.hour, value.minute, value.second, value.microsecond


def _microseconds(value: time) -> int:
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


_EPOCH_DAY = date(2000, 1, 1).toordinal()
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
