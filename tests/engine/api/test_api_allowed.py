"""make test: one API for all, and a request takes milliseconds.

Who may do what, over HTTP: rows and outcomes of others do not exist for a caller, and what is not allowed leaves no trace.

An account belongs to the caller with its overdraft limit: `LIMITS`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI

from api.commands import router_of
from api.problems import HANDLERS
from api.requests import RawPath
from api.services import TOO_MANY_SEARCHES
from api.view_reader import ViewReader
from api.waits import Slots
from domain.accounts import ChargeFee, CloseAccount, CreditInterest, Deposit, OpenAccount, Withdraw
from infra.access import Access, Caller, Row, Rows
from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.rebuild.rebuild import resume
from projections.engine.views.core_views import all_views, command_key
from tests.engine.api.api import DAY, Api, Named, appended, everything, fresh, problem
from tests.engine.api.test_api_views import subscribed
from tests.engine.domain.customers import CUSTOMERS, Register
from tests.engine.projections.bankviews import stop_as_older_code_would
from tests.engine.spine import scalar
from tools.testing.fixtures import Samefold
from tools.testing.waiting import SLOWNESS, until

LIMITS = {"ada": 100, "bob": 200, "zoe": 300}


def may_send(caller: Caller, stream: str, command: object) -> bool | Row:
    account, limit = stream.partition("/")[2], LIMITS.get(caller.subject, 0)
    if "teller" in caller.roles:
        return True
    match command:
        case OpenAccount(overdraft_limit=asked):
            return asked == limit
        case Deposit():
            return Row("balances", account=account, overdraft_limit=limit)
        case CreditInterest():  # once it is done, the row is another one
            return Row("balances", account=account, overdraft_limit=limit, cents=0)
        case Withdraw():
            return Row("balances", overdraft_limit=limit)
        case CloseAccount():  # as of a token that lacks a claim
            return Row("balances", account=account, overdraft_limit=None)
        case ChargeFee():
            return "yes"  # type: ignore[return-value]
        case _:
            return False


def may_read(caller: Caller, view: str) -> bool | Rows:
    if "teller" in caller.roles:
        return True
    if caller.subject == "quitter":
        sys.exit(1)
    if caller.subject == "noel":
        return Rows(by=None)
    if caller.subject not in LIMITS:
        return "all"  # type: ignore[return-value]
    limit = LIMITS[caller.subject]
    match view:
        case "balances":
            return Rows(overdraft_limit=limit) | Rows(overdraft_limit=0, cents=limit)
        case "statement":
            return Rows(account=f"{caller.subject}'s")
        case "daily_totals":
            return Rows(operation="deposit", count=1)
        case "transfers":
            return Rows(owner=caller.subject)
        case "command_outcomes":
            return Rows(by=caller.subject)
        case _:
            return False


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with everything(shared_world, access=Access(may_send, may_read)) as api:
        yield api


def get(api: Api, caller: str, path: str, **headers: str) -> httpx.Response:
    return api.get(path, Caller=caller, **headers)


def post(api: Api, caller: str, name: str, command: str, key: str = "", **body: Any) -> httpx.Response:
    return api.post(name, command, {"Caller": caller}, key, **body)


def opened(api: Api, caller: str, name: str = "", key: str = "") -> str:
    name = name or fresh()
    answer = post(api, caller, name, "open-account", key, overdraft_limit=LIMITS[caller])
    assert answer.status_code == 200, answer.text
    return name


def test_what_a_callers_rights_need_an_index_for_is_a_search(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index serves `overdraft_limit`, and that is no fault of the caller's."""
    opened(api, "ada")
    monkeypatch.setattr(api.services.views, "small_view", 0)
    assert get(api, "ada", "/views/balances?limit=1").json()["items"][0]["overdraft_limit"] == 100
    problem(get(api, "ada", "/views/balances?transactions=0"), 422, "no-index")
    problem(get(api, "ada", "/views/balances/live?limit=3"), 422, "no-index")
    monkeypatch.setattr(api.services, "searches", Slots(0, TOO_MANY_SEARCHES, wait_s=0.05))
    problem(get(api, "ada", "/views/balances?limit=1"), 429, "too-many-searches")
    assert get(api, "tess teller", "/views/balances?limit=1").status_code == 200


@contextmanager
def parked(world: Settings, view: str, stream: str) -> Iterator[None]:
    """As if the view had left out the stream's later events."""
    table = all_views()[view].table_name
    with connect(world, "test") as db:
        db.execute("insert into parked values (%s, %s, %s, 0, 5, 3, 'no')", (table, stream, view))
        try:
            yield
        finally:
            db.execute("delete from parked where stream = %s", (stream,))


def same(one: httpx.Response, other: httpx.Response) -> None:
    """Both answers are the same but for ids and positions."""

    def told(answer: httpx.Response) -> Any:
        return answer.status_code, {*answer.headers}, answer.json() | {"position": "", "correlation_id": ""}

    assert told(one) == told(other)


# rows


def test_a_row_of_another_is_as_if_it_were_not_there(api: Api, shared_world: Settings) -> None:
    mine, theirs = opened(api, "ada"), opened(api, "bob")
    path, missing = f"/views/balances/{theirs}", "/views/balances/nobody"
    assert get(api, "ada", f"/views/balances/{mine}").json()["row"]["overdraft_limit"] == 100
    seen = get(api, "bob", path)
    assert seen.json()["row"]["overdraft_limit"] == 200
    after = f"after={seen.json()['position']}"
    problem(get(api, "ada", path), 404, "no-row")
    for headers in ({}, {"If_None_Match": seen.headers["ETag"]}, {"If_None_Match": "*"}):
        for query in ("", f"?{after}"):
            same(get(api, "ada", path + query, **headers), get(api, "ada", missing + query, **headers))
    with parked(shared_world, "balances", f"accounts/{theirs}"):
        problem(get(api, "bob", path), 409, "parked")
        same(get(api, "ada", path), get(api, "ada", missing))
    assert get(api, "tom teller", path).json()["row"]["account"] == theirs
    assert api.client.get(path).status_code == 200, "where nobody is named, nothing is asked"


def test_pages_are_full_of_the_callers_rows(api: Api) -> None:
    names: dict[str, list[str]] = {caller: [] for caller in LIMITS}
    for number in range(14):
        caller = "ada" if number % 4 == 0 else "bob"
        names[caller].append(opened(api, caller, f"page-{number:02}"))

    def walked(caller: str) -> list[str]:
        seen, path = [], "/views/balances?limit=2"
        while path:
            found = get(api, caller, path).json()
            seen += [row["account"] for row in found["items"] if row["account"].startswith("page-")]
            assert {row["overdraft_limit"] for row in found["items"]} == {LIMITS[caller]}
            assert len(found["items"]) == 2 or found["next"] is None
            path = found["next"]
        return seen

    assert walked("ada") == names["ada"]
    assert walked("bob") == names["bob"]
    of_bob = get(api, "bob", "/views/balances?limit=1").json()
    cursor = httpx.URL(of_bob["next"]).params["cursor"]
    other = problem(get(api, "ada", f"/views/balances?limit=100&cursor={cursor}"), 422, "bad-cursor")
    assert "caller" in other["detail"]
    assert get(api, "ada", "/views/balances?overdraft_limit=200").json()["items"] == []
    assert get(api, "ada", f"/views/balances?account={names['bob'][0]}").json()["items"] == []
    page = get(api, "bob", "/views/balances")
    assert get(api, "ada", "/views/balances", If_None_Match=page.headers["ETag"]).status_code == 200


def test_the_last_rows_of_a_stopped_view_are_the_callers_too(api: Api, shared_world: Settings) -> None:
    mine, theirs, last = opened(api, "ada"), opened(api, "bob"), "if-stopped=last-rows"
    live = f"/views/balances/{theirs}/live"
    with subscribed(api, live, Caller="ada") as ada, subscribed(api, live, Caller="bob") as bob:
        assert [ada.next().event, bob.next().event] == ["gone", "row"]
        stop_as_older_code_would(shared_world, "balances")
        try:
            path = f"/views/balances/{theirs}?{last}"
            assert get(api, "bob", path).json()["row"]["account"] == theirs
            same(get(api, "ada", path), get(api, "ada", f"/views/balances/nobody?{last}"))
            page = {row["account"] for row in get(api, "ada", f"/views/balances?{last}&limit=1000").json()["items"]}
            assert (mine in page, theirs in page) == (True, False)
            assert ada.next().data == bob.next().data, "that it has stopped tells nothing of a row"
            problem(post(api, "bob", theirs, "deposit", cents=1), 503, "view-stopped")
        finally:
            resume(shared_world, ["balances"], all_views())


def test_what_may_not_be_read_is_denied_and_logged_once(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/views/balances", "/views/balances/x", "/views/balances/x/live"):
        caplog.clear()
        told = problem(get(api, "eve\\n", path), 403, "not-allowed")
        assert told["title"] == "The caller may not do that."
        assert told["correlation_id"]
        [line] = [one for one in caplog.records if "denied" in one.message]
        assert (line.levelno, line.message) == (logging.WARNING, "denied: 'eve\\\\n' may not read balances")
    for caller in ("eve", "noel"):
        problem(get(api, caller, "/outcomes/accounts/x/y"), 403, "not-allowed")


def test_views_that_may_not_be_read_are_not_listed(api: Api) -> None:
    def listed(caller: str) -> set[str]:
        return {one["name"] for one in get(api, caller, "/views").json()["views"]}

    shown = {name for name, view in all_views().items() if not view.is_system}
    assert listed("tom teller") == shown
    assert listed("ada") == {"balances", "statement", "daily_totals", "transfers"}
    assert listed("eve") == listed("noel") == set()


@pytest.mark.parametrize("path", ["/views/transfers", "/views/transfers/1", "/views/transfers/1/live"])
def test_a_column_that_is_not_there_lets_nothing_through(api: Api, caplog: pytest.LogCaptureFixture, path: str) -> None:
    told = problem(get(api, "ada", path), 500, "bad-access")
    assert "owner" not in json.dumps(told)
    assert "owner" in caplog.text


def test_who_reads_some_rows_is_told_of_parked_streams_among_them_at_most(api: Api, shared_world: Settings) -> None:
    mine, theirs = opened(api, "ada"), opened(api, "bob")
    post(api, "ada", mine, "deposit", cents=1)
    totals, pages = f"/views/daily_totals/{DAY}/deposit", ("/views/balances", "/views/statement", "/views/daily_totals")

    def listed(caller: str) -> dict[str, int | None]:
        return {one["name"]: one["parked"] for one in get(api, caller, "/views").json()["views"]}

    before = {path: get(api, "ada", path).headers["ETag"] for path in pages}
    with (
        parked(shared_world, "balances", f"accounts/{theirs}"),
        parked(shared_world, "statement", f"accounts/{theirs}"),
    ):
        assert [get(api, "tom teller", path).json()["parked"] for path in pages] == [1, 1, 0]
        assert [get(api, "ada", path).json()["parked"] for path in pages] == [0, None, None]
        assert {path: get(api, "ada", path).headers["ETag"] for path in pages} == before
        assert get(api, "bob", "/views/balances").json()["parked"] == 1
        assert get(api, "tom teller", totals).json()["parked"] == 0
        assert get(api, "ada", totals).json().get("parked") is None
        assert (listed("tom teller")["balances"], set(listed("ada").values())) == (1, {None})
    with parked(shared_world, "balances", f"accounts/{mine}"):
        assert [get(api, caller, "/views/balances").json()["parked"] for caller in ("ada", "bob")] == [1, 0]
        assert get(api, "ada", "/views/balances").headers["ETag"] != before["/views/balances"]


# live


def test_a_row_that_is_no_longer_the_callers_is_gone(api: Api, shared_world: Settings) -> None:
    theirs = opened(api, "bob")
    mine = fresh()
    post(api, "tom teller", mine, "open-account", overdraft_limit=0)
    post(api, "tom teller", mine, "deposit", cents=100)
    path = f"/views/balances/{mine}/live"
    with (
        subscribed(api, path, Caller="ada") as ada,
        subscribed(api, path, Caller="bob") as bob,
        subscribed(api, path, Caller="tom teller") as tom,
        subscribed(api, f"/views/balances/{theirs}/live", Caller="ada") as other,
    ):
        assert [one.next().event for one in (ada, bob, tom, other)] == ["row", "gone", "row", "gone"]
        post(api, "tom teller", mine, "deposit", cents=100)
        moved = ada.next()
        assert (moved.event, set(moved.data)) == ("gone", {"position"})
        assert bob.next().data["row"]["cents"] == 200
        assert tom.next().data["row"]["cents"] == 200
        with parked(shared_world, "balances", f"accounts/{theirs}"):
            post(api, "bob", theirs, "deposit", cents=1)
            with subscribed(api, f"/views/balances/{theirs}/live", Caller="ada") as late:
                assert late.next().event == "gone"
            with subscribed(api, f"/views/balances/{theirs}/live", Caller="bob") as late:
                told = late.next()
                assert (told.event, told.data["since_version"]) == ("parked", 3)
        assert other.messages.empty()


def test_a_live_list_has_the_callers_rows_and_tells_of_no_others(api: Api) -> None:
    name = fresh()
    path = f"/views/balances/live?account={name}"
    with (
        subscribed(api, path, Caller="ada") as ada,
        subscribed(api, path, Caller="bob") as bob,
        subscribed(api, path, Caller="tom teller") as tom,
    ):
        assert [one.next().data["items"] for one in (ada, bob, tom)] == [[], [], []]
        post(api, "tom teller", name, "open-account", overdraft_limit=0)
        assert tom.next().data["enter"][0]["row"]["cents"] == 0
        post(api, "tom teller", name, "deposit", cents=100)
        for one in (ada, tom):
            assert one.next().data["enter"][0]["row"]["cents"] == 100
        post(api, "tom teller", name, "deposit", cents=100)
        assert (left := ada.next().data)["leave"] == [0]
        assert left["enter"] == []
        assert bob.next().data["enter"][0]["row"]["cents"] == 200
        assert ada.messages.empty()
        assert bob.messages.empty()


def test_watchers_with_rules_of_one_shape_are_read_in_one_query(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[tuple[int, set[Any]]] = []
    by_keys = ViewReader.by_keys

    async def counted(self: ViewReader, view: Any, keys: Any, only: Any = ()) -> Any:
        if view.name == "balances":
            rounds.append((len(keys), {one.shape for one in only}))
        return await by_keys(self, view, keys, only)

    name = opened(api, "ada")
    monkeypatch.setattr(ViewReader, "by_keys", counted)
    lives = [
        subscribed(api, f"/views/balances/{name}/live", Caller=caller) for caller in ("ada", "bob", "zoe", "tom teller")
    ]
    with lives[0] as ada, lives[1] as bob, lives[2] as zoe, lives[3] as tom:
        assert [one.next().event for one in (ada, bob, zoe, tom)] == ["row", "gone", "gone", "row"]
        rounds.clear()
        until(lambda: len(rounds) >= 4, "two rounds have passed")
        assert {(count, len(shapes)) for count, shapes in rounds} == {(3, 1), (1, 0)}


# outcomes


def outcome(api: Api, caller: str, name: str, key: str, **headers: str) -> httpx.Response:
    return get(api, caller, f"/outcomes/accounts/{name}/{key}", **headers)


def test_the_outcome_of_anothers_command_is_as_if_there_were_none(api: Api) -> None:
    name = opened(api, "ada", key="o1")
    assert outcome(api, "ada", name, "o1").json()["outcome"] == "accepted"
    problem(outcome(api, "bob", name, "o1"), 404, "no-outcome")
    same(outcome(api, "bob", name, "o1"), outcome(api, "bob", name, "o2"))
    waited = {"Prefer": "wait=1"}
    same(outcome(api, "bob", name, "o1", **waited), outcome(api, "bob", name, "o2", **waited))


def test_who_waits_is_not_told_of_anothers_outcome_when_it_arrives(api: Api) -> None:
    name = opened(api, "ada")
    with ThreadPoolExecutor(2) as pool:

        def waits(caller: str, wait_s: float) -> Future[httpx.Response]:
            return pool.submit(outcome, api, caller, name, "d1", Prefer=f"wait={wait_s:.0f}")

        ada, bob = waits("ada", 60), waits("bob", 3 * SLOWNESS)
        until(lambda: len(api.services.outcomes) == 2, "both wait")
        post(api, "ada", name, "deposit", "d1", cents=1)
        assert ada.result().json()["outcome"] == "accepted"
        problem(bob.result(), 404, "no-outcome")


def test_what_access_raises_ends_one_request(api: Api) -> None:
    problem(get(api, "quitter", "/views/balances"), 500, "defect")
    assert get(api, "ada", "/views/balances").status_code == 200


# commands


def test_what_may_not_be_sent_is_not_appended_and_tells_nothing(
    api: Api, shared_world: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = opened(api, "ada"), opened(api, "bob")
    before = appended(shared_world)
    caplog.clear()
    there = post(api, "ada", theirs, "deposit", "secret-key", cents=987654)
    problem(there, 403, "not-allowed")
    [line] = [one for one in caplog.records if "denied" in one.message]
    assert (line.levelno, line.message) == (
        logging.WARNING,
        f"denied: 'ada' may not send Deposit to 'accounts/{theirs}'",
    )
    assert "987654" not in caplog.text
    same(there, post(api, "ada", "nobody", "deposit", "secret-key", cents=987654))
    same(there, post(api, "ada", mine, "charge-fee", cents=1))
    same(there, post(api, "ada", "new", "open-account", overdraft_limit=200))
    problem(post(api, "ada", mine, "deposit", cents="many"), 422, "invalid")
    with parked(shared_world, "balances", f"accounts/{mine}"):
        same(there, post(api, "ada", mine, "deposit", cents=1))
    problem(post(api, "ada", mine, "withdraw", cents=1), 500, "bad-access")
    same(there, post(api, "ada", mine, "close-account"))
    assert appended(shared_world) == before
    assert post(api, "ada", mine, "deposit", cents=1).status_code == 200
    assert appended(shared_world) == before + 1


def test_personal_values_are_asked_about_as_they_were_sent_and_before_a_key_is_made() -> None:
    asked: list[object] = []

    def denied(_caller: Caller, stream: str, command: object) -> bool:
        asked.extend((stream, command))
        return False

    app = FastAPI(exception_handlers=HANDLERS)
    # no stores and no keys: asking for any would fail
    app.state.services = SimpleNamespace(settings=Settings(), access=Access(denied, lambda *_: False))
    app.include_router(router_of({"customers": CUSTOMERS}, []))
    app.add_middleware(RawPath)

    async def sent(name: object) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(Named(app)), base_url="http://api") as client:
            return await client.post("/customers/1/register", json={"name": name}, headers={"Caller": "eve"})

    answer = asyncio.run(sent("Ada Lovelace"))
    assert (answer.status_code, answer.json()["code"]) == (403, "not-allowed")
    assert asked == ["customers/1", Register(name="Ada Lovelace")]
    assert (asyncio.run(sent(7)).status_code, len(asked)) == (422, 2), "what does not fit is not asked about"


def test_a_command_sent_again_by_its_sender_gets_its_answer(api: Api, shared_world: Settings) -> None:
    """Though what allowed it is over: its own effect was that."""
    name = opened(api, "ada")
    first = post(api, "ada", name, "credit-interest", "i1", cents=5)
    again = post(api, "ada", name, "credit-interest", "i1", cents=5)
    assert first.status_code == 200
    assert again.json() | {"position": ""} == first.json() | {"position": ""}
    problem(post(api, "ada", name, "credit-interest", "i2", cents=5), 403, "not-allowed")
    problem(post(api, "bob", name, "credit-interest", "i1", cents=5), 403, "not-allowed")
    problem(post(api, "ada", name, "credit-interest", "i1", cents=6), 422, "key-reused")
    assert scalar(shared_world, "select cents from balances_v2 where account = %s", name) == 5


def test_who_sent_a_command_stands_in_commit_outcome_and_history(
    api: Api, shared_world: Settings, samefold: Samefold, tmp_path: Path
) -> None:
    name, file = opened(api, "ada", key="o1"), tmp_path / "repair.jsonl"
    stream = f"accounts/{name}"
    post(api, "tom teller", name, "withdraw", "w1", cents=5_000)
    assert api.post(name, "deposit", key="d1", cents=1).status_code == 200
    problem(post(api, "ada", name, "charge-fee", cents=1), 403, "not-allowed")
    file.write_text(json.dumps({"stream": stream, "id": "f1", "type": "ChargeFee", "data": {"cents": 1, "on": DAY}}))
    operators = {"a" * 192: 1, " ": 2, "": 2, "ann": 0}
    ended = (samefold("send", str(file), "--operator", operator, settings=shared_world) for operator in operators)
    assert [one.returncode for one in ended] == [*operators.values()]
    expected, keys = ["ada", "tom", None, "operator:ann"], ("o1", "w1", "d1", "f1")
    told = [outcome(api, "tom teller", name, key, Prefer="wait=30").json().get("by") for key in reversed(keys)]
    assert told[::-1] == expected
    with connect(shared_world, "test") as db:
        query = "select code, by from command_outcomes_v3 where command = %s"
        found = [db.execute(query, (UUID(command_key(stream, key)),)).fetchone() for key in keys]
    assert found == [("insufficient-funds" if by == "tom" else None, by) for by in expected]
    history = samefold("history", stream, "--json", settings=shared_world).stdout
    lines = [json.loads(line) for line in history.splitlines()]
    assert [line.get("by") for line in lines] == expected
    assert "by" not in lines[2], "none, and not null"
    shown = samefold("history", stream, settings=shared_world).stdout
    assert "operator:ann" in shown
