"""Statements on views' tables, as `projections/engine/store/rows.py` composes them, and COPY."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from projections.engine.views.binary_arrays import BinaryArray
from proofs.model_read.catalogue import shape
from proofs.model_read.postgres import Key, Lock, Result, Row, Statement, Steps

_HEADER = struct.Struct(">iiI")
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_DECODE: dict[int, Callable[[bytes], Any]] = {
    16: lambda data: data != b"\0",
    17: bytes,
    20: lambda data: int.from_bytes(data, "big", signed=True),
    21: lambda data: int.from_bytes(data, "big", signed=True),
    25: lambda data: data.decode(),
    114: lambda data: data.decode(),
    1184: lambda data: _EPOCH + timedelta(microseconds=int.from_bytes(data, "big", signed=True)),
}


def values_of(array: BinaryArray) -> list[Any]:
    """The elements of an array as the product sends it."""
    data = array.data
    dimensions, _, oid = _HEADER.unpack_from(data)
    if not dimensions:
        return []
    count = int.from_bytes(data[12:16], "big")
    decode, at, values = _DECODE[oid], 20, []
    for _ in range(count):
        length = int.from_bytes(data[at : at + 4], "big", signed=True)
        at += 4
        values.append(None if length < 0 else decode(data[at : at + length]))
        at += max(length, 0)
    return values


def key_columns(statement: Statement, table: str) -> tuple[str, ...]:
    """The primary key of a view's table, whichever build of its version it is."""
    return statement.database.keys[re.sub(r"_r\d+$", "", table)]


_NAME = r'"(\w+)"'
_NAMES = r'((?:"\w+"(?:, )?)+)'
_ARRAYS = r"((?:%s(?:::numeric\[\])?(?:, )?)+)"


def _split(names: str) -> list[str]:
    return [name.strip('"') for name in names.split(", ")]


def _rows(columns: Sequence[str], casts: str, parameters: Sequence[BinaryArray]) -> list[dict[str, Any]]:
    values = [values_of(array) for array in parameters]
    for index, cast in enumerate(casts.split(", ")):
        if cast.endswith("numeric[]"):
            values[index] = [None if value is None else Decimal(value) for value in values[index]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


@shape(rf'select ((?:t\."\w+"(?:::text)?(?:, )?)+) from {_NAME} t where t\.{_NAME} = any\(%s\)')
def select(statement: Statement, parameters: Any, columns: str, table: str, key: str) -> Steps:
    yield from statement.use(table)
    names = re.findall(r'"(\w+)"', columns)
    found = []
    for value in values_of(parameters[0]) if isinstance(parameters[0], BinaryArray) else parameters[0]:
        row = statement.one(table, (value,))
        if row is not None:
            found.append(tuple(row[name] for name in names))
    return Result(found, len(found))


_INSERT = rf"insert into {_NAME} as t \({_NAMES}\) select \* from unnest\({_ARRAYS}\)"


@shape(_INSERT)
def insert(statement: Statement, parameters: Any, table: str, names: str, casts: str) -> Steps:
    rows = _rows(_split(names), casts, parameters)
    keys = key_columns(statement, table)
    for row in rows:
        yield from statement.insert(table, tuple(row[name] for name in keys), row)
    return Result(count=len(rows))


@shape(rf"{_INSERT} on conflict \({_NAMES}\) do update set (.+)")
def upsert(
    statement: Statement, parameters: Any, table: str, names: str, casts: str, conflict: str, sets: str
) -> Steps:
    rows = _rows(_split(names), casts, parameters)
    keys = _split(conflict)
    combine = [_set(one) for one in re.split(r", (?=\"\w+\" = )", sets)]
    for row in rows:

        def onto(there: Row, row: Row = row) -> Row:
            return {**there, **{name: value(there, row) for name, value in combine}}

        yield from statement.insert(table, tuple(row[name] for name in keys), row, onto)
    return Result(count=len(rows))


def _same(there: Any, new: Any) -> Any:
    assert there == new, "a row of another partition"
    return there


_SETS: list[tuple[str, Callable[[Any, Any], Any]]] = [
    (r'"(\w+)" = excluded\."\1"', lambda _there, new: new),
    (r'"(\w+)" = t\."\1" \+ excluded\."\1"', lambda there, new: there + new),
    (r'"(\w+)" = least\(t\."\1", excluded\."\1"\)', min),
    (r'"(\w+)" = greatest\(t\."\1", excluded\."\1"\)', max),
    (r'"(\w+)" = case when t\."\1" = excluded\."\1" then t\."\1" end', _same),
]


def _set(text: str) -> tuple[str, Callable[[Row, Row], Any]]:
    for pattern, combined in _SETS:
        if match := re.fullmatch(pattern, text):
            return match.group(1), _on_column(match.group(1), combined)
    raise AssertionError(f"teach the model to set {text}")


def _on_column(name: str, combined: Callable[[Any, Any], Any]) -> Callable[[Row, Row], Any]:
    return lambda there, new: combined(there[name], new[name])


@shape(rf"delete from {_NAME} t using unnest\({_ARRAYS}\) k\({_NAMES}\) where .+")
def delete(statement: Statement, parameters: Any, table: str, casts: str, names: str) -> Steps:
    wanted = _rows(_split(names), casts, parameters)
    count = yield from statement.delete(
        table, lambda row: any(all(row[name] == value for name, value in one.items()) for one in wanted)
    )
    return Result(count=count)


def copied(statement: Statement, table: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Steps:
    """COPY: into a table that is being loaded, which has no key that would refuse a row twice."""
    yield from statement.use(table, Lock.WRITE)
    keys = key_columns(statement, table)
    for number, values in enumerate(rows):
        row = dict(zip(names, values, strict=True))
        key: Key = (*(row[name] for name in keys), "copied", statement.session.pid, number)
        statement.put(table, key, {name: _stored(value) for name, value in row.items()})
    return Result(count=len(rows))


def _stored(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
