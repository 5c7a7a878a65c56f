"""make test-all: it kills processes. Live lists: what their clients see is the page, after all that happened to either side."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from random import Random
from socket import SHUT_RDWR, socket
from threading import Event, Thread
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest

from api import live_lists
from api.feeds import Watcher
from api.live_lists import ListFeed
from api.live_rows import RowFeed
from api.view_reader import ViewReader
from infra.access import Rows
from infra.log.records import Command
from infra.settings import Settings
from projections.engine.views.core_views import all_views
from projections.engine.views.pages import Page
from projections.engine.views.queries import Found
from projections.engine.views.view import View
from tests.engine.api.api import Api, problem, unfolded
from tests.engine.api.front import free_port, is_ready
from tests.engine.api.test_api_views import folded, get, subscribed
from tests.engine.spawned import spawned
from tests.engine.spine import command, deposit, handler, open_account, outcomes, send, set_up
from tools.testing.fixtures import SEED
from tools.testing.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with unfolded(shared_world) as api:
        yield api


class ListClient:
    """What a page of JavaScript would do: keeps the list that it is sent, and connects again with the last id."""

    def __init__(self, url: str, question: str) -> None:
        self.question = question
        self.items: list[Any] = []
        self.connections = 0
        self._address = urlsplit(url)
        self._last_id = ""
        self._stop = Event()
        self._socket: socket | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, event: str, data: Any) -> None:
        if event == "page":
            self.items = data["items"]
        elif event == "changes":
            items = list(self.items)
            for place in reversed(data["leave"]):
                del items[place]
            for one in data["enter"]:
                items.insert(one["at"], one["row"])
            self.items = items

    def close(self) -> None:
        self._stop.set()
        with suppress(OSError):
            assert self._socket is not None
            self._socket.shutdown(SHUT_RDWR)  # wakes the thread that reads from it, which closing does not
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(OSError, http.client.HTTPException):
                self._read()
            self._stop.wait(0.1)

    def _read(self) -> None:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=DEADLINE_S)
        with closing(connection):
            connection.connect()
            self._socket = connection.sock
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": self._last_id} if self._last_id else {})
            connection.request("GET", f"/views/balances/live?{self.question}", headers=headers)
            with connection.getresponse() as answer:
                if answer.status == 200:
                    self.connections += 1
                    self._follow(answer)

    def _follow(self, answer: http.client.HTTPResponse) -> None:
        event: dict[str, str] = {}
        for line in iter(answer.readline, b""):
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                event[name] = value
            elif "data" in event:
                self.take(event["event"], json.loads(event["data"]))
                self._last_id, event = event["id"], {}


def some_question(random: Random, prefix: str) -> str:
    filters = {
        "account.prefix": lambda: f"{prefix}{random.choice(['', '1', '2'])}",
        "account.in": lambda: ",".join(f"{prefix}{random.randrange(30)}" for _ in range(9)),
        "cents.gte": lambda: str(random.randrange(20)),
        "cents.lt": lambda: str(random.randrange(40)),
        "transactions.not": lambda: str(random.randrange(4)),
        "closed_on.null": lambda: random.choice(["true", "false"]),
        "owner": lambda: random.choice(["ada", "bob"]),
        "owner.prefix": lambda: random.choice(["a", "b", ""]),
    }
    chosen = {name: filters[name]() for name in random.sample(sorted(filters), random.randint(0, 3))}
    columns = random.sample(["cents", "owner", "closed_on", "last_on", "transactions", "account"], random.randint(0, 2))
    if columns:
        chosen["sort"] = ",".join(random.choice(["", "-"]) + name for name in columns)
    if random.random() < 0.3:
        chosen["fields"] = ",".join(random.sample(["account", "cents", "owner"], 2))
    return urlencode(chosen | {"limit": str(random.choice([1, 3, 10, 100]))})


def test_after_all_that_happened_each_clients_list_is_the_page(world: Settings, tmp_path: Path) -> None:
    """200 questions, accounts that come, change and close, an API and an agent that are killed."""
    random = Random(SEED)
    port = free_port()
    set_up(world)
    settings = world.model_copy(update={"api_port": port})
    api_process = (sys.executable, "-m", "api")
    agent_process = (sys.executable, "-m", "projections.engine.live.agent")
    url = f"http://127.0.0.1:{port}"
    opened: list[str] = []

    def batch(number: int) -> None:
        """Commands of all kinds, until they have their outcomes."""
        day, sent = "2026-01-02", list[Command]()
        for _ in range(6):
            name = f"n{len(opened)}"
            opened.append(name)
            owner = random.choice(["ada", "bob", ""])
            sent.append(
                command(f"accounts/{name}", f"{name}-open", "OpenAccount", overdraft_limit=0, owner=owner, on=day)
            )
        some = random.sample(opened, min(len(opened), 8))
        sent += [deposit(name, f"{name}-{number}", random.randint(1, 9)) for name in some]
        name = random.choice(opened)
        sent.append(command(f"accounts/{name}", f"{name}-close-{number}", "CloseAccount", on=day))
        send(world, *sent)
        keys = [(one.stream, one.id) for one in sent]
        until(lambda: len(outcomes(world, keys)) == len(keys), "the commands are folded")

    with ExitStack() as stack, handler(world):
        agent = stack.enter_context(spawned(settings, tmp_path / "agent.log", *agent_process))
        serving = stack.enter_context(spawned(settings, tmp_path / "api.log", *api_process))
        batch(0)
        until(lambda: is_ready(url), "the API is ready")
        clients = [ListClient(url, some_question(random, "n")) for _ in range(200)]
        for client in clients:
            stack.callback(client.close)
        until(lambda: all(client.connections for client in clients), "all clients are connected")
        for number in range(1, 9):
            if number == 3:
                serving.kill()
                stack.enter_context(spawned(settings, tmp_path / "api.log", *api_process))
            if number == 6:
                agent.kill()
                stack.enter_context(spawned(settings, tmp_path / "agent.log", *agent_process))
            batch(number)
        until(lambda: is_ready(url), "the API is ready again")
        until(lambda: all(client.connections > 1 for client in clients), "all clients have come back")
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as asking:

            def others() -> list[tuple[str, Any, Any]]:
                pages = [(one, asking.get(f"/views/balances?{one.question}").json()["items"]) for one in clients]
                return [(one.question, one.items, page) for one, page in pages if one.items != page]

            try:
                until(lambda: not others(), "each list is the page")
            except AssertionError:
                print(others()[:1])
                raise


def test_a_list_says_where_rows_leave_and_enter_it(api: Api, shared_world: Settings) -> None:
    folded(shared_world, *(open_account(f"list-{name}") for name in "abc"))
    question = "account.prefix=list-&sort=-cents&fields=account,cents&limit=3"
    with subscribed(api, f"/views/balances/live?{question}") as live:
        first = live.next()
        assert (first.event, [row["account"] for row in first.data["items"]]) == (
            "page",
            ["list-c", "list-b", "list-a"],
        )
        folded(shared_world, deposit("list-a", "list-a-1", 5))
        changed = live.next()
        assert (changed.event, changed.data["leave"]) == ("changes", [2])
        assert changed.data["enter"] == [{"at": 0, "row": {"account": "list-a", "cents": 5}}]
        assert changed.data["position"] != first.data["position"]
        folded(shared_world, open_account("list-d"))
        assert live.next().data["enter"] == [{"at": 1, "row": {"account": "list-d", "cents": 0}}]
        folded(shared_world, deposit("list-d", "list-d-1", 9))
        assert live.next().data["enter"][0] == {"at": 0, "row": {"account": "list-d", "cents": 9}}
    with subscribed(api, f"/views/balances/live?{question}", Last_Event_ID=changed.id) as live:
        again = live.next()
        assert (again.event, again.data["items"][0]["account"]) == ("page", "list-d")
    with subscribed(api, f"/views/balances/live?{question}", Last_Event_ID=again.id) as live:
        folded(shared_world, deposit("list-b", "list-b-1", 7))
        assert live.next().event in ("changes", "page")  # as its list was read before the deposit, or not


@pytest.mark.parametrize(
    ("kind", "read", "path"),
    [(ListFeed, "page", "/views/balances/live?account={}"), (RowFeed, "by_keys", "/views/balances/{}/live")],
)
def test_who_comes_while_a_round_reads_is_sent_nothing_older_than_what_he_has_seen(
    api: Api,
    shared_world: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ListFeed] | type[RowFeed],
    read: str,
    path: str,
) -> None:
    name = f"round-{read}"
    is_read, goes_on = Event(), Event()
    monkeypatch.setattr(live_lists, "QUESTION_S", DEADLINE_S)
    folded(shared_world, open_account(name))
    with subscribed(api, path.format(name)) as first:
        first.next()
        views = api.services.feed(all_views()["balances"], kind).views
        really = getattr(views, read)

        async def slowly(*asked: Any) -> Any:
            found = await really(*asked)
            is_read.set()
            await asyncio.to_thread(goes_on.wait, DEADLINE_S)
            return found

        monkeypatch.setattr(views, read, slowly)
        folded(shared_world, deposit(name, "first", 5))
        assert is_read.wait(DEADLINE_S)
        folded(shared_world, deposit(name, "second", 6))
        with subscribed(api, path.format(name)) as second:
            goes_on.set()
            data = second.next().data
            assert (data.get("row") or data["items"][0])["cents"] == 11


def test_what_no_index_serves_is_no_live_list(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("unserved"))
    with subscribed(api, "/views/balances/live?transactions=0"):
        pass
    monkeypatch.setattr(api.services.views, "small_view", 0)
    problem(get(api, "/views/balances/live?transactions=0"), 422, "no-index")
    for unknown in ("cursor=a", "count=true", "if-unindexed=search"):
        problem(get(api, f"/views/balances/live?{unknown}"), 422, "invalid")


def test_a_question_that_takes_too_long_ends_its_streams_and_no_others(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("slow"))
    monkeypatch.setattr(live_lists, "QUESTION_S", 0.5)
    read = ViewReader.page

    async def page(self: ViewReader, view: View, page: Page, only: Rows | None = None) -> Found:
        if page.most == 7:
            await asyncio.Event().wait()
        return await read(self, view, page, only)

    monkeypatch.setattr(ViewReader, "page", page)
    path = "/views/balances/live?account=slow&limit="
    with subscribed(api, f"{path}7") as slow, subscribed(api, f"{path}8") as other:
        assert other.next().event == "page"
        until(lambda: slow.ended, "the stream ends")
        assert slow.error is None
        folded(shared_world, deposit("slow", "slow-1", 5))
        assert other.next().event == "changes"


def test_a_question_that_takes_too_long_once_goes_on(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may have been away."""
    folded(shared_world, open_account("frozen"))
    monkeypatch.setattr(live_lists, "QUESTION_S", 0.5)
    read, frozen = ViewReader.page, count()

    async def page(self: ViewReader, view: View, page: Page, only: Rows | None = None) -> Found:
        if page.most == 9 and next(frozen) % 2:
            await asyncio.Event().wait()
        return await read(self, view, page, only)

    monkeypatch.setattr(ViewReader, "page", page)
    with subscribed(api, "/views/balances/live?account=frozen&limit=9") as live:
        assert live.next().event == "page"
        for number in range(3):
            folded(shared_world, deposit("frozen", f"frozen-{number}", 5))
            assert live.next().event == "changes"


def test_a_new_question_is_read_before_the_others_of_a_round(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("busy"))
    read, is_read, goes_on, asked = ViewReader.page, Event(), Event(), list[int]()

    async def page(self: ViewReader, view: View, page: Page, only: Rows | None = None) -> Found:
        asked.append(page.most)
        if len(asked) == 4:
            is_read.set()
            await asyncio.to_thread(goes_on.wait, DEADLINE_S)
        return await read(self, view, page, only)

    path = "/views/balances/live?account=busy&limit="
    with ExitStack() as stack:
        for limit in (11, 12, 13):
            assert stack.enter_context(subscribed(api, f"{path}{limit}")).next().event == "page"
        gone = ExitStack()
        assert gone.enter_context(subscribed(api, f"{path}14")).next().event == "page"
        asked += [0, 0, 0]
        monkeypatch.setattr(ViewReader, "page", page)
        folded(shared_world, deposit("busy", "busy-1", 5))
        assert is_read.wait(DEADLINE_S)
        gone.close()
        new = stack.enter_context(subscribed(api, f"{path}15"))
        feed = api.services.feed(all_views()["balances"], ListFeed)
        until(lambda: [one.page.most for one in feed.watchers] == [11, 12, 13, 15], "one is gone, and one is new")
        goes_on.set()
        assert new.next().event == "page"
    assert asked[3:5] == [11, 15]
    assert 14 not in asked, "nobody asks it any more"


def test_clients_that_leave_leave_nothing_behind(api: Api, shared_world: Settings) -> None:
    """The collector of garbage comes seldom (docs/reliability.md): each client would hold its rows until then."""
    folded(shared_world, open_account("leaving"))
    gc.collect()
    gc.disable()
    try:
        for path in ("/views/balances/live?account=leaving", "/views/balances/leaving/live"):
            with subscribed(api, path) as live:
                live.next()
        until(lambda: not any(isinstance(one, Watcher) for one in gc.get_objects()), "all watches are gone")
    finally:
        gc.enable()


def test_a_row_whose_key_is_the_word_has_its_path(api: Api, shared_world: Settings) -> None:
    assert "text/event-stream" in problem(get(api, "/views/balances/live"), 404, "no-row")["hint"]
    folded(shared_world, open_account("live"))
    found = get(api, "/views/balances/live").json()
    assert found["row"]["account"] == "live"
    for path in ("/views/balances/live", "/views/balances/%6Cive"):
        head = api.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["ETag"] == get(api, path).headers["ETag"]
    listed = {"Accept": "text/event-stream"}
    for path, headers in {"live": listed, "live?account=live": {}, "live/live": {}}.items():
        head = api.client.head(f"/views/balances/{path}", headers=headers)
        assert (head.status_code, head.headers["Allow"]) == (405, "GET")
    with subscribed(api, "/views/balances/live/live") as live:
        assert live.next().data["row"] == found["row"]
    with subscribed(api, "/views/balances/live?account=live") as live:
        assert live.next().data["items"] == [found["row"]]
    with subscribed(api, "/views/balances/live", Accept="text/event-stream") as live:
        assert found["row"] in live.next().data["items"]
