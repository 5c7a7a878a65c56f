"""Server-sent events: a stream's commits without gap or repeat, a row's newest state, and a client who goes costs nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from socket import SHUT_RDWR
from threading import Thread
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from fastapi.sse import KEEPALIVE_COMMENT

from api import due, event_stream, live_routes, stream_feed
from api.readers import Readers
from api.reading import ViewReader
from api.row_feed import Watcher
from api.stream_feed import Follower, StreamFeed
from infra.log import topics
from infra.log.history import Page, Wanted
from infra.log.records import Commit, EventRecord
from infra.log.rule import START, Counted, Reading, read
from infra.log.source import read_range
from infra.settings import Settings
from tests.engine.api import Api, everything, ready, serving, unfolded
from tests.engine.spine import DEADLINE_S, deposit, open_account, project, send, until
from tests.engine.test_api_views import decided, folded, get, problem


class Message(NamedTuple):
    """One event as it was sent."""

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
        request = self._client.build_request("GET", path, headers={n.replace("_", "-"): v for n, v in headers.items()})
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
            connection.shutdown(SHUT_RDWR)  # wakes whoever reads from it, which closing does not
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


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with unfolded(shared_world) as api:
        yield api


def readers(api: Api) -> Readers:
    found: Readers = api.server.config.loaded_app.state.readers
    return found


def versions(subscription: Subscription, count: int) -> list[int]:
    found = [subscription.next() for _ in range(count)]
    assert [message.id for message in found] == [str(message.data["version"]) for message in found]
    return [message.data["version"] for message in found]


# commits of a stream


def test_first_what_has_happened_and_then_what_happens(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("ada"), deposit("ada", "1", 250))
    with subscribed(api, "/accounts/ada/events/live") as live:
        opened, deposited = live.next(), live.next()
        assert (opened.event, opened.id, opened.data["stream"]) == ("commit", "1", "accounts/ada")
        assert deposited.data["events"] == get(api, "/accounts/ada/events?from_version=2").json()["events"]
        folded(shared_world, deposit("ada", "2", 1), deposit("bob", "no", 1))
        assert versions(live, 1) == [3]
        assert live.messages.empty()


def test_a_client_that_comes_back_goes_on_after_the_last_event_it_saw(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("back"), *(deposit("back", f"back-{n}", 1) for n in range(3)))
    with subscribed(api, "/accounts/back/events/live", Last_Event_ID="2") as live:
        assert versions(live, 2) == [3, 4]
    with subscribed(api, "/accounts/back/events/live?from_version=4") as live:
        assert versions(live, 1) == [4]
    folded(shared_world, deposit("back", "back-9", 1))
    with subscribed(api, "/accounts/back/events/live?from_version=1", Last_Event_ID="4") as live:
        assert versions(live, 1) == [5]


def test_who_has_all_of_it_makes_nobody_read_the_log(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("all"))
    monkeypatch.setattr("api.scans.page_of", None)
    with subscribed(api, "/accounts/all/events/live", Last_Event_ID="1") as live:
        folded(shared_world, deposit("all", "d", 1))
        assert versions(live, 1) == [2]


def test_a_stream_without_events_may_be_followed(api: Api, shared_world: Settings) -> None:
    with subscribed(api, "/accounts/unborn/events/live") as live:
        until(lambda: live.comments > 0, "the client is heard")
        folded(shared_world, open_account("unborn"))
        assert versions(live, 1) == [1]


def test_nobody_is_told_of_what_the_read_model_does_not_show(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[bool] = []
    positions = StreamFeed._positions

    async def counted(self: StreamFeed) -> dict[int, Reading]:
        rounds.append(True)
        return await positions(self)

    folded(shared_world, open_account("soon"))
    monkeypatch.setattr(due, "POLL_S", 0.05)
    with subscribed(api, "/accounts/soon/events/live") as live:
        assert versions(live, 1) == [1]
        monkeypatch.setattr(StreamFeed, "_positions", counted)
        decided(shared_world, deposit("soon", "soon-1", 1))
        seen = len(rounds)
        until(lambda: len(rounds) > seen + 3, "the reader has looked")
        assert live.messages.empty()

        # the mutant: whatever is in the log
        async def of_the_log(self: StreamFeed) -> dict[int, Reading]:
            return await asyncio.to_thread(all_of, shared_world)

        monkeypatch.setattr(StreamFeed, "_positions", of_the_log)
        assert versions(live, 1) == [2]
        assert get(api, "/views/balances/soon").json()["row"]["transactions"] == 0
    project(shared_world)


def all_of(world: Settings) -> dict[int, Reading]:
    """Where a reader stands who has read the whole log."""
    at: dict[int, Reading] = {}
    for partition, end in topics.describe(world, world.events_topic).end.items():
        at[partition] = START
        for records in read_range(world, world.events_topic, partition, 0, end):
            at[partition] = read(at[partition], records)[0]
    return at


def without_gap(api: Api, world: Settings, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while a client's history is being read reaches it, once."""
    folded(world, open_account(name), deposit(name, f"{name}-1", 1))
    page, feed = readers(api).scans.page, readers(api).streams
    came: list[bool] = []

    def more() -> None:
        folded(world, deposit(name, f"{name}-2", 1), deposit(name, f"{name}-3", 1))
        [follower] = feed._followers[f"accounts/{name}"]
        end = topics.describe(world, world.events_topic).end[follower.partition]
        until(lambda: feed.stands_at(follower).next_offset == end, "it has been given out")

    async def meanwhile(*arguments: Any, **options: Any) -> Page:
        found = await page(*arguments, **options)
        if not came:
            came.append(True)
            await asyncio.to_thread(more)
        return found

    monkeypatch.setattr(readers(api).scans, "page", meanwhile)
    with subscribed(api, f"/accounts/{name}/events/live") as live:
        assert versions(live, 2) == [1, 2]
        until(lambda: bool(came), "more has come")
        folded(world, deposit(name, f"{name}-4", 1))
        assert versions(live, 1) == [3]
        assert versions(live, 2) == [4, 5]


def test_between_what_has_happened_and_what_happens_nothing_is_lost(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        without_gap(api, shared_world, "gap", patch)

    # the mutant: a client that takes its place when it has read the history
    pages = live_routes._pages

    async def then_begin(serving: Readers, wanted: Wanted, at: Reading, stop: int) -> AsyncIterator[list[Counted]]:
        async for page in pages(serving, wanted, at, stop):
            yield page
        for follower in serving.streams._followers[wanted.stream]:
            follower.start_anew()

    monkeypatch.setattr(live_routes, "_pages", then_begin)
    with pytest.raises(AssertionError, match=r"\[5"):
        without_gap(api, shared_world, "lost", monkeypatch)


def test_a_client_that_is_too_slow_misses_nothing_and_holds_no_memory(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer is full after one commit: it reads the log itself, over and over, and gets each commit once."""
    monkeypatch.setattr(stream_feed, "BUFFER_BYTES", 1)
    lost: list[bool] = []
    start_anew = Follower.start_anew

    def counted(self: Follower) -> None:
        lost.append(True)
        start_anew(self)

    monkeypatch.setattr(Follower, "start_anew", counted)
    folded(shared_world, open_account("slow"))
    with subscribed(api, "/accounts/slow/events/live") as live:
        assert versions(live, 1) == [1]
        for round_ in range(3):
            folded(shared_world, *(deposit("slow", f"slow-{round_}-{n}", 1) for n in range(8)))
        assert versions(live, 24) == list(range(2, 26))
        assert lost
        folded(shared_world, deposit("slow", "slow-end", 1))
        assert versions(live, 1) == [26]


def test_what_waits_for_a_slow_client_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def most_held() -> int:
        follower = Follower("accounts/1", 0)
        data = msgspec.Raw(b"x" * 10_000)
        for version in range(1, 101):
            events = [EventRecord("MoneyDeposited", data)]
            commit = Commit("accounts/1", version, events, str(version), version, "f", "accepted", None, 0, version)
            follower.give(Counted(version, 0, commit))
        held = 0
        while follower.take() is not None:
            held += 1
        return held

    assert most_held() == 0  # all of it is lost, and read from the log again
    monkeypatch.setattr(stream_feed, "BUFFER_BYTES", 10**9)  # the mutant
    assert most_held() == 100


def test_one_reader_serves_all_and_ends_with_the_last_client(api: Api, shared_world: Settings) -> None:
    folded(shared_world, open_account("shared"))
    feed = readers(api).streams
    with subscribed(api, "/accounts/shared/events/live") as one:
        task = feed._task
        with subscribed(api, "/accounts/shared/events/live") as two:
            assert feed._task is task
            folded(shared_world, deposit("shared", "d", 1))
            assert versions(one, 2) == versions(two, 2) == [1, 2]
        until(lambda: len(feed._followers.get("accounts/shared", ())) == 1, "the one that left is forgotten")
    until(lambda: feed._task is None, "nobody follows, nobody reads")
    assert readers(api).room.taken == 0


def test_a_reader_that_fails_ends_its_clients_who_come_back(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded(shared_world, open_account("fails"))
    with subscribed(api, "/accounts/fails/events/live") as live:
        assert versions(live, 1) == [1]
        with monkeypatch.context() as patch:
            patch.setattr(StreamFeed, "_give", None)
            folded(shared_world, deposit("fails", "d", 1))
            until(lambda: live.ended, "the stream ends")
        assert live.error is None
    with subscribed(api, "/accounts/fails/events/live", Last_Event_ID="1") as live:
        assert versions(live, 1) == [2]


# rows of views


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


def test_all_watched_rows_of_a_view_are_read_in_one_query(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"many-{number}" for number in range(5)]
    asked: list[int] = []
    by_keys = ViewReader.by_keys

    async def counted(self: ViewReader, view: Any, keys: Any, streams: Any = ()) -> Any:
        asked.append(len(keys))
        return await by_keys(self, view, keys, streams)

    folded(shared_world, *map(open_account, names))
    monkeypatch.setattr(ViewReader, "by_keys", counted)
    lives = [Subscription(api, f"/views/balances/{name}/live") for name in names]
    try:
        for live in lives:
            assert live.next().event == "row"
        asked.clear()
        folded(shared_world, *(deposit(name, f"{name}-d", 1) for name in names))
        for live in lives:
            assert live.next().data["row"]["cents"] == 1
        assert set(asked) == {5}
    finally:
        for live in lives:
            live.close()


def test_a_slow_watcher_is_sent_the_newest_state_alone() -> None:
    async def sent() -> list[bytes]:
        watcher = Watcher(("a",), None)
        frames = watcher.frames()
        assert (await anext(frames)).startswith(b": samefold\nretry: ")
        for state in ("1", "2", "3"):
            watcher.tell(state, state.encode())
        found = [await anext(frames)]
        watcher.end()
        return found + [frame async for frame in frames]

    assert asyncio.run(sent()) == [b"3"]


# room, silence, the end


def test_there_is_room_for_so_many(api: Api, shared_world: Settings) -> None:
    room = readers(api).room
    until(lambda: room.taken == 0, "all have left")
    most, room._most = room._most, 1
    try:
        with subscribed(api, "/views/balances/room/live"):
            for path in ("/views/balances/room/live", "/accounts/room/events/live"):
                answer = get(api, path)
                problem(answer, 429, "too-many-subscribers")
                assert int(answer.headers["Retry-After"]) > 0
        until(lambda: room.taken == 0, "the client has left")
        with subscribed(api, "/accounts/room/events/live"):
            pass
    finally:
        room._most = most


def test_silence_is_broken_by_comments(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEEPALIVE_COMMENT.startswith(b":")
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.02)
    for path in ("/views/balances/silent/live", "/accounts/silent/events/live"):
        with subscribed(api, path) as live:
            until(lambda: live.comments > 3, "comments come")  # asked at once


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/accounts/a%00b/events/live", {}, 422, "invalid"),
        ("/accounts/ada/events/live?from_version=0", {}, 422, "invalid"),
        ("/accounts/ada/events/live?colour=red", {}, 422, "invalid"),
        ("/accounts/ada/events/live", {"Last_Event_ID": "x"}, 422, "invalid"),
        ("/accounts/ada/events/live", {"Last_Event_ID": "-1"}, 422, "invalid"),
        ("/accounts/ada/events/live", {"Last_Event_ID": "9" * 30}, 422, "invalid"),
        ("/views/balances/ada/live?colour=red", {}, 422, "invalid"),
        ("/views/balances/ada/live", {"Last_Event_ID": "x" * 101}, 422, "invalid"),
        ("/views/statement/ada/x/live", {}, 422, "invalid"),
        ("/views/nothing/ada/live", {}, 404, "not-found"),
    ],
)
def test_what_does_not_fit_is_told_before_the_stream_begins(
    api: Api, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    problem(get(api, path, **headers), status, code)
    assert readers(api).room.taken == 0


def test_at_the_end_of_the_process_streams_end_cleanly_and_another_process_goes_on(world: Settings) -> None:
    with everything(world) as first, serving(world, name="second") as second:
        send(world, open_account("ada"))
        until(lambda: get(first, "/views/balances/ada").status_code == 200, "the account is there")
        paths = ("/accounts/ada/events/live", "/views/balances/ada/live")
        lives = [Subscription(first, path) for path in paths]
        try:
            seen = [live.next() for live in lives]
            first.server.should_exit = True
            for live in lives:
                until(lambda: live.ended, "the stream ends", 5)  # noqa: B023  # asked at once
                assert live.error is None
        finally:
            for live in lives:
                live.close()
        ready(second)
        send(world, deposit("ada", "d", 5))
        for path, last in zip(paths, seen, strict=True):
            with subscribed(second, path, Last_Event_ID=last.id) as live:
                message = live.next()
                assert message.data.get("version", 2) == 2
                assert message.data.get("row", {"cents": 5})["cents"] == 5


def test_under_load_each_commit_comes_once_and_in_order(world: Settings) -> None:
    """Clients come in the midst of it; some go and come back with what they saw last."""
    names = ["l1", "l2", "l3"]
    count = 30
    with everything(world) as api:
        send(world, *map(open_account, names))
        seen: dict[str, list[int]] = {name: [] for name in names}

        def follow(name: str) -> None:
            while not seen[name] or seen[name][-1] <= count:
                last = {"Last_Event_ID": str(seen[name][-1])} if seen[name] else {}
                with subscribed(api, f"/accounts/{name}/events/live", **last) as live:
                    seen[name] += versions(live, 1 + len(seen[name]) % 5)[: count + 1]

        threads = [Thread(target=follow, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for number in range(0, count, 5):
            send(world, *(deposit(name, f"{name}-{n}", 1) for n in range(number, number + 5) for name in names))
        # the last client of a stream may have asked for more than there is
        send(world, *(deposit(name, f"{name}-more-{n}", 1) for n in range(5) for name in names))
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        for name in names:
            assert seen[name] == list(range(1, len(seen[name]) + 1))
