"""make test: queries take milliseconds. `Rows` as SQL: rows that are not among them do not exist, by key, by page and in sums."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest

from infra.access import BadAccess, Rows
from infra.database.connect import Connection
from infra.settings import Settings
from projections.engine.views import queries
from projections.engine.views.view import View
from tests.engine.projections import viewkit
from tests.engine.projections.test_asking import EVERYTHING, TOPIC, ask, insert, make, page_of, rows

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 120_000, UTC)
NAME = UUID(int=5)


def paged(
    db: Connection, view: View, only: Rows | None, after: Any = None, most: int = 10, **filters: Any
) -> list[Any]:
    found = ask(db, page_of(view, filters, after, most, only))
    return [tuple(row[column.name] for column in view.key) for row in rows(found)]


def by_keys(db: Connection, view: View, asked: list[tuple[tuple[Any, ...], Rows]]) -> list[int]:
    """The numbers of the keys that have a row."""
    keys, only = zip(*asked, strict=True)
    return [row.number for row in ask(db, queries.by_keys(view, view.table_name, TOPIC, keys, (), only)).rows]


@pytest.fixture
def things(db: Connection, world: Settings) -> View:
    view = viewkit.view(EVERYTHING, "things")
    make(db, world, view)
    of_first = (True, Decimal("12.50"), MOMENT, NAME, b"\xff\0", "red", 4, "ä'b", True)
    of_second = (False, Decimal("12.51"), MOMENT + timedelta(microseconds=1), UUID(int=6), b"\xff", "green", None, None)
    insert(db, view, "a", -(2**63), date(2026, 1, 2), *of_first)
    insert(db, view, "b", 1, date(2026, 1, 3), *of_second, False)
    return view


FIRST, SECOND = ("a", -(2**63), date(2026, 1, 2)), ("b", 1, date(2026, 1, 3))


@pytest.mark.parametrize(
    "columns",
    [
        {"word": "a"},
        {"number": -(2**63)},
        {"day": date(2026, 1, 2)},
        {"yes": True},
        {"money": Decimal("12.5")},
        {"moment": MOMENT.astimezone(timezone(timedelta(hours=5)))},
        {"name": NAME},
        {"blob": b"\xff\0"},
        {"colour": "RED"},
        {"perhaps": 4},
        {"said": "ä'b"},
        {"said": "ä'b", "r": True, "number": -(2**63)},
    ],
    ids=",".join,
)
def test_a_value_of_each_type_lets_its_row_through_and_no_other(
    db: Connection, things: View, columns: dict[str, Any]
) -> None:
    if "colour" in columns:
        colour = next(one.enum for one in things.columns if one.enum)
        columns = {"colour": colour["RED"]}
    only = Rows(**columns)
    assert [word for word, *_ in paged(db, things, only)] == ["a"]
    assert by_keys(db, things, [(SECOND, only), (FIRST, only)]) == [2]
    either = only | Rows(word="nobody", yes=False)
    assert by_keys(db, things, [(FIRST, either), (SECOND, either)]) == [1]


def test_a_row_without_a_value_belongs_to_nobody(db: Connection, things: View) -> None:
    assert paged(db, things, Rows(said="")) == []
    assert paged(db, things, Rows(word="b", said="")) == []
    assert [word for word, *_ in paged(db, things, Rows(word="b") | Rows(said="ä'b"))] == ["a", "b"]


class Colour(Enum):
    """Of the same words, but not the column's."""

    RED = "red"


@pytest.mark.parametrize(
    "columns",
    [
        {"owner": "a"},
        {"word": 1},
        {"word": "a\0"},
        {"number": "1"},
        {"number": 2**63},
        {"number": Decimal(1)},
        {"day": MOMENT},
        {"day": "2026-01-02"},
        {"yes": 1},
        {"money": 12.5},
        {"money": Decimal("NaN")},
        {"moment": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"moment": date(2026, 1, 1)},
        {"name": str(NAME)},
        {"blob": "ab"},
        {"colour": "red"},
        {"colour": Colour.RED},
        {"perhaps": [4]},
    ],
    ids=str,
)
def test_a_column_that_is_not_there_or_a_value_of_another_type_is_a_named_error(columns: dict[str, Any]) -> None:
    view = viewkit.view(EVERYTHING, "things")
    for only in (Rows(**columns), Rows(word="a") | Rows(**columns)):
        with pytest.raises(BadAccess, match="things"):
            page_of(view, {}, None, 1, only)
        with pytest.raises(BadAccess, match="things"):
            queries.by_keys(view, view.table_name, TOPIC, [FIRST], (), [only])


def test_pages_stay_full_between_the_rows_of_others(db: Connection, world: Settings) -> None:
    view = viewkit.view(viewkit.PURSES)
    make(db, world, view)
    for number in range(30):
        insert(db, view, f"p{number:02}", number, "mine" if number % 7 == 0 else "theirs")
    only, after, seen = Rows(note="mine"), None, []
    while page := paged(db, view, only, after, 2):
        seen.append([purse for (purse,) in page])
        after = page[-1]
    assert seen == [["p00", "p07"], ["p14", "p21"], ["p28"]]
    assert paged(db, view, only, ("p08",), 2) == [("p14",), ("p21",)]  # after a row of somebody else's
    assert paged(db, view, only, None, 9, cents=7) == [("p07",)]
    assert paged(db, view, only, None, 9, cents=8, note="theirs") == []


def test_a_summary_is_compared_after_it_is_added_up(db: Connection, world: Settings) -> None:
    view = viewkit.view(viewkit.TOTALS, "totals")
    make(db, world, view)
    for kind, partition, cents in (("Filled", 0, 10**20), ("Filled", 1, 1), ("Spent", 1, -3)):
        insert(db, view, kind, 1, cents, cents % 1_000, cents % 1_000, partition=partition)
    whole, share = Rows(cents=10**20 + 1), Rows(cents=10**20)
    assert paged(db, view, whole) == [("Filled",)]
    assert paged(db, view, share) == []
    assert by_keys(db, view, [(("Filled",), whole), (("Filled",), share), (("Spent",), whole)]) == [1]
    by_key = Rows(kind="Spent") | Rows(largest=1, count=2)
    assert paged(db, view, by_key, None, 5, count=2) == [("Filled",)]
    assert paged(db, view, by_key) == [("Filled",), ("Spent",)]
    assert by_keys(db, view, [(("Spent",), by_key)]) == [1]


def test_many_callers_are_one_query_of_one_shape(db: Connection, things: View) -> None:
    """Each key is asked for with values of its own."""
    asked = [(FIRST, Rows(word="a")), (FIRST, Rows(word="b")), (SECOND, Rows(word="b")), (FIRST, Rows(word="a"))]
    assert by_keys(db, things, asked) == [1, 3, 4]
    texts = {queries.by_keys(things, "things_v1", TOPIC, [FIRST], (), [Rows(word=f"{n}")]).text for n in range(9)}
    assert len(texts) == 1
