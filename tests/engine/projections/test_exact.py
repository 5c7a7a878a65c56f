"""make test: values are judged in memory; two tables are made.

Rows are exact: what PostgreSQL can't hold, or would give back
otherwise, is refused or made so at its very event.

That rows and parked streams are therefore the same in every batch size, before and after a restart, live and rebuilt, is what
`proofs/test_one_fold.py` shows, with the same values.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from domain.engine.value_limits import MOST_DIGITS
from infra.database.connect import ValueRefused, connect, named_errors
from infra.settings import Settings
from projections.engine.fold.exact import Exact
from projections.engine.fold.plan import Sums
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.rows import StoredValueUnknown
from projections.engine.views.column_types import MOST_KEY_BYTES, BadRow
from proofs.one_fold.expect import canonical
from proofs.one_fold.generate import Column
from proofs.one_fold.made import tell
from proofs.one_fold.values import COLUMNS, KEYS, Mood
from tests.engine.projections.test_engine import Bench
from tests.engine.projections.test_fold import filled
from tests.engine.projections.viewkit import view, views

ALL = [
    *(Column(f"k{n}", kind, "Key") for n, kind in enumerate(KEYS)),
    *(Column(f"c{n}", kind, optional=True) for n, kind in enumerate(COLUMNS)),
]
PLAIN: dict[str, Any] = {column.name: column.type.good[0] for column in ALL}
EVERY = view(
    "from proofs.one_fold.values import Line, Mood, Parcel, Tone\n"
    f"class Row(NamedTuple): {'; '.join(f'{column.name}: {column.annotation}' for column in ALL)}\n"
    "def key(event: Filled, at: At) -> tuple[Any, ...]: ...\n"
    "def evolve(row: Row | None, event: Filled, at: At) -> Row | None: ...\n"
)
EXACT = Exact(EVERY)
by_column = pytest.mark.parametrize("column", ALL, ids=lambda column: column.annotation)


def row_with(**values: Any) -> Any:
    return tuple.__new__(EVERY.row, tuple({**PLAIN, **values}.values()))


@by_column
def test_what_fits_becomes_what_the_database_gives_back(column: Column) -> None:
    for value in column.type.good:
        row = row_with(**{column.name: value})
        exact = EXACT.row(row)
        assert tell(getattr(exact, column.name)) == tell(canonical(column.kind, column.role, value))
        assert EXACT.are([row]) is (exact is row)
        assert EXACT.row(exact) is exact, "what was read is folded on without a second look"


@by_column
def test_what_does_not_fit_is_a_bad_row_that_names_column_and_type(column: Column) -> None:
    is_key = column.role == "Key"
    values = [*column.type.bad, *MORE_BAD.get(column.kind, ())]
    if is_key:
        values += [None, *TOO_LONG.get(column.kind, ())]
    for value in values:
        row = row_with(**{column.name: value})
        with pytest.raises(BadRow) as refused:
            EXACT.row(row)
        told = str(refused.value)
        assert (f"column '{column.name}'" in told and type(value).__name__ in told) or "key takes" in told
        assert not EXACT.are([row_with(), row])
        if is_key:
            with pytest.raises(BadRow):
                EXACT.key(tuple(row)[: len(KEYS)])


MORE_BAD: dict[str, list[Any]] = {
    "str": ["a\0b", "\ud800\udc00"],
    "Decimal": [Decimal("0E+999999"), Decimal(f"1E-{MOST_DIGITS + 1}"), Decimal(10) ** MOST_DIGITS],
    "bool": [0, 1],
    "bytes": [[1]],
}
TOO_LONG: dict[str, list[Any]] = {
    "str": ["x" * (MOST_KEY_BYTES + 1), "é" * MOST_KEY_BYTES],
    "Decimal": [Decimal("1" * (MOST_KEY_BYTES + 1))],
}


@given(st.data())
def test_many_rows_are_judged_as_each_is(data: st.DataObject) -> None:
    """`are` is `row` of each, or a batch would be refused where its events alone are not."""
    some = st.sampled_from(ALL).flatmap(
        lambda column: st.tuples(st.just(column.name), st.sampled_from([*column.type.good, *column.type.bad]))
    )
    rows = [row_with(**dict(changed)) for changed in data.draw(st.lists(st.lists(some, max_size=2), max_size=3))]
    assert EXACT.are(rows) == all(map(_stays, rows))


def _stays(row: Any) -> bool:
    try:
        return EXACT.row(row) is row
    except BadRow:
        return False


def test_a_row_of_another_length_or_class_is_none() -> None:
    values = tuple(PLAIN.values())
    for row in (tuple.__new__(EVERY.row, ("k",)), tuple.__new__(EVERY.row, (*values, 1)), values, "k", None):
        assert not EXACT.are([row])
        with pytest.raises(BadRow):
            EXACT.row(row)
    for key in ("k", ["k"], ("k",), None):
        with pytest.raises(BadRow):
            EXACT.key(key)


OF_ONE = ("purse",)
OF_TWO = ("box", "purse")
OWN = [
    (OF_ONE, ("7", 1), "purse/7"),
    (OF_ONE, (7, 1), "purse/7"),
    (OF_ONE, (b"7", 1), "purse/7"),
    (OF_ONE, (Mood.UP,), "purse/above nothing"),
    (OF_ONE, (UUID(int=7), 2), f"purse/{UUID(int=7)}"),
    (OF_ONE, ("a", "b"), "purse/a"),
    (OF_TWO, ("box", "7"), "box/7"),
    (OF_TWO, ("box/7",), "box/7"),
    (OF_TWO, ("box", "purse"), "box/purse"),
]
ANOTHERS = [
    *((OF_ONE, key, stream) for _, key, _ in OWN[:5] for stream in ("purse/8", "purse/07", f"purse/{key[-1]}8")),
    (OF_ONE, ("a", "b"), "purse/b"),
    (OF_TWO, ("7",), "box/7"),
    (OF_TWO, ("7", "box"), "box/7"),
    (OF_TWO, ("box", "purse"), "purse/box"),
    (OF_TWO, ("box",), "box/box"),
]
"""Contexts of a view, a key, and a stream."""


def test_a_key_that_begins_with_the_stream_s_id_is_its_own() -> None:
    """In a view of two contexts, with the context's name too. So a key that two streams both stand in is not both's."""
    for contexts, key, stream in OWN:
        Exact(dataclasses.replace(EVERY, contexts=contexts)).require_own(key, stream)
    for contexts, key, stream in ANOTHERS:
        with pytest.raises(BadRow, match=r"begin with `at\.(id|stream)`"):
            Exact(dataclasses.replace(EVERY, contexts=contexts)).require_own(key, stream)


SUMMARY = view(
    """
    class Total(NamedTuple):
        kind: Key[str]
        amount: Sum[Decimal]

    def delta(event: Filled, at: At) -> Iterable[Total]:
        return []
    """
)


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=None), min_size=1, max_size=20))
@example([Decimal(10) ** 40, Decimal(1).scaleb(-40)])
def test_decimals_add_up_exactly(numbers: list[Decimal]) -> None:
    of, exact, merge = SUMMARY, Exact(SUMMARY), Sums(SUMMARY).merge
    total = Decimal(0)
    for number in numbers:
        try:
            [total] = merge([total], [exact.row(of.row("a", number)).amount])
        except BadRow:
            assert abs(number.adjusted()) >= MOST_DIGITS or number.as_tuple().exponent < -MOST_DIGITS  # type: ignore[operator]
            return
    assert Fraction(total) == sum(map(Fraction, numbers))


def test_a_table_with_as_many_columns_as_a_view_may_have_takes_rows(world: Settings) -> None:
    """A key as long, of as many columns, as may be; and a row as wide."""
    keys = [f"k{number}" for number in range(30)]
    rest = [f"c{number}" for number in range(219)]
    long = "é" * 30 + "x"
    source = f"""
    class Row(NamedTuple):
        key: Key[str]
        {"; ".join(f"{name}: Key[str]" for name in keys)}
        {"; ".join(f"{name}: str" for name in rest)}

    def key(event: Filled, at: At) -> tuple[Any, ...]:
        return (at.id, *[{long!r}] * 30)

    def evolve(row: Row | None, event: Filled, at: At) -> Row | None:
        return Row(*key(event, at), *[str(n) * 1000 + str(hash(n)) for n in range(219)])
    """
    bench = Bench(world, views(purses=source))
    assert bench.apply(bench.batch(0, ("x" * 100, [filled(1)]))) == BatchResult(CommitStatus.APPLIED)
    assert len(bench.rows("purses")) == 1
    bench.db.close()


def test_a_value_that_an_enum_has_no_more_is_named(world: Settings) -> None:
    source = """
    class Kind(Enum):
        ONE = "one"

    class Row(NamedTuple):
        key: Key[str]
        kind: Kind

    def evolve(row: Row | None, event: Filled, at: At) -> Row | None:
        return Row(at.id, Kind.ONE)
    """
    bench = Bench(world, views(purses=source))
    bench.apply(bench.batch(0, ("a", [filled(1)])))
    bench.db.execute("update purses_v1 set kind = 'two'")
    bench.fresh_committer()
    with pytest.raises(StoredValueUnknown, match="'two' in column 'kind'"):
        bench.apply(bench.batch(0, ("a", [filled(1)])))
    bench.db.close()


def test_a_value_is_no_matter_of_the_connection(world: Settings) -> None:
    with connect(world, "test") as db:
        for query in ("select '10000-01-01'::date", "select 1/0", "select 'x'::int"):
            with pytest.raises(ValueRefused), named_errors(world):
                db.execute(query).fetchall()
        with pytest.raises(ValueRefused), named_errors(world):
            db.execute("select %s", ("a\0b",))
