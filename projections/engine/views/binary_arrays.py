"""PostgreSQL's binary arrays: one per column of a batch, for `insert … select from unnest(…)`.

psycopg dumps a list element by element in Python; packing a whole column at once takes a tenth of the time.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import psycopg
from psycopg.adapt import Dumper, PyFormat
from psycopg.pq import Format

_HEADER = struct.Struct(">iiIii")
_LENGTH = struct.Struct(">i")
_NULL = _LENGTH.pack(-1)
_INTERVAL = struct.Struct(">qii")
_SHORT_LENGTHS = [_LENGTH.pack(size) for size in range(1_024)]
_REPEATS, _SAMPLE = 4, 64
"""Values are encoded once per distinct value when each occurs this often on average, in a sample of this size."""
_EPOCH_MS = 946_684_800_000

# element type: (oid, oid of its array)
BOOL, BYTEA, INT8, INT2, TEXT = (16, 1000), (17, 1001), (20, 1016), (21, 1005), (25, 1009)
JSON, DATE, TIMESTAMPTZ, UUID = (114, 199), (1082, 1182), (1184, 1185), (2950, 2951)
FLOAT8, TIME, INTERVAL, JSONB = (701, 1022), (1083, 1183), (1186, 1187), (3802, 3807)


class BinaryArray:
    """A one-dimensional array in PostgreSQL's binary form, ready to send."""

    __slots__ = ("data", "oid")

    def __init__(self, types: tuple[int, int], count: int, body: bytes) -> None:
        element, self.oid = types
        # the "has nulls" flag may be set without any null: PostgreSQL checks for itself
        self.data = _HEADER.pack(1, 1, element, count, 1) + body if count else _HEADER.pack(0, 0, element, 0, 0)[:12]


class BinaryArrayDumper(Dumper):
    """How psycopg sends a BinaryArray; the array knows its oid."""

    format = Format.BINARY

    def dump(self, obj: BinaryArray) -> bytes:
        return obj.data

    def get_key(self, obj: BinaryArray, _format: PyFormat) -> tuple[type, int]:  # type: ignore[override]
        return (self.cls, obj.oid)

    def upgrade(self, obj: BinaryArray, _format: PyFormat) -> Dumper:
        dumper = BinaryArrayDumper(self.cls)
        dumper.oid = obj.oid
        return dumper


psycopg.adapters.register_dumper(BinaryArray, BinaryArrayDumper)


def texts(values: Sequence[str | None]) -> BinaryArray:
    if _repeat(values):
        return _of_few(TEXT, values, lambda value: _cell(value.encode()))
    if None in values:
        return variable(TEXT, [None if value is None else value.encode() for value in values])
    present = cast(Sequence[str], values)
    if len(set(map(len, present))) == 1 and "".join(present).isascii():
        # all equally long: one join, with the length before each value as four latin-1 characters
        length = _LENGTH.pack(len(present[0])).decode("latin-1")
        return BinaryArray(TEXT, len(present), (length + length.join(present)).encode("latin-1"))
    return variable(TEXT, list(map(str.encode, present)))


def bigints(values: Sequence[int | None]) -> BinaryArray:
    return fixed(INT8, 8, "q", values)


def smallints(values: Sequence[int | None]) -> BinaryArray:
    return fixed(INT2, 2, "h", values)


def times_of_ms(milliseconds: Sequence[int]) -> BinaryArray:
    """timestamptz from ms since 1970, without a datetime in between."""
    return fixed(TIMESTAMPTZ, 8, "q", [(ms - _EPOCH_MS) * 1000 for ms in milliseconds])


def intervals(values: Sequence[timedelta | None]) -> BinaryArray:
    """Each as microseconds below a day, days, and no months."""
    return variable(
        INTERVAL,
        [None if v is None else _INTERVAL.pack(v.seconds * 1_000_000 + v.microseconds, v.days, 0) for v in values],
    )


def uuids(digits: Sequence[str]) -> BinaryArray:
    """Of 32 hexadecimal digits each, of which there is at least one; all at once. Raises ValueError."""
    length, body = _LENGTH.pack(16).hex(), b""
    with suppress(ValueError):  # of the place in all of them together
        body = bytes.fromhex(length + length.join(digits))
    if len(body) != 20 * len(digits) or set(map(len, digits)) != {32}:
        raise ValueError("a fingerprint is not 32 hexadecimal digits")
    return BinaryArray(UUID, len(digits), body)


def fixed(
    types: tuple[int, int], size: int, code: str, values: Sequence[Any], convert: Callable[[Any], int] | None = None
) -> BinaryArray:
    """An array of values of one size in bytes. `convert` makes of a value what struct packs as `code`."""
    if size % 4 or _repeat(values) or None in values:
        pack = struct.Struct(f">i{code}").pack
        return _of_few(types, values, lambda value: pack(size, value if convert is None else convert(value)))
    if convert is not None:
        values = list(map(convert, values))
    # as words of 4 bytes, the length before each value
    count, words = len(values), size // 4
    packed = array("i", struct.pack(f">{count}{code}", *values))
    cells = array("i", _LENGTH.pack(size)) * (count * (1 + words))
    for word in range(words):
        cells[1 + word :: 1 + words] = packed[word::words]
    return BinaryArray(types, count, cells.tobytes())


def variable(types: tuple[int, int], values: Sequence[bytes | None]) -> BinaryArray:
    """An array of bytes of any length."""
    if None in values:
        return BinaryArray(types, len(values), b"".join(_NULL if v is None else _cell(v) for v in values))
    sizes = list(map(len, cast(Sequence[bytes], values)))
    flat: list[Any] = [b""] * (2 * len(values))
    flat[0::2] = map(_SHORT_LENGTHS.__getitem__ if max(sizes, default=0) < len(_SHORT_LENGTHS) else _LENGTH.pack, sizes)
    flat[1::2] = values
    return BinaryArray(types, len(values), b"".join(flat))


def _repeat(values: Sequence[Any]) -> bool:
    """Whether the values repeat, judging by some of them."""
    some = values[:_SAMPLE]
    return _REPEATS * len(set(some)) <= len(some)


def _of_few(types: tuple[int, int], values: Sequence[Any], cell: Callable[[Any], bytes]) -> BinaryArray:
    """An array of values of which many are equal; `cell` encodes one with its length."""
    cells = {value: _NULL if value is None else cell(value) for value in set(values)}
    return BinaryArray(types, len(values), b"".join(map(cells.__getitem__, values)))


def _cell(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value
