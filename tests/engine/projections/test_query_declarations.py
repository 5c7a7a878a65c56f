"""make test: nothing but declarations.

A query is read from its module, and what does not fit is refused with its line and what to change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import projections
from projections.engine.queries.query import BadQuery, discover
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from projections.engine.views.view import discover as discovered_views
from tests.engine.projections.querykit import HEAD, query
from tests.engine.projections.viewkit import MOVES, PURSES, TOTALS, views

VIEWS = views(purses=PURSES, moves=MOVES, totals=TOTALS) | {"streams_purses": all_views()["streams_accounts"]}
LINE = HEAD.count("\n") + 1


def selecting(sql: str, row: str = "purse: str", parameters: str = "") -> str:
    """A module with this row, and the SQL in line LINE + 2, or + 4 with parameters."""
    text = f"class Parameters(NamedTuple):\n    {parameters}\n" if parameters else ""
    return f'{text}class Found(NamedTuple):\n    {row}\nSQL = """{sql}"""\n'


GOOD = {
    "one view": (selecting("select purse from purses"), "purses"),
    "a summary": (selecting("select kind, cents from totals", "kind: str\n    cents: int"), "totals"),
    "two views, one twice": (
        selecting(
            "select p.purse from purses p join moves m using (purse) where exists (select from moves o where o.cents > m.cents)"
        ),
        "moves purses",
    ),
    "a part of its own": (
        selecting("with rich as (select purse from purses where cents > 5) select purse from rich"),
        "purses",
    ),
    "a part of a part, in its place": (
        selecting(
            "with recursive live as (select purse, 1 as n from purses union all select purse, n + 1 from live where n < 3), "
            "b as (select purse from live) select purse from b where exists (select from live l where l.purse = b.purse)"
        ),
        "purses",
    ),
    "both of two": (selecting("select purse from purses union all select purse from moves"), "moves purses"),
    "a parameter": (
        selecting(
            "select purse from purses where note like '%x%' and cents % 2 = %(rest)s", parameters="rest: int = 1"
        ),
        "purses",
    ),
    "sums, dates and words": (
        selecting(
            "select lower(purse) as purse, round(avg(cents), 2) as mean, (now() at time zone 'UTC')::date as day "
            "from purses where note is distinct from 'x' group by 1 order by 2 desc nulls last limit 3 -- the largest",
            "purse: str\n    mean: Decimal\n    day: date",
        ),
        "purses",
    ),
    "names in another case": (selecting("SELECT PURSE FROM Purses"), "purses"),
    "lines of a list": (
        selecting(
            "select purse from purses, jsonb_array_elements(purses.note::jsonb) as lines (line) where line ->> 'a' = 'b'"
        ),
        "purses",
    ),
    "a window": (
        selecting("select purse from (select purse, rank() over (order by cents) r from purses) x where r < 3"),
        "purses",
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_a_query_names_its_views(tmp_path: Path, case: str) -> None:
    source, named = GOOD[case]
    found = query(tmp_path, source, VIEWS)
    assert " ".join(view.name for view in found.views) == named
    assert (found.name, found.question, found.agents) == ("asked", "Which question?", frozenset({"core"}))


BAD = {
    # the module
    "no row": ("SQL = 'select 1'", "no class is its row", None),
    "two rows": (
        "class A(NamedTuple):\n    a: int\nclass B(NamedTuple):\n    b: int\nSQL = ''",
        "any of A, B could",
        None,
    ),
    "not a NamedTuple": ("class A:\n    _fields = ('a',)\n    a: int\nSQL = ''", "not a NamedTuple", None),
    "a type that no column has": (selecting("select 1", "purse: complex"), "has the type <class 'complex'>", None),
    "a key": (selecting("select purse from purses", "purse: Key[str]"), "'purse' has a mark", None),
    "no SQL": ("class A(NamedTuple):\n    a: int", "has no text SQL", None),
    "a parameter of every query": (selecting("", parameters="limit: int"), "'limit' is a parameter of every", None),
    "a parameter with parts": (selecting("", parameters="some: list[str]"), "'some' is a list", None),
    "a wrong default": (
        selecting("select purse from purses where note = %(x)s", parameters="x: str = 3"),
        "default of 'x'",
        None,
    ),
    # one select over views
    "not SQL": (selecting("\nselect purse\n from purses where ("), "this is no SQL at `(`", 3),
    "an open quote": (selecting("select 'purse from purses"), "this is no SQL", 1),
    "nothing": (selecting(" "), "not one select", 1),
    "the session's user": (selecting("select g.n as purse from purses p, lower(user) as g (n)"), "'user' stands in", 1),
    "a whole row in a function": (
        selecting("select g.n as purse from purses p,\nconcat(p) as g (n)"),
        "'p' stands in",
        2,
    ),
    "a whole row beside lateral": (
        selecting("select g.n as purse from purses p cross join lateral concat(p) as g (n)"),
        "'p' stands in",
        1,
    ),
    "a function of another schema": (
        selecting("select g.n as purse from purses p, public.lower('x') as g (n)"),
        "has a schema",
        1,
    ),
    "too deep": (selecting(f"select {'(' * 3_000}purse{')' * 3_000} as purse from purses"), "nested too deeply", None),
    "a natural join": (selecting("select m.purse from purses p\nnatural join moves m"), "has a natural join", 2),
    "a table of a function that reads a file": (
        selecting("select purse from purses, pg_ls_dir('.') x (purse)"),
        "function pg_ls_dir is not allowed",
        1,
    ),
    "two": (selecting("select purse from purses; select 1"), "not one select", 1),
    "a semicolon": (selecting("select purse from purses;"), "not one select", 1),
    "values": (selecting("values ('1')"), "not one select", 1),
    "a delete": (selecting("delete from purses returning purse"), "not one select", 1),
    "a delete in with": (
        selecting("with gone as (\ndelete from purses returning purse) select purse from gone"),
        "more than a select",
        2,
    ),
    "an update": (
        selecting("with x as (update purses set cents = 1 returning purse) select purse from x"),
        "more than",
        1,
    ),
    "a command": (selecting("explain select purse from purses"), "not one select", 1),
    "locks": (selecting("select purse from purses for update"), "more than a select", 1),
    "makes a table": (selecting("select purse into x from purses"), "more than a select", 1),
    "no view": (selecting("select '1' as purse"), "names no view", 1),
    "a table of Samefold's": (selecting("select stream as purse\n\nfrom positions"), "positions is not a view", 3),
    "a view's table": (selecting("select purse from purses_v1"), "purses_v1 is not a view", 1),
    "the write side": (selecting("select purse from streams_purses"), "streams_purses is not a view", 1),
    "a catalog": (selecting("select usename as purse from pg_user"), "pg_user is not a view", 1),
    "a schema": (
        selecting("select table_name as purse from information_schema.tables"),
        "information_schema.tables is not",
        1,
    ),
    "a view with a schema": (selecting("select purse from public.purses"), "public.purses is not a view", 1),
    "a function's column without its name": (
        selecting("select purse from purses where '1' =\n(select max(value) from jsonb_each_text(purses.note::jsonb))"),
        "no column 'value'",
        2,
    ),
    **{
        f"a table that only looks like one in `with`: {sql}": (selecting(sql), "others is not a view", None)
        for sql in (
            "with others as (select others.purse from others) select purse from others",
            "with x as (select o.purse from others o), others as (select purse from purses) select purse from x",
            "select purse from (with others as (select purse from purses) select purse from others) x, others",
            "select p.purse from purses p, (select 1 as x) as others, others as o",
            "select purse from purses where exists (with others as (select purse from purses) select from others) "
            "or exists (select from others)",
        )
    },
    "a hidden view": (
        selecting("with moves as (select purse from purses) select purse from moves"),
        "'moves' can't",
        1,
    ),
    # functions
    **{
        f"{function}": (
            selecting(f"select purse from purses\nwhere {function}({arguments}) is null"),
            f"{function} is not allowed",
            2,
        )
        for function, arguments in {
            "pg_sleep": "10",
            "set_config": "'role', 'none', false",
            "pg_read_file": "'/etc/passwd'",
            "lo_import": "'/etc/passwd'",
            "dblink": "'', ''",
            "pg_advisory_lock": "1",
            "nextval": "'s'",
            "pg_terminate_backend": "1",
            "query_to_xml": "'select 1', true, true, ''",
            "current_setting": "'x'",
            "random": "",
            "repeat": "'x', 1000000000",
        }.items()
    },
    "a quoted function": (
        selecting('select purse from purses where "pg_sleep"(1) is null'),
        "pg_sleep is not allowed",
        1,
    ),
    "a function of a schema": (
        selecting("select purse from purses where pg_catalog.pg_sleep(1) is null"),
        "not allowed",
        1,
    ),
    **{
        f"a type: {kind}": (selecting(f"select '1'::{kind}::text as purse\nfrom purses"), f"type {kind} is not", None)
        for kind in ("regclass", "regproc", "oid", "pg_catalog.regclass", "record", "pg_lsn")
    },
    # columns
    "a whole row": (selecting("select purse from purses where\npurses::text = ''"), "purses is a whole row", 2),
    "a column of a row": (selecting("select (p)._partition::text as purse from purses p"), "p is a whole row", 1),
    "a parameter by number": (selecting("select purse from purses where note = $1"), "$1 has no name", 1),
    "a star": (selecting("select * from purses"), "has a `*`", 1),
    "a view's star": (selecting("select p.* from purses p"), "has a `*`", 1),
    "the hidden column": (selecting("select purse from purses\nwhere _partition = 1"), "no column '_partition'", 2),
    "a column of every table": (selecting("select purse from purses where ctid is null"), "no column 'ctid'", 1),
    "no such column": (selecting("select purse\nfrom purses\nwhere p.cent = 1"), "'cent'", 3),
    "of a view that has none such": (
        selecting("select p.purse from purses p where p.after = 1"),
        "no column 'after'",
        1,
    ),
    "of two": (
        selecting("select cents as purse from purses, moves"),
        "no column 'cents' here, or there are several",
        1,
    ),
    "another column": (selecting("select note from purses"), "the select gives note, and the row has purse", 1),
    "another order": (selecting("select note, purse from purses", "purse: str\n    note: str"), "gives note, purse", 1),
    "without a name": (selecting("select count(*) from purses"), "the select gives", 1),
    # parameters
    "no such parameter": (selecting("select purse from purses\nwhere cents > %(least)s"), "has no 'least'", 2),
    "an unused one": (selecting("select purse from purses", parameters="least: int"), "no `%(least)s`", 1),
    "one in quotes": (selecting("select purse from purses where note = '%(x)s'", parameters="x: str"), "in quotes", 1),
    "one in a comment": (
        selecting("select purse from purses -- %(x)s", parameters="x: str"),
        "in quotes or in a comment",
        1,
    ),
    "one without a name": (selecting("select purse from purses where note = %s"), "in quotes or in a comment", 1),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_query_is_refused_with_its_line(tmp_path: Path, case: str) -> None:
    source, told, line = BAD[case]
    with pytest.raises(BadQuery) as refused:
        query(tmp_path, source, VIEWS)
    message = refused.value.message
    assert told in message
    assert message.startswith("projections/queries/asked.py")
    assert refused.value.hint
    if line is not None:
        at = LINE + source[: source.index("SQL")].count("\n") + line - 1
        assert f"asked.py, line {at}: " in message


ORDERS = {
    "select purse, cents from purses": "purse cents",
    "select purse, cents from purses order by cents desc -- the largest": "-cents purse",
    "select purse, cents from purses order by 2, 2 desc": "cents purse",
    "select purse, (2) as cents from purses order by (2) desc": "-cents purse",
    "select purse, (1) as cents from purses order by (1)": "purse cents",
    "select p.purse, p.cents from purses p order by p.cents desc, p.purse desc": "-cents -purse",
    "select purse, count(*) as cents from purses group by purse order by count(*)": "cents purse",
    "select purse, cents from purses union all select purse, cents from moves order by cents": "cents purse",
    "with a as (select purse, cents from purses order by cents) select purse, cents from a": "purse cents",
    "select purse, rank() over (order by note) as cents from purses order by purse": "purse cents",
    # pages can't go on
    "select distinct on (note) purse, cents from purses": "",
    "select distinct on (note, purse) purse, cents from purses order by note, purse": "",
    "select purse, cents from purses order by cents limit 9": "",
    "select purse, cents from purses offset 3": "",
    "select purse, cents from purses fetch first 3 rows only": "",
    "select purse, cents from purses order by cents nulls first": "",
    "select purse, cents from purses order by note": "",
    "select purse, cents from purses order by lower(purse)": "",
    'select purse, cents from purses order by purse collate "C" ': "",
    "select purse, cents from purses order by 0": "",
    "(select purse, cents from purses order by cents)": "",
    "with a as (select purse, cents from purses) (select purse, cents from a order by cents)": "",
}


@pytest.mark.parametrize("sql", ORDERS)
def test_pages_go_on_in_the_order_of_the_sql_if_that_is_of_the_rows_columns(tmp_path: Path, sql: str) -> None:
    found = query(tmp_path, selecting(sql, "purse: str\n    cents: int"), VIEWS)
    assert " ".join(map(str, found.order)) == ORDERS[sql]


def test_a_query_has_a_name_of_its_own(tmp_path: Path) -> None:
    for name in ("purses", "positions", "x_v2", "Asked", "x" * 41):
        with pytest.raises(BadQuery, match="can't be a query"):
            query(tmp_path, selecting("select purse from purses"), VIEWS, name)


def test_of_several_rows_the_one_called_row_is_meant(tmp_path: Path) -> None:
    other = "class Other(NamedTuple):\n    a: int\n"
    found = query(tmp_path, other + selecting("select purse from purses").replace("Found", "Row"), VIEWS)
    assert [column.name for column in found.columns] == ["purse"]


def test_queries_are_found_by_being_there_and_are_no_views() -> None:
    assert set(discover()) == {"largest_accounts"}
    assert not {"queries", "largest_accounts"} & {*discovered_views(), *all_views()}


def test_a_service_without_the_folder_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "__path__", [str(tmp_path)])
    assert discover.__wrapped__() == {}


def test_views_of_two_agents_have_both(tmp_path: Path) -> None:
    other: dict[str, View] = views(purses='AGENT = "side"\n' + PURSES.replace("\n    ", "\n"), moves=MOVES)
    sql = "select p.purse from purses p join moves m using (purse)"
    assert query(tmp_path, selecting(sql), other).agents == {"core", "side"}
