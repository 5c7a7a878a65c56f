"""make test-all: it rebuilds. Pages over HTTP: what is refused, and pages that go on through changes and a switch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

from infra.settings import Settings
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.views.core_views import all_views
from tests.engine.api.api import Api, problem, unfolded
from tests.engine.api.test_api_views import folded, get
from tests.engine.spine import deposit, open_account
from tools.testing.fixtures import SEED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with unfolded(shared_world) as api:
        yield api


REFUSED = {
    "sort=nothing": "query.sort",
    "sort=cents,-cents": "query.sort",
    "sort=": "query.sort",
    "sort=--cents": "query.sort",
    "sort=cents&sort=account": "query.sort",
    "fields=nothing": "query.fields",
    "fields=cents,cents": "query.fields",
    "count=yes": "query.count",
    "if-unindexed=scan": "query.if-unindexed",
    "cents.gte=NaN": "query.cents.gte",
    "cents.gte=Infinity": "query.cents.gte",
    f"cents.lt={'9' * 40}": "query.cents.lt",
    f"cents.in={','.join(['1'] * 101)}": "query.cents.in",
    "cents.in=1,x": "query.cents.in",
    "cents.in=": "query.cents.in",
    'owner.in="a,b': "query.owner.in",
    'owner.in=a,"b"c': "query.owner.in",
    f"owner.in={','.join(['a'] * 101)}": "query.owner.in",
    "cents.gte=": "query.cents.gte",
    "cents.gte=1&cents.gte=2": "query.cents.gte",
    "cents.prefix=1": "query.cents.prefix",
    "cents.null=true": "query.cents.null",
    "cents.like=1": "query.cents.like",
    "opened_on.gte=2026-02-30": "query.opened_on.gte",
    "closed_on.null=maybe": "query.closed_on.null",
    "owner.prefix=%00": "query.owner.prefix",
}


@pytest.mark.parametrize("question", REFUSED)
def test_what_is_no_question_is_refused_by_its_place(api: Api, question: str) -> None:
    found = problem(get(api, f"/views/balances?{question}"), 422, "invalid")
    assert [one["at"] for one in found["errors"]] == [REFUSED[question]]


def accounts(api: Api, question: str) -> list[str]:
    return [row["account"] for row in get(api, f"/views/balances?{question}").json()["items"]]


def test_characters_of_patterns_are_characters(api: Api, shared_world: Settings) -> None:
    names = ["like%a", "like%b", "like\\a", "like_a", "likexa", "like,a", 'like"a']
    folded(shared_world, *(open_account(name) for name in names))
    assert accounts(api, "account.prefix=like%25") == ["like%a", "like%b"]
    assert accounts(api, "account.prefix=like%5C") == ["like\\a"]
    assert accounts(api, "account.prefix=like_") == ["like_a"]
    assert sorted(accounts(api, "account.prefix=like")) == sorted(names)
    assert accounts(api, 'account.in="like,a","like""a",nobody') == ['like"a', "like,a"]
    assert accounts(api, "account.prefix=like&cents.gte=5&cents.lt=4") == []
    assert accounts(api, "account=like_a&opened_on.lt=9999-12-31&overdraft_limit.in=0") == ["like_a"]


def test_fields_and_the_count_come_where_they_are_asked_for(api: Api, shared_world: Settings) -> None:
    folded(shared_world, *(open_account(f"fields-{number}") for number in range(3)))
    found = get(api, "/views/balances?account.prefix=fields-&fields=cents,account&count=true&limit=2")
    assert found.headers["Content-Type"] == "application/vnd.samefold.fields+json"
    page = found.json()
    assert page["items"] == [{"cents": 0, "account": "fields-0"}, {"cents": 0, "account": "fields-1"}]
    assert (page["count"], page["count_is_exact"]) == (3, True)
    follows = get(api, page["next"])
    assert follows.json()["items"] == [{"cents": 0, "account": "fields-2"}]
    assert "count" not in get(api, "/views/balances?account.prefix=fields-").json()
    assert (
        get(api, "/views/balances?account.prefix=fields-&count=true&limit=2").headers["ETag"] != found.headers["ETag"]
    )


def test_lists_of_texts_are_one_text_in_the_document(api: Api) -> None:
    """A client would encode the commas within the texts of an array like those between them."""
    described = get(api, "/openapi.json").json()["paths"]["/views/balances"]["get"]["parameters"]
    owner, cents = (one for name in ("owner.in", "cents.in") for one in described if one["name"] == name)
    assert (owner["schema"]["type"], cents["schema"]["type"], cents["explode"]) == ("string", "array", False)
    is_one = re.compile(owner["schema"]["pattern"]).search
    assert all(map(is_one, ["", "a", ",", '"a,b",c', 'a"b', '"a""b"', ",".join(["a"] * 100)]))
    assert not any(map(is_one, ['"a,b', 'a,"b"c', '"', ",".join(["a"] * 101), "a\0"]))


def test_a_list_that_comes_as_several_parameters_is_told_of_commas(api: Api) -> None:
    [error] = problem(get(api, "/views/balances?sort=cents&sort=account"), 422, "invalid")["errors"]
    assert "commas" in error["problem"]


@pytest.mark.parametrize(
    ("question", "step"),
    [
        ("balances?owner.in=a,b", "sort=owner"),
        ("balances?owner.prefix=a&sort=-cents", "sort=owner"),
        ("balances?cents.gte=5", "sort=cents"),
        ("balances?owner.not=a", "if-unindexed=search"),
        ("daily_totals?count.gte=5&sort=-count", "if-unindexed=search"),
    ],
)
def test_what_a_hint_says_is_answered(api: Api, monkeypatch: pytest.MonkeyPatch, question: str, step: str) -> None:
    monkeypatch.setattr(api.services.views, "small_view", 0)
    path, _, filters = f"/views/{question}".partition("?")
    for live in ("", "/live"):
        hint = problem(get(api, f"{path}{live}?{filters}"), 422, "no-index")["hint"]
        assert f"`{step}`" in hint
        assert "INDEXES" not in hint
    others = filters.partition("&sort=")[0] if step.startswith("sort=") else filters
    assert get(api, f"{path}?{others}&{step}").status_code == 200


def test_a_cursor_of_another_question_says_what_is_another(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("cursor-a"), open_account("cursor-b"))
    following = get(api, "/views/balances?limit=1&account.prefix=cursor-&sort=-cents").json()["next"]
    cursor = httpx.URL(following).params["cursor"]
    for question, word in {
        "balances?account.prefix=cursor-": "sort",
        "balances?account.prefix=cursor-&sort=cents": "sort",
        "balances?account.prefix=cursor&sort=-cents": "filters",
        "transfers?sort=-cents": "view",
    }.items():
        assert word in problem(get(api, f"/views/{question}&cursor={cursor}"), 422, "bad-cursor")["detail"]
    for forged in (cursor[:-1], f"{cursor}A", cursor[::-1], "", "W10"):
        problem(get(api, f"/views/balances?account.prefix=cursor-&sort=-cents&cursor={forged}"), 422, "bad-cursor")
    assert len(get(api, following).json()["items"]) == 1


@pytest.mark.parametrize("sort", ["cents", "-cents", "-last_on,cents", "closed_on"])
def test_pages_go_on_through_changes_and_a_switch(api: Api, shared_world: Settings, sort: str) -> None:
    """Accounts that do not move come exactly once, in their order, whatever the others do; both ways meet at the ends."""
    random, prefix = Random(f"{SEED}{sort}"), f"through {sort}:"
    still = {f"{prefix}s{number:02}": number % 7 for number in range(14)}
    moving = [f"{prefix}m{number}" for number in range(4)]
    folded(shared_world, *map(open_account, [*still, *moving]))
    folded(shared_world, *(deposit(name, f"{name}-1", cents) for name, cents in still.items() if cents))
    seen: list[dict[str, Any]] = []
    path: str | None = f"/views/balances?account.prefix={prefix}&sort={sort}&limit=3"
    number = 0
    while path:
        page = get(api, path).json()
        seen += page["items"]
        path, number = page["next"], number + 1
        moved, new = random.choice(moving), f"{prefix}n{number}"
        folded(shared_world, deposit(moved, f"{moved}-{number}", random.randint(1, 5)), open_account(new))
        if number == 2:
            rebuild(shared_world, ["balances"], all_views())
    whole = get(api, f"/views/balances?account.prefix={prefix}&sort={sort}&limit=1000").json()["items"]
    assert [row for row in seen if row["account"] in still] == [row for row in whole if row["account"] in still]
    columns = [name.removeprefix("-") for name in sort.split(",")]
    turned = ",".join(name if sort.startswith("-") else f"-{name}" for name in columns) if len(columns) == 1 else ""
    if turned:
        assert (
            get(api, f"/views/balances?account.prefix={prefix}&sort={turned}&limit=1000").json()["items"] == whole[::-1]
        )
