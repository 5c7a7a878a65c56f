"""A stream's history over HTTP: what counts in the log, in order, and nothing that the read model does not know yet."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from threading import Event
from typing import Any

import httpx
import pytest

from api import history_routes, scans
from api.cursors import cursor_after
from infra.log import history, topics
from infra.log.history import Page, Wanted, page_of
from infra.log.partitioner import partition_of
from infra.log.records import Commit, EventRecord, Record, decode_event, encode
from infra.log.rule import START, Counted, Reading, Void
from infra.settings import Settings
from projections.engine.views.token import Token
from tests.engine.api import Api, unfolded
from tests.engine.spine import deposit, open_account, produce, project, records_of, until, withdraw
from tests.engine.test_api_views import decided, folded, get, problem, token_now

PARTITIONS = 4


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with unfolded(shared_world) as api:
        yield api


def events(answer: httpx.Response) -> list[tuple[Any, ...]]:
    return [(one["version"], one.get("type"), one["command_id"]) for one in answer.json()["events"]]


def ends(world: Settings) -> dict[int, int]:
    return topics.describe(world, world.events_topic).end


def walk(api: Api, path: str | None) -> list[dict[str, Any]]:
    """All entries of all pages."""
    found: list[dict[str, Any]] = []
    while path:
        page = get(api, path).json()
        found += page["events"]
        path = page["next"]
    return found


def test_what_happened_comes_in_order_with_version_time_and_command(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("ada", 500), withdraw("ada", "w", 900), deposit("ada", "d", 250))
    answer = get(api, "/accounts/ada/events")
    first, second = answer.json()["events"]
    assert answer.json() | {"events": []} == {"stream": "accounts/ada", "version": 2, "events": [], "next": None}
    assert datetime.fromisoformat(first.pop("at")).tzinfo is not None
    assert first == {
        "version": 1,
        "outcome": "accepted",
        "command_id": "open-ada",
        "type": "AccountOpened",
        "data": {"overdraft_limit": 500, "on": "2026-01-01"},
    }
    assert (second["version"], second["type"], second["data"]["cents"]) == (2, "MoneyDeposited", 250)
    assert Token.parse(answer.headers["Samefold-Position"]) == token_now(shared_world)


def test_rejections_are_shown_to_whoever_asks_for_them(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("rej"), withdraw("rej", "no", 900), deposit("rej", "yes", 1))
    entries = get(api, "/accounts/rej/events?rejected=true").json()["events"]
    assert [(one["version"], one["outcome"], one.get("code")) for one in entries] == [
        (1, "accepted", None),
        (1, "rejected", "insufficient-funds"),
        (2, "accepted", None),
    ]
    assert "ETag" not in get(api, "/accounts/rej/events?rejected=true").headers
    folded(shared_world, deposit("never", "no", 1))
    problem(get(api, "/accounts/never/events"), 404, "no-stream")
    [refused] = get(api, "/accounts/never/events?rejected=true").json()["events"]
    assert refused["code"] == "account-not-open"


def test_the_etag_is_the_version_that_a_command_may_expect(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("tag"), deposit("tag", "d", 1))
    assert get(api, "/accounts/tag/events").headers["ETag"] == '"2"'
    monkeypatch.setattr(scans, "page_of", None)  # nobody reads the log for what the client has
    assert get(api, "/accounts/tag/events", If_None_Match='"2"').status_code == 304
    assert get(api, "/accounts/tag/events?from_version=3").json()["events"] == []
    headers = {"If-Match": '"1"', "Prefer": "wait=0"}
    body = {"cents": 1, "on": "2026-01-02"}
    assert api.client.post("/accounts/tag/deposit", json=body, headers=headers).status_code == 202


def test_pages_hold_each_event_once_and_go_on_where_the_last_one_ended(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 7
    folded(shared_world, open_account("pages"), *(deposit("pages", f"pages-{n}", n) for n in range(1, count)))
    for name in ("pages-a", "pages-b", "pages-c", "pages-d"):
        folded(shared_world, open_account(name))
    starts: list[int] = []

    def watched(settings: Settings, wanted: Wanted, at: Reading, stop: int, **bounds: Any) -> Page:
        starts.append(at.next_offset)
        return page_of(settings, wanted, at, stop, **bounds)

    monkeypatch.setattr(scans, "page_of", watched)
    whole = walk(api, "/accounts/pages/events")
    assert [one["version"] for one in whole] == list(range(1, count + 1))
    starts.clear()
    assert walk(api, "/accounts/pages/events?limit=2") == whole
    assert starts == sorted(set(starts))
    assert len(starts) == 4
    assert walk(api, "/accounts/pages/events?limit=2&from_version=4") == whole[3:]
    assert walk(api, "/accounts/pages/events?limit=1&rejected=true") == whole


def test_a_page_ends_when_its_time_is_up_and_the_next_one_goes_on(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"time-{n}" for n in range(40)]
    mine = [name for name in names if partition_of(f"accounts/{name}", PARTITIONS) == 0]
    folded(shared_world, *(one for name in mine for one in (open_account(name), deposit(name, f"{name}-d", 1))))
    whole = walk(api, f"/accounts/{mine[-1]}/events?limit=5")
    monkeypatch.setattr(scans, "SECONDS", -1.0)
    monkeypatch.setattr("infra.log.source.BATCH", 2)
    answer = get(api, f"/accounts/{mine[-1]}/events").json()
    assert answer["next"] is not None
    assert answer["events"] == []
    assert "ETag" not in get(api, f"/accounts/{mine[-1]}/events").headers
    assert walk(api, f"/accounts/{mine[-1]}/events") == whole


def test_history_ends_where_the_read_model_stands(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("edge"))
    decided(shared_world, deposit("edge", "edge-1", 1))

    def is_ahead() -> bool:
        """Whether history tells of what the balance does not hold."""
        told = len(get(api, "/accounts/edge/events?rejected=true").json()["events"]) - 1
        return told > int(get(api, "/views/balances/edge").json()["row"]["transactions"])

    assert not is_ahead()

    # the mutant: as far as the log goes
    def to_the_end(found: Any, stream: str) -> tuple[int, int]:
        partition = partition_of(stream, PARTITIONS)
        return partition, ends(shared_world)[partition]

    with monkeypatch.context() as patch:
        patch.setattr(history_routes, "place_in", to_the_end)
        assert is_ahead()
    project(shared_world)
    assert not is_ahead()
    assert len(get(api, "/accounts/edge/events").json()["events"]) == 2


def test_what_is_void_is_no_part_of_it(api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A superseded writer's late commit stands in the log, and nobody is told of it."""
    folded(shared_world, open_account("void"))
    stream = "accounts/void"
    [event] = [EventRecord("MoneyDeposited", b'{"cents":1,"on":"2026-01-02"}')]  # type: ignore[arg-type]
    late = Commit(stream, 2, [event], "late", 10**6, "f", "accepted", None, -5, 1)
    partition = partition_of(stream, PARTITIONS)
    before = len(records_of(shared_world, shared_world.events_topic))
    produce(shared_world, shared_world.events_topic, partition, stream.encode(), encode(late))
    folded(shared_world, deposit("void", "d", 2))
    assert len(records_of(shared_world, shared_world.events_topic)) >= before + 2

    def commands() -> list[str]:
        return [command for _, _, command in events(get(api, "/accounts/void/events?rejected=true"))]

    assert commands() == ["open-void", "d"]

    # the mutant: whatever stands there counts
    def count_all(reading: Reading, records: list[Record]) -> tuple[Reading, list[Counted], list[Void]]:
        found = [(record, decode_event(record)) for record in records]
        counted = [Counted(one.offset, one.time_ms, commit) for one, commit in found if isinstance(commit, Commit)]
        return reading._replace(next_offset=records[-1].offset + 1), counted, []

    monkeypatch.setattr(history, "read", count_all)
    assert commands() == ["open-void", "late", "d"]


def test_only_a_few_histories_are_read_at_once(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("busy"))
    go_on, running = Event(), []

    def slow(*arguments: Any, **bounds: Any) -> Page:
        running.append(1)
        assert go_on.wait(30)
        return page_of(*arguments, **bounds)

    monkeypatch.setattr(scans, "page_of", slow)
    monkeypatch.setattr(scans, "PATIENCE_S", 0.2)
    path = f"{api.url}/accounts/busy/events"
    with ThreadPoolExecutor(scans.AT_ONCE) as pool:
        asked = [pool.submit(httpx.get, path, timeout=30) for _ in range(scans.AT_ONCE)]
        until(lambda: len(running) == scans.AT_ONCE, "all places are taken")
        answer = get(api, "/accounts/busy/events")
        problem(answer, 429, "too-many-scans")
        assert answer.headers["Retry-After"] == "1"
        go_on.set()
        assert {one.result().status_code for one in asked} == {200}
    assert get(api, "/accounts/busy/events").status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/accounts/nobody/events", 404, "no-stream"),
        ("/nothing/ada/events", 404, "not-found"),
        ("/accounts/a%00b/events", 422, "invalid"),
        (f"/accounts/{'x' * 201}/events", 422, "invalid"),
        ("/accounts/ada/events?from_version=0", 422, "invalid"),
        ("/accounts/ada/events?from_version=9223372036854775808", 422, "invalid"),
        ("/accounts/ada/events?limit=0", 422, "invalid"),
        ("/accounts/ada/events?rejected=yes", 422, "invalid"),
        ("/accounts/ada/events?colour=red", 422, "invalid"),
        ("/accounts/ada/events?cursor=x", 422, "bad-cursor"),
        ("/accounts/ada/events?after=x", 422, "bad-token"),
    ],
)
def test_what_does_not_fit_is_told(api: Api, path: str, status: int, code: str) -> None:
    problem(get(api, path), status, code)


def test_a_cursor_from_beyond_the_read_model_is_refused(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("forged"), deposit("forged", "d", 1))
    bound = ["accounts/forged", "1", "False"]
    for values in (["1000000000000", "0", "0", "0"], ["-1", "0", "0", "0"], ["a", "0", "0", "0"], ["1"]):
        cursor = cursor_after(bound, values)
        problem(get(api, f"/accounts/forged/events?cursor={cursor}"), 422, "bad-cursor")


def test_a_stream_is_looked_for_no_further_than_its_last_event(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("short"))
    partition = partition_of("accounts/short", PARTITIONS)
    end = ends(shared_world)[partition]
    wanted = Wanted("accounts/short", partition, 0, 1)
    bounds = {"most": 10, "most_bytes": 10**6, "seconds": 60.0}
    page = page_of(shared_world, wanted, START, end, **bounds)  # type: ignore[arg-type]
    assert (len(page.commits), page.is_last) == (1, True)
    assert page.next.next_offset == page.commits[0].offset + 1
    nothing = page_of(shared_world, wanted, page.next, end, **bounds)  # type: ignore[arg-type]
    assert (nothing.commits, nothing.is_last) == ([], True)
    assert nothing.next.next_offset >= end
    stopped = page_of(shared_world, wanted, START, 1, is_stopped=lambda: True, **bounds)  # type: ignore[arg-type]
    assert stopped.next.next_offset == 1
    assert history.page_of is page_of
