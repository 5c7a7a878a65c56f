"""make test: nothing but functions. Arrays in PostgreSQL's binary form: the same bytes, however they are packed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from projections.engine.views import binary_arrays
from projections.engine.views.binary_arrays import BinaryArray
from projections.engine.views.column_types import Scalar, type_of
from projections.engine.views.columns import Column


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


DAY_0 = datetime(2000, 1, 1, tzinfo=UTC)
ARRAYS: dict[str, tuple[Callable[[Any], BinaryArray], int, st.SearchStrategy[Any], Callable[[Any], bytes]]] = {
    "bigints": (binary_arrays.bigints, 20, st.integers(-(2**63), 2**63 - 1), partial(struct.pack, ">q")),
    "smallints": (binary_arrays.smallints, 21, st.integers(-(2**15), 2**15 - 1), partial(struct.pack, ">h")),
    "bools": (type_of(Scalar.BOOL).pack, 16, st.booleans(), partial(struct.pack, ">?")),
    "dates": (type_of(Scalar.DATE).pack, 1082, st.dates(), lambda day: struct.pack(">i", (day - DAY_0.date()).days)),
    "times": (
        type_of(Scalar.DATETIME).pack,
        1184,
        st.datetimes(timezones=st.just(UTC)),
        lambda time: struct.pack(">q", (time - DAY_0) // timedelta(microseconds=1)),
    ),
    "floats": (
        type_of(Scalar.FLOAT).pack,
        701,
        st.floats(allow_nan=False).map((0.0).__add__),
        partial(struct.pack, ">d"),
    ),
    "times of day": (
        type_of(Scalar.TIME).pack,
        1083,
        st.times(),
        lambda time: struct.pack(">q", (datetime.combine(DAY_0, time, UTC) - DAY_0) // timedelta(microseconds=1)),
    ),
    "durations": (
        type_of(Scalar.TIMEDELTA).pack,
        1186,
        st.timedeltas(),
        lambda span: struct.pack(">qii", (span - timedelta(span.days)) // timedelta(microseconds=1), span.days, 0),
    ),
    "JSON": (
        Column("it", Scalar.LIST, parts=(Column("[]", Scalar.INT),)).type.pack,
        3802,
        st.lists(st.integers(0, 99)),
        lambda value: b"\x01" + json.dumps(value, separators=(",", ":")).encode(),
    ),
    "texts": (binary_arrays.texts, 25, st.text(st.characters(exclude_categories=["Cs"]), max_size=5), str.encode),
}
"""What packs them, PostgreSQL's number of the type, its values, and how it documents one."""


@pytest.mark.parametrize(("pack", "element", "values", "cell"), ARRAYS.values(), ids=ARRAYS)
@given(data=st.data())
def test_an_array_is_what_postgresql_documents(
    pack: Callable[[Any], BinaryArray],
    element: int,
    values: st.SearchStrategy[Any],
    cell: Callable[[Any], bytes],
    data: st.DataObject,
) -> None:
    some = data.draw(lists_of(values))
    array = pack(some)
    assert array.data == one_by_one(array, element, [None if value is None else cell(value) for value in some])


@pytest.mark.parametrize("count", [1, 100])
def test_a_number_that_does_not_fit_is_refused(count: int) -> None:
    with pytest.raises(struct.error):
        binary_arrays.bigints([2**63] * count)
    with pytest.raises(struct.error):
        binary_arrays.bigints([*range(count), 2**63])
