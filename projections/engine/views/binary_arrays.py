"""PostgreSQL's binary arrays, a column of a batch at a time: `insert … select from unnest(…)` takes one per column.

psycopg dumps lists element by element in Python; packing a whole column at once costs a tenth of that. Texts, of which most rows
consist, are looked up where few are different, and are one join where all are equally long.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import date
from typing import Any, cast
from uuid import UUID

from psycopg.adapt import Dumper, PyFormat
from psycopg.pq import Format

_HEADER = struct.Struct(">iiIii")
_LENGTH = struct.Struct(">i")
_NULL = _LENGTH.pack(-1)
_SHORT = [_LENGTH.pack(size) for size in range(1_024)]
"""The length of each value up to that size."""
_FEW = 4
"""Texts are looked up when each occurs so many times on average."""
_EPOCH_DAY = date(2000, 1, 1).toordinal()
EPOCH_MS = 946_684_800_000

# element type: (oid, oid of its array)
_BOOL, _BYTEA, _INT8, _INT2, _TEXT = (16, 1000), (17, 1001), (20, 1016), (21, 1005), (25, 1009)
_JSON, _DATE, _TIMESTAMPTZ, _UUID = (114, 199), (1082, 1182), (1184, 1185), (2950, 2951)


class BinaryArray:
    """A one-dimensional array in PostgreSQL's binary form, ready to send."""

    __slots__ = ("data", "oid")

    def __init__(self, types: tuple[int, int], count: int, body: bytes) -> None:
        element, self.oid = types
        # the flag for nulls may be set without any: the receiver looks for itself
        self.data = _HEADER.pack(1, 1, element, count, 1) + body if count else _HEADER.pack(0, 0, element, 0, 0)[:12]


class BinaryArrayDumper(Dumper):
    """Tells psycopg how to send a BinaryArray; the oid comes from the array itself."""

    format = Format.BINARY

    def dump(self, obj: BinaryArray) -> bytes:
        return obj.data

    def get_key(self, obj: BinaryArray, _format: PyFormat) -> tuple[type, int]:  # type: ignore[override]
        return (self.cls, obj.oid)

    def upgrade(self, obj: BinaryArray, _format: PyFormat) -> Dumper:
        dumper = BinaryArrayDumper(self.cls)
        dumper.oid = obj.oid
        return dumper


def texts(values: Sequence[str | None]) -> BinaryArray:
    different = set(values)
    if _FEW * len(different) <= len(values):
        cells = {value: _NULL if value is None else _cell(value.encode()) for value in different}
        return BinaryArray(_TEXT, len(values), b"".join(map(cells.__getitem__, values)))
    if None in different:
        return _variable(_TEXT, [None if value is None else value.encode() for value in values])
    present = cast(Sequence[str], values)
    if len(set(map(len, present))) == 1 and "".join(present).isascii():
        # the length that stands before each value, as four characters that latin-1 turns into just these bytes
        length = _LENGTH.pack(len(present[0])).decode("latin-1")
        return BinaryArray(_TEXT, len(present), (length + length.join(present)).encode("latin-1"))
    return _variable(_TEXT, list(map(str.encode, present)))


def bigints(values: Sequence[int | None]) -> BinaryArray:
    return _fixed(_INT8, 8, "q", values)


def smallints(values: Sequence[int | None]) -> BinaryArray:
    return _fixed(_INT2, 2, "h", values)


def bools(values: Sequence[bool | None]) -> BinaryArray:
    return _fixed(_BOOL, 1, "?", values)


def dates(values: Sequence[date | None]) -> BinaryArray:
    return _fixed(_DATE, 4, "i", [v if v is None else v.toordinal() - _EPOCH_DAY for v in values])


def times(microseconds: Sequence[int | None]) -> BinaryArray:
    """timestamptz from microseconds since 2000."""
    return _fixed(_TIMESTAMPTZ, 8, "q", microseconds)


def times_of_ms(milliseconds: Sequence[int]) -> BinaryArray:
    """timestamptz from ms since 1970, without a datetime in between."""
    return times([(ms - EPOCH_MS) * 1000 for ms in milliseconds])


def uuids(values: Sequence[UUID | None]) -> BinaryArray:
    return _variable(_UUID, [v if v is None else v.bytes for v in values])


def blobs(values: Sequence[bytes | None]) -> BinaryArray:
    return _variable(_BYTEA, values)


def jsons(values: Sequence[bytes | None]) -> BinaryArray:
    return _variable(_JSON, values)


def _fixed(types: tuple[int, int], size: int, code: str, values: Sequence[Any]) -> BinaryArray:
    if None in values:
        one = struct.Struct(f">i{code}")
        return BinaryArray(types, len(values), b"".join(_NULL if v is None else one.pack(size, v) for v in values))
    count = len(values)
    flat = [size] * (2 * count)
    flat[1::2] = values
    return BinaryArray(types, count, struct.pack(f">{f'i{code}' * count}", *flat))


def _variable(types: tuple[int, int], values: Sequence[bytes | None]) -> BinaryArray:
    if None in values:
        return BinaryArray(types, len(values), b"".join(_NULL if v is None else _cell(v) for v in values))
    sizes = list(map(len, cast(Sequence[bytes], values)))
    flat: list[Any] = [b""] * (2 * len(values))
    flat[0::2] = map(_SHORT.__getitem__ if max(sizes, default=0) < len(_SHORT) else _LENGTH.pack, sizes)
    flat[1::2] = values
    return BinaryArray(types, len(values), b"".join(flat))


def _cell(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value
