"""make test: a batch takes milliseconds.

Columns with parts, and those of floats, times of day and durations: on a real PostgreSQL they come back as they went in.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, time, timedelta
from decimal import Decimal
from textwrap import dedent
from typing import Any, NamedTuple

import jsonschema_rs
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from psycopg import sql
from starlette.requests import Request

from api.problems import Problem
from api.view_questions import question_of
from api.views import router_of
from infra.access import BadAccess, Rows
from infra.database.connect import Connection
from infra.settings import Settings
from projections.engine.fold.exact import Exact
from projections.engine.rebuild.load import copy_into
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.rows import StoredValueUnknown
from projections.engine.views import queries
from projections.engine.views.column_types import BadRow
from projections.engine.views.columns import BadView, Column, columns_of
from projections.engine.views.nested_types import MOST_JSON
from projections.engine.views.sql_views import replace_sql_view
from projections.engine.views.view import View
from proofs.one_fold.expect import copied
from proofs.one_fold.made import tell
from proofs.one_fold.values import Line, Mood, Parcel, parcel
from tests.engine.projections import test_asking as asking
from tests.engine.projections.test_engine import Bench
from tests.engine.projections.test_fold import PARK, filled
from tests.engine.projections.viewkit import make_tables, view, views

ORDERS = """
    from proofs.one_fold.values import Line, Parcel

    class Order(NamedTuple):
        purse: Key[str]
        lines: list[Line]
        parcel: Parcel
        prices: dict[str, Decimal]
        deep: dict[str, list[tuple[int | None, ...]]]
        line: Line | None
        share: float
        opens: time
        takes: timedelta

    NEXT: list[Order] = []
    SEEN: list[Order | None] = []

    def evolve(row: Order | None, event: Filled | Spent, at: At) -> Order | None:
        SEEN.append(row)
        return NEXT[-1]._replace(purse=at.id)
"""

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)
ints = st.integers(-(2**63), 2**63 - 1)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
moments = st.datetimes(timezones=st.just(UTC))
floats = st.floats(allow_nan=False, allow_infinity=False)
lines = st.builds(Line, texts, ints, decimals, st.none() | moments)
parcels = st.builds(
    Parcel,
    lines=st.lists(lines, max_size=3).map(tuple),
    notes=st.dictionaries(texts, st.lists(texts, max_size=3), max_size=3),
    mood=st.none() | st.sampled_from(Mood),
    weight=floats,
    label=st.binary(max_size=9),
    mark=st.none() | st.uuids(),
    sent=st.none() | st.dates(),
    until=st.none() | st.times(),
    takes=st.timedeltas(),
)
parts = (
    st.lists(lines, max_size=3),
    parcels,
    st.dictionaries(texts, decimals, max_size=4),
    st.dictionaries(texts, st.lists(st.lists(st.none() | ints, max_size=3).map(tuple), max_size=3), max_size=3),
    st.none() | lines,
    floats,
    st.times(),
    st.timedeltas(),
)


def module_of(of: View) -> Any:
    return sys.modules[of.row.__module__]


@pytest.fixture
def bench(world: Settings) -> Iterator[Bench]:
    of_orders = Bench(world, views(purses=ORDERS))
    yield of_orders
    of_orders.db.close()


def test_a_row_comes_back_as_it_went_in_whichever_way(bench: Bench, world: Settings) -> None:
    """Sent in arrays or by COPY, read by the fold. Classes too: a list is a list, a NamedTuple its own class."""
    orders = bench.views["purses"]
    module, exact, table = module_of(orders), Exact(orders), sql.Identifier(orders.table_name)

    @given(st.tuples(*parts))
    @hypothesis(max_examples=60, deadline=None)
    def comes_back(values: tuple[Any, ...]) -> None:
        try:
            row = exact.row(orders.row("a", *values))
        except BadRow:
            return
        assert exact.are([row])
        module.NEXT.append(orders.row("a", *values))
        assert bench.apply(bench.batch(0, ("a", [filled(1)]))) == BatchResult(CommitStatus.APPLIED)
        assert bench.apply(bench.batch(0, ("a", [filled(1)]))) == BatchResult(CommitStatus.APPLIED)
        cached = module.SEEN[-1]
        bench.db.execute(sql.SQL("delete from {}").format(table))
        stored = [row[0], *(v if v is None or (c := column.type.to_database) is None else c(v)
                  for column, v in zip(orders.columns[1:], row[1:], strict=True)), 0]  # fmt: skip
        with bench.db.cursor().copy(copy_into(orders, orders.table_name)) as copy:
            copy.set_types([*(one.type.copied_as or one.type.sql_name for one in orders.columns), "int2"])
            copy.write_row(stored)
        for _ in range(2):  # what COPY wrote, and what arrays wrote
            bench.fresh_committer()
            assert bench.apply(bench.batch(0, ("a", [filled(1)]))) == BatchResult(CommitStatus.APPLIED)
            assert module.SEEN[-1] == cached == row
            assert tell(module.SEEN[-1]) == tell(cached) == tell(copied(row)), "and in the same order"

    comes_back()


def test_jsonb_as_verify_reads_it_is_what_was_stored(db: Connection) -> None:
    of = {column.name: column.type for column in view(ORDERS).columns}

    def read(text: str, name: str) -> Any:
        found = db.execute("select %s::jsonb::text", (text,)).fetchone()
        convert = of[name].as_stored
        assert found is not None
        assert convert is not None
        return convert(found[0])

    value = {"b": Decimal("1.10"), "aa": Decimal(1)}
    stored = of["prices"].to_database(value)  # type: ignore[misc]
    assert read('{"b": "1.10", "aa": "1", "b": "1.10"}', "prices") == stored
    for other in ('{"b": "1.1", "aa": "1"}', '{"b": "1.10"}', '{"b": "1.10", "aa": 1}', "[]", "null", '{"b": "x"}'):
        assert read(other, "prices") != stored, other
    assert of["deep"].from_database('{"a": [[1, null]]}') == {"a": [(1, None)]}  # type: ignore[misc]


def test_a_fold_changes_no_cached_row_in_place(world: Settings) -> None:
    """It gets copies of lists and dicts, sorted by key, as deep as they go: from the cache, and from the same batch."""
    source = """
    from proofs.one_fold.values import Line, Parcel

    class Order(NamedTuple):
        purse: Key[str]
        notes: list[str]
        deep: dict[str, tuple[dict[str, list[int]], ...]]
        parcel: Parcel

    def evolve(row: Order | None, event: Filled | Spent, at: At) -> Order | None:
        if row is None:
            return Order(at.id, [], {"b": ({"z": [], "y": []},), "a": ()}, Parcel(notes={"b": [], "a": []}))
        row.notes.append("".join([*row.deep, *row.deep["b"][0], *row.parcel.notes]))
        row.deep["b"][0]["z"].append(event.cents)
        row.parcel.notes["b"].append(str(event.cents))
        if event.cents == 13:
            raise ValueError
        return row
    """
    bench = Bench(world, views(purses=PARK + source))
    bench.apply(bench.batch(0, ("a", [filled(1), filled(2)])))
    for _ in range(2):
        again = bench.batch(0, ("a", [filled(3), filled(4)]))
        bench.db.execute("update positions set epoch = epoch + 1 where partition = 0")
        bench.apply(again)  # fenced, or refused: it is folded, and not written
        bench.db.execute("update positions set epoch = epoch - 1 where partition = 0")
        bench.at[0], bench.versions["a"] = again.was, bench.versions["a"] - 2
    for event in (filled(3), filled(4), filled(13)):
        assert bench.apply(bench.batch(0, ("a", [event]))).status is CommitStatus.APPLIED
    [(_, notes, deep, packed, _)] = bench.rows("purses")
    assert notes == ["abyzab"] * 3
    assert deep["b"] == [{"y": [], "z": [2, 3, 4]}]
    assert packed["notes"]["b"] == ["2", "3", "4"]
    bench.db.close()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a field of an item": ({"lines": [Line("a", 1, Decimal(1)), Line("b", 2**63, Decimal(1))]}, "lines[1].pieces: it does"),
    "deeper": ({"deep": {"x": [(1,), (1, "2")]}}, "deep['x'][1][1]: it is of another type"),
    "in a fact": ({"parcel": parcel(lines=(Line("\0", 1, Decimal(1)),))}, "parcel.lines[0].product: it contains a NUL"),
    "a key": ({"prices": {"\ud800": Decimal(1)}}, "prices key: it contains"),
    "none": ({"lines": [None]}, "lines[0]: it is not declared as `… | None`"),
    "the whole": ({"lines": ()}, "can't hold this tuple: it is of another type"),
    "a number that is none": ({"share": float("nan")}, "column 'share' (float) can't hold this float: it is not a finite"),
    "too long": ({"lines": [Line("x" * MOST_JSON, 1, Decimal(1))]}, f"bytes, more than {MOST_JSON}"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_with_the_path_to_it(what: str) -> None:
    of = view(ORDERS)
    values, told = WRONG[what]
    plain = of.row("a", [], Parcel(), {}, {}, None, 0.0, time(0), timedelta(0))
    with pytest.raises(BadRow) as refused:
        Exact(of).row(plain._replace(**values))
    assert told in str(refused.value)
    assert f"column '{next(iter(values))}'" in str(refused.value)
    assert not Exact(of).are([plain, plain._replace(**values)])


def test_as_much_json_as_may_be_is_written_and_shown(bench: Bench) -> None:
    module = module_of(bench.views["purses"])
    plain = bench.views["purses"].row("a", [], Parcel(), {}, {}, None, 0.0, time(0), timedelta(0))
    size = MOST_JSON - bench.views["purses"].columns[3].type.size({"\x01": Decimal(0), "": Decimal(1)})
    numbers = [tuple(ints) for ints in [[9] * (size // 4)] * 2]
    for values in ({"prices": {"\x01": Decimal(0), "x" * size: Decimal(1)}}, {"deep": {"": numbers}}):
        module.NEXT.append(plain._replace(**values))
        assert bench.apply(bench.batch(0, ("a", [filled(1)]))) == BatchResult(CommitStatus.APPLIED)


def test_json_of_other_parts_in_a_table_is_named(bench: Bench) -> None:
    orders = bench.views["purses"]
    module_of(orders).NEXT.append(orders.row("a", [], Parcel(), {}, {}, None, 0.0, time(0), timedelta(0)))
    bench.apply(bench.batch(0, ("a", [filled(1)])))
    bench.db.execute("""update purses_v1 set lines = '[{"product": "a"}]'""")
    bench.fresh_committer()
    with pytest.raises(StoredValueUnknown, match=r"\[\{\"product\": \"a\"\}\]' in column 'lines'"):
        bench.apply(bench.batch(0, ("a", [filled(1)])))


# ── how they are shown and asked for ──


def test_a_row_is_shown_as_its_schema_says_and_exactly(db: Connection, world: Settings) -> None:
    of = view(ORDERS, "orders")
    asking.make(db, world, of)
    values = (
        [Line("é", 2**63 - 1, Decimal("0.0000001000"), None)],
        Parcel(lines=(Line("a", 1, Decimal("1.10")),), notes={"a": ["b"]}, weight=0.1, label=b"\xff", takes=timedelta(1, 5)),
        {"b": Decimal(1), "a": Decimal("2.50")},
        {"a": [(1, None)]},
        None,
        1e-7,
        time(9, 30, 0, 500_000),
        -timedelta(microseconds=1),
    )  # fmt: skip
    stored = [v if v is None or (c := column.type.to_database) is None else c(v)[1:].decode()
              for column, v in zip(of.columns[1:], values, strict=True)]  # fmt: skip
    asking.insert(db, of, "a", *stored)
    found = asking.ask(db, queries.by_keys(of, of.table_name, asking.TOPIC, [("a",)]))
    text = bytes(found.rows[0].json)
    row = json.loads(text)
    for column in of.columns:
        jsonschema_rs.validator_for(column.schema).validate(row[column.name])
    assert row["lines"] == [{"product": "é", "pieces": 2**63 - 1, "price": "0.0000001000", "at": None}]
    assert (row["parcel"]["label"], row["parcel"]["takes"], row["prices"]["a"]) == ("/w==", "P1DT5S", "2.50")
    assert (row["share"], row["opens"], row["takes"], row["line"]) == (1e-7, "09:30:00.5", "-PT0.000001S", None)


def test_a_page_is_never_filtered_by_a_column_with_parts(db: Connection, world: Settings) -> None:
    of = view(ORDERS, "orders")
    app = FastAPI()
    app.include_router(router_of({"orders": of}))
    paths = app.openapi()["paths"]
    parameters = {one["name"] for one in paths["/views/orders"]["get"]["parameters"]}
    assert {"purse", "share", "opens", "takes"} <= parameters
    assert not {"lines", "parcel", "prices", "deep", "line"} & parameters
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"lines=[]&line=a&share.is=1"}
    with pytest.raises(Problem) as refused:
        question_of(of, Request(scope), "")
    assert refused.value.kind.status == 422
    lines, line, share = (one["problem"] for one in refused.value.members["errors"])
    assert lines.startswith("A column with parts is no filter. There are: after, ")
    assert line == "A column with parts is no filter. There are: line.null."
    assert (
        share == "No such parameter. There are: share, share.gt, share.gte, share.in, share.lt, share.lte, share.not."
    )
    with pytest.raises(BadAccess, match="column 'lines' can't be compared"):
        asking.page_of(of, {}, None, 5, Rows(lines=[]))


def test_a_column_of_another_type_is_cast_by_the_sql_view(db: Connection, world: Settings) -> None:
    source = """
    class Order(NamedTuple):
        purse: Key[str]
        a: {}
        b: {}

    def evolve(row: Order | None, event: Filled, at: At) -> Order | None: ...
    """
    old = view(source.format("list[int]", "timedelta"), "orders")
    new = view("VERSION = 2\n" + dedent(source.format("str", "str")), "orders")
    back = view("VERSION = 3\n" + dedent(source.format("list[int]", "timedelta")), "orders")
    make_tables(world, {"1": old, "2": new, "3": back})
    for one in (old, new, back):
        db.execute(
            "insert into builds (id, view, version, agent, table_name, state, code_set, shape) "
            "values (gen_random_uuid(), 'orders', %s, 'core', %s, 'ready', '{}', '')",
            (one.version, one.table_name),
        )
    db.execute("insert into orders_v1 values ('a', '[1, 2]', '1 day 2 seconds', 0)")
    db.execute("insert into orders_v2 values ('a', '[1, 2]', '1 day 00:00:02', 0)")
    replace_sql_view(db, "orders")
    for table in ("orders_v1", "orders_v2"):
        db.execute("delete from live where view = 'orders'")
        db.execute("insert into live values ('orders', 'core', 1, %s)", (table,))
        assert db.execute("select purse, a, b from orders").fetchall() == [("a", [1, 2], timedelta(1, 2))]


# ── declarations ──


PLAIN = """\
class Row(NamedTuple):
    id: Key[str]
    cents: {}

def evolve(row: Row | None, event: Filled, at: At) -> Row | None: ...
"""


@dataclass(frozen=True, slots=True)
class Part:
    sort: Mood


@dataclass(slots=True)
class Loose:
    sort: int


class Whole(NamedTuple):
    parts: list[Part]
    other: dict[str, Part | None]


def test_a_column_goes_to_another_process(world: Settings) -> None:
    [column, _] = columns_of(Whole, "whole")
    value = [Part(Mood.UP)]
    assert column.type.to_database is not None
    there: Column = pickle.loads(pickle.dumps(column))
    assert there == column
    assert there.type.to_database(value) == column.type.to_database(value)  # type: ignore[misc]


def test_the_parts_belong_to_a_columns_shape() -> None:
    kinds = (
        "list[Line]",
        "tuple[Line, ...]",
        "dict[str, Line]",
        "Line",
        "Parcel",
        "list[Line | None]",
        "list[Line] | None",
    )
    head = "from proofs.one_fold.values import Line, Parcel\n"
    assert len({view(head + PLAIN.format(kind)).shape for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("list[Loose]", "cents[] can be changed in place. Write `@dataclass(frozen=True, slots=True)`"),
        ("list[Loop]", "cents[].within[] is a Loop within a Loop."),
        ("dict[str, list[Level]]", "cents[][] is <enum 'Level'>."),
        ("Key[list[int]]", "is a key of list"),
        ("Key[float]", "is a key of float"),
        ("list[Sum[int]]", "cents[] has the mark of a column inside. Write it around the column's whole type"),
    ],
)
def test_a_part_that_no_column_can_store_is_named(kind: str, told: str) -> None:
    head = f"from proofs.one_fold.values import Level, Loop\nfrom {__name__} import Loose\n"
    with pytest.raises(BadView) as refused:
        view(head + PLAIN.format(kind))
    assert told in f"{refused.value.message} {refused.value.hint}"


def test_a_sum_of_floats_is_refused_with_the_reason() -> None:
    with pytest.raises(BadView) as refused:
        view(PLAIN.format("Sum[float]").partition("def")[0] + "def delta(event: Filled, at: At) -> Iterable[Row]: ...")
    assert refused.value.message == "View 'purses': column 'cents' is a sum of float."
    assert refused.value.hint == "Use a sum of int, decimal. Floats add up to another sum in another order."
