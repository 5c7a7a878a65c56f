"""make test: no process is needed. What leaves a live list and what enters it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.feeds import Watcher
from api.live_lists import QUESTION_S, Listed, ListFeed, Listing
from api.services import POOL_WAIT_S
from api.view_reader import TOO_MANY_READERS
from domain.engine.personal.keys import KeysNotRead
from projections.engine.views.pages import Page
from projections.engine.views.queries import Found, Row
from projections.engine.views.view import View

some_rows = st.lists(st.integers(0, 9).map(lambda number: b"%d" % number), max_size=12)


def found(**members: Any) -> Found:
    common = {"table": "t", "position": "p", "stopped": None, "parked": 0, "has_personal": False}
    return Mock(spec=Found, **common | members)


def listing(rows: Sequence[bytes], **members: Any) -> Listing:
    return Listing(found(**members), list(map(msgspec.Raw, rows)))


def data_of(frame: bytes) -> Any:
    [data] = [line for line in frame.split(b"\n") if line.startswith(b"data: ")]
    return msgspec.json.decode(data.removeprefix(b"data: "))


def changed(data: Any, items: Sequence[int]) -> list[int]:
    """What a client makes of its list by an event."""
    now: list[int] = data.get("items", list(items))
    for place in reversed(data.get("leave", ())):
        del now[place]
    for one in data.get("enter", ()):
        now.insert(one["at"], one["row"])
    return now


def changes(before: Sequence[bytes], after: Sequence[bytes]) -> Any:
    return data_of(listing(after).frame(listing(before).places))


@given(some_rows, some_rows)
def test_what_leaves_and_enters_makes_the_one_list_of_the_other(before: list[bytes], after: list[bytes]) -> None:
    assert changed(changes(before, after), [int(row) for row in before]) == [int(row) for row in after]


@given(st.lists(st.tuples(some_rows, st.booleans())), some_rows)
def test_a_client_that_misses_states_has_the_newest_list(
    states: list[tuple[list[bytes], bool]], last: list[bytes]
) -> None:
    watcher, items, events = Watcher(None), list[int](), 0
    for number, (rows, is_taken) in enumerate([*states, (last, True)]):
        watcher.offer(listing(rows, position=number))
        if is_taken and (frame := watcher.take()):
            data = data_of(frame)
            assert ("items" in data, data["position"]) == (not events, str(number))
            items, events = changed(data, items), events + 1
        assert not is_taken or (watcher.take(), items) == (None, [int(row) for row in rows])


def test_a_client_that_comes_back_with_the_list_gets_nothing_twice() -> None:
    rows, news = [b"1", b"2"], listing([b"2"], position=3)
    back, new, later = Watcher(listing(rows).tag), Watcher(None), Watcher("of an older list")
    for position in (1, 2):
        for one in (back, new, later):
            one.offer(listing(rows, position=position))
        sent = [one.take() for one in (back, new, later)]
        assert [frame and sorted(data_of(frame)) for frame in sent] == (
            [None, *[["items", "parked", "position"]] * 2] if position == 1 else [None] * 3
        )
    for one in (back, new, later):
        one.offer(news)
    first, *others = [one.take() for one in (back, new, later)]
    assert first is not None
    assert data_of(first) == {"leave": [0], "enter": [], "parked": 0, "position": "3"}
    assert all(one is first for one in others), "it is encoded once"


@given(st.permutations(range(9)), st.permutations(range(9)))
def test_no_row_leaves_that_could_stay(before: list[int], after: list[int]) -> None:
    longest = [[0] * 10 for _ in range(10)]
    for one, was in enumerate(before):
        for other, now in enumerate(after):
            beside = max(longest[one][other + 1], longest[one + 1][other])
            longest[one + 1][other + 1] = longest[one][other] + 1 if was == now else beside
    made = changes(*([b"%d" % number for number in rows] for rows in (before, after)))
    assert 9 - len(made["leave"]) == longest[9][9]


def feed_of(notifications: Mock, **answers: Any) -> ListFeed:
    """Whose rounds are the test's."""

    async def nothing(*_: object) -> Found:
        return found()

    async def shown(some: Found) -> list[msgspec.Raw]:
        return [row.json for row in some.rows]

    reader = Mock(by_keys=nothing, shown=shown, **answers)
    reader.with_last_rows.return_value = reader
    return ListFeed(Mock(agent="core"), reader, notifications)


def rows_of(*rows: bytes) -> list[Row]:
    return [Row(number, msgspec.Raw(row)) for number, row in enumerate(rows, start=1)]


def watching(feed: ListFeed, *pages: Page) -> list[Watcher]:
    watchers = [Watcher(None) for _ in pages]
    for page, watcher in zip(pages, watchers, strict=True):
        feed.watchers[Listed(None, page)] = {watcher}
    return watchers


ONE, OTHER = Page((), (), 10), Page((), (), 11)


def test_a_list_is_read_again_after_a_repair_that_moves_no_position() -> None:
    """As `samefold parked replay` does."""
    rows = [b"1"]

    async def page(*_: object) -> Found:
        return found(rows=rows_of(*rows))

    async def seen() -> list[bytes]:
        feed = feed_of(notifications := Mock(), page=page)
        [[notified]] = [call.args for call in notifications.subscribe.call_args_list]
        [watcher] = watching(feed, ONE)
        frames = []
        for moved in ({0: 1}, None):
            notified("core", moved)
            await feed.round()
            frames.append(watcher.take() or b"")
            rows[:] = [b"2"]
        return frames

    first, second = asyncio.run(seen())
    assert b"event: page" in first
    assert b'"leave":[0],"enter":[{"at":0,"row":2}]' in second


def test_a_question_whose_clients_were_all_ended_is_not_asked() -> None:
    """They are watchers until they have gone, also those that have stopped reading."""
    asked: list[Page] = []

    async def page(_view: View, page: Page, *_: object) -> Found:
        asked.append(page)
        return found(rows=[], has_personal=True)

    async def rounds() -> None:
        feed = feed_of(Mock(), page=page)
        one, _ = watching(feed, ONE, OTHER)
        await feed.round()
        one.end()
        await feed.round()

    asyncio.run(rounds())
    assert asked == [ONE, OTHER, OTHER]


@pytest.mark.parametrize("error", [TOO_MANY_READERS(), KeysNotRead("They are not.")], ids=["pool", "keys"])
def test_what_passes_keeps_the_clients_of_a_question_and_those_of_the_others(error: Exception) -> None:
    errors = [error]

    async def page(_view: View, page: Page, *_: object) -> Found:
        if page is ONE and errors:
            raise errors.pop()
        return found(rows=rows_of(b"1"))

    async def sent() -> list[bool]:
        feed = feed_of(Mock(), page=page)
        both = watching(feed, ONE, OTHER)
        await feed.round()
        first = [one.take() is not None for one in both]
        await feed.round()
        return [*first, *(one.take() is not None for one in both), *(one.is_ended for one in both)]

    assert asyncio.run(sent()) == [False, True, True, False, False, False]
    # for a place in the pool, and for a connection of it: else the question would end for being slow
    assert QUESTION_S > 2 * POOL_WAIT_S


def test_a_list_that_nobody_asks_any_more_when_it_is_read_is_not_kept() -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, Listing) for one in gc.get_objects())

    async def left() -> int:
        async def page(*_: object) -> Found:
            feed.leave(Listed(None, ONE), watchers.pop())
            return found(rows=rows_of(b"1"))

        feed = feed_of(Mock(), page=page)
        watchers = watching(feed, ONE)
        await feed.round()
        return kept()

    before = kept()
    assert asyncio.run(left()) == before
