"""make test + test-all: a state takes milliseconds, processes that end seconds.

Server-sent events: a row's newest state, and a client who goes costs nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, Queue
from socket import SHUT_RDWR
from threading import Thread
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi.sse import KEEPALIVE_COMMENT

from api import live_rows
from api.live_rows import Watcher
from api.services import TOO_MANY_SUBSCRIBERS, Slots
from api.view_reader import ViewReader
from infra.settings import Settings
from infra.testing.waiting import DEADLINE_S, until
from tests.engine.api.api import Api, everything, named, problem, ready, serving, unfolded
from tests.engine.api.test_api_views import folded, get
from tests.engine.spine import deposit, open_account, send


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


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with unfolded(shared_world) as api:
        yield api


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

    async def counted(self: ViewReader, view: Any, keys: Any, *more: Any) -> Any:
        asked.append(len(keys))
        return await by_keys(self, view, keys, *more)

    folded(shared_world, *map(open_account, names))
    monkeypatch.setattr(ViewReader, "by_keys", counted)
    with ExitStack() as stack:
        lives = [stack.enter_context(subscribed(api, f"/views/balances/{name}/live")) for name in names]
        assert {live.next().event for live in lives} == {"row"}
        asked.clear()
        folded(shared_world, *(deposit(name, f"{name}-d", 1) for name in names))
        assert {live.next().data["row"]["cents"] for live in lives} == {1}
        assert set(asked) == {5}


def test_a_slow_watcher_is_sent_the_newest_state_alone() -> None:
    async def sent() -> list[bytes]:
        watcher = Watcher(("a",), None)
        frames = watcher.frames()
        assert (await anext(frames)).startswith(b": samefold\nretry: ")
        for state in ("1", "2", "3"):
            watcher.send(state, state.encode())
        found = [await anext(frames)]
        watcher.end()
        return found + [frame async for frame in frames]

    assert asyncio.run(sent()) == [b"3"]


# room, silence, the end


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


def test_silence_is_broken_by_comments(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEEPALIVE_COMMENT.startswith(b":")
    monkeypatch.setattr(live_rows, "HEARTBEAT_S", 0.02)
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
