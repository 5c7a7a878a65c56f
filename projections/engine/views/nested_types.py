"""Types of columns with parts: `list[T]`, `tuple[T, ...]`, `dict[str, T]`, NamedTuples and frozen dataclasses such as facts.

They are stored as `jsonb`. NamedTuples and dataclasses are objects there, and so msgspec decodes each as a Struct of the same
fields, from which the row's value is made without its constructor.

`evolve` gets a copy of each list and dict of the row before, dicts sorted by key. So it can change them in place, without changing
the cached row; and `jsonb`, which keeps no order of keys, changes nothing for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import cached_property, partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import msgspec

from domain.engine.storable import building, encode
from projections.engine.views import binary_arrays
from projections.engine.views.binary_arrays import BinaryArray
from projections.engine.views.column_types import BadRow, ColumnType, Scalar, Values, type_of

if TYPE_CHECKING:
    from projections.engine.views.columns import Column

MOST_JSON = 1 << 20
"""Longest value of a column with parts, in bytes of its JSON."""

Convert = Callable[[Any], Any]


class Nested(ColumnType):
    """What they have in common. `to_database` gives PostgreSQL's binary form of `jsonb`."""

    sql_name, copied_as, loaded, is_filterable, index_bytes = "jsonb", "bytea", "{}::text", False, None
    form = "JSON"

    def to_database(self, value: Any) -> bytes:
        return b"\1" + encode(value if self.to_json is None else self.to_json(value), order="deterministic")

    def from_database(self, text: str) -> Any:
        read = self._decode(text)
        return read if self.from_json is None else self.from_json(read)

    @cached_property
    def _decode(self) -> Convert:
        with building:
            return msgspec.json.Decoder(self.json_type).decode

    def as_stored(self, text: str) -> bytes:
        """Of a text that no value is stored as, the text."""
        with suppress(ValueError):
            stored = self.to_database(self.from_database(text))
            if _exactly(text) == _exactly(stored[1:]):  # msgspec also reads other texts: a decimal's number
                return stored
        return text.encode()

    def size(self, value: Any) -> int:
        """Bytes of its JSON."""
        return 0 if value is None else len(self.to_database(value)) - 1

    def longest(self, values: Values) -> int:
        return max(map(self.size, values))

    def pack(self, values: Values) -> BinaryArray:
        stored = [None if value is None else self.to_database(value) for value in values]
        return binary_arrays.variable(binary_arrays.JSONB, stored)


class _Items(Nested):
    """A list, or a tuple of any length."""

    def __init__(self, kind: type, item: Column) -> None:
        self.python, self._item = kind, item
        self.schema = {"type": "array", "items": item.schema}
        self.json_type = list[_json_type(item)] if kind is list else tuple[_json_type(item), ...]  # type: ignore[misc]
        self.to_json, self.from_json = self._of_each(item.type.to_json), self._of_each(item.type.from_json)
        self.copied = self._of_each(item.type.copied) or (list.copy if kind is list else None)

    def exact(self, value: Any) -> Any:
        _require(value, self.python)
        exact = [_exact(self._item, one, f"[{place}]") for place, one in enumerate(value)]
        return value if all(map(is_, exact, value)) and type(value) is self.python else self.python(exact)

    def are_exact(self, values: Values) -> bool:
        return self._item.are_exact([*chain.from_iterable(values)])

    def _of_each(self, convert: Convert | None) -> Convert | None:
        if convert is None:
            return None
        each, kind = _or_none(convert, self._item), self.python
        return lambda value: kind(map(each, value))


class _Dict(Nested):
    python = dict

    def __init__(self, value: Column) -> None:
        self._key, self._value = type_of(Scalar.STR), value
        self.schema = {"type": "object", "additionalProperties": value.schema}
        self.json_type = dict[str, _json_type(value)]  # type: ignore[misc]
        self.to_json, self.from_json = self._of_each(value.type.to_json), self._of_each(value.type.from_json)
        each = self._of_each(value.type.copied)
        self.copied = lambda value: dict(sorted((value if each is None else each(value)).items()))

    def exact(self, value: Any) -> Any:
        _require(value, dict)
        found = dict[str, Any]()
        for name, one in value.items():
            try:
                key = self._key.exact(name)
            except BadRow as error:
                raise BadRow(str(error), " key") from None
            found[key] = _exact(self._value, one, f"[{key!r:.50}]")
        is_same = type(value) is dict and all(value[key] is one for key, one in found.items())
        return value if is_same and set(map(type, value)) <= {str} else found

    def are_exact(self, values: Values) -> bool:
        keys = [*chain.from_iterable(values)]
        return (
            set(map(type, keys)) <= {str}
            and self._key.are_exact(keys)
            and self._value.are_exact([*chain.from_iterable(map(dict.values, values))])
        )

    def _of_each(self, convert: Convert | None) -> Convert | None:
        if convert is None:
            return None
        each = _or_none(convert, self._value)
        return lambda value: {key: each(one) for key, one in value.items()}


class _Record(Nested):
    """A NamedTuple or a dataclass."""

    def __init__(self, kind: type, fields: Sequence[Column]) -> None:
        self.python, self._fields = kind, fields
        names = [field.name for field in fields]
        self.schema = {
            "type": "object",
            "properties": {field.name: field.schema for field in fields},
            "required": names,
            "additionalProperties": False,
        }
        with building:
            self.json_type = msgspec.defstruct(
                kind.__name__,
                [(field.name, _json_type(field)) for field in fields],
                forbid_unknown_fields=True,
                gc=False,
            )
        is_tuple = issubclass(kind, tuple)
        self._values: Convert = tuple if is_tuple else partial(_values_of, names)
        self._make: Convert = partial(tuple.__new__, kind) if is_tuple else partial(_with_values, kind, names)
        written, read, copied = map(self._changing, ("to_json", "from_json", "copied"))
        if written is not None or is_tuple:
            self.to_json = lambda value: self.json_type(*(written or tuple)(self._values(value)))
        self.from_json = lambda value: self._make((read or tuple)(msgspec.structs.astuple(value)))
        if copied is not None:
            self.copied = lambda value: self._make(copied(self._values(value)))

    def exact(self, value: Any) -> Any:
        if type(value) is not self.python:
            _require(value, self.python)
            raise BadRow("it is of a class derived from the declared one")
        values = self._values(value)
        if len(values) != len(self._fields):
            raise BadRow(f"it has {len(values)} values, not {len(self._fields)}")
        exact = [_exact(field, one, f".{field.name}") for field, one in zip(self._fields, values, strict=True)]
        return value if all(map(is_, exact, values)) else self._make(exact)

    def are_exact(self, values: Values) -> bool:
        try:
            columns = zip(*map(self._values, values), strict=True)
            return all(field.are_exact(of) for field, of in zip(self._fields, columns, strict=True))
        except ValueError:  # a tuple of another length
            return False

    def _changing(self, what: str) -> Convert | None:
        """What changes a record's values; None where no field's are changed."""
        found = [(place, _or_none(c, f)) for place, f in enumerate(self._fields) if (c := getattr(f.type, what))]
        if not found:
            return None

        def change(values: Sequence[Any]) -> list[Any]:
            changed = [*values]
            for place, convert in found:
                changed[place] = convert(changed[place])
            return changed

        return change


def nested_type(column: Column) -> Nested:
    """The type of a column with parts."""
    match column.scalar:
        case Scalar.DICT:
            return _Dict(*column.parts)
        case Scalar.RECORD:
            assert column.record is not None, "a record has a class"
            return _Record(column.record, column.parts)
        case other:
            return _Items({Scalar.LIST: list, Scalar.TUPLE: tuple}[other], *column.parts)


def on_copies(function: Callable[[Any, Any, Any], Any], columns: Sequence[Column]) -> Callable[[Any, Any, Any], Any]:
    """An `evolve` that gets copies of the lists and dicts of the row before, which is cached: it may change them in place."""
    places = [place for place, column in enumerate(columns) if column.type.copied is not None]
    return partial(_evolve_copy, function, columns, places) if places else function


def _evolve_copy(
    function: Callable[..., Any], columns: Sequence[Column], places: Sequence[int], row: Any, event: Any, at: Any
) -> Any:
    if row is not None:
        values = [*row]
        for place in places:
            if values[place] is not None:
                values[place] = columns[place].type.copied(values[place])  # type: ignore[misc]  # there is one at these places
        row = tuple.__new__(type(row), values)
    return function(row, event, at)


_exactly = partial(json.loads, parse_int=Decimal, parse_float=Decimal)


def _exact(part: Column, value: Any, path: str) -> Any:
    """The part's value. Raises BadRow with the path to it."""
    if value is None and part.optional:
        return None
    try:
        return part.type.exact(value)
    except BadRow as error:
        raise BadRow(str(error), f"{path}{error.path}") from None


def _require(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise BadRow("it is not declared as `… | None`" if value is None else "it is of another type")


def _json_type(part: Column) -> Any:
    kind = part.type.json_type or part.type.python
    return kind | None if part.optional else kind


def _or_none(convert: Convert, part: Column) -> Convert:
    return (lambda value: None if value is None else convert(value)) if part.optional else convert


def _values_of(names: Sequence[str], record: Any) -> tuple[Any, ...]:
    return tuple([getattr(record, name) for name in names])


def _with_values(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """An instance of a frozen dataclass, as msgspec makes it: what was checked before is not checked again."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
