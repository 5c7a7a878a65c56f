"""make test: nothing but functions. Arrays in PostgreSQL's binary form: the same bytes, however they are packed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from projections.engine.views import binary_arrays
from projections.engine.views.binary_arrays import BinaryArray
from projections.engine.views.column_types import Scalar, type_of


def one_by_one(array: BinaryArray, element: int, cells: Sequence[bytes | None]) -> bytes:
    """What PostgreSQL documents: dimensions, flag, element type, length, lower bound; then each value after its length."""
    if not cells:
        return struct.pack(">iiI", 0, 0, element)
    assert array.data[4:8] in (b"\0\0\0\0", b"\0\0\0\1")
    head = array.data[:8] + struct.pack(">Iii", element, len(cells), 1)
    return head + b"".join(
        struct.pack(">i", -1) if cell is None else struct.pack(">i", len(cell)) + cell for cell in cells
    )


def lists_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Lists of different values and of few ones, short and longer than a sample, with nulls and without."""
    few = st.lists(values, min_size=1, max_size=3).flatmap(lambda some: st.lists(st.sampled_from(some), max_size=100))
    return st.one_of(
        st.lists(values, max_size=80),
        st.lists(st.none() | values, max_size=80),
        few,
        st.tuples(st.lists(values, min_size=1, max_size=2), st.lists(st.none() | values, max_size=9)).map(
            lambda both: both[0] * 64 + both[1]
        ),
    )


LONG, SHORT = st.integers(-(2**63), 2**63 - 1), st.integers(-(2**15), 2**15 - 1)


@given(values=lists_of(LONG))
def test_bigints(values: list[int | None]) -> None:
    array = binary_arrays.bigints(values)
    assert array.data == one_by_one(array, 20, [None if v is None else struct.pack(">q", v) for v in values])


@given(values=lists_of(SHORT))
def test_smallints(values: list[int | None]) -> None:
    array = binary_arrays.smallints(values)
    assert array.data == one_by_one(array, 21, [None if v is None else struct.pack(">h", v) for v in values])


@given(values=lists_of(st.booleans()))
def test_bools(values: list[bool | None]) -> None:
    array = type_of(Scalar.BOOL).pack(values)
    assert array.data == one_by_one(array, 16, [None if v is None else struct.pack(">?", v) for v in values])


@given(values=lists_of(st.dates()))
def test_dates(values: list[date | None]) -> None:
    array = type_of(Scalar.DATE).pack(values)
    days = [None if v is None else struct.pack(">i", (v - date(2000, 1, 1)).days) for v in values]
    assert array.data == one_by_one(array, 1082, days)


@given(values=lists_of(st.datetimes(timezones=st.just(UTC))))
def test_times(values: list[datetime | None]) -> None:
    array = type_of(Scalar.DATETIME).pack(values)
    since = datetime(2000, 1, 1, tzinfo=UTC)
    ticks = [None if v is None else struct.pack(">q", (v - since) // timedelta(microseconds=1)) for v in values]
    assert array.data == one_by_one(array, 1184, ticks)


@given(values=lists_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)))
def test_texts(values: list[str | None]) -> None:
    array = binary_arrays.texts(values)
    assert array.data == one_by_one(array, 25, [None if v is None else v.encode() for v in values])


@pytest.mark.parametrize("count", [1, 100])
def test_a_number_that_does_not_fit_is_refused(count: int) -> None:
    with pytest.raises(struct.error):
        binary_arrays.bigints([2**63] * count)
    with pytest.raises(struct.error):
        binary_arrays.bigints([*range(count), 2**63])
