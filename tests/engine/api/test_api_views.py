"""make test + test-all: a read takes milliseconds; waits, a rebuild and processes that end take seconds.

Views over HTTP: a row and the position it is of are of one moment, and no answer is older than what the caller has seen.
Server-sent events: a row's newest state, and a client who goes costs nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from queue import Empty, Queue
from socket import SHUT_RDWR
from threading import Thread
from typing import Any, NamedTuple
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI
from fastapi.sse import KEEPALIVE_COMMENT

from api import app, feeds, views
from api import services as api_services
from api.feeds import State, Watcher
from api.problems import Problem
from api.services import TOO_MANY_SEARCHES, TOO_MANY_SUBSCRIBERS, Services
from api.view_reader import PositionWaits
from api.waits import Slots
from infra.database.connect import connect
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.log.records import Command, Commit, decode_event
from infra.settings import Settings
from projections.engine.rebuild.rebuild import rebuild, resume
from projections.engine.store.positions import channel
from projections.engine.views.core_views import agent_views, all_views
from projections.engine.views.queries import Found
from projections.engine.views.token import Token
from projections.engine.views.view import View
from tests.engine.api.api import Api, everything, named, problem, ready, served, serving, unfolded
from tests.engine.api.test_api_health import changed
from tests.engine.projections.bankviews import BROKEN, SUMS, live_table, make_tables, stop_as_older_code_would, view
from tests.engine.projections.test_stopping import fold
from tests.engine.spine import (
    command,
    commits,
    deposit,
    handler,
    open_account,
    outcomes,
    project,
    records_of,
    send,
    set_up,
)
from tools.migrations.migrate import upgrade
from tools.testing.fixtures import world_of
from tools.testing.waiting import DEADLINE_S, until

PARTITIONS = 4


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with unfolded(shared_world) as api:
        yield api


def get(api: Api, path: str, **headers: str) -> httpx.Response:
    return api.get(path, **headers)


def decided(world: Settings, *sent: Command) -> None:
    """Send commands, and wait until the handler has put their outcomes into the log."""
    send(world, *sent)
    ids = {one.id for one in sent}
    until(lambda: ids <= {commit.command_id for commit in commits(world)}, "the commands are decided")


def folded(world: Settings, *sent: Command) -> None:
    """Send commands, and fold until all of them have their outcomes."""
    send(world, *sent)
    keys = [(one.stream, one.id) for one in sent]

    def are_there() -> bool:
        project(world)
        return len(outcomes(world, keys)) == len(keys)

    until(are_there, "the commands are decided and folded")


def token_now(world: Settings) -> Token:
    """The position of a client that has seen the whole log."""
    topic = topics.describe(world, world.events_topic)
    return Token.of(topic.id, topic.end)


def test_the_views_are_listed_with_their_questions_keys_and_columns(api: Api) -> None:
    views = {one["name"]: one for one in get(api, "/views").json()["views"]}
    assert set(views) == {name for name, one in all_views().items() if not one.is_system}
    statement = views["statement"]
    assert statement["question"].startswith("What happened on an account")
    assert (statement["kind"], statement["version"], statement["key"]) == ("journal", 2, ["account", "line"])
    assert statement["columns"]["day"] == {"type": "string", "format": "date"}
    assert get(api, views["statement"]["href"]).status_code == 200


def test_head_is_answered_as_get_is_without_a_body(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("head"))
    row = "/views/balances/head"
    for path in (row, "/views/balances?limit=1", "/views", "/health/live"):
        got, head = api.get(path), api.client.head(path)
        assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
        for header in ("Content-Length", "ETag"):
            assert head.headers.get(header) == got.headers.get(header)
    assert api.client.head(f"{row}/live").status_code == 405, "it would not end"


def test_a_cursor_belongs_to_its_question(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("cursor-1"), open_account("cursor-2"))
    cursor = httpx.URL(get(api, "/views/balances?limit=1").json()["next"]).params["cursor"]
    assert get(api, f"/views/balances?limit=2&cursor={cursor}").status_code == 200
    problem(get(api, f"/views/balances?cents=0&cursor={cursor}"), 422, "bad-cursor")
    problem(get(api, f"/views/statement?cursor={cursor}"), 422, "bad-cursor")
    problem(get(api, f"/views/balances?sort=cents&cursor={cursor}"), 422, "bad-cursor")
    problem(get(api, f"/views/balances?cursor={cursor[:-8]}AAAAAAAA"), 422, "bad-cursor")


def test_lists_that_no_key_leads_to_leave_room_for_others(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("search"))
    monkeypatch.setattr(api.services, "searches", Slots(0, TOO_MANY_SEARCHES, wait_s=0.05))
    assert get(api, "/views/balances?transactions=0").status_code == 200, "it is small"
    monkeypatch.setattr(api.services.views, "small_view", 0)
    unserved = problem(get(api, "/views/balances?transactions=0"), 422, "no-index")
    assert 'Index("transactions")' in unserved["hint"]
    assert "balances" in unserved["hint"]
    problem(get(api, "/views/balances?transactions=0&if-unindexed=search"), 429, "too-many-searches")
    assert get(api, "/views/balances?account=search").status_code == 200
    assert get(api, "/views/balances").status_code == 200


def test_a_search_that_waits_for_a_position_leaves_its_place_to_others(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("places"))
    monkeypatch.setattr(api.services, "searches", searches := Slots(1, TOO_MANY_SEARCHES, wait_s=DEADLINE_S))
    monkeypatch.setattr(api.services.views, "small_view", 0)
    topic = topics.describe(shared_world, shared_world.events_topic)
    ahead = Token.of(topic.id, {0: topic.end[0] + 1})
    path = "/views/balances?transactions=0&if-unindexed=search"
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(get, api, f"{path}&after={ahead}", Prefer="wait=3")
        until(lambda: len(api.services.positions) == 1 and searches.taken == 0, "one waits, and has no place")
        assert get(api, path).status_code == 200
        problem(waits.result(), 503, "position-not-reached")


def test_searches_of_one_caller_leave_room_for_those_of_others(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_services, "SEARCH_WAIT_S", 0.05)

    async def search() -> None:
        services = Services(world, "searching")
        async with services.searching("mallory"):
            for _ in range(9):
                with pytest.raises(Problem, match="too-many-searches"):
                    async with services.searching("mallory"):
                        pass
            async with services.searching("ada"), services.searching("bob"), services.searching(None):
                pass
        async with services.searching("mallory"):
            pass

    asyncio.run(search())


# what a client has at hand


def test_an_etag_stands_for_what_an_answer_holds_and_not_for_its_position(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("tag"))
    paths = ("/views/balances/tag", "/views/balances?account=tag")
    before = [get(api, path) for path in paths]
    folded(shared_world, open_account("tag-other"))
    for path, first in zip(paths, before, strict=True):
        etag = first.headers["ETag"]
        assert etag.startswith('W/"')
        same = get(api, path, If_None_Match=f'"other", {etag}')
        assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", etag)
        assert Token.parse(same.headers["Samefold-Position"]) == token_now(shared_world)
        assert get(api, path, If_None_Match="*").status_code == 304
        assert get(api, path, If_None_Match='W/"other"').status_code == 200
    folded(shared_world, deposit("tag", "tag-d", 1))
    assert get(api, paths[0], If_None_Match=before[0].headers["ETag"]).status_code == 200


def test_a_row_and_its_position_are_of_one_moment(api: Api, shared_world: Settings) -> None:
    """Each answer's row holds just what stands in the log before its position, while another thread folds."""
    partition = partition_of("accounts/moment", PARTITIONS)
    folded(shared_world, open_account("moment"))

    def read() -> tuple[int, int]:
        answer = get(api, "/views/balances/moment").json()
        [offsets] = Token.parse(answer["position"]).positions.values()
        return answer["row"]["transactions"], offsets[partition]

    def fold() -> None:
        for number in range(5):
            folded(shared_world, deposit("moment", f"m-{number}", 1))

    with ThreadPoolExecutor(1) as pool:
        folding = pool.submit(fold)
        answers = [read()]
        while not folding.done():
            answers.append(read())
    answers.append(read())
    entries = [(record.offset, decode_event(record)) for record in records_of(shared_world, shared_world.events_topic)]
    mine = [at for at, one in entries if isinstance(one, Commit) and one.stream == "accounts/moment"]
    for transactions, end in answers:
        assert 1 + transactions == sum(offset < end for offset in mine), "row and position are of two moments"
    assert len({transactions for transactions, _ in answers}) > 1


@pytest.mark.slow
def test_a_switch_shows_no_client_an_older_state(api: Api, shared_world: Settings) -> None:
    """Another table goes live between two reads; the first one after it is asked from the old table, and once more."""

    def transactions() -> int:
        return int(get(api, "/views/balances/switch").json()["row"]["transactions"])

    folded(shared_world, open_account("switch"), deposit("switch", "switch-1", 1))
    assert transactions() == 1
    before = live_table(shared_world, "balances")
    rebuild(shared_world, ["balances"], all_views())
    assert live_table(shared_world, "balances") != before
    folded(shared_world, deposit("switch", "switch-2", 1))
    assert transactions() == 2


def test_a_table_that_is_gone_is_not_asked_for_ever(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("gone"))
    assert get(api, "/views/balances/gone").status_code == 200
    api.services.views._tables["balances"] = "balances_v2_r999"
    assert get(api, "/views/balances/gone").status_code == 200


# no older than what was seen


def test_an_answer_waits_for_what_the_caller_has_seen(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("waits"))
    decided(shared_world, deposit("waits", "waits-1", 7))
    # of several positions, all are waited for
    topic = topics.describe(shared_world, shared_world.events_topic)
    seen = "&".join(f"after={Token.of(topic.id, {partition: end})}" for partition, end in topic.end.items())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, api, f"/views/balances/waits?{seen}")
        until(lambda: len(api.services.positions) == 1, "one waits")
        project(shared_world)
        with connect(shared_world, "test") as db:
            # as an agent does with its batch: again, for a listener who came late
            db.execute("select pg_notify(%s, 'again')", (channel("core"),))
        assert answer.result().json()["row"]["cents"] == 7
    ahead = Token.of(topic.id, {0: topic.end[0] + 1})
    late = get(api, f"/views/balances/waits?{seen}&after={ahead}", Prefer="wait=1")
    problem(late, 503, "position-not-reached")
    assert str(token_now(shared_world)) in late.json()["detail"]
    assert len(api.services.positions) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("api")
def test_readers_beyond_the_bound_get_429(shared_world: Settings) -> None:
    with served(shared_world.model_copy(update={"api_max_waiting": 1})) as small, ThreadPoolExecutor(1) as pool:
        path = f"/views/balances?after={Token.of(small.services.stores.topics()[1].id, {0: 10**12})}"
        waiting = pool.submit(get, small, path, Prefer="wait=60")
        until(lambda: len(small.services.positions) == 1, "one waits")
        problem(get(small, path, Prefer="wait=60"), 429, "too-many-readers")
        small.server.should_exit = True
        problem(waiting.result(), 503, "stopping")


# stopped views


@contextmanager
def stopped(world: Settings, name: str) -> Iterator[None]:
    """The view is stopped at the log's end, which is folded."""
    stop_as_older_code_would(world, name)
    try:
        yield
    finally:
        resume(world, [name], all_views())


LAST = "if-stopped=last-rows"


def test_the_last_rows_of_a_stopped_view_are_for_who_asks_for_them_by_name(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("last-1"), open_account("last-2"), deposit("last-1", "last-d", 5))
    path = "/views/balances/last-1"
    live, at = get(api, f"{path}?{LAST}"), token_now(shared_world)
    assert (live.json(), "Samefold-Stopped" in live.headers) == (get(api, path).json(), False)
    with stopped(shared_world, "balances"):
        decided(shared_world, deposit("last-1", "last-e", 7))
        fold(shared_world, agent_views("core"))
        assert token_now(shared_world) != at
        last = get(api, f"{path}?{LAST}&after={at}")
        assert (last.status_code, last.json(), last.headers["ETag"]) == (200, live.json(), live.headers["ETag"])
        assert last.json()["position"] == last.headers["Samefold-Position"] == str(at)
        since = datetime.fromisoformat(last.headers["Samefold-Stopped"])
        assert since.utcoffset() == timedelta(0)
        same = get(api, f"{path}?{LAST}", If_None_Match=last.headers["ETag"])
        assert (same.status_code, same.headers["Samefold-Stopped"]) == (304, last.headers["Samefold-Stopped"])
        none = get(api, f"/views/balances/none?{LAST}")
        assert (problem(none, 404, "no-row")["position"], "Samefold-Stopped" in none.headers) == (str(at), True)
        accounts: list[str] = []
        page: str | None = f"/views/balances?limit=1&{LAST}"
        while page:
            found = get(api, page).json()
            accounts, page = accounts + [row["account"] for row in found["items"]], found["next"]
            assert found["position"] == str(at)
        assert {"last-1", "last-2"} <= {*accounts}
        problem(get(api, path), 503, "view-stopped")
        assert "if-stopped" in str(problem(get(api, f"{path}?if-stopped=yes"), 422, "invalid")["errors"])
        # what waits would take a place from the readers of other views
        monkeypatch.setattr(PositionWaits, "waiting", Mock(side_effect=AssertionError("it waits")))
        late = problem(get(api, f"{path}?{LAST}&after={token_now(shared_world)}"), 503, "position-not-reached")
        assert str(at) in late["detail"]
    assert get(api, f"{path}?{LAST}").json()["row"]["cents"] == 12


def test_a_read_that_would_begin_to_wait_at_the_end_of_the_process_is_answered_at_once() -> None:
    waits = PositionWaits(Mock(), 1)
    waits.give_up()
    with pytest.raises(Problem, match="stopping"), waits.waiting({"core"}, Token({})):
        pass


def test_a_watcher_is_told_that_the_view_has_stopped_and_goes_on_when_it_is_resumed(
    api: Api, shared_world: Settings
) -> None:
    folded(shared_world, open_account("told"))
    path, at = "/views/balances/told/live", token_now(shared_world)
    with subscribed(api, path) as live, subscribed(api, "/views/balances/nobody/live") as other:
        assert [live.next().event, other.next().event] == ["row", "gone"]
        with stopped(shared_world, "balances"):
            told = live.next()
            assert (told.event, told.data) == (
                "stopped",
                {"code": "poison-event", "since": told.data["since"], "position": str(at)},
            )
            assert other.next().data == told.data
            decided(shared_world, deposit("told", "told-d", 7))
            fold(shared_world, agent_views("core"))
            problem(get(api, path, Last_Event_ID=told.id), 503, "view-stopped")
        assert live.next().data["row"]["cents"] == 7
        assert other.next().event == "gone"
        with subscribed(api, path, Last_Event_ID=told.id) as again:
            assert again.next().data["row"]["cents"] == 7


def test_what_does_not_pass_ends_live_rows_and_is_logged(
    api: Api, shared_world: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/views/balances/refused/live"
    with subscribed(api, path) as live:
        assert live.next().event == "gone"
        with changed(
            shared_world,
            "alter table build_positions rename to elsewhere",
            "alter table elsewhere rename to build_positions",
        ):
            until(lambda: live.ended, "the stream ends")
            assert live.error is None
            [line] = [one for one in caplog.records if one.name == feeds.__name__]
            assert (line.levelname, "build_positions" in line.getMessage()) == ("WARNING", True)
            problem(get(api, path), 503, "database-behind")
    with subscribed(api, path) as live:
        assert live.next().event == "gone"


# stores away


def test_without_kafka_what_is_folded_is_read(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "TIMEOUT_S", 1.0)
    folded(shared_world, open_account("away"))
    seen = token_now(shared_world)
    no_kafka = shared_world.model_copy(update={"kafka_bootstrap": "127.0.0.1:1"})
    with serving(no_kafka, name="no-kafka") as without:
        until(lambda: "kafka" in without.services.stores.failures, "Kafka is found to be away")
        assert get(without, "/views/balances/away").json()["row"]["account"] == "away"
        problem(get(without, f"/views/balances/away?after={seen}"), 503, "kafka-unavailable")


# live: server-sent events


class Message(NamedTuple):
    event: str
    id: str
    data: dict[str, Any]


class Subscription:
    """Reads a stream of events in a thread of its own."""

    def __init__(self, api: Api, path: str, **headers: str) -> None:
        self.messages: Queue[Message] = Queue()
        self.comments = 0
        self.ended = False
        self.error: BaseException | None = None
        self._client = httpx.Client(base_url=api.url, timeout=DEADLINE_S)
        request = self._client.build_request("GET", path, headers=named(headers))
        self.response = self._client.send(request, stream=True)
        self._thread = Thread(target=self._read)
        self._thread.start()

    def next(self) -> Message:
        try:
            return self.messages.get(timeout=DEADLINE_S)
        except Empty:
            raise AssertionError("no event came") from None

    def close(self) -> None:
        connection = self.response.extensions["network_stream"].get_extra_info("socket")
        with suppress(OSError):
            connection.shutdown(SHUT_RDWR)  # wakes the thread that reads from it, which closing does not
        self._thread.join(DEADLINE_S)
        self._client.close()

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            for line in self.response.iter_lines():
                if line.startswith(":"):
                    self.comments += 1
                elif line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif "data" in fields:
                    self.messages.put(Message(fields["event"], fields["id"], json.loads(fields["data"])))
                    fields = {}
        except (httpx.HTTPError, httpx.StreamError) as error:
            self.error = error
        self.ended = True


@contextmanager
def subscribed(api: Api, path: str, **headers: str) -> Iterator[Subscription]:
    subscription = Subscription(api, path, **headers)
    try:
        assert subscription.response.status_code == 200
        assert subscription.response.headers["Content-Type"].startswith("text/event-stream")
        yield subscription
    finally:
        subscription.close()


def test_a_watched_row_is_sent_as_it_is_and_whenever_it_changes(api: Api, shared_world: Settings) -> None:
    with subscribed(api, "/views/balances/watch/live") as live:
        assert live.next().event == "gone"
        folded(shared_world, open_account("watch"))
        assert (first := live.next()).event == "row"
        assert first.data["row"] == get(api, "/views/balances/watch").json()["row"]
        folded(shared_world, open_account("watch-other"))
        folded(shared_world, deposit("watch", "d", 5))
        assert live.next().data["row"]["cents"] == 5  # and nothing for the other


def test_a_watcher_that_comes_back_is_sent_only_what_is_new_to_it(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("again"))
    with subscribed(api, "/views/balances/again/live") as live:
        seen = live.next()
        assert f'W/"{seen.id}"' == get(api, "/views/balances/again").headers["ETag"]
    with subscribed(api, "/views/balances/again/live", Last_Event_ID=seen.id) as live:
        folded(shared_world, deposit("again", "d", 5))
        assert live.next().data["row"]["cents"] == 5
    with subscribed(api, "/views/balances/again/live", Last_Event_ID=seen.id) as live:
        assert live.next().data["row"]["cents"] == 5


def state_of(tag: str) -> State:
    return State(Mock(spec=Found, position="p"), "row", tag)


def test_a_slow_watcher_is_sent_the_newest_state_alone() -> None:
    async def sent() -> list[bytes]:
        watcher = Watcher(None)
        frames = watcher.frames()
        assert (await anext(frames)).startswith(b": samefold\nretry: ")
        for state in ("1", "2", "3"):
            watcher.offer(state_of(state))
        found = [await anext(frames)]
        watcher.end()
        return found + [frame async for frame in frames]

    assert asyncio.run(sent()) == [state_of("3").frame(None)]


def test_who_is_woken_for_nothing_gets_comments_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As who is slow is by batches of which the last undoes the others."""
    monkeypatch.setattr(feeds, "HEARTBEAT_S", 0.02)

    async def woken() -> bytes:
        watcher = Watcher("seen")
        frames = watcher.frames()
        await anext(frames)
        following = asyncio.ensure_future(anext(frames))
        async with asyncio.timeout(DEADLINE_S):
            while not following.done():
                watcher.offer(state_of("other"))
                watcher.offer(state_of("seen"))
                await asyncio.sleep(0)
        return await following

    assert asyncio.run(woken()) == KEEPALIVE_COMMENT


def test_there_is_room_for_so_many(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/views/balances/room/live"
    room = Slots(1, TOO_MANY_SUBSCRIBERS)
    monkeypatch.setattr(api.services, "subscribers", room)
    with subscribed(api, path):
        answer = get(api, path)
        problem(answer, 429, "too-many-subscribers")
        assert int(answer.headers["Retry-After"]) > 0
    until(lambda: room.taken == 0, "the client has left")
    with subscribed(api, path):
        pass


def test_live_rows_end_now_and_then(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their client connects again. One that is gone, unseen by the server, does not, and its place is free."""
    monkeypatch.setattr(views, "LONGEST_FEED_S", 0.3)
    with subscribed(api, "/views/balances/ends/live") as live:
        assert live.next().event == "gone"
        until(lambda: live.ended, "the stream ends")
        assert live.error is None


def test_silence_is_broken_by_comments(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEEPALIVE_COMMENT.startswith(b":")
    monkeypatch.setattr(feeds, "HEARTBEAT_S", 0.02)
    with subscribed(api, "/views/balances/silent/live") as live:
        until(lambda: live.comments > 3, "comments come")


@pytest.mark.slow
def test_at_the_end_of_the_process_streams_end_cleanly_and_another_process_goes_on(world: Settings) -> None:
    with everything(world) as first, serving(world, name="second") as second:
        send(world, open_account("ada"))
        until(lambda: get(first, "/views/balances/ada").status_code == 200, "the account is there")
        with subscribed(first, "/views/balances/ada/live") as live:
            seen = live.next()
            first.server.should_exit = True
            until(lambda: live.ended, "the stream ends")
            assert live.error is None
        ready(second)
        send(world, deposit("ada", "d", 5))
        with subscribed(second, "/views/balances/ada/live", Last_Event_ID=seen.id) as live:
            assert live.next().data["row"]["cents"] == 5


# parked streams


@contextmanager
def with_views(more: Mapping[str, View]) -> Iterator[dict[str, View]]:
    """This process runs code that has these views too."""
    views = dict(sorted({**all_views(), **more}.items()))
    with pytest.MonkeyPatch.context() as patch:
        for module in (app, api_services):
            patch.setattr(module, "all_views", lambda: views)
        yield views


@pytest.fixture(scope="module")
def parked_api(stack: Any, migrated: str) -> Iterator[Api]:
    """An API whose code has a view that parks, with an account that is parked in it and one that is not."""
    sums = view(SUMS, "sums", BROKEN)
    totals = view(SUMMED, "totals", BROKEN)
    with (
        world_of(stack, migrated) as world,
        ExitStack() as running,
        with_views({"sums": sums, "totals": totals}) as views,
    ):
        core = {name: one for name, one in views.items() if one.agent == "core"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.engine.spine.agent_views", lambda _agent: core)
            upgrade(world)
            make_tables(world, {"sums": sums, "totals": totals})
            set_up(world)
            running.enter_context(handler(world))
            details = {"purpose": "poison"}
            poison = command("accounts/sick", "sick-2", "Deposit", cents=5, on="2026-01-02", details=details)
            opened = [open_account("well"), open_account("sick")]
            folded(world, *opened, deposit("well", "well-1", 3), deposit("sick", "sick-1", 4), poison)
        api = running.enter_context(serving(world))
        ready(api)
        yield api


SUMMED = """
    ON_POISON = "park"

    class Total(NamedTuple):
        kind: Key[str]
        cents: Sum[int]
        last: Latest[int]
        first: First[int]
        last_large: Latest[int | None]

    def delta(event: MoneyDeposited | MoneyWithdrawn, at: At) -> Iterable[Total]:
        fail(event)
        yield Total(type(event).__name__, change(event), event.cents, event.cents, event.cents if event.cents > 9 else None)
"""


def test_the_row_of_a_parked_stream_is_not_passed_off_as_up_to_date(parked_api: Api) -> None:
    assert get(parked_api, "/views/sums/well").json()["row"]["cents"] == 3
    found = problem(get(parked_api, "/views/sums/sick"), 409, "parked")
    assert (found["view"], found["stream"], found["since_version"]) == ("sums", "accounts/sick", 3)
    assert get(parked_api, "/views/balances/sick").json()["row"]["cents"] == 9


def test_where_the_key_does_not_tell_the_stream_parked_ones_are_counted(parked_api: Api) -> None:
    assert get(parked_api, "/views/sums").json()["parked"] == 1
    totals = get(parked_api, "/views/totals/MoneyDeposited").json()
    assert (totals["row"]["cents"], totals["parked"]) == (7, 1)
    assert {totals["row"]["first"], totals["row"]["last"]} == {3, 4}
    assert totals["row"]["last_large"] is None
    assert get(parked_api, "/views/totals?last_large=&limit=5").json()["items"] == [totals["row"]]
    assert get(parked_api, "/views/totals?last_large=10").json()["items"] == []
    assert get(parked_api, "/views/totals?__last=1").status_code == 422
    views = {one["name"]: one["parked"] for one in get(parked_api, "/views").json()["views"]}
    assert (views["sums"], views["totals"], views["balances"]) == (1, 1, 0)


def test_a_view_without_a_docstring_is_described_by_its_name() -> None:
    described = FastAPI()
    described.include_router(views.router_of({"balances": replace(all_views()["balances"], question="")}))
    paths = described.openapi()["paths"]
    for path in ("/views/balances", "/views/balances/{account}"):
        assert paths[path]["get"]["description"] == "The rows of balances."
