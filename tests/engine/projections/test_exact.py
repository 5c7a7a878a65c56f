"""Rows are exact: what PostgreSQL can't hold, or would give back otherwise, is refused or made so at its very event.

So the rows of a view, and what it parks, are the same in every batch size, before and after a restart, live and rebuilt.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from textwrap import dedent
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from domain.accounts import AccountOpened, Details, MoneyDeposited
from infra.database.connect import ValueRefused, connect, naming
from infra.log import topics
from infra.settings import Settings
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.exact import MOST_KEY_BYTES, Exact
from projections.engine.fold.plan import Plan, combiners
from projections.engine.live.tail import Tail
from projections.engine.operate.replaying import drop, replay
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.store.commit import BatchResult, Committer, Fate, prepare
from projections.engine.store.parking import parked_streams
from projections.engine.store.positions import read_positions
from projections.engine.store.rows import StoredValueUnknown, loaded, select_rows
from projections.engine.verify.verify import verify
from projections.engine.views.column_types import MOST_DIGITS, BadRow
from projections.engine.views.columns import BadView
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper, _ends, fold_all, start
from tests.engine.projections import bankviews
from tests.engine.projections.test_engine import Bench
from tests.engine.projections.test_fold import filled
from tests.engine.projections.viewkit import view, views
from tests.engine.spine import set_up

# ── one row ──

ALL = """
    class Row(NamedTuple):
        key: Key[str]
        number: Key[int]
        price: Key[Decimal]
        colour: Key[Colour]
        a: bool | None
        b: int | None
        c: str | None
        d: date | None
        e: datetime | None
        f: Decimal | None
        g: UUID | None
        h: bytes | None
        i: Colour | None

    def key(event: Filled, at: At) -> tuple[Any, ...]:
        return MADE[event.cents][:4]

    def evolve(row: Row | None, event: Filled, at: At) -> Row | None:
        return Row(*MADE[event.cents])
"""
COLUMNS = ["key", "number", "price", "colour", "a", "b", "c", "d", "e", "f", "g", "h", "i"]


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Text(str):
    __slots__ = ()


class Size(IntEnum):
    ONE = 1


class Name(StrEnum):
    ANN = "ann"


class Moment(datetime):
    pass


class Number(Decimal):
    pass


def all_columns(made: list[tuple[Any, ...]]) -> View:
    found = view("from tests.engine.projections.test_exact import Colour\n" + dedent(ALL))
    found.function.__globals__["MADE"] = made
    return found


PLAIN: dict[str, Any] = {
    "key": "k", "number": 1, "price": Decimal("1.5"), "colour": Colour.RED, "a": True, "b": 2, "c": "é", "d": DAY,
    "e": datetime(2026, 1, 2, 3, tzinfo=UTC), "f": Decimal("2.50"), "g": UUID(int=7), "h": b"\x00\xff", "i": Colour.GREEN,
}  # fmt: skip
WEST = timezone(timedelta(hours=-5))
NAIVE = PLAIN["e"].replace(tzinfo=None)
FITS: Mapping[str, list[tuple[Any, Any]]] = {
    "key": [("x" * (MOST_KEY_BYTES - 10), None), (Name.ANN, "ann"), (Text("é"), "é")],
    "number": [(True, 1), (Size.ONE, 1), (2**63 - 1, 2**63 - 1), (-(2**63), -(2**63))],
    "price": [
        (Decimal("1.500"), Decimal("1.5")), (Decimal("1E+3"), Decimal(1000)), (7, Decimal(7)), (Decimal("-0.0"), Decimal(0)),
    ],
    "a": [(None, None), (False, False)],
    "b": [(True, 1), (Size.ONE, 1), (None, None)],
    "c": [(Name.ANN, "ann"), (Text("\U0001f642"), "\U0001f642"), ("", "")],
    "d": [(datetime(2026, 5, 6, 7, tzinfo=WEST), date(2026, 5, 6)), (date.min, date.min), (date.max, date.max)],
    "e": [
        (datetime(2026, 5, 6, 23, 30, tzinfo=WEST), datetime(2026, 5, 7, 4, 30, tzinfo=UTC)),
        (Moment(2026, 5, 6, tzinfo=UTC), datetime(2026, 5, 6, tzinfo=UTC)),
        (datetime(2026, 5, 6, tzinfo=timezone(timedelta(0), "GMT")), datetime(2026, 5, 6, tzinfo=UTC)),
        (datetime(2026, 5, 6, tzinfo=UTC, fold=1), datetime(2026, 5, 6, tzinfo=UTC)),
        (datetime.max.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)),
        (datetime.min.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)),
    ],
    "f": [
        (Decimal("1E+3"), Decimal(1000)), (Decimal("-0.00"), Decimal("0.00")), (Number("1.10"), Decimal("1.10")),
        (Decimal("1E-7"), Decimal("1E-7")), (5, Decimal(5)), (Decimal("9" * MOST_DIGITS + "." + "9" * MOST_DIGITS),) * 2,
    ],
    "g": [(None, None)],
    "h": [(bytearray(b"ab"), b"ab"), (memoryview(b"ab"), b"ab"), (b"", b"")],
    "i": [(None, None)],
}  # fmt: skip
"""Values of a column that are taken, with what they become; None: they are as they were."""
DOES_NOT_FIT: Mapping[str, list[Any]] = {
    "key": ["x" * (MOST_KEY_BYTES + 1), "é" * MOST_KEY_BYTES, "\0", None, 1],
    "number": [2**63, -(2**63) - 1, 1.0, "1", None],
    "price": [Decimal("NaN"), 1.5, Decimal("1" * (MOST_KEY_BYTES + 1)), None],
    "colour": ["red", None, Name.ANN],
    "a": [1, 0, "true"],
    "b": [2**63, -(2**63) - 1, 1.0, Decimal(1), "1"],
    "c": ["a\0b", "\ud800", "\ud800\udc00", 1, b"a", Colour.RED],
    "d": ["2026-01-01", 1],
    "e": [
        NAIVE, datetime.max.replace(tzinfo=WEST), datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), DAY,
    ],
    "f": [
        Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), Decimal(10) ** MOST_DIGITS, Decimal(f"1E-{MOST_DIGITS + 1}"),
        0.5, "1", Decimal("0E+999999"),
    ],
    "g": ["5", 5],
    "h": ["a", 5, [1]],
    "i": ["red", Name.ANN],
}  # fmt: skip


def row_with(of: View, **values: Any) -> Any:
    return tuple.__new__(of.row, tuple({**PLAIN, **values}.values()))


@pytest.mark.parametrize("column", COLUMNS)
def test_what_does_not_fit_is_a_bad_row_that_names_column_and_type(column: str) -> None:
    of = all_columns([])
    exact = Exact(of)
    for value in DOES_NOT_FIT[column]:
        row = row_with(of, **{column: value})
        with pytest.raises(BadRow) as refused:
            exact.row(row)
        told = str(refused.value)
        assert (f"column '{column}'" in told and type(value).__name__ in told) or "key takes" in told
        assert not exact.are([row_with(of), row])
        if column in COLUMNS[:4]:
            with pytest.raises(BadRow):
                exact.key(tuple(row)[:4])


@given(st.data())
def test_many_rows_are_judged_as_each_is(data: st.DataObject) -> None:
    """`are` is `row` of each, or a batch would be refused where its events alone are not."""
    of = all_columns([])
    exact = Exact(of)
    choices = {
        name: st.sampled_from([PLAIN[name], *(one for one, _ in FITS.get(name, [])), *DOES_NOT_FIT[name]])
        for name in COLUMNS
    }
    changed = st.dictionaries(st.sampled_from(COLUMNS), st.just(None), max_size=2)
    rows = [
        row_with(of, **{name: data.draw(choices[name]) for name in data.draw(changed)})
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    assert exact.are(rows) == all(_stays(exact, row) for row in rows)


def _stays(exact: Exact, row: Any) -> bool:
    try:
        return exact.row(row) is row
    except BadRow:
        return False


def test_a_row_of_another_length_or_class_is_none() -> None:
    of = all_columns([])
    exact = Exact(of)
    for row in (
        tuple.__new__(of.row, ("k",)),
        tuple.__new__(of.row, (*PLAIN.values(), 1)),
        tuple(PLAIN.values()),
        "k",
        None,
    ):
        assert not exact.are([row])
        with pytest.raises(BadRow):
            exact.row(row)
    for key in ("k", ["k"], ("k",), None):
        with pytest.raises(BadRow):
            exact.key(key)


@pytest.mark.parametrize(
    ("key", "stream"),
    [
        (("7", 1), "purse/7"),
        ((7, 1), "purse/7"),
        ((b"7", 1), "purse/7"),
        ((Colour.RED,), "purse/red"),
        ((UUID(int=7), 2), f"purse/{UUID(int=7)}"),
    ],
)
def test_a_key_that_begins_with_the_stream_s_id_is_its_own(key: tuple[Any, ...], stream: str) -> None:
    exact = Exact(all_columns([]))
    exact.require_own(key, stream)
    for other in ("purse/8", "purse/07", f"purse/{key[-1]}8"):
        with pytest.raises(BadRow, match=r"begin with `at\.id`"):
            exact.require_own(key, other)


def test_a_key_that_two_streams_both_stand_in_is_nobodys() -> None:
    exact = Exact(all_columns([]))
    exact.require_own(("a", "b"), "purse/a")
    with pytest.raises(BadRow):
        exact.require_own(("a", "b"), "purse/b")


def test_a_key_in_a_view_of_two_contexts_begins_with_the_context_too() -> None:
    exact = Exact(dataclasses.replace(all_columns([]), contexts=("box", "purse")))
    exact.require_own(("box", "7"), "box/7")
    exact.require_own(("box/7",), "box/7")
    exact.require_own(("box", "purse"), "box/purse")
    for key, stream in [
        (("7",), "box/7"),
        (("7", "box"), "box/7"),
        (("box", "purse"), "purse/box"),
        (("box",), "box/box"),
    ]:
        with pytest.raises(BadRow, match=r"begin with `at\.stream`"):
            exact.require_own(key, stream)


def test_rows_come_back_as_they_are_held(world: Settings) -> None:
    """In value, type and what they look like, all the way through PostgreSQL."""
    cases = [(name, *case) for name in COLUMNS for case in FITS.get(name, [])]
    of = all_columns([])
    made = []
    for number, (name, value, _) in enumerate(cases):
        row = {**PLAIN, "key": f"k{number}", name: value}
        made.append(tuple(row.values()))
    of.function.__globals__["MADE"] = made
    bench = Bench(world, {**views(), "purses": of})
    bench.apply(bench.batch(0, *[(str(row[0]), [filled(number)]) for number, row in enumerate(made)]))
    held = dict(bench.committer.held[0].rows["purses"])
    bench.fresh_committer()
    query, parameters, _ = select_rows(of, "purses_v1", list(held))
    read = loaded(of, None, bench.db.execute(query, parameters).fetchall())

    assert len(read) == len(cases)
    assert {key: repr(row) for key, row in read.items()} == {key: repr(row) for key, row in held.items()}
    for number, (name, value, becomes) in enumerate(cases):
        key = next(key for key in read if key[0] == (f"k{number}" if name != "key" else str(value)))
        expected = value if becomes is None else becomes
        found = getattr(read[key], name)
        assert (found, repr(found)) == (expected, repr(expected)), name
    exact = Exact(of)
    assert exact.are(list(read.values())), "what was read is folded on without a second look"
    bench.db.close()


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=None), min_size=1, max_size=20))
@example([Decimal(10) ** 40, Decimal(1).scaleb(-40)])
@settings(deadline=None)
def test_decimals_add_up_exactly(numbers: list[Decimal]) -> None:
    of = view(
        """
    class Total(NamedTuple):
        kind: Key[str]
        amount: Sum[Decimal]

    def delta(event: Filled, at: At) -> Iterable[Total]:
        return []
    """
    )
    exact, (add,) = Exact(of), combiners(of)
    total = Decimal(0)
    for number in numbers:
        try:
            total = add(total, exact.row(of.row("a", number)).amount)
        except BadRow:
            assert abs(number.adjusted()) >= MOST_DIGITS or number.as_tuple().exponent < -MOST_DIGITS  # type: ignore[operator]
            return
    assert Fraction(total) == sum(map(Fraction, numbers))


def test_an_enum_whose_values_cant_be_stored_is_no_column() -> None:
    source = """
    class Odd(Enum):
        NUL = "a\\0"

    class Row(NamedTuple):
        key: Key[str]
        odd: Odd

    def evolve(row: Row | None, event: Filled, at: At) -> Row | None:
        return None
    """
    with pytest.raises(BadView, match="odd"):
        view(source)


def test_a_key_or_a_row_with_more_columns_than_postgresql_has_room_for_is_no_view() -> None:
    for marked in ("Key[int]", "int"):
        columns = "\n".join(f"        c{number}: {marked}" for number in range(32 if marked != "int" else 251))
        with pytest.raises(BadView, match="too many columns"):
            view(
                f"""
    class Row(NamedTuple):
        key: Key[str]
{columns}

    def evolve(row: Row | None, event: Filled, at: At) -> Row | None:
        return None
    """
            )


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
    assert bench.apply(bench.batch(0, ("x" * 100, [filled(1)]))) == BatchResult(Fate.APPLIED)
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
            with pytest.raises(ValueRefused), naming(world):
                db.execute(query).fetchall()
        with pytest.raises(ValueRefused), naming(world):
            db.execute("select %s", ("a\0b",))


# ── the same rows and the same parked streams, however they are folded ──

ZONES = """
    class Zone(NamedTuple):
        account: Key[str]
        at: datetime
        days: str

    def evolve(row: Zone | None, event: MoneyDeposited, at: At) -> Zone | None:
        zone = timezone(timedelta(hours=-5))
        day = datetime(event.on.year, event.on.month, event.on.day, 23, 30)
        if purpose(event) == "far":
            day = datetime(9999, 12, 31, 23)
        when = day if purpose(event) == "naive" else day.replace(tzinfo=zone)
        return Zone(at.id, when, row.days + f" {row.at.date()} {row.at.tzinfo}" if row else "")
"""
"""What it says of the row before depends on the zone that is held."""
SUBCLASSES = """
    class Size(IntEnum):
        ONE = 1

    class Name(StrEnum):
        ANN = "ann"

    class Sub(NamedTuple):
        account: Key[str]
        size: int
        name: str
        amount: Decimal
        seen: str

    def evolve(row: Sub | None, event: MoneyDeposited, at: At) -> Sub | None:
        return Sub(at.id, Size.ONE, Name.ANN, Decimal("-0.0") if at.version % 2 else Decimal("1E+2"),
                   "; ".join(map(repr, row[1:4])) if row else "")
"""
WEIGHTS = """
    class Weight(NamedTuple):
        account: Key[str]
        weight: int
        deposits: int

    def evolve(row: Weight | None, event: MoneyDeposited, at: At) -> Weight | None:
        if purpose(event) == "stray":
            return Weight("somebody else's", 1, 1)
        return Weight(at.id, 10**19 if purpose(event) == "heavy" else 1, 1 + (row.deposits if row else 0))
"""
"""A row that can't be stored is gone with the next event, where both are in one batch."""
SIDES = """
    class Side(Enum):
        OUT = "out"
        IN = "in"

    class Balance(NamedTuple):
        account: Key[str]
        side: Key[Side]
        price: Key[Decimal]
        number: Key[int]
        deposits: int

    def key(event: MoneyDeposited, at: At) -> tuple[str, Side, Decimal, int]:
        price = Decimal("1.0") if at.version % 2 else Decimal("1.00")
        account = "anybody" if purpose(event) == "stray" else at.id
        return (account, Side.IN if event.cents % 2 else Side.OUT, price, 10**19 if purpose(event) == "heavy" else 1)

    def evolve(row: Balance | None, event: MoneyDeposited, at: At) -> Balance | None:
        if row and event.cents == 3:
            return None
        return Balance(*key(event, at), 1 + (row.deposits if row else 0))
"""
TOTALS = """
    class Kind(Enum):
        ODD = "odd"
        EVEN = "even"

    class Total(NamedTuple):
        kind: Key[Kind]
        account: Key[str]
        amount: Sum[Decimal]
        times: Sum[int]
        last: Max[datetime]

    def delta(event: MoneyDeposited, at: At) -> Iterable[Total]:
        when = datetime(9999 if purpose(event) == "far" else 2026, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))
        amount = Decimal("NaN") if purpose(event) == "heavy" else Decimal(10) ** 30 if event.cents % 2 else Decimal("1E-20")
        yield Total(Kind.ODD if event.cents % 2 else Kind.EVEN, at.id, amount, True, when)
"""
LINES = """
    class Line(NamedTuple):
        account: Key[str]
        words: Key[str]
        line: Key[int]
        note: str

    def rows(event: MoneyDeposited, after: State, at: At) -> Iterable[Line]:
        words = "w" * 3000 if purpose(event) == "long" else ""
        line = 2 if purpose(event) == "again" else at.version
        account = "anybody" if purpose(event) == "stray" else at.id
        yield Line(account, words, line, "a\\0" if purpose(event) == "nul" else "")
"""
NASTY = {
    "zones": (ZONES, {"far", "naive"}),
    "subclasses": (SUBCLASSES, set[str]()),
    "weights": (WEIGHTS, {"heavy", "stray"}),
    "sides": (SIDES, {"heavy", "stray"}),
    "totals": (TOTALS, {"far", "heavy"}),
    "lines": (LINES, {"long", "again", "nul", "stray"}),
}
"""Views, and the purposes that each can't take."""
PURPOSES = sorted(set[str]().union(*(cant for _, cant in NASTY.values())))
HEAD = """
from datetime import timedelta, timezone
from enum import IntEnum, StrEnum

def purpose(event):
    return event.details.purpose if FAILS else ""
"""


def nasty(*, park: bool = True, fails: bool = True, only: str | None = None) -> dict[str, View]:
    before = HEAD + f"FAILS = {fails}\n" + ('ON_POISON = "park"\n' if park else "")
    return bankviews.with_views(
        {name: bankviews.view(source, name, before) for name, (source, _) in NASTY.items() if only in (None, name)}
    )


def deposit(cents: int, purpose: str = "") -> MoneyDeposited:
    return MoneyDeposited(cents=cents, on=DAY, details=Details(purpose=purpose))


def lives(world: Settings) -> Bookkeeper:
    """An account for each purpose: three healthy deposits, the one with the purpose at version 5, and two more."""
    set_up(world)
    keeper = Bookkeeper(world)
    for cents in range(-1, 6):
        for account in ("good", *PURPOSES):
            if cents < 0:
                keeper.commit(account, AccountOpened(overdraft_limit=0, on=DAY))
            else:
                keeper.commit(account, deposit(cents + 1, account if cents == 3 else ""))
    keeper.flush()
    return keeper


PARKED = {(name, f"accounts/{purpose}"): 5 for name, (_, cant) in NASTY.items() for purpose in cant}


class Found(NamedTuple):
    rows: dict[str, list[tuple[Any, ...]]]
    parked: dict[tuple[str, str], int]


def found_in(world: Settings, tables: Mapping[str, str]) -> Found:
    with connect(world, "test") as db:
        parked = {
            (one.view, one.stream): one.since_version for one in parked_streams(db) if one.table in tables.values()
        }
    return Found({name: bankviews.rows(world, table) for name, table in tables.items()}, parked)


def fold_in_batches(world: Settings, some: Mapping[str, View], most: int | None, *, restarts: bool) -> None:
    """As an agent whose batches hold so many records, whose rows are read again for each where it restarts."""
    plan = Plan(some)
    with connect(world, "test agent") as db:
        prepare(db)
        positions = read_positions(db, "core", world.events_topic)
        assert positions is not None
        committer, at = Committer(plan, positions), dict(positions.readings)
        end = topics.describe(world, world.events_topic).end
        with Tail(world, world.events_topic, at) as tail:
            while batches := tail.towards(at, _ends(at, end), most or 10_000):
                assert committer.apply(db, batches).fate is Fate.APPLIED
                at.update({batch.partition: batch.next for batch in batches})
                if restarts:
                    again = read_positions(db, "core", world.events_topic)
                    assert again is not None
                    committer = Committer(Plan(some), again)


def start_over(world: Settings, some: Mapping[str, View]) -> None:
    """As if nothing had been folded."""
    with connect(world, "test") as db:
        for table in ("positions", "live", "builds", "parked", "skips", *(one.table_name for one in some.values())):
            db.execute(f"truncate {table} cascade".encode())
    start(world, some)


@pytest.mark.slow
def test_the_same_in_every_batch_size_after_restarts_and_rebuilt(world: Settings) -> None:
    lives(world)
    some = nasty()
    bankviews.make_tables(world, some)
    live: dict[str, Found] = {}
    tables = {name: some[name].table_name for name in NASTY}
    for most, restarts in ((1, True), (1, False), (7, True), (None, False)):
        start_over(world, some)
        fold_in_batches(world, some, most, restarts=restarts)
        live[f"{most} {restarts}"] = found_in(world, tables)
        assert verify(world, some, processes=1).differences == 0
    first = live["1 True"]
    assert first.parked == PARKED
    assert all(first.rows.values())
    assert {how: one for how, one in live.items() if one != first} == {}
    made = rebuild(world, list(NASTY), some, make_live=False, processes=1)
    assert found_in(world, {name: made.tables[name] for name in NASTY}) == first
    assert made.parked == Counter(name for name, _ in PARKED), "and it says so"


def test_what_was_parked_for_a_row_is_replayed_or_dropped(world: Settings) -> None:
    lives(world)
    some, corrected = nasty(), nasty(fails=False)
    bankviews.make_tables(world, some)
    start_over(world, some)
    fold_all(world, some)
    for name, (_, cant) in NASTY.items():
        for number, purpose in enumerate(sorted(cant)):
            if number == 0:
                done = drop(world, some[name], f"accounts/{purpose}")
                assert (done.dropped, done.events, done.parked) == (5, 2, None), "all but the one event"
            else:
                done = replay(world, corrected[name], f"accounts/{purpose}")
                assert (done.events, done.parked) == (3, None)
    assert verify(world, corrected, processes=1).differences == 0
    assert found_in(world, {name: some[name].table_name for name in NASTY}).parked == {}


def test_a_view_that_does_not_park_stops_at_the_event_by_name(world: Settings) -> None:
    lives(world)
    others = bankviews.with_views({})
    bankviews.make_tables(world, nasty())
    for name in (name for name, (_, cant) in NASTY.items() if cant):
        some = nasty(park=False, only=name)
        start_over(world, some)
        with pytest.raises(PoisonEvent) as live:
            fold_all(world, some)
        start_over(world, others)
        fold_all(world, others)
        with pytest.raises(PoisonEvent) as rebuilt:
            rebuild(world, [name], some, make_live=False, processes=1)
        for stopped in (live.value, rebuilt.value):
            assert (stopped.view, stopped.version) == (name, 5)
