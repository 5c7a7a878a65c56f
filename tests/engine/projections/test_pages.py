"""make test + test-all: queries take milliseconds, hundreds of pages seconds.

Pages of a view against a list in Python: filtered, sorted, counted, and gone on with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from operator import ge, gt, le, lt
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from psycopg import sql

from infra.access import Rows
from infra.database.connect import Connection
from infra.settings import Settings
from projections.engine.views.columns import Column, value_of
from projections.engine.views.indexes import Index, Order, Part
from projections.engine.views.pages import Filter, Missing, Op, Page, missing_index, operators_of, order_of, page_query
from projections.engine.views.view import View
from tests.engine.projections import viewkit
from tests.engine.projections.test_asking import TOPIC, ask, make, page_of, rows

THINGS = """
    class Thing(NamedTuple):
        word: Key[str]
        number: Key[int]
        cents: int
        name: str
        maybe: int | None
        said: str | None
        day: date
        money: Decimal | None
        yes: bool
        share: float
        opens: time | None
        takes: timedelta

    INDEXES = (
        *(Index("cents"), Index("name"), Index("maybe", "-cents"), Index("-said")),
        *(Index("yes", "money"), Index("share", "-takes")),
    )

    def rows(event: Filled | Spent, after: State, at: At) -> Iterable[Thing]:
        yield from ()
"""
LONG = "x" * 100
WORDS = [
    "",
    "a",
    "A",
    "ab",
    "%",
    "\\",
    "a,b",
    'a"b',
    "ä",
    "\uffff",
    "\U0001f600",
    "\U0010ffff",
    LONG,
    f"{LONG}a",
    f"{LONG}b",
]
VALUES: dict[str, list[Any]] = {
    "word": ["a", "B", "ä"],
    "number": [-1, 0, 7, 2**63 - 1],
    "cents": [-5, 0, 1, 2],
    "name": WORDS,
    "maybe": [None, 1, 2],
    "said": [None, *WORDS],
    "day": [date(2026, 1, 1), date(2026, 1, 2)],
    "money": [None, Decimal("-1.5"), Decimal("1.50"), Decimal("1.500"), Decimal(10**30)],
    "yes": [False, True],
    "share": [-1.5, 0.0, 1e-7, 0.1 + 0.2, 1e300],
    "opens": [None, time(9), time(9, 0, 0, 1), time(23, 59, 59, 999_999)],
    "takes": [timedelta(0), timedelta(days=-1, microseconds=1), timedelta(days=400, seconds=5)],
}
"""Few of each column, so that many rows are equal in some."""
Row = tuple[Any, ...]
COMPARED: dict[Op, Callable[[Any, Any], bool]] = {
    Op.GTE: ge,
    Op.GT: gt,
    Op.LTE: le,
    Op.LT: lt,
    Op.PREFIX: str.startswith,
}


@st.composite
def pages(draw: st.DrawFn, view: View) -> Page:
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=2, unique=True))
    sort = tuple(Part(column_of(view, name), draw(st.booleans())) for name in names)
    filters = []
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3, unique=True)):
        column = column_of(view, name)
        op = draw(st.sampled_from([one for one in operators_of(column) if one is not Op.NULL]))
        some = [value for value in VALUES[name] if value is not None]
        value: Any = draw(st.lists(st.sampled_from(some), min_size=1) if op is Op.IN else st.sampled_from(some))
        if op in (Op.EQUAL, Op.NOT) and column.optional and draw(st.booleans()):
            value = None
        filters.append(Filter(column, op, value))
    return Page(tuple(filters), order_of(view, sort), draw(st.integers(1, 7)), is_counted=True)


@st.composite
def rules(draw: st.DrawFn) -> Rows | None:
    """What `may_read` returns: all rows, or those of a condition or of either of two."""
    some = st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(0, 100), min_size=1, max_size=2)
    either = draw(st.lists(some, max_size=2))
    values = {name: [value for value in all_ if value is not None] for name, all_ in VALUES.items()}
    found = [Rows(**{name: values[name][n % len(values[name])] for name, n in one.items()}) for one in either]
    return (found[0] | found[1] if len(found) > 1 else found[0]) if found else None


def is_among(view: View, row: Row, only: Rows | None) -> bool:
    value = dict(zip((column.name for column in view.columns), row, strict=True))
    return only is None or any(all(value[name] == wanted for name, wanted in one) for one in only.any_of)


def column_of(view: View, name: str) -> Column:
    return next(column for column in view.columns if column.name == name)


def fulfils(view: View, row: Row, one: Filter) -> bool:
    value = row[view.columns.index(one.column)]
    match one.op:
        case Op.EQUAL | Op.NOT:
            return (value == one.value) is (one.op is Op.EQUAL)
        case Op.IN:
            return value in one.value
        case _:
            return value is not None and COMPARED[one.op](value, one.value)


def in_order(view: View, some: Sequence[Row], order: Order) -> list[Row]:
    found = list(some)
    for column, descending in reversed(order):
        place = view.columns.index(column)

        def sorted_by(row: Row, place: int = place) -> tuple[bool, Any]:
            value = row[place][:100] if isinstance(row[place], str) else row[place]
            return (True, 0) if value is None else (False, value)

        found.sort(key=sorted_by, reverse=descending)
    return found


@pytest.fixture
def things(db: Connection, world: Settings) -> View:
    view = viewkit.view(THINGS, "things")
    make(db, world, view)
    return view


def put(db: Connection, some: Sequence[Row]) -> None:
    places = sql.SQL(", ").join(sql.Placeholder() * (len(VALUES) + 1))
    statement = sql.SQL("insert into things_v1 values ({}) on conflict (word, number) do update set {}").format(
        places,
        sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in list(VALUES)[2:]),
    )
    with db.cursor() as cursor:
        cursor.executemany(statement, [(*row, 0) for row in some])


def all_pages(
    db: Connection, view: View, page: Page, only: Rows | None = None, between: Callable[[], None] = lambda: None
) -> Iterator[Row]:
    """The rows of all pages, as a client goes through them: with cursors of texts."""
    while True:
        found = ask(db, page_query(view, view.table_name, TOPIC, page, only))
        names = [column.name for column in view.columns]
        for row in rows(found):
            shown = zip(view.columns, (row[name] for name in names), strict=True)
            yield tuple(None if value is None else _value(column, value) for column, value in shown)
        if len(found.rows) < page.most:
            return
        place = found.rows[-1].place
        assert place is not None
        after = zip(page.order, place, strict=True)
        page = page._replace(after=tuple(None if text is None else value_of(part.column, text) for part, text in after))
        between()


def _value(column: Column, shown: Any) -> Any:
    return value_of(column, str(shown).lower() if isinstance(shown, bool) else str(shown))


def some_rows(random: Random) -> list[Row]:
    keys = [(word, number) for word in VALUES["word"] for number in VALUES["number"]]
    others = list(VALUES.values())[2:]
    return [(*key, *map(random.choice, others)) for key in random.sample(keys, random.randint(0, len(keys)))]


@pytest.mark.slow
def test_pages_are_what_a_list_would_be_of_the_rows_that_a_caller_may_read(db: Connection, things: View) -> None:
    """Nobody sees another row, in no page, count or cursor."""

    @given(st.data(), rules(), st.randoms(use_true_random=False))
    @hypothesis(max_examples=300, deadline=None)
    def check(data: st.DataObject, only: Rows | None, random: Random) -> None:
        there = some_rows(random)
        db.execute("truncate things_v1")
        put(db, there)
        page = data.draw(pages(things))
        own = [row for row in there if is_among(things, row, only)]
        wanted = in_order(
            things, [row for row in own if all(fulfils(things, row, one) for one in page.filters)], page.order
        )
        assert list(all_pages(db, things, page, only)) == wanted
        assert ask(db, page_query(things, things.table_name, TOPIC, page, only)).counted == len(wanted)

    check()


@pytest.mark.slow
def test_a_row_that_does_not_move_comes_once_while_others_do(db: Connection, things: View) -> None:
    """They come, go and move between two pages."""

    @given(st.data(), st.randoms(use_true_random=False))
    @hypothesis(max_examples=60, deadline=None)
    def check(data: st.DataObject, random: Random) -> None:
        there = some_rows(random)
        still = [row for row in there if random.random() < 0.5]
        db.execute("truncate things_v1")
        put(db, there)
        page = data.draw(pages(things))

        def between() -> None:
            keys = {row[:2] for row in still}
            db.execute(
                "delete from things_v1 where not (word, number) = any(select * from unnest(%s::text[], %s::int8[]))",
                [[word for word, _ in keys], [number for _, number in keys]],
            )
            put(db, [row for row in some_rows(random) if row[:2] not in keys])

        seen = list(all_pages(db, things, page, None, between))
        wanted = in_order(
            things, [row for row in still if all(fulfils(things, row, one) for one in page.filters)], page.order
        )
        assert [row for row in seen if row in still] == wanted

    check()


def test_texts_are_found_by_each_of_their_beginnings(db: Connection, things: View) -> None:
    put(
        db,
        [
            ("a", number, 0, word, None, word, date(2026, 1, 1), None, True, 0.5, None, timedelta(1))
            for number, word in enumerate(WORDS)
        ],
    )
    for name in ("name", "said"):
        for prefix in WORDS:
            found = rows(ask(db, page_of(things, {f"{name}.prefix": prefix}, most=99)))
            assert [row[name] for row in found] == [word for word in WORDS if word.startswith(prefix)]
            found = rows(ask(db, page_of(things, {name: prefix}, most=99)))
            assert [row[name] for row in found] == [prefix], "an index has the beginning only"


SERVED: list[tuple[Mapping[str, Any], Sequence[str], str]] = [
    ({}, (), "pkey"),
    ({"word": "w7"}, ("-number",), "pkey"),
    ({"word": "w7", "number": 7, "day.gte": date(2026, 1, 1)}, ("day",), "pkey"),
    ({}, ("cents",), "cents"),
    ({"cents": 5}, (), "cents"),
    ({"cents.gte": 5, "cents.lt": 900}, ("-cents",), "cents"),
    ({"cents.in": (5, 6)}, ("cents",), "cents"),
    ({"name": "n7"}, (), "name"),
    ({"name.prefix": "n7"}, ("name",), "name"),
    ({"name.gt": "n7"}, ("name",), "name"),
    ({"maybe": 7}, ("-cents",), "maybe_cents"),
    ({"maybe": None}, ("-cents",), "maybe_cents"),
    ({"said": "s7", "name": "n7"}, (), ""),
    ({"said": None}, ("word",), "said"),
    ({}, ("-said",), "said"),
    ({"yes": True}, ("money",), "yes_money"),
    ({"share.gt": 5.5}, ("-share", "takes"), "share_takes"),
]
BESIDE = "An index serves ranges of one column, and `.not` or `.null=false` only beside a column with one value."
ADDED = "{} is of '{}', which readers add up, so that no stored value has its order."
UNSERVED: list[tuple[Mapping[str, Any], Sequence[str], Missing]] = [
    ({"day": date(2026, 1, 1)}, (), Missing(("day",))),
    ({"name": "n7"}, ("cents",), Missing(("name", "cents"))),
    ({}, ("day", "-cents"), Missing(("day", "-cents"))),
    ({"number": 7}, (), Missing(("number",))),
    ({"day.gte": date(2026, 1, 1)}, ("-day",), Missing(("-day",))),
    ({}, ("cents", "-word"), Missing(("cents", "-word", "-number"))),
    ({"cents.gte": 5}, (), Missing(sort="cents")),
    ({"name.in": ["n"]}, ("-cents",), Missing(sort="name")),
    ({"day.gte": date(2026, 1, 1)}, (), Missing(("day",), "day")),
    ({"cents.not": 5}, ("cents",), Missing(why=BESIDE)),
    ({"cents.gte": 5, "name.prefix": "n"}, ("cents",), Missing(why=BESIDE)),
]
OF_TOTALS: list[tuple[Mapping[str, Any], Sequence[str], Missing]] = [
    ({"cents.gte": 5}, ("-cents",), Missing(why=ADDED.format('Index("cents")', "cents"))),
    ({"cents": 5}, (), Missing(why=ADDED.format('Index("cents")', "cents"))),
    ({"day": 5}, ("said",), Missing(why=ADDED.format('Index("day", "said")', "said"))),
    ({"said": None}, ("day", "-owner"), Missing(why=ADDED.format('Index("said")', "said"))),
    ({"cents.gte": 5, "owner": "w"}, ("cents",), Missing(why=ADDED.format('Index("owner", "cents")', "cents"))),
]
PARTS = [
    (
        {"tags": None},
        (),
        Missing(why="Index(\"tags\") is of column 'tags', whose values have no order that pages could have."),
    ),
    ({"tags": None, "note": "a"}, (), Missing(("note",))),
]


def asked_page(view: View, filters: Mapping[str, Any], sort: Sequence[str]) -> Page:
    where = [
        Filter(column_of(view, name), Op(op), value)
        for full, value in filters.items()
        for name, _, op in [full.partition(".")]
    ]
    parts = tuple(Part(column_of(view, name.removeprefix("-")), name.startswith("-")) for name in sort)
    return Page(tuple(where), order_of(view, parts), 10)


def test_what_an_index_serves_is_read_from_it_and_not_sorted(db: Connection, things: View) -> None:
    db.execute(
        "insert into things_v1 select 'w' || n % 100, n, n, 'n' || n % 5000, nullif(n % 5000, 0), nullif('s' || n % 5000, 's0'),"
        "'2026-01-01'::date + n % 300, n % 977, n % 2 = 0, n, null, '1 day', 0 from generate_series(1, 30000) n"
    )
    db.execute("analyze things_v1")
    for filters, sort, name in SERVED:
        page = asked_page(things, filters, sort)
        assert missing_index(things, page, None) is None, (filters, sort)
        first = ask(db, page_query(things, things.table_name, TOPIC, page))
        for one in (page, page._replace(after=_place_of(page, first.rows[-1].place or ()))):
            query = page_query(things, things.table_name, TOPIC, one)
            plan = "\n".join(line for (line,) in db.execute(b"explain analyze " + query.text, query.parameters))
            assert "Seq Scan on things_v1" not in plan, f"{filters} {sort}:\n{plan}"
            assert f"things_v1_{'by_' if name != 'pkey' else ''}{name}" in plan, f"{filters} {sort}:\n{plan}"
            removed = [int(line.rpartition(":")[2]) for line in plan.splitlines() if "Rows Removed by" in line]
            assert sum(removed) < 1_000, f"{filters} {sort}:\n{plan}"


TOTALS = """
    class Total(NamedTuple):
        owner: Key[str]
        day: Key[int]
        cents: Sum[int]
        said: Latest[str | None]

    INDEXES = (Index("day"),)

    def delta(event: Filled | Spent, at: At) -> Iterable[Total]:
        yield from ()
"""


def test_a_page_of_a_summary_by_its_key_adds_up_what_it_shows(db: Connection, world: Settings) -> None:
    view = viewkit.view(TOTALS, "totals")
    make(db, world, view)
    db.execute(
        "insert into totals_v1 (owner, day, cents, said, __said, _partition) select 'w' || n % 100, n, n, 'said', n, p "
        "from generate_series(1, 30000) n, generate_series(0, 3) p"
    )
    db.execute("analyze totals_v1")
    for sort in ("owner", "-owner", "day", "-day"):
        page = asked_page(view, {}, (sort,))
        first = ask(db, page_query(view, view.table_name, TOPIC, page))
        for one in (page, page._replace(after=_place_of(page, first.rows[-1].place or ()))):
            query = page_query(view, view.table_name, TOPIC, one)
            plan = "\n".join(line for (line,) in db.execute(b"explain analyze " + query.text, query.parameters))
            [read] = re.findall(r"Scan .*on totals_v1 .*actual time=\S+ rows=(\d+)", plan)
            assert int(read) < 10_000, f"{sort}:\n{plan}"


def _place_of(page: Page, place: Sequence[str | None]) -> tuple[Any, ...]:
    after = zip(page.order, place, strict=True)
    return tuple(None if text is None else value_of(part.column, text) for part, text in after)


TAGGED = """
    class Tagged(NamedTuple):
        purse: Key[str]
        note: str
        tags: list[str] | None

    def evolve(row: Tagged | None, event: Filled | Spent, at: At) -> Tagged | None:
        return row
"""


@pytest.mark.parametrize(
    ("source", "filters", "sort", "missing"),
    [*((THINGS, *one) for one in UNSERVED), *((TOTALS, *one) for one in OF_TOTALS), *((TAGGED, *one) for one in PARTS)],
    ids=str,
)
def test_what_no_index_serves_is_told_with_what_would_be_served(
    source: str, filters: Mapping[str, Any], sort: Sequence[str], missing: Missing
) -> None:
    view = viewkit.view(source, "things")
    assert missing_index(view, asked_page(view, filters, sort), None) == missing


@given(pages(viewkit.view(THINGS, "things")), rules())
@hypothesis(max_examples=50, deadline=None)
def test_an_index_that_is_told_serves_the_page(page: Page, only: Rows | None) -> None:
    """With it, the next one may be told, where a caller's rows are of several kinds."""
    source, missing = THINGS, Missing()
    for _ in range(2):
        view = viewkit.view(source, "things")
        missing = missing_index(view, page, only) or Missing()
        if missing.columns:
            source = source.replace("INDEXES = (", f"INDEXES = ({Index(*missing.columns)}, ", 1)
        if missing.sort:
            page = page._replace(order=order_of(view, (Part(column_of(view, missing.sort)),)))
    left = missing_index(viewkit.view(source, "things"), page, only)
    assert left is None or (left.why and left == missing)


def test_rows_of_a_caller_are_filters_of_an_index(things: View) -> None:
    by_key, by_name = asked_page(things, {}, ()), asked_page(things, {}, ("name",))
    assert missing_index(things, by_key, Rows(name="n7")) is None
    assert missing_index(things, by_key, Rows(name="n7") | Rows(cents=5)) is None
    assert missing_index(things, by_key, Rows(name="n7") | Rows(number=5)) == Missing(("number",))
    assert missing_index(things, by_name, Rows(day=date(2026, 1, 1))) == Missing(("day", "name"))
