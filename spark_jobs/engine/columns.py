"""The columns that an event's fields have in Spark: types, and how values get there.

    bool, int, float, str, bytes    boolean, bigint, double, string, binary
    date, datetime, timedelta       date, timestamp (a time without a zone is taken as UTC), interval day to second
    Decimal                         decimal(38, 18)
    UUID, time                      string, as in the log
    Enum, Literal                   string or bigint: the stored value
    facts and named tuples          struct of their fields; a tuple of several types has the fields _1, _2, …
    list, set, tuple of one type    array; a set's values are sorted by their texts
    dict                            map
    T | None                        as T: every column may be null
    anything else                   string, the stored JSON: unions of several types, facts without fields

A personal value is its ciphertext, as in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark

from domain.engine.storable import CONTAINERS, MAPPINGS
from infra.errors import SamefoldError

Convert = Callable[[Any], Any]


class BadColumn(SamefoldError):
    """Event classes can't become the columns of one table."""

    exit_code = 2


class ColumnType(NamedTuple):
    """A type in Spark and in Arrow. `convert` makes what `pyarrow.array` takes of a value; None where it takes the value itself."""

    spark: spark.DataType
    arrow: pa.DataType
    convert: Convert | None = None


class Column(NamedTuple):
    """A column, and how to get its value from what a row is made of."""

    name: str
    type: ColumnType
    get: Callable[[Any], Any]

    def array(self, rows: Sequence[Any]) -> pa.Array:
        """Raises pyarrow.ArrowInvalid, OverflowError for a value that the type can't hold."""
        values = map(self.get, rows)
        if (convert := self.type.convert) is None:
            return pa.array(values, self.type.arrow)
        return pa.array([None if value is None else convert(value) for value in values], self.type.arrow)


TEXT = ColumnType(spark.StringType(), pa.string())
WHOLE = ColumnType(spark.LongType(), pa.int64())
SMALL = ColumnType(spark.IntegerType(), pa.int32())
BYTES = ColumnType(spark.BinaryType(), pa.binary())
TIME = ColumnType(spark.TimestampType(), pa.timestamp("us", "UTC"))

_JSON = TEXT._replace(convert=lambda value: msgspec.json.encode(value).decode())
_PLAIN: Mapping[Any, ColumnType] = {
    bool: ColumnType(spark.BooleanType(), pa.bool_()),
    int: WHOLE,
    float: ColumnType(spark.DoubleType(), pa.float64()),
    str: TEXT,
    bytes: BYTES,
    date: ColumnType(spark.DateType(), pa.date32()),
    datetime: TIME,
    time: TEXT._replace(convert=msgspec.to_builtins),
    timedelta: ColumnType(spark.DayTimeIntervalType(), pa.duration("us")),
    Decimal: ColumnType(spark.DecimalType(38, 18), pa.decimal128(38, 18)),
    UUID: TEXT._replace(convert=str),
}


def fields_of(kind: type, taken: Collection[str] = ()) -> list[Column]:
    """The columns of a fact's fields. One gets `event_` before its name, again and again, while that is `taken` or another field's.

    Spark ignores the case of letters.
    """
    own, used, columns = _fields(kind), {*taken}, []
    for name, hint in own:
        free = name
        while free.lower() in used or (free != name and free.lower() in {other.lower() for other, _ in own}):
            free = f"event_{free}"
        used.add(free.lower())
        columns.append(Column(free, type_of(hint), attrgetter(name)))
    return columns


def type_of(kind: Any) -> ColumnType:
    """The column type of a field's type."""
    while True:
        if hasattr(kind, "__supertype__"):  # a NewType
            kind = kind.__supertype__
        elif get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        else:
            break
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        some = [one for one in arguments if one is not NoneType]
        return type_of(some[0]) if len(some) == 1 else _JSON
    if origin is Literal:
        return _of_values(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _array(type_of(arguments[0]))
    if origin is tuple and arguments:
        return _struct([(f"_{n}", type_of(one)) for n, one in enumerate(arguments, 1)], tuple)
    if origin in CONTAINERS:
        return _array(type_of(arguments[0]), is_set=CONTAINERS[origin] in (set, frozenset))
    if origin in MAPPINGS:
        return _map(*map(type_of, arguments))
    if isinstance(kind, type) and issubclass(kind, Enum):
        found = _of_values([one.value for one in kind])
        return found if found is _JSON else found._replace(convert=attrgetter("value"))
    return struct_of(kind) if isinstance(kind, type) and _fields(kind) else _JSON


def struct_of(kind: type, taken: Collection[str] = ()) -> ColumnType:
    """The struct of a fact's or named tuple's fields, with the names of `fields_of`."""
    names = [name for name, _ in _fields(kind)]
    columns = [(column.name, column.type) for column in fields_of(kind, taken)]
    return _struct(columns, attrgetter(*names) if names[1:] else lambda value: tuple(getattr(value, n) for n in names))


def _fields(kind: type) -> list[tuple[str, Any]]:
    """The fields of a fact or named tuple, with their types."""
    names = [one.name for one in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hints[name]) for name in names]


def _of_values(values: Sequence[Any]) -> ColumnType:
    kinds = set(map(type, values)) - {NoneType}
    return _PLAIN[kinds.pop()] if kinds in ({str}, {int}, {bool}) else _JSON


def _struct(fields: Sequence[tuple[str, ColumnType]], values: Callable[[Any], tuple[Any, ...]]) -> ColumnType:
    names, converters = [name for name, _ in fields], [one.convert for _, one in fields]

    def convert(value: Any) -> dict[str, Any]:
        parts = zip(names, converters, values(value), strict=True)
        return {name: part if of is None or part is None else of(part) for name, of, part in parts}

    return ColumnType(
        spark.StructType([spark.StructField(name, one.spark) for name, one in fields]),
        pa.struct([pa.field(name, one.arrow) for name, one in fields]),
        convert,
    )


def _array(of: ColumnType, *, is_set: bool = False) -> ColumnType:
    each = _each(of)

    def convert(values: Any) -> list[Any]:
        return each(sorted(values, key=repr) if is_set else values)

    return ColumnType(spark.ArrayType(of.spark), pa.list_(pa.field("element", of.arrow)), convert)


def _map(keys: ColumnType, values: ColumnType) -> ColumnType:
    of_keys, of_values = _each(keys), _each(values)

    def convert(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        return list(zip(of_keys(value.keys()), of_values(value.values()), strict=True))

    return ColumnType(spark.MapType(keys.spark, values.spark), pa.map_(keys.arrow, values.arrow), convert)


def _each(of: ColumnType) -> Callable[[Any], list[Any]]:
    convert = of.convert
    if convert is None:
        return list
    return lambda values: [None if value is None else convert(value) for value in values]
