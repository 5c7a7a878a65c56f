"""A view's rows exactly as the database gives them back: checked, and made so, right after the event that made them.

So a row that is folded on is the same whether it was held or read again, in every engine and batch size, and PostgreSQL refuses
no value that has passed here. Values of a subclass become the column's own type, times become UTC, decimals what `numeric`
makes of them; what has no such form is a BadRow, at its event. A row that needs nothing stays the very object it was.

`row` does this for one row. `are` tells of many, a column at a time, whether `row` would leave each as it is: nearly always it
would, and then nobody needs to call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import filterfalse
from operator import is_, itemgetter
from types import NoneType
from typing import Any, NamedTuple

from projections.engine.views.column_types import BadRow, Values
from projections.engine.views.columns import Column
from projections.engine.views.event_context import At
from projections.engine.views.view import View, tuple_getter

MOST_KEY_BYTES = 2_000
"""What a key's texts, bytes and decimals may take together. An entry of an index ends at 2,704, with all else that is in it."""

Check = Callable[[Any], Any]


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
    kind, exact, are_exact = column.type.python, column.type.exact, column.type.are_exact

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
        return not values or (kinds == {kind} and are_exact(values))

    return _Column(check, are, column.type.size, column.type.longest)
