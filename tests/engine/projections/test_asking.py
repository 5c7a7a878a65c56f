"""make test: a query takes milliseconds.

Reading views: values from text, and the queries behind rows and pages, against a real PostgreSQL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from psycopg import sql

from infra.access import Rows
from infra.database.connect import Connection
from infra.settings import Settings
from projections.engine.views import queries
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import BadValue, Column, Role, schema_of, value_of
from projections.engine.views.indexes import Part
from projections.engine.views.pages import Filter, Op, Page, order_of, page_query
from projections.engine.views.queries import Found, Query
from projections.engine.views.view import View
from tests.engine.projections import viewkit

TOPIC = "events"
"""The log's name in the tables. No test here reads it."""
TOPIC_ID = "mVYkg7c0Qx6B6y3zTnAz-w"

EVERYTHING = """
    class Colour(Enum):
        RED = "red"
        GREEN = "green"

    class Thing(NamedTuple):
        word: Key[str]
        number: Key[int]
        day: Key[date]
        yes: bool
        money: Decimal
        moment: datetime
        name: UUID
        blob: bytes
        colour: Colour
        perhaps: int | None
        said: str | None
        r: bool

    def rows(event: Filled | Spent, after: State, at: At) -> Iterable[Thing]:
        yield from ()
"""
"""A view with a column of each kind."""

COLUMNS = {
    Scalar.STR: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    Scalar.INT: st.integers(-(2**63), 2**63 - 1),
    Scalar.BOOL: st.booleans(),
    Scalar.DATE: st.dates(),
    Scalar.DATETIME: st.datetimes(min_value=datetime(2, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001  # the zone is given beside it
    Scalar.DECIMAL: st.decimals(allow_nan=False, allow_infinity=False, places=6),
    Scalar.UUID: st.uuids(),
    Scalar.BYTES: st.binary(),
    Scalar.FLOAT: st.floats(allow_nan=False, allow_infinity=False),
    Scalar.TIME: st.times(),
    Scalar.TIMEDELTA: st.timedeltas(),
}


def column(scalar: Scalar) -> Column:
    return Column("it", scalar)


def make(db: Connection, world: Settings, view: View) -> None:
    """The view's table, live, folded up to offset 7 in each of two partitions."""
    viewkit.make_tables(world, {view.name: view})
    db.execute("insert into live values (%s, %s, %s, %s)", (view.name, view.agent, view.version, view.table_name))
    for partition in (0, 1):
        db.execute(
            "insert into positions values (%s, %s, %s, %s, 7, 0, 1, 1, %s)",
            (view.agent, TOPIC, partition, TOPIC_ID, uuid4()),
        )


def insert(db: Connection, view: View, *values: Any, partition: int = 0) -> None:
    places = sql.SQL(", ").join(sql.Placeholder() * (len(values) + 1))
    stored = [getattr(value, "value", value) for value in values]
    db.execute(
        sql.SQL("insert into {} values ({})").format(sql.Identifier(view.table_name), places), [*stored, partition]
    )


def ask(db: Connection, query: Query) -> Found:
    row = db.execute(query.text, query.parameters).fetchone()
    assert row is not None
    return queries.found(row[0])


def page_of(
    view: View,
    filters: Mapping[str, Any] = {},
    after: tuple[Any, ...] | None = None,
    most: int = 10,
    only: Rows | None = None,
    sort: Sequence[str] = (),
) -> Query:
    """A page of rows with these values, by column, or by column and operator: `cents.gte`."""
    columns = {column.name: column for column in view.columns}
    asked = [(*name.partition(".")[::2], value) for name, value in filters.items()]
    order = order_of(view, tuple(Part(columns[one.removeprefix("-")], one.startswith("-")) for one in sort))
    where = tuple(Filter(columns[name], Op(op), value) for name, op, value in asked)
    return page_query(view, view.table_name, TOPIC, Page(where, order, most, after), only)


def rows(found: Found) -> list[dict[str, Any]]:
    return [json.loads(bytes(row.json), parse_float=Decimal) for row in found.rows]


@pytest.mark.parametrize("scalar", COLUMNS)
def test_whatever_a_row_shows_is_read_from_a_url_as_the_same_value(db: Connection, scalar: Scalar) -> None:
    """The way of a key: stored, shown as JSON, sent back as text, found again."""

    @given(COLUMNS[scalar])
    @hypothesis(max_examples=60, deadline=None)
    def goes_round(value: Any) -> None:
        shown = column(scalar).type.shown(sql.SQL("t.{}").format(sql.Identifier(column(scalar).name)))
        kind = sql.SQL(column(scalar).type.sql_name)
        query = sql.SQL("select row_to_json(r)::text from (select {} as it from (select %s::{} as it) t) r").format(
            shown, kind
        )
        row = db.execute(query, (value,)).fetchone()
        assert row is not None
        text = json.loads(row[0])["it"]
        if isinstance(text, bool):
            text = str(text).lower()
        assert value_of(column(scalar), str(text)) == value

    goes_round()


def test_a_time_is_read_with_any_offset_and_with_what_an_address_makes_of_a_plus() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for text in ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:05 00:00", "2026-01-03T01:18:05+22:14"):
        assert value_of(column(Scalar.DATETIME), text) == moment


@pytest.mark.parametrize(
    ("scalar", "text", "value"),
    [
        (Scalar.TIME, "08:00", time(8)),
        (Scalar.TIMEDELTA, "PT1H", timedelta(hours=1)),
        (Scalar.TIMEDELTA, "-P1DT2H3M4.5S", -timedelta(1, 4.5, hours=2, minutes=3)),
    ],
)
def test_what_a_command_may_have_is_read_from_a_url_too(scalar: Scalar, text: str, value: object) -> None:
    """And what a browser's field for a time gives."""
    assert value_of(column(scalar), text) == value
    assert re.search(schema_of(column(scalar))["pattern"], text)


NO_VALUES = {
    Scalar.INT: ("", " 1", "+1", "1_0", "1e3", "٣", f"{2**63}", f"{-(2**63) - 1}", "1" * 5_000),
    Scalar.STR: ("a\0", "\ud800"),
    Scalar.DATE: ("2026-02-30", "2026-W01-1", "20260101", "10000-01-01"),
    Scalar.DATETIME: ("2026-01-01T00:00:00", "2026-01-01"),
    Scalar.DECIMAL: ("NaN", "Infinity", "1e400", "1." + "1" * 2_000),
    Scalar.BOOL: ("True", "1"),
    Scalar.UUID: ("1",),
    Scalar.BYTES: ("A", "*"),
    Scalar.FLOAT: ("", "nan", "inf", "1e400", "1_0", " 1", ".5", "0x1", "١"),
    Scalar.TIME: ("24:00:00", "9:00:00", "09", "09:", "09:00Z", "09:00:00Z", "09:00:60", "T09:00:00"),
    Scalar.TIMEDELTA: (
        *("P", "PT", "P1DT", "P1M", "P1Y", "P1W", "PT1M1H", "P999999999DT24H", "P999999999DT86400S"),
        *("1", "+P1D", "P1.5D", "PT1.5H", "PT1.0000001S", "p1d"),
    ),
}


@pytest.mark.parametrize("scalar", NO_VALUES)
def test_other_texts_are_refused(scalar: Scalar) -> None:
    for text in NO_VALUES[scalar]:
        with pytest.raises(BadValue):
            pytest.fail(f"{text!a:.40} is read as {value_of(column(scalar), text)}")
    total = Column("total", Scalar.INT, role=Role.SUM)
    assert (value_of(total, str(2**70)), schema_of(total)) == (2**70, {"type": "integer"}), "sums have no bound"


def test_a_word_is_looked_up_as_its_enum_reads_it() -> None:
    """An enum may accept other spellings; rows are stored with the member's own value."""

    class Colour(Enum):
        RED = "red"
        GREEN = "green"

        @classmethod
        def _missing_(cls, value: object) -> Colour | None:
            return cls.RED if value == "RED" else None

    colour = Column("colour", Scalar.STR, enum=Colour)
    assert value_of(colour, "red") == value_of(colour, "RED") == "red"
    assert schema_of(colour) == {"type": "string", "enum": ["red", "green"]}
    with pytest.raises(BadValue, match="Send one of: red, green"):
        value_of(colour, "blue")


def test_a_row_of_every_kind_of_column_comes_out_as_its_schema_says(db: Connection, world: Settings) -> None:
    view = viewkit.view(EVERYTHING, "things")
    make(db, world, view)
    moment, name = datetime(2026, 1, 2, 3, 4, 5, 120_000, UTC), UUID(int=5)
    key = ("ä/b\U0001f600", -(2**63), date(2026, 1, 2))
    insert(db, view, *key, True, Decimal("12.50"), moment, name, b"\xff" * 60, "red", None, "", True)
    found = ask(db, queries.by_keys(view, view.table_name, TOPIC, [key]))
    [row] = rows(found)
    key_shown = [key[0], -(2**63), "2026-01-02"]
    shown = [*key_shown, True, "12.50", "2026-01-02T03:04:05.12+00:00", str(name), "/" * 80, "red", None, "", True]
    assert row == dict(zip((one.name for one in view.columns), shown, strict=True))
    assert (found.version, found.table, str(found.position)) == (1, "things_v1", f"1~{TOPIC_ID}.0-7-7")
    for asked, value in (("money", Decimal("12.5")), ("blob", b"\xff" * 60), ("perhaps", None), ("name", name)):
        assert len(rows(ask(db, page_of(view, {asked: value}, None, 5)))) == 1


def test_rows_are_told_apart_by_their_place_among_the_keys(db: Connection, world: Settings) -> None:
    view = viewkit.view(viewkit.PURSES)
    make(db, world, view)
    for purse in ("a", "b"):
        insert(db, view, purse, 1, "")
    found = ask(db, queries.by_keys(view, view.table_name, TOPIC, [("b",), ("none",), ("a",), ("b",)]))
    assert [(row.number, json.loads(bytes(row.json))["purse"]) for row in found.rows] == [(1, "b"), (3, "a"), (4, "b")]
    assert ask(db, queries.by_keys(view, view.table_name, TOPIC, [])).rows == ()


@pytest.mark.parametrize("number", [1, 30])
def test_reads_by_key_keep_a_plan_that_looks_keys_up(db: Connection, world: Settings, number: int) -> None:
    """Whether it is one key or many: a plan takes longer than the read, and a scan of the table longer still."""
    view = viewkit.view(viewkit.PURSES)
    make(db, world, view)
    insert_many = sql.SQL("insert into {} select n::text, n, '', 0 from generate_series(1, 2000) n")
    db.execute(insert_many.format(sql.Identifier(view.table_name)))
    db.execute(sql.SQL("analyze {}").format(sql.Identifier(view.table_name)))
    keys = [(str(n),) for n in range(1, number + 1)]
    query = queries.by_keys(view, view.table_name, TOPIC, keys, [f"purse/{key}" for (key,) in keys])
    for _ in range(20):
        db.execute(query.text, query.parameters)
    asked = "select name, generic_plans from pg_prepared_statements where statement like '%json_build_array%'"
    [(name, generic_plans)] = db.execute(asked).fetchall()
    assert generic_plans > 0
    explained = sql.SQL("explain execute {}({})").format(
        sql.Identifier(name),
        sql.SQL(", ").join(sql.Literal(query.parameters[name]) for name in ("topic", "streams", "k0", "view")),
    )
    plan = "\n".join(line for (line,) in db.execute(explained))
    assert f"Seq Scan on {view.table_name}" not in plan, plan


def test_pages_go_on_by_key_through_what_comes_and_goes(db: Connection, world: Settings) -> None:
    """A row that is there all the time is seen once, whatever happens to others between two pages."""
    view = viewkit.view(viewkit.MOVES, "moves")
    make(db, world, view)
    for purse in ("a", "b", "c"):
        for move in range(1, 4):
            insert(db, view, purse, move, 0, 0)
    seen: list[tuple[Any, ...]] = []
    while page := rows(ask(db, page_of(view, {}, seen[-1] if seen else None, 2))):
        seen += [(row["purse"], row["move"]) for row in page]
        insert(db, view, "A", len(seen), 0, 0)  # a row that comes before each page's place
    assert seen == [(p, m) for p in "abc" for m in (1, 2, 3)]


def test_a_page_of_what_equals(db: Connection, world: Settings) -> None:
    view = viewkit.view(viewkit.MOVES, "moves")
    make(db, world, view)
    for purse, move, cents in (("a", 1, 5), ("a", 2, 6), ("b", 1, 5), ("b", 2, 5)):
        insert(db, view, purse, move, cents, 0)

    def moves(filters: dict[str, Any], after: tuple[Any, ...] | None = None) -> list[tuple[str, int]]:
        found = ask(db, page_of(view, filters, after, 10))
        return [(row["purse"], row["move"]) for row in rows(found)]

    assert moves({"purse": "a"}) == [("a", 1), ("a", 2)]
    assert moves({"cents": 5}) == [("a", 1), ("b", 1), ("b", 2)]
    assert moves({"cents": 5, "purse": "b"}, ("b", 1)) == [("b", 2)]
    assert moves({"cents": 7}) == []


def test_a_summary_adds_up_its_shares_before_it_compares(db: Connection, world: Settings) -> None:
    view = viewkit.view(viewkit.TOTALS, "totals")
    make(db, world, view)
    for kind, partition, cents in (("Filled", 0, 10**20), ("Filled", 1, 1), ("Spent", 1, -3)):
        insert(db, view, kind, 1, cents, cents % 1_000, cents % 1_000, partition=partition)
    filled = {"kind": "Filled", "count": 2, "cents": 10**20 + 1, "largest": 1, "smallest": 0}
    assert rows(ask(db, queries.by_keys(view, view.table_name, TOPIC, [("Filled",)]))) == [filled]

    def kinds(filters: dict[str, Any], after: tuple[Any, ...] | None = None) -> list[str]:
        return [row["kind"] for row in rows(ask(db, page_of(view, filters, after, 10)))]

    assert kinds({}) == ["Filled", "Spent"]
    assert kinds({}, ("Filled",)) == ["Spent"]
    assert kinds({"cents": 10**20 + 1}) == ["Filled"]
    assert kinds({"cents": 10**20}) == []
    assert kinds({"kind": "Spent", "count": 1, "largest": 997}) == ["Spent"]


def test_a_page_walks_the_key_and_not_the_table(db: Connection, world: Settings) -> None:
    """By the plan: a page of a large view must cost what a page holds."""
    view = viewkit.view(viewkit.MOVES, "moves")
    make(db, world, view)
    db.execute("insert into moves_v1 select 'p' || n % 50, n, 0, 0, 0 from generate_series(1, 20000) n")
    db.execute("analyze moves_v1")
    query = page_of(view, {"purse": "p7"}, ("p7", 9_000), 11)
    plan = "\n".join(line for (line,) in db.execute(b"explain analyze " + query.text, query.parameters))
    assert "Seq Scan on moves_v1" not in plan, plan
    assert "Index Scan using moves_v1_pkey" in plan, plan


def test_parked_streams_are_counted_and_named(db: Connection, world: Settings) -> None:
    view = viewkit.view(viewkit.PURSES)
    make(db, world, view)
    for table, stream in ((view.table_name, "purse/a"), (view.table_name, "purse/b"), ("purses_v9", "purse/c")):
        db.execute("insert into parked values (%s, %s, 'purses', 0, 5, 3, 'no')", (table, stream))
    found = ask(db, queries.by_keys(view, view.table_name, TOPIC, [("a",)], ["purse/a", "purse/c"]))
    assert (found.parked, dict(found.parked_since)) == (2, {"purse/a": 3})
    assert ask(db, page_of(view, {}, None, 1)).parked == 2
