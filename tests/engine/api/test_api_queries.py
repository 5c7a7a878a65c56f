"""make test: one API; a question takes milliseconds, a rebuild a second.

Queries of the author's over HTTP: views at one moment, no older than what the caller has seen, and what is wrong is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any
from unittest.mock import Mock, patch
from uuid import uuid4

import httpx
import pytest

from api import app as api_app
from api import services as api_services
from api.services import TOO_MANY_SEARCHES
from api.view_reader import PositionWaits
from api.waits import Slots
from infra.access import Access, Caller, Rows
from infra.database.connect import connect
from infra.log import topics
from infra.settings import Settings
from projections.engine.queries.query import Query, discover
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.views.core_views import all_views
from projections.engine.views.token import Token
from tests.engine.api.api import Api, problem, served, unfolded
from tests.engine.api.test_api_views import decided, folded, get, stopped, token_now
from tests.engine.projections.bankviews import live_table
from tests.engine.projections.querykit import query
from tests.engine.spine import deposit, open_account, project
from tools.testing.fixtures import SEED
from tools.testing.waiting import until

RANDOM = Random(SEED)

BOTH = """
    class Parameters(NamedTuple):
        account: str
    class Row(NamedTuple):
        balance: int
        booked: int
        lines: int
    SQL = '''
    select cents as balance, (select coalesce(sum(s.cents), 0) from statement s where s.account = b.account) as booked,
           (select count(*) from statement s where s.account = b.account) as lines
      from balances b where b.account = %(account)s'''
"""
EVERY_TYPE = """
    class Colour(Enum):
        RED = "red"
    class Parameters(NamedTuple):
        number: int
        word: str = "a"
        day: date = date(2026, 1, 2)
        moment: datetime | None = None
        money: Decimal = Decimal("1.50")
        one: UUID | None = None
        yes: bool = True
        colour: Colour = Colour.RED
        share: float = 0.5
        at: time = time(1, 2)
        long: timedelta = timedelta(days=1)
    class Row(NamedTuple):
        number: int
        word: str
        day: date
        moment: datetime | None
        money: Decimal
        one: UUID | None
        yes: bool
        colour: Colour
        share: float
        at: time
        long: timedelta
        below: int
    SQL = '''select %(number)s as number, %(word)s as word, %(day)s as day, %(moment)s as moment, %(money)s as money,
        %(one)s as one, %(yes)s as yes, %(colour)s as colour,
        %(share)s as share, %(at)s as at, %(long)s as long, 10 / %(number)s as below from balances limit 1'''
"""
TYPELESS = """
    class Row(NamedTuple):
        account: int
    SQL = "select lower(account) as account from balances"
"""
LONG = """
    class Parameters(NamedTuple):
        size: int
    class Row(NamedTuple):
        account: str
    SQL = "select lpad(account, %(size)s::int4, 'x') as account from balances limit 1"
"""
ALIAS = """
    class Row(NamedTuple):
        owner: str
        held: int
    SQL = "select owner, sum(cents) as held from balances group by owner having held > 5"
"""
FRACTIONS = """
    class Row(NamedTuple):
        half: int
    SQL = "select cents / 2.0 as half from balances"
"""
ACCOUNTS = """
    class Row(NamedTuple):
        account: str
        owner: str
    SQL = "select account, owner from balances order by account"
"""
SLEEPS = """
    class Row(NamedTuple):
        many: int
    SQL = '''with recursive n as (select 1 as i union all select n.i + 1 from n)
             select count(*) as many from n, balances'''
"""

TWO = """
    class Row(NamedTuple):
        account: str
    SQL = "select account from balances where account like 'q-more-%' order by account limit 2"
"""
PAGED = {
    name: f"""
    class Row(NamedTuple):
        owner: str
        closed_on: date | None
        many: int
    SQL = '''select owner, closed_on, sum(cents) as many from balances where starts_with(account, 'q-page-')
              group by account, owner, closed_on {order}'''
"""
    for name, order in {
        "by_nothing": "",
        "by_owner": "order by owner desc, closed_on -- of each",
        "by_closing": "order by closed_on desc, sum(cents)",
        "by_number": "order by 2, 1 desc",
    }.items()
}
FROM_VALUES = "from balances b, (values {}) as t (x, n) where b.account = 'q-page-0'"
EQUAL = {
    name: f"""
    class Row(NamedTuple):
        x: {kind}
        n: int
    SQL = '''select {column} as x, n {FROM_VALUES.format(values)} order by 1 desc'''
"""
    for name, (kind, column, values) in {
        "scales": ("Decimal", "x", "(1.0::numeric, 1), (1.00, 1), (1.000, 1), (2, 1), (3, 1)"),
        "zeros": ("float", "x", "(0::float8, 1), ('-0'::float8, 1), (0, 1), (1, 1)"),
        "days": ("timedelta", "x", "(interval '1 day', 1), ('24:00:00', 1), ('24:00:00', 1), ('1 h', 1)"),
        "numbers": ("list[float]", "x", "('[1.0]'::jsonb, 1), ('[1.00]', 1), ('[1]', 1), ('[2]', 1)"),
        "nulls": (
            "list[str] | None",
            "x -> 'v'",
            """('{"v": null}'::jsonb, 1), ('{"v": ["a"]}', 2), ('{"v": null}', 3)""",
        ),
        "parts": ("int", "(n)", "(1, 1), (2, 2), (3, 3)"),
    }.items()
}
MOVING = """
    class Row(NamedTuple):
        account: str
        cents: int
    SQL = "select account, cents from balances where account like 'q-page-%' order by cents desc"
"""


def may_read(caller: Caller, view: str) -> bool | Rows:
    match caller.subject, view:
        case ("ada", "own"):
            return Rows(owner="ada") | Rows(account="q-own-3")
        case ("bob", "own"):
            return Rows(purse="x")
        case _:
            return "teller" in caller.roles


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Query]:
    folder, views = tmp_path_factory.mktemp("queries"), all_views()
    sources = {"both": BOTH, "types": EVERY_TYPE, "typeless": TYPELESS, "fractions": FRACTIONS, "own": ACCOUNTS}
    sources |= {"sleeps": SLEEPS, "alias": ALIAS, "long": LONG, "two": TWO, "moving": MOVING, **PAGED, **EQUAL}
    return discover() | {name: query(folder, source, views, name) for name, source in sources.items()}


@pytest.fixture(scope="module")
def api(shared_world: Settings, queries: Mapping[str, Query]) -> Iterator[Api]:
    with (
        patch.object(api_app, "discover", lambda: queries),
        unfolded(shared_world, Access(lambda *_: False, may_read)) as api,
    ):
        yield api


def both(api: Api, account: str, **headers: str) -> httpx.Response:
    return get(api, f"/queries/both?account={account}", **headers)


def test_openapi_has_the_parameters_and_rows_of_each(api: Api) -> None:
    document = get(api, "/openapi.json").json()
    assert document["paths"]["/queries/largest_accounts"]["get"]["description"] == "Which owners hold most?"
    asked = document["paths"]["/queries/types"]["get"]
    found = {one["name"]: one for one in asked["parameters"] if one["in"] == "query"}
    assert [name for name, one in found.items() if one["required"]] == ["number"]
    assert found["day"]["schema"] == {"type": "string", "format": "date", "default": "2026-01-02"}
    assert found["money"]["schema"]["default"] == "1.50"
    assert [found[name]["schema"]["default"] for name in ("share", "at", "long")] == [0.5, "01:02:00", "P1D"]
    assert found["colour"]["schema"] == {"type": "string", "enum": ["red"], "default": "red"}
    assert found["moment"]["schema"] == {"anyOf": [{"type": "string", "format": "date-time"}, {"const": ""}]}
    row = document["components"]["schemas"]["TypesQueryRow"]
    assert row["properties"]["below"]["type"] == "integer"
    assert set(row["required"]) == set(row["properties"])


def test_an_answer_has_its_position_and_a_tag_of_what_it_holds(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("q-tag"), deposit("q-tag", "q-tag-1", 40))
    first = both(api, "q-tag")
    assert first.json()["items"] == [{"balance": 40, "booked": 40, "lines": 1}]
    assert (first.json()["next"], first.json()["parked"]) == (None, 0)
    assert Token.parse(first.json()["position"]) == token_now(shared_world)
    assert first.headers["Samefold-Position"] == first.json()["position"]
    folded(shared_world, open_account("q-other"))
    same = both(api, "q-tag", If_None_Match=first.headers["ETag"])
    assert (same.status_code, same.content) == (304, b"")
    assert Token.parse(same.headers["Samefold-Position"]) == token_now(shared_world)
    folded(shared_world, deposit("q-tag", "q-tag-2", 1))
    assert both(api, "q-tag", If_None_Match=first.headers["ETag"]).json()["items"][0]["balance"] == 41
    assert api.client.head("/queries/both?account=q-tag").headers["ETag"] == both(api, "q-tag").headers["ETag"]


def test_more_rows_than_asked_for_are_told(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("q-more-1"), open_account("q-more-2"))
    few, all_ = get(api, "/queries/two?limit=1").json(), get(api, "/queries/two?limit=2").json()
    assert (few["items"], few["more"], all_["more"]) == (all_["items"][:1], True, False)
    problem(get(api, "/queries/two?cursor=x"), 422, "invalid")


def pages(api: Api, path: str) -> list[list[dict[str, Any]]]:
    found, next_ = list[list[dict[str, Any]]](), path
    while next_ and len(found) < 99:
        page = get(api, next_).json()
        found.append(page["items"])
        next_ = page["next"]
    return found


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_pages_hold_each_row_once_also_those_that_are_equal(api: Api, names: list[str], name: str, limit: int) -> None:
    [whole] = pages(api, f"/queries/{name}?limit=1000")
    found = pages(api, f"/queries/{name}?limit={limit}")
    assert [row for page in found for row in page] == whole
    assert len(whole) == len(names)
    assert {len(page) for page in found[:-1]} == {limit}


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("limit", [1, 2])
def test_pages_end_where_equal_values_are_written_differently(api: Api, name: str, limit: int) -> None:
    [whole] = pages(api, f"/queries/{name}?limit=1000")
    found = pages(api, f"/queries/{name}?limit={limit}")
    assert [len(page) for page in found] == [min(limit, len(whole) - at) for at in range(0, len(whole), limit)]
    assert sorted(row["n"] for page in found for row in page) == sorted(row["n"] for row in whole)


@pytest.fixture(scope="module")
def names(shared_world: Settings) -> list[str]:
    """Accounts, many of which are equal but for their names."""
    names = [f"q-page-{number}" for number in range(20)]
    folded(shared_world, *map(open_account, names))
    with connect(shared_world, "test") as db:
        for name in names:
            closed_on, owner = RANDOM.choice([None, "2026-01-02", "2026-01-03"]), RANDOM.choice(["a", "B", "ä", ""])
            text = f"update {live_table(shared_world, 'balances')} set closed_on = %s, owner = %s where account = %s"
            db.execute(text.encode(), (closed_on, owner, name))
    return names


def test_a_row_that_does_not_move_comes_once_while_others_come_and_go(
    api: Api, shared_world: Settings, names: list[str]
) -> None:
    left, order = names[::2], list[str]()
    with connect(shared_world, "test") as db:
        page = get(api, "/queries/moving?limit=3").json()
        while page["next"]:
            order += [row["account"] for row in page["items"]]
            gone = RANDOM.choice([name for name in names if name not in left])
            text = f"update {live_table(shared_world, 'balances')} set cents = %s where account = %s"
            db.execute(text.encode(), (RANDOM.randint(-9, 9), gone))
            page = get(api, page["next"]).json()
    order += [row["account"] for row in page["items"]]
    assert sorted(name for name in order if name in left) == sorted(left)


def test_a_cursor_of_another_question_is_refused_with_what_differs(api: Api, names: list[str]) -> None:
    cursor = get(api, "/queries/largest_accounts?limit=1").json()["next"].partition("cursor=")[2]
    for path, differs in {
        f"largest_accounts?at_least=1&cursor={cursor}": "another parameters.",
        f"by_nothing?cursor={cursor}": "another query or release and another parameters.",
        f"largest_accounts?cursor={cursor[:-2]}": "none that an answer gave",
        "largest_accounts?cursor=W10": "none that an answer gave",
    }.items():
        assert differs in problem(get(api, f"/queries/{path}"), 422, "bad-cursor")["detail"]
    own = get(api, "/queries/own?limit=1", Caller="tom teller").json()["next"]
    assert "another caller" in problem(get(api, own, Caller="eve teller"), 422, "bad-cursor")["detail"]
    assert get(api, f"{own}&limit=2", Caller="tom teller").status_code == 422, "a parameter twice"


TYPES = {
    "number": ("5", ["", "x", "1.0", "1e3", "9" * 40, "9223372036854775808", "+1", "NaN"]),
    "word": ("ä'b%20%25", ["%00"]),
    "day": ("2026-12-01", ["", "2026-02-30", "infinity", "20261201", "2026-W01-1"]),
    "moment": ("2026-12-01T10:00:00Z", ["2026-12-01", "2026-12-01T10:00:00", "now"]),
    "money": ("-12.5", ["", "1e5", "NaN", "Infinity", "1,5"]),
    "one": ("00000000-0000-0000-0000-000000000005", ["5", "x"]),
    "yes": ("false", ["", "1", "True"]),
    "colour": ("red", ["", "RED", "blue"]),
    "share": ("1.5", ["", "NaN", "Infinity", "1e999"]),
    "at": ("10:00:01.5", ["", "24:00:00", "10", "10:00Z"]),
    "long": ("P2DT0.5S", ["", "P1M", "1 day"]),
}


def test_parameters_are_typed(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("q-types"))
    [row] = get(api, "/queries/types?number=3").json()["items"]
    assert row == {"number": 3, "word": "a", "day": "2026-01-02", "moment": None, "money": "1.50"} | {
        "one": None,
        "yes": True,
        "colour": "red",
        "below": 3,
        "share": 0.5,
        "at": "01:02:00",
        "long": "P1D",
    }
    given = "&".join(f"{name}={value}" for name, (value, _) in TYPES.items())
    [row] = get(api, f"/queries/types?{given}").json()["items"]
    assert (row["number"], row["word"], row["day"], row["money"], row["yes"]) == (
        5,
        "ä'b %",
        "2026-12-01",
        "-12.5",
        False,
    )
    assert (row["share"], row["at"], row["long"]) == (1.5, "10:00:01.5", "P2DT0.5S")
    assert (row["moment"], row["one"]) == ("2026-12-01T10:00:00+00:00", TYPES["one"][0])
    assert get(api, "/queries/types?number=3&moment=&one=").json()["items"][0]["moment"] is None


@pytest.mark.parametrize("name", TYPES)
def test_what_is_no_value_of_a_parameter_is_refused_by_its_name(api: Api, name: str) -> None:
    for wrong in TYPES[name][1]:
        number = "" if name == "number" else "number=1&"
        told = problem(get(api, f"/queries/types?{number}{name}={wrong}"), 422, "invalid")
        assert [one["at"] for one in told["errors"]] == [f"query.{name}"], wrong
        assert "no" in told["errors"][0]["problem"]


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ("", "number"),
        ("?number=1&number=1", "number"),
        ("?number=1&nunber=1", "nunber"),
        ("?number=1&limit=0", "limit"),
        ("?number=1&limit=1001", "limit"),
        ("?number=1&cursor=x", "cursor"),
        ("?number=1&if-stopped=last-rows", "if-stopped"),
    ],
)
def test_what_a_query_does_not_take_is_refused(api: Api, asked: str, at: str) -> None:
    told = problem(get(api, f"/queries/types{asked}"), 422, "invalid")
    assert [one["at"] for one in told["errors"]] == [f"query.{at}"]
    problem(get(api, "/queries"), 404, "not-found")
    problem(get(api, "/queries/nothing"), 404, "not-found")
    problem(get(api, "/queries/own?after=x"), 422, "bad-token")
    problem(get(api, "/queries/own?after=1~AAAAAAdbzRX_______5-Mw.0-1"), 409, "other-log")


def test_what_cant_be_computed_is_named_and_logged(
    api: Api, shared_world: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    folded(shared_world, open_account("q-zero"), deposit("q-zero", "q-zero-1", 3))
    problem(get(api, "/queries/types?number=0"), 422, "query-failed")
    problem(get(api, "/queries/long?size=1000000000"), 422, "query-failed")
    assert "projections/queries/types.py: DivisionByZero." in caplog.text
    for _ in range(2):
        for name in ("typeless", "alias"):
            problem(get(api, f"/queries/{name}"), 500, "bad-query")
    assert "column 'account' is declared as int, and the SQL gives text" in caplog.text
    problem(get(api, "/queries/fractions"), 500, "bad-query")
    assert "a value is not of its declared type: Expected `int`, got `float` - at `$.half`" in caplog.text


@pytest.mark.usefixtures("api")
def test_a_query_that_takes_too_long_is_ended(shared_world: Settings, queries: Mapping[str, Query]) -> None:
    folded(shared_world, open_account("q-long"))
    with (
        patch.object(api_app, "discover", lambda: queries),
        patch.object(api_services, "LONGEST_QUERY_MS", 200),
        served(shared_world, "hurried") as hurried,
    ):
        problem(get(hurried, "/queries/sleeps"), 503, "database-unavailable")


def test_each_query_is_a_search(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.services, "searches", Slots(0, TOO_MANY_SEARCHES, wait_s=0.05))
    problem(get(api, "/queries/largest_accounts"), 429, "too-many-searches")


def test_who_waits_for_a_position_takes_no_other_callers_search(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("q-slot"))
    decided(shared_world, deposit("q-slot", "q-slot-1", 7))
    monkeypatch.setattr(api.services, "searches", Slots(1, TOO_MANY_SEARCHES))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, api, f"/queries/both?account=q-slot&after={token_now(shared_world)}")
        until(lambda: len(api.services.positions) == 1, "one waits")
        until(lambda: both(api, "q-slot").status_code == 200, "the one that waits leaves its place")
        project(shared_world)
        assert answer.result().json()["items"][0]["balance"] == 7


# who may ask


def test_a_query_is_denied_or_its_rows_are_the_callers(
    api: Api, shared_world: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    folded(shared_world, *(open_account(f"q-own-{number}") for number in range(4)))
    with connect(shared_world, "test") as db:
        db.execute(f"update {live_table(shared_world, 'balances')} set owner = 'ada' where account = 'q-own-1'")
    everything = get(api, "/queries/own?limit=1000", Caller="tom teller").json()
    assert {"q-own-0", "q-own-1"} <= {row["account"] for row in everything["items"]}
    own = get(api, "/queries/own?limit=1000", Caller="ada").json()
    assert [row["account"] for row in own["items"]] == ["q-own-1", "q-own-3"]
    assert own["parked"] is None
    assert get(api, "/queries/own?limit=1", Caller="ada").json()["items"] == own["items"][:1]
    for caller in ("ada", "eve"):
        problem(get(api, "/queries/largest_accounts", Caller=caller), 403, "not-allowed")
    assert "denied: 'eve' may not read largest_accounts" in caplog.text
    problem(get(api, "/queries/own", Caller="bob"), 500, "bad-access")
    assert "names column 'purse'" in caplog.text


# one moment, and none that is older than what was seen


def test_an_answer_waits_for_what_the_caller_has_seen(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("q-waits"))
    decided(shared_world, deposit("q-waits", "q-waits-1", 7))
    seen = token_now(shared_world)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, api, f"/queries/both?account=q-waits&after={seen}")
        until(lambda: len(api.services.positions) == 1, "one waits")
        project(shared_world)
        assert answer.result().json()["items"] == [{"balance": 7, "booked": 7, "lines": 1}]
    topic = topics.describe(shared_world, shared_world.events_topic)
    ahead = Token.of(topic.id, {0: topic.end[0] + 1})
    late = get(api, f"/queries/both?account=q-waits&after={ahead}", Prefer="wait=0")
    problem(late, 503, "position-not-reached")


def test_views_are_of_one_moment_before_during_and_after_a_switch(api: Api, shared_world: Settings) -> None:
    """Deposits go on, and both views are rebuilt and switched meanwhile: the answers are a history of the account."""
    folded(shared_world, open_account("q-switch"))
    tables = {name: live_table(shared_world, name) for name in ("balances", "statement")}
    total = 0

    def asked() -> tuple[int, ...]:
        answer = both(api, "q-switch")
        assert answer.status_code == 200, answer.text
        [row] = answer.json()["items"]
        assert row["balance"] == row["booked"], "the views are of two moments"
        return row["lines"], row["balance"]

    def has_folded() -> bool:
        try:
            project(shared_world)
        except AssertionError:  # fenced by the switch: an agent reads its positions again, too
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        switching = pool.submit(rebuild, shared_world, ["balances", "statement"], all_views())
        answers = [asked()]
        number = 0
        while not switching.done() or number < 5:
            number += 1
            decided(shared_world, deposit("q-switch", f"q-switch-{number}", number))
            folding = pool.submit(until, has_folded, "the deposit is folded")
            while not folding.done():
                answers.append(asked())
            folding.result()
            total += number
            [row] = get(api, f"/queries/both?account=q-switch&after={token_now(shared_world)}").json()["items"]
            assert row == {"balance": total, "booked": total, "lines": number}, "an older state was shown"
        switching.result()
    assert {name: live_table(shared_world, name) for name in tables}.items().isdisjoint(tables.items())
    assert answers == sorted(answers), "it went back"
    assert all(balance == lines * (lines + 1) // 2 for lines, balance in answers), "a state that never was"


def test_a_table_that_is_gone_is_not_asked_for_ever(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("q-gone"))
    api.services.views._tables["statement"] = "statement_v2_r999"
    assert both(api, "q-gone").json()["items"] == [{"balance": 0, "booked": 0, "lines": 0}]


def test_a_stopped_view_ends_the_query(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("q-stopped"))
    with stopped(shared_world, "balances"):
        problem(both(api, "q-stopped"), 503, "view-stopped")
    assert both(api, "q-stopped").status_code == 200


def test_a_view_of_another_version_ends_the_query(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("q-version"))
    with connect(shared_world, "test") as db:
        db.execute("update live set version = 1 where view = 'statement'")
        try:
            problem(both(api, "q-version"), 503, "view-not-live")
        finally:
            db.execute("update live set version = 2 where view = 'statement'")
    assert both(api, "q-version").status_code == 200


def test_of_views_of_two_agents_the_slower_one_counts(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("q-two"), deposit("q-two", "q-two-1", 7))
    topic, seen = topics.describe(shared_world, shared_world.events_topic), token_now(shared_world)
    path = f"/queries/both?account=q-two&after={seen}"
    with connect(shared_world, "test") as db:
        db.execute("update live set agent = 'side' where view = 'statement'")
        monkeypatch.setattr(Query, "agents", property(lambda _: frozenset({"core", "side"})))
        try:
            assert both(api, "q-two").json()["position"] == "1", "the other agent has begun nowhere"
            problem(get(api, path, Prefer="wait=0"), 503, "position-not-reached")
            for partition, end in topic.end.items():
                db.execute(
                    "insert into positions values ('side', %s, %s, %s, %s, 0, 1, 1, %s)",
                    (topic.name, partition, topic.id, end - 1 if end else 0, uuid4()),
                )
            problem(get(api, path, Prefer="wait=0"), 503, "position-not-reached")
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(get, api, path)
                until(lambda: len(api.services.positions) == 1, "one waits")
                for partition, end in topic.end.items():
                    db.execute(
                        "update positions set next_offset = %s where agent = 'side' and partition = %s",
                        (end, partition),
                    )
                found = answer.result()
                assert found.status_code == 200, found.text
                assert Token.parse(found.json()["position"]) == Token.of(topic.id, topic.end)
        finally:
            db.execute("update live set agent = 'core' where view = 'statement'")
            db.execute("delete from positions where agent = 'side'")


def test_who_waits_for_two_agents_is_woken_by_either() -> None:
    waits = PositionWaits(Mock(), 1)
    with waits.waiting({"core", "side"}, Token.of("topic", {0: 5})) as waiter:
        for agent, moved, wakes in (
            ("other", {0: 9}, False),
            ("core", {0: 5}, True),
            ("side", {0: 5}, True),
            ("", None, True),
        ):
            waiter._wake.clear()
            waits._notified(agent, moved)
            assert waiter._wake.is_set() is wakes, agent
