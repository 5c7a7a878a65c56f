"""make test: a query takes milliseconds.

Queries of the author's against a real PostgreSQL: what they call, what they give, and what is refused rather than rounded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from infra.access import BadAccess, Rows
from infra.database.connect import Connection
from infra.settings import Settings
from projections.engine.queries.checked import FUNCTIONS
from projections.engine.queries.query import BadQuery, Query
from projections.engine.queries.statement import Answer, Behind, answer, described, require_types, statement
from projections.engine.views.view import View
from tests.engine.projections import viewkit
from tests.engine.projections.querykit import query
from tests.engine.projections.test_asking import EVERYTHING, TOPIC, TOPIC_ID, insert, make
from tests.engine.projections.viewkit import TOTALS
from tools.testing import given_views

DAY = date(2026, 1, 2)

THINGS = viewkit.view(EVERYTHING, "things")
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 120_000, UTC)
FIRST = ("a", 1, date(2026, 1, 2), True, Decimal("12.50"), MOMENT, UUID(int=5), b"\xff\0", "red", 4, "ä'b", True)
COLUMNS = ["word", "number", "day", "yes", "money", "moment", "name", "blob", "colour", "perhaps", "said", "r"]
Asking = Callable[..., Query]


@pytest.fixture
def things(db: Connection, world: Settings) -> View:
    make(db, world, THINGS)
    insert(db, THINGS, *FIRST)
    insert(db, THINGS, "b", 2, *FIRST[2:9], None, None, False)
    return THINGS


@pytest.fixture
def asking(tmp_path: Path) -> Asking:
    """A query with this row and SQL over `things`, or over `of`."""

    def asked(row: str, sql: str, parameters: str = "", of: Mapping[str, View] | None = None) -> Query:
        head = f"class Parameters(NamedTuple):\n    {parameters}\n" if parameters else ""
        enum = "class Colour(Enum):\n    RED = 'red'\n"
        enum += "class Line(NamedTuple):\n    word: str\n    number: int\n"
        enum += "class Note(NamedTuple):\n    word: str | None\n    number: int\n"
        text = f'{head}{enum}class Row(NamedTuple):\n    {row.replace("; ", chr(10) + "    ")}\nSQL = """{sql}"""\n'
        return query(tmp_path, text, of or {"things": THINGS})

    return asked


def ask(
    db: Connection, asked: Query, only: Rows | None = None, most: int = 10, behind: Behind | None = None, **values: Any
) -> Answer:
    """As a reader would, after PostgreSQL's own word on the types."""
    tables = {view.name: view.table_name for view in asked.views}
    cursor = db.execute(*described(asked, tables))
    require_types(asked, cursor.description, db.adapters.types)
    given = {**asked.defaults, **values}
    [(found,)] = db.execute(*statement(asked, tables, TOPIC, given, most, only, behind)).fetchall()
    return answer(asked, found)


def rows(found: Answer) -> list[dict[str, Any]]:
    return [json.loads(bytes(row), parse_float=Decimal) for row in found.rows]


CALLS = {
    **{name: f"{name}(number)" for name in ("count", "sum", "avg", "min", "max", "array_agg", "jsonb_agg")},
    **{name: f"{name}(yes)" for name in ("bool_and", "bool_or", "every")},
    "string_agg": "string_agg(word, ',' order by word)",
    "percentile_disc": "percentile_disc(0.5) within group (order by number)",
    **{name: f"{name}() over (order by number)" for name in ("row_number", "rank", "dense_rank")},
    "ntile": "ntile(2) over (order by number)",
    **{name: f"{name}(number) over (order by word)" for name in ("lag", "lead", "first_value", "last_value")},
    **{name: f"{name}(number, 1)" for name in ("coalesce", "nullif", "greatest", "least", "mod", "div")},
    **{name: f"{name}(money)" for name in ("abs", "ceil", "floor", "round", "trunc", "sign")},
    **{name: f"{name}(said)" for name in ("lower", "upper", "length", "trim")},
    **{name: f"{name}(said, 1)" for name in ("substr", "left", "right", "concat")},
    "substring": "substring(said from 1 for 2)",
    "replace": "replace(said, 'a', 'b')",
    "split_part": "split_part(said, 'a', 1)",
    **{name: f"{name}(said, 'a')" for name in ("starts_with", "strpos")},
    **{name: f"{name}('month', moment)" for name in ("date_trunc", "date_part")},
    "extract": "extract(year from day)",
    "age": "age(moment)",
    "to_char": "to_char(moment, 'YYYY')",
    "make_date": "make_date(2026, 1, 2)",
    "now": "now()",
    "jsonb_array_length": "jsonb_array_length(jsonb_agg(number))",
    "jsonb_build_object": "jsonb_build_object('a', number)",
    "cardinality": "cardinality(array[number])",
    "jsonb_object_agg": "jsonb_object_agg(word, number)",
    **{name: f"{name}(number)" for name in ("stddev", "variance", "sqrt", "exp", "ln", "log")},
    "percentile_cont": "percentile_cont(0.5) within group (order by number)",
    "mode": "mode() within group (order by word)",
    **{name: f"{name}() over (order by number)" for name in ("percent_rank", "cume_dist")},
    "nth_value": "nth_value(word, 1) over (order by number)",
    "power": "power(number, 2)",
    "width_bucket": "width_bucket(number, 0, 10, 5)",
    **{name: f"{name}(said)" for name in ("initcap", "md5")},
    **{name: f"{name}(said, 5)" for name in ("lpad", "rpad")},
    "concat_ws": "concat_ws(',', said, word)",
    "regexp_replace": "regexp_replace(said, '[a-c]', 'x')",
    "date_bin": "date_bin('1 hour', moment, timestamptz '2026-01-01')",
    "to_date": "to_date('2026', 'YYYY')",
    "make_interval": "make_interval(days => 1)",
    "jsonb_typeof": "jsonb_typeof(jsonb_build_object('a', number))",
    "jsonb_array_elements": "(select max(e.value::text) from jsonb_array_elements('[1]'::jsonb) e)",
    "jsonb_array_elements_text": "(select max(it) from jsonb_array_elements_text('[1]'::jsonb) as them (it))",
    "jsonb_each": "(select max(e.key) from jsonb_each(jsonb_build_object('a', things.number)) e)",
    "jsonb_each_text": "(select max(e.value) from jsonb_each_text(jsonb_build_object('a', things.number)) e)",
    "unnest": "(select max(u.it) from unnest(array[number]) as u (it))",
    "generate_series": "(select max(n.at) from generate_series(1, things.number) as n (at))",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_query_may_call_is_a_function_of_postgresql(
    db: Connection, things: View, asking: Asking, function: str
) -> None:
    call = CALLS[function]
    assert f"{function}(" in call
    asked = asking(
        "found: bool",
        f"select x is null as found from (select {call} as x from things group by {', '.join(COLUMNS)}) y",
    )
    assert len(ask(db, asked).rows) == 2


@pytest.mark.parametrize(
    "condition",
    [
        *(
            "word ~ '^a$'",
            "word !~* 'B'",
            "word ilike 'A%'",
            "word not like 'b%'",
            "word similar to 'a|c'",
            "word || 'x' = 'ax'",
        ),
        *(
            "number between 0 and 1",
            "number in (1, 3)",
            "number = any(array[1, 3])",
            "(word, number) = ('a', 1)",
            "number ^ 2 < 2",
        ),
        *(
            "day + 1 = date '2026-01-03' and r",
            "moment < now() - interval '1 second' and r",
            "day <= current_date and not not r",
        ),
        *(
            "(moment at time zone 'UTC')::date = day and r",
            "word is distinct from 'b'",
            "position('a' in word) = 1",
            "r is true",
        ),
        *("case when r then 1 else 2 end = 1", "word collate \"C\" < 'b'", "number < (select max(number) from things)"),
        *(
            "exists (select from things o where o.number > things.number)",
            "cast(number as text) = '1'",
            "number & 1 = 1",
        ),
        *(
            "array[number, 5] @> array[1::bigint]",
            "jsonb_build_object('a', word) ->> 'a' = 'a'",
            "word < all(select 'b')",
        ),
    ],
)
def test_what_a_query_may_compare_with(db: Connection, things: View, asking: Asking, condition: str) -> None:
    assert rows(ask(db, asking("word: str", f"select word from things where {condition}"))) == [{"word": "a"}]


def test_each_type_comes_exactly_as_it_is_declared(db: Connection, things: View, asking: Asking) -> None:
    row = (
        "word: str; number: int; day: date; yes: bool; money: Decimal; moment: datetime; name: UUID; blob: bytes; "
        "colour: Colour; perhaps: int | None; said: str | None; r: bool"
    )
    found = rows(ask(db, asking(row, f"select {', '.join(COLUMNS)} from things order by word")))
    first = {"word": "a", "number": 1, "day": "2026-01-02", "yes": True, "money": "12.50", "name": str(UUID(int=5))}
    first |= {"moment": "2026-01-02T03:04:05.12+00:00", "blob": "/wA=", "colour": "red", "perhaps": 4, "said": "ä'b"}
    assert found == [first | {"r": True}, first | {"word": "b", "number": 2, "perhaps": None, "said": None, "r": False}]


SORTED = {
    **{name: f"it: {kind}; word: str" for name, kind in (("number", "int"), ("yes", "bool"), ("money", "Decimal"))},
    **{name: f"it: {kind}; word: str" for name, kind in (("moment", "datetime"), ("name", "UUID"), ("blob", "bytes"))},
    "day": "it: date; word: str",
    "colour": "it: Colour; word: str",
    "r": "it: bool; word: str",
    "perhaps": "it: int | None; word: str",
    "said": "it: str | None; word: str",
    "sum(number) over ()": "it: int; word: str",
    "3.50 + number": "it: Decimal; word: str",
    "number + 0.1::float8": "it: float; word: str",
    "moment - timestamptz '2026-01-01'": "it: timedelta; word: str",
    "moment::time": "it: time; word: str",
    "jsonb_build_object('word', said, 'number', number)": "it: Note; word: str",
}


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("value", SORTED)
def test_pages_go_on_behind_a_value_of_each_type(
    db: Connection, things: View, asking: Asking, value: str, descending: bool
) -> None:
    """NULL is the greatest value."""
    insert(db, things, "c", 1, *FIRST[2:9], None, "", False)
    order = "order by it desc" if descending else "order by it"
    asked = asking(SORTED[value], f"select {value} as it, word from things {order}")
    whole, behind, found = ask(db, asked), None, list[dict[str, Any]]()
    for _ in whole.rows:
        one = ask(db, asked, most=1, behind=behind)
        found += rows(one)
        behind = Behind(one.places[0], 1)
    assert found == rows(whole)
    assert not ask(db, asked, behind=behind).rows


@pytest.mark.parametrize(
    ("row", "sql", "value"),
    [
        ("it: int", "select sum(number) as it from things", 3),
        ("it: int", "select 5.00 as it from things", 5),
        ("it: int", "select count(*) filter (where yes) as it from things", 2),
        ("it: int", "select -9223372036854775808::numeric as it from things", -(2**63)),
        ("it: Decimal", "select avg(number) as it from things", "1.5000000000000000"),
        ("it: Decimal", "select max(number) as it from things", "2"),
        ("it: int | None", "select sum(number) as it from things where word = 'nobody'", None),
        ("it: str", "select max(word)::varchar as it from things", "b"),
        ("it: float", "select 0.1::float8 as it from things", Decimal("0.1")),
        ("it: float", "select 3::float8 as it from things", 3),
        ("it: time", "select time '10:00:01.5' as it from things", "10:00:01.5"),
        ("it: timedelta", "select interval '25 hours 1.5 s' as it from things", "P1DT3601.5S"),
        ("it: timedelta | None", "select null::interval as it from things", None),
        ("it: list[int]", "select jsonb_agg(number order by number) as it from things", [1, 2]),
        (
            "it: list[Line]",
            "select jsonb_agg(jsonb_build_object('word', word, 'number', number) order by number) as it "
            "from things where r",
            [{"word": "a", "number": 1}],
        ),
        ("it: list[Decimal]", "select jsonb_agg(money::text) as it from things where r", ["12.50"]),
        ("it: dict[str, int] | None", "select null::jsonb as it from things", None),
    ],
)
def test_a_whole_number_is_one_whatever_postgresql_calls_it(
    db: Connection, things: View, asking: Asking, row: str, sql: str, value: Any
) -> None:
    assert rows(ask(db, asking(row, sql), most=1)) == [{"it": value}]


@pytest.mark.parametrize(
    ("row", "sql", "why"),
    [
        ("it: int", "select avg(number) as it from things", "Expected `int`, got `float`"),
        ("it: int", "select sum(number) * 9223372036854775807 as it from things", "<= 9223372036854775807"),
        ("it: int", "select 'NaN'::numeric as it from things", "got `str`"),
        ("it: Decimal", "select 'Infinity'::numeric as it from things", "regex"),
        ("it: int", "select sum(number) as it from things where word = 'nobody'", "got `null`"),
        ("it: str", "select said as it from things", "got `null`"),
        ("it: Colour", "select word as it from things", "enum"),
        ("it: date", "select 'infinity'::date as it from things", "date"),
        ("it: datetime", "select '-infinity'::timestamptz as it from things", "date"),
        ("it: float", "select 'NaN'::float8 as it from things", "got `str`"),
        ("it: float", "select '-Infinity'::float8 as it from things", "got `str`"),
        ("it: time", "select time '24:00' as it from things", "time"),
        ("it: timedelta", "select interval '1 month' as it from things", "duration"),
        ("it: timedelta", "select age(moment + interval '3 years', moment) as it from things", "duration"),
        (
            "it: timedelta",
            "select interval '-1 month 30 days' as it from things",
            "duration",
        ),
        ("it: list[int]", "select jsonb_agg(word) as it from things", "got `str`"),
        ("it: list[int]", "select jsonb_agg(number * 1e19) as it from things", "64 bits"),
        ("it: list[int]", "select jsonb_build_object('a', number) as it from things", "got `object`"),
        ("it: list[int]", "select null::jsonb as it from things", "not declared"),
        ("it: list[Decimal]", "select jsonb_agg(money) as it from things", "a Decimal is a text there"),
        ("it: Line", "select jsonb_build_object('word', word) as it from things", "number"),
        ("it: dict[str, int]", "select jsonb_build_object(word, money) as it from things", "float"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_not_rounded(
    db: Connection, things: View, asking: Asking, row: str, sql: str, why: str
) -> None:
    with pytest.raises(BadQuery, match=r"asked\.py: a value is not of its declared type: .*") as refused:
        ask(db, asking(row, sql))
    assert why in refused.value.message


@pytest.mark.parametrize(
    ("row", "gives"),
    [
        ("it: int", "avg(number)::float8"),
        ("it: int", "max(word)"),
        ("it: int", "bool_and(yes)"),
        ("it: str", "count(*)"),
        ("it: str", "array_agg(word)"),
        ("it: date", "max(moment)"),
        ("it: date", "max(day)::timestamp"),
        ("it: datetime", "max(day)"),
        ("it: datetime", "max(moment)::timestamp"),
        ("it: bool", "count(*)"),
        ("it: UUID", "max(word)"),
        ("it: bytes", "max(word)"),
        ("it: Decimal", "max(word)"),
    ],
)
def test_a_column_of_another_type_is_refused_before_there_are_rows(
    db: Connection, things: View, asking: Asking, row: str, gives: str
) -> None:
    with pytest.raises(BadQuery, match=r"column 'it' is declared as \w+, and the SQL gives \w+"):
        ask(db, asking(row, f"select {gives} as it from things"))


@pytest.mark.parametrize(
    ("kind", "value", "condition"),
    [
        ("str", "a", "word = %(it)s and said = 'ä''b' -- 100%"),
        ("int", 2**63 - 1, "number < %(it)s and number % 2 = 1"),
        ("Decimal", Decimal("12.5"), "money = %(it)s and number = 1"),
        ("date", date(2026, 1, 2), "day = %(it)s and r"),
        ("datetime", MOMENT, "moment = %(it)s and word like '%a%'"),
        ("UUID", UUID(int=5), "name = %(it)s and perhaps = 4"),
        ("bytes", b"\xff\0", "blob = %(it)s and r"),
        ("bool", True, "r = %(it)s"),
        ("Colour", "red", "colour = %(it)s and r"),
        ("int | None", None, "perhaps = 4 and %(it)s is null"),
        ("str", "' or true --", "word = 'a' and said <> %(it)s"),
    ],
)
def test_a_parameter_has_its_type(
    db: Connection, things: View, asking: Asking, kind: str, value: Any, condition: str
) -> None:
    asked = asking("word: str", f"select word from things where {condition}", f"it: {kind}")
    assert rows(ask(db, asked, it=value)) == [{"word": "a"}]


def test_a_default_is_stored_as_the_database_has_it(db: Connection, things: View, tmp_path: Path) -> None:
    text = """
        class Colour(Enum):
            RED = "red"
        class Parameters(NamedTuple):
            colour: Colour = Colour.RED
        class Found(NamedTuple):
            word: str
        SQL = "select word from things where colour = %(colour)s order by word"
    """
    assert len(ask(db, query(tmp_path, text, {"things": THINGS})).rows) == 2


def test_rows_that_are_not_the_callers_are_left_out_of_the_answer_alone(
    db: Connection, things: View, asking: Asking
) -> None:
    ranked = "select word, rank() over (order by number desc) as place from things limit 2"
    asked = asking("word: str; place: int", ranked)
    assert rows(ask(db, asked, Rows(word="a"))) == [{"word": "a", "place": 2}]
    assert rows(ask(db, asked, Rows(word="c") | Rows(word="b", place=1))) == [{"word": "b", "place": 1}]
    assert ask(db, asked, Rows(word="a")).parked is None
    first = asking("word: str; place: int", f"select word, place from ({ranked}) x order by place limit 1")
    assert rows(ask(db, first, Rows(word="a"))) == [], "a rule chooses among the rows of the answer"
    for only, why in ((Rows(owner="a"), "no such column"), (Rows(place="1"), "can't hold")):
        with pytest.raises(BadAccess, match=why):
            ask(db, asked, only)


def test_a_summary_is_added_up_over_the_partitions(db: Connection, world: Settings, asking: Asking) -> None:
    totals = viewkit.view(TOTALS, "totals")
    make(db, world, totals)
    insert(db, totals, "Filled", 2, 30, 20, 10)
    insert(db, totals, "Filled", 1, 5, 50, 5, partition=1)
    insert(db, totals, "Spent", 1, -5, -5, -5, partition=1)
    sql = "select kind, cents, largest, smallest from totals where cents > %(least)s"
    asked = asking("kind: str; cents: int; largest: int; smallest: int", sql, "least: int", {"totals": totals})
    assert rows(ask(db, asked, least=30)) == [{"kind": "Filled", "cents": 35, "largest": 50, "smallest": 5}]
    twice = "select a.kind from totals a join totals b on a.cents = b.cents"
    assert len(ask(db, asking("kind: str", twice, of={"totals": totals})).rows) == 2


def test_a_condition_on_a_view_that_is_named_twice_reaches_its_index(
    db: Connection, things: View, asking: Asking
) -> None:
    twice = "select a.word from things a join things b using (number) where a.word = %(word)s and b.word = %(word)s"
    text, values = statement(
        asking("word: str", twice, "word: str"), {"things": "things_v1"}, TOPIC, {"word": "a"}, 1, None
    )
    db.execute("set enable_seqscan = off")
    plan = "\n".join(line for (line,) in db.execute(b"explain " + text, values))
    assert plan.count("Index Cond: (word = ") == 2
    assert "Seq Scan on things_v1" not in plan


def test_no_more_rows_come_than_were_asked_for_in_the_authors_order(
    db: Connection, things: View, asking: Asking
) -> None:
    asked = asking("word: str", "select word from things order by word desc")
    assert [row["word"] for row in rows(ask(db, asked))] == ["b", "a"]
    assert [row["word"] for row in rows(ask(db, asked, most=1))] == ["b"]


def test_the_position_is_one_that_the_agents_of_all_views_have_reached(
    db: Connection, world: Settings, asking: Asking
) -> None:
    side = replace(viewkit.view(TOTALS, "totals"), agent="side")
    make(db, world, THINGS)
    both = {"things": THINGS, "totals": side}
    asked = asking("kind: str", "select kind from totals, things", of=both)
    with pytest.raises(Exception, match="does not exist"):
        ask(db, asked)
    viewkit.make_tables(world, {"totals": side})
    assert ask(db, asked).live == {"things": (1, "things_v1")}, "what is not live is found missing"
    db.execute("insert into live values ('totals', 'side', 1, 'totals_v1')")
    found = ask(db, asked)
    assert found.live == {"things": (1, "things_v1"), "totals": (1, "totals_v1")}
    assert found.position.positions == {}, "one of them has begun nowhere"
    for partition, offset in ((0, 5), (1, 9)):
        db.execute(
            "insert into positions values ('side', %s, %s, %s, %s, 0, 1, 1, %s)",
            (TOPIC, partition, TOPIC_ID, offset, uuid4()),
        )
    assert ask(db, asked).position.positions == {TOPIC_ID: {0: 5, 1: 7}}
    alone = asking("word: str", "select word from things", of=both)
    assert ask(db, alone).position.positions == {TOPIC_ID: {0: 7, 1: 7}}


def test_streams_that_a_view_leaves_out_are_counted(db: Connection, things: View, asking: Asking) -> None:
    for stream in ("purses/1", "purses/2"):
        db.execute(
            "insert into parked values ('things_v1', %s, 'things', 0, 1, 1, 'it failed')",
            (stream,),
        )
    assert ask(db, asking("word: str", "select word from things")).parked == 2


SHELVES = """
    class Line(NamedTuple):
        word: str
        price: Decimal | None

    class Shelf(NamedTuple):
        shelf: Key[str]
        lines: list[Line]
        marks: dict[str, tuple[date, ...]]
        line: Line | None
        share: float
        at: time
        long: timedelta
        money: Decimal
        blob: bytes

    def rows(event: Filled | Spent, after: State, at: At) -> Iterable[Shelf]:
        yield from ()
"""


def test_rows_that_a_test_gives_may_have_any_column(
    db: Connection, world: Settings, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = viewkit.view(SHELVES, "shelves")
    make(db, world, view)
    line = vars(sys.modules[view.row.__module__])["Line"]
    given = (
        "a",
        [line("x", Decimal("0.10"))],
        {"k": (DAY,)},
        None,
        0.5,
        time(1),
        timedelta(hours=2),
        Decimal(3),
        b"\1",
    )
    asked = asking(
        "shelf: str; price: Decimal; marks: dict[str, list[date]]; share: float; long: timedelta",
        "select s.shelf, (l.line ->> 'price')::numeric as price, s.marks, s.share, s.long "
        "from shelves s, jsonb_array_elements(s.lines) as l (line) order by 1",
        of={"shelves": view},
    )
    monkeypatch.setattr(given_views, "discover", lambda: {"asked": asked})
    [found] = given_views.answered(world, "asked", {"shelves": [view.row(*given)]})
    assert found == ("a", "0.10", {"k": ["2026-01-02"]}, 0.5, "PT7200S")
    assert db.execute("select from shelves_v1").rowcount == 0, "nothing of it stays"
