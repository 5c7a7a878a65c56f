"""A view's rows exactly as the database gives them back: checked, and made so, right after the event that made them.

So a row that is folded on is the same whether it was held or read again, in every engine and batch size, and PostgreSQL refuses
no value that has passed here. Values of a subclass become the column's own type, times become UTC, decimals what `numeric`
makes of them; what has no such form is a BadRow, at its event. A row that needs nothing stays the very object it was.

`row` does this for one row. `are` tells of many, a column at a time, whether `row` would leave each as it is: nearly always it
would, and then nobody needs to call it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation
from enum import Enum
from functools import partial
from itertools import filterfalse, repeat
from operator import attrgetter, is_, itemgetter
from types import NoneType
from typing import Any, NamedTuple
from uuid import UUID

from projections.engine.views.columns import Column, Role, Scalar, is_storable
from projections.engine.views.event_context import At
from projections.engine.views.view import View, tuple_getter

MOST_KEY_BYTES = 2_000
"""What a key's texts, bytes and decimals may take together. An entry of an index ends at 2,704, with all else that is in it."""
MOST_LENGTH = 1 << 24
"""Of a text in characters, of bytes."""
MOST_DIGITS = 1_000
"""Of a decimal, before the point and behind it, and of what a sum is given. Any number of those add up within `numeric`."""
SMALLEST_INT, LARGEST_INT = -(2**63), 2**63 - 1
_BEYOND_BOUNDS = 1 - 10**MOST_DIGITS, 10**MOST_DIGITS - 1

EXACT = Context(prec=3 * MOST_DIGITS, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[Inexact, InvalidOperation])
"""For decimals. Python's own context rounds to 28 digits; `numeric` does not."""

Check = Callable[[Any], Any]
Values = Sequence[Any]


class BadRow(ValueError):
    """A view's function made a row, or `key` a key, that the database can't hold, or would not give back."""


class Exact:
    """One view's check, worked out from its columns."""

    def __init__(self, view: View) -> None:
        self._row = view.row
        self._columns = list(map(_exact_column, view.columns))
        self._key_places = view.key_places
        self._key_columns = [self._columns[place] for place in view.key_places]
        self._key_of = tuple_getter(view.key_places)
        self._own_key = itemgetter(*view.key_places) if view.key_function is None else self._key_of
        self._contexts = view.contexts

    def row(self, row: Any) -> Any:
        """The row as the database gives it back. Raises BadRow."""
        if (kind := type(row)) is not self._row:
            raise BadRow(f"a row must be a {self._row.__name__}, not {kind.__name__}")
        values = _checked(self._columns, row)
        self._require_short(self._key_of(values))
        return row if all(map(is_, values, row)) else tuple.__new__(self._row, values)

    def entity(self, key: Any, row: Any) -> Any:
        """The same of the row at this key, which must be the row's own. Raises BadRow."""
        row = self.row(row)
        if (own := self._own_key(row)) != key:
            raise BadRow(f"the row's key is {own!r}, but its event's is {key!r}")
        return row

    def line(self, row: Any, at: At) -> Any:
        """The same of a journal's row, whose key must be its stream's alone. Raises BadRow."""
        row = self.row(row)
        self.require_own(self._key_of(row), at.stream)
        return row

    def require_own(self, key: tuple[Any, ...], stream: str) -> None:
        """Refuse a key that another stream's row could have too: it would belong to whoever comes first.

        A view of one context begins its keys with the stream's id; one of several with the stream's name, or with context and id.
        Raises BadRow.
        """
        context, _, ident = stream.partition("/")
        if len(self._contexts) == 1:
            if not _is_text(key[0], ident):
                raise BadRow("its key may be another stream's too: let it begin with `at.id`")
        elif not (_is_text(key[0], stream) or (len(key) > 1 and _is_text(key[0], context) and _is_text(key[1], ident))):
            raise BadRow("its key may be another stream's too: let it begin with `at.stream`")

    def key(self, key: Any) -> tuple[Any, ...]:
        """What a view's `key` returned, as its row has it. Raises BadRow."""
        if not isinstance(key, tuple):
            raise BadRow(f"`key` must return a tuple, not {type(key).__name__}")
        values = _checked(self._key_columns, key)
        self._require_short(values)
        return values

    def are(self, rows: Values, keys: Values | None = None) -> bool:
        """Whether each row would stay as it is; with `keys`, as the entity at that key, which itself is exact."""
        if not rows:
            return True
        if set(map(type, rows)) != {self._row}:
            return False
        try:
            columns = list(zip(*rows, strict=True))
            if not all(column.are(values) for column, values in zip(self._columns, columns, strict=True)):
                return False
        except ValueError:  # a row of another length
            return False
        if keys is not None:
            return list(map(self._own_key, rows)) == keys
        longest = sum(self._columns[place].longest(columns[place]) for place in self._key_places)
        return longest <= MOST_KEY_BYTES or all(self._size(self._key_of(row)) <= MOST_KEY_BYTES for row in rows)

    def are_own(self, rows: Values, streams: Sequence[str]) -> bool:
        """Whether `require_own` takes each row's key. May be False for other texts than those that stand in one column."""
        if not rows:
            return True
        prefix = f"{self._contexts[0]}/" if len(self._contexts) == 1 else ""
        column = list(map(itemgetter(self._key_places[0]), rows))
        texts = column if type(column[0]) is str else map(str, column)
        return list(map(prefix.__add__, texts)) == streams

    def _size(self, key: tuple[Any, ...]) -> int:
        return sum(column.size(value) for column, value in zip(self._key_columns, key, strict=True))

    def _require_short(self, key: tuple[Any, ...]) -> None:
        if (size := self._size(key)) > MOST_KEY_BYTES:
            raise BadRow(f"its key takes {size} bytes, and an index has room for {MOST_KEY_BYTES}")


def _is_text(value: Any, text: str) -> bool:
    """Whether a key's value says nothing but this text. Of several that mean the same number or id, only one does."""
    match value:
        case bytes():
            return value == text.encode()
        case Enum():
            return str(value.value) == text
        case _:
            return str(value) == text


class _Column(NamedTuple):
    """How one column's values are checked."""

    check: Check
    """The value as the database gives it back. Raises BadRow."""
    are: Callable[[Values], bool]
    """Whether each value would stay as it is."""
    size: Callable[[Any], int]
    """How many bytes a value takes in a key, beyond what any value may."""
    longest: Callable[[Values], int]
    """No value of these has a larger size."""


def _checked(columns: Sequence[_Column], values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(values) != len(columns):
        raise BadRow(f"it has {len(values)} values, not {len(columns)}")
    return tuple([column.check(value) for column, value in zip(columns, values, strict=True)])


def _exact_column(column: Column) -> _Column:
    kind, exact, within = _kind(column)

    def check(value: Any) -> Any:
        if value is None and column.optional:
            return None
        try:
            return exact(value)
        except BadRow as error:
            name = column.enum.__name__ if column.enum else column.scalar
            raise BadRow(f"column '{column.name}' ({name}) can't hold this {type(value).__name__}: {error}") from None

    def are(values: Values) -> bool:
        kinds = set(map(type, values))
        if column.optional and NoneType in kinds:
            values = [*filterfalse(partial(is_, None), values)]
            kinds.remove(NoneType)
        return not values or (kinds == {kind} and within(values))

    return _Column(check, are, *_lengths(column))


# For each type of column: the type of what is exact, the check, and whether values, which are of that type, are exact.


def _kind(column: Column) -> tuple[type, Check, Callable[[Values], bool]]:
    if column.enum is not None:
        return column.enum, partial(_same, column.enum), _all
    match column.scalar:
        case Scalar.INT:
            low, high = _BEYOND_BOUNDS if column.role is Role.SUM else (SMALLEST_INT, LARGEST_INT)
            return (
                int,
                partial(_int, low, high),
                lambda values: _are_of_64_bits(values) or (low <= min(values) and max(values) <= high),
            )
        case Scalar.STR:
            return str, _text, _are_texts
        case Scalar.DATETIME:
            return datetime, _time, _are_times
        case Scalar.DECIMAL:
            check = _key_number if column.is_key else _number
            return Decimal, check, lambda values: all(_stays(check, value) for value in values)
        case Scalar.BYTES:
            return bytes, _bytes, lambda values: max(map(len, values)) <= MOST_LENGTH
        case Scalar.DATE:
            return date, _date, _all
        case Scalar.UUID:
            return UUID, _uuid, _all
        case Scalar.BOOL:
            return bool, partial(_same, bool), _all
        case Scalar.JSON:
            raise AssertionError("no author's view has such a column")


def _all(_values: Values) -> bool:
    return True


def _stays(check: Check, value: Any) -> bool:
    try:
        return check(value) is value
    except BadRow:
        return False


def _require(value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise BadRow("it is not declared as `… | None`" if value is None else "it is of another type")


def _same(kind: type, value: Any) -> Any:
    _require(value, kind)
    return value


def _int(low: int, high: int, value: Any) -> int:
    _require(value, int)
    exact = value if type(value) is int else int.__int__(value)
    if not low <= exact <= high:
        raise BadRow("it is beyond 64 bits" if high == LARGEST_INT else f"it has more than {MOST_DIGITS} digits")
    return exact


def _are_of_64_bits(values: Values) -> bool:
    """A quarter of the time that `min` and `max` take."""
    try:
        return bool(struct.pack(f"{len(values)}q", *values))
    except struct.error:
        return False


def _text(value: Any) -> str:
    _require(value, str)
    exact = value if type(value) is str else str.__str__(value)
    if not is_storable(exact):
        raise BadRow("it has a NUL or half a surrogate pair in it")
    if len(exact) > MOST_LENGTH:
        raise BadRow(f"it is longer than {MOST_LENGTH} characters")
    return exact


def _are_texts(values: Values) -> bool:
    together = "".join(values)
    return is_storable(together) and (len(together) <= MOST_LENGTH or max(map(len, values)) <= MOST_LENGTH)


def _bytes(value: Any) -> bytes:
    _require(value, bytes, bytearray, memoryview)
    exact = value if type(value) is bytes else bytes(value)
    if len(exact) > MOST_LENGTH:
        raise BadRow(f"it is longer than {MOST_LENGTH} bytes")
    return exact


def _date(value: Any) -> date:
    _require(value, date)
    return value if type(value) is date else date(value.year, value.month, value.day)


def _uuid(value: Any) -> UUID:
    _require(value, UUID)
    return value if type(value) is UUID else UUID(int=value.int)


def _time(value: Any) -> datetime:
    _require(value, datetime)
    if value.utcoffset() is None:
        raise BadRow("it has no time zone")
    try:
        utc = value.astimezone(UTC)
    except OverflowError:
        raise BadRow("in UTC it is before the year 1 or after 9999") from None
    if value is utc and type(value) is datetime and not value.fold:
        return value
    return datetime(utc.year, utc.month, utc.day, utc.hour, utc.minute, utc.second, utc.microsecond, UTC)


def _are_times(values: Values) -> bool:
    return all(map(is_, map(attrgetter("tzinfo"), values), repeat(UTC))) and not any(map(attrgetter("fold"), values))


def _number(value: Any) -> Decimal:
    _require(value, Decimal, int)
    exact = value if type(value) is Decimal else Decimal(value)
    exponent = exact.as_tuple().exponent
    if not isinstance(exponent, int):
        raise BadRow("it is no finite number")
    if exact.adjusted() >= MOST_DIGITS or exponent < -MOST_DIGITS:
        raise BadRow(f"it has more than {MOST_DIGITS} digits before or behind the point")
    if exponent > 0:
        exact = EXACT.quantize(exact, Decimal(1))
    return exact.copy_abs() if exact.is_signed() and not exact else exact


def _key_number(value: Any) -> Decimal:
    """Numbers that are equal are one key, so they must be one value: without zeros at the end."""
    number = _number(value)
    normal = _number(EXACT.normalize(number))
    return number if number.as_tuple() == normal.as_tuple() else normal


# What a value takes in a key, beyond the 16 bytes that each may take; and what none of some values exceeds.


def _lengths(column: Column) -> tuple[Callable[[Any], int], Callable[[Values], int]]:
    if column.enum is not None:
        most = max(len(member.value.encode()) for member in column.enum)
        return lambda _: most, lambda _: most
    match column.scalar:
        case Scalar.STR:
            return lambda value: len(value.encode()), lambda values: 4 * max(map(len, values))
        case Scalar.BYTES:
            return len, lambda values: max(map(len, values))
        case Scalar.DECIMAL:
            return lambda value: len(str(value)), lambda values: max(map(len, map(str, values)))
        case _:
            return lambda _: 0, lambda _: 0
