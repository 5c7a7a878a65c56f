"""Makes a view's rows exact, as the database returns them, right after the event that made them.

So a row that is folded further is the same whether it was cached or read again, in every engine and batch size, and PostgreSQL
refuses no value that passed here. Values of a subclass become the column's own type, times become UTC, decimals become what
`numeric` stores; a value without such a form is a BadRow, at its event. A row that is exact already stays the same object.

`row` does this for one row. `are` checks many at once, column by column, which is fast: nearly always all rows are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from operator import is_, itemgetter
from typing import Any

from projections.engine.views.column_types import MOST_KEY_BYTES, BadRow, Values
from projections.engine.views.columns import Column
from projections.engine.views.event_context import At
from projections.engine.views.nested_types import MOST_JSON
from projections.engine.views.view import View, tuple_getter


class Exact:
    """One view's checks, derived from its columns."""

    def __init__(self, view: View) -> None:
        self._row = view.row
        self._columns = view.columns
        self._key_places = view.key_places
        self._key_columns = view.key
        self._nested = [(place, column) for place, column in enumerate(view.columns) if column.parts]
        self._key_of = tuple_getter(view.key_places)
        self._own_key = view.key_of
        self._contexts = view.contexts

    def row(self, row: Any) -> Any:
        """The row as the database returns it. Raises BadRow."""
        if (kind := type(row)) is not self._row:
            raise BadRow(f"a row must be a {self._row.__name__}, not {kind.__name__}")
        values = _exact(self._columns, row)
        for place, column in self._nested:
            if (size := column.type.size(values[place])) > MOST_JSON:
                what = f"column '{column.name}' ({column.scalar}) can't hold this {column.scalar}"
                raise BadRow(f"{what}: its JSON takes {size} bytes, more than {MOST_JSON}")
        self._require_short(self._key_of(values))
        return row if all(map(is_, values, row)) else tuple.__new__(self._row, values)

    def entity(self, key: Any, row: Any) -> Any:
        """The exact row of an entity, which must have this key. Raises BadRow."""
        row = self.row(row)
        if (own := self._own_key(row)) != key:
            raise BadRow(f"the row's key is {own!r}, but its event's is {key!r}")
        return row

    def line(self, row: Any, at: At) -> Any:
        """The exact row of a journal, whose key must belong to the event's stream. Raises BadRow."""
        row = self.row(row)
        self.require_own(self._key_of(row), at.stream)
        return row

    def require_own(self, key: tuple[Any, ...], stream: str) -> None:
        """Refuse a key that another stream's row could have too: streams would overwrite each other's rows.

        A view of one context begins its keys with the stream's id; one of several with the stream's name, or with context and id.
        Raises BadRow.
        """
        context, _, ident = stream.partition("/")
        if len(self._contexts) == 1:
            if not _is_text(key[0], ident):
                raise BadRow("another stream could have the same key: it must begin with `at.id`")
        elif not (_is_text(key[0], stream) or (len(key) > 1 and _is_text(key[0], context) and _is_text(key[1], ident))):
            raise BadRow("another stream could have the same key: it must begin with `at.stream`")

    def key(self, key: Any) -> tuple[Any, ...]:
        """The exact form of what a view's `key` returned. Raises BadRow."""
        if not isinstance(key, tuple):
            raise BadRow(f"`key` must return a tuple, not {type(key).__name__}")
        values = _exact(self._key_columns, key)
        self._require_short(values)
        return values

    def are(self, rows: Values, keys: Values | None = None) -> bool:
        """Whether all rows are exact; with `keys`, which are exact, also whether each row has its key."""
        if not rows:
            return True
        if set(map(type, rows)) != {self._row}:
            return False
        try:
            columns = list(zip(*rows, strict=True))
            if not all(column.are_exact(values) for column, values in zip(self._columns, columns, strict=True)):
                return False
            if any(column.type.longest(columns[place]) > MOST_JSON for place, column in self._nested):
                return False
        except ValueError:  # a row of another length
            return False
        if keys is not None:
            return list(map(self._own_key, rows)) == keys
        longest = sum(self._columns[place].type.longest(columns[place]) for place in self._key_places)
        return longest <= MOST_KEY_BYTES or all(self._size(self._key_of(row)) <= MOST_KEY_BYTES for row in rows)

    def are_own(self, rows: Values, streams: Sequence[str]) -> bool:
        """Whether `require_own` accepts each row's key. May be False for keys that begin with other than one text column."""
        if not rows:
            return True
        prefix = f"{self._contexts[0]}/" if len(self._contexts) == 1 else ""
        column = list(map(itemgetter(self._key_places[0]), rows))
        texts = column if type(column[0]) is str else map(str, column)
        return list(map(prefix.__add__, texts)) == streams

    def _size(self, key: tuple[Any, ...]) -> int:
        return sum(column.type.size(value) for column, value in zip(self._key_columns, key, strict=True))

    def _require_short(self, key: tuple[Any, ...]) -> None:
        if (size := self._size(key)) > MOST_KEY_BYTES:
            raise BadRow(f"its key takes {size} bytes, and an index has room for {MOST_KEY_BYTES}")


def _exact(columns: Sequence[Column], values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(values) != len(columns):
        raise BadRow(f"it has {len(values)} values, not {len(columns)}")
    return tuple([column.exact(value) for column, value in zip(columns, values, strict=True)])


def _is_text(value: Any, text: str) -> bool:
    """Whether this text is the only one that the key's value stands for: `7` of a column of ints is not the id `007`."""
    match value:
        case bytes():
            return value == text.encode()
        case Enum():
            return str(value.value) == text
        case _:
            return str(value) == text
