"""make test: no process is needed. What leaves a live list and what enters it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from api.live_lists import Listed, ListFeed, Listing, ListWatcher
from projections.engine.views.pages import Page
from projections.engine.views.queries import Found

some_rows = st.lists(st.integers(0, 9).map(lambda number: b"%d" % number), max_size=12)


def listing(rows: Sequence[bytes]) -> Listing:
    found = Mock(spec=Found, table="t", position="p", stopped=None, parked=0, has_personal=False)
    return Listing(found, list(map(msgspec.Raw, rows)))


def changes(before: Sequence[bytes], after: Sequence[bytes]) -> Any:
    had = listing(before)
    [data] = [line for line in listing(after).frame(had.tag, had.places).split(b"\n") if line.startswith(b"data: ")]
    return msgspec.json.decode(data.removeprefix(b"data: "))


@given(some_rows, some_rows)
def test_what_leaves_and_enters_makes_the_one_list_of_the_other(before: list[bytes], after: list[bytes]) -> None:
    found, items = changes(before, after), [int(row) for row in before]
    for place in reversed(found["leave"]):
        del items[place]
    for one in found["enter"]:
        items.insert(one["at"], one["row"])
    assert items == [int(row) for row in after]


@given(st.permutations(range(9)), st.permutations(range(9)))
def test_no_row_leaves_that_could_stay(before: list[int], after: list[int]) -> None:
    longest = [[0] * 10 for _ in range(10)]
    for one, was in enumerate(before):
        for other, now in enumerate(after):
            beside = max(longest[one][other + 1], longest[one + 1][other])
            longest[one + 1][other + 1] = longest[one][other] + 1 if was == now else beside
    found = changes(*([b"%d" % number for number in rows] for rows in (before, after)))
    assert 9 - len(found["leave"]) == longest[9][9]


def test_a_list_is_read_again_after_a_repair_that_moves_no_position() -> None:
    """As `samefold parked replay` does."""
    page = Page((), (), 10)
    rows = [b"1"]

    async def found(*_: object) -> Found:
        return Mock(spec=Found, table="t", position="p", stopped=None, parked=0, has_personal=False)

    async def shown(_: Found) -> list[msgspec.Raw]:
        return list(map(msgspec.Raw, rows))

    async def seen() -> list[bytes]:
        reader, notifications = Mock(by_keys=found, page=found, shown=shown), Mock()
        reader.with_last_rows.return_value = reader
        feed = ListFeed(Mock(agent="core"), reader, notifications)
        [[notified]] = [call.args for call in notifications.subscribe.call_args_list]
        watcher = feed.watchers.setdefault(Listed(None, page), {ListWatcher(None)})
        [one] = watcher
        frames = []
        for moved in ({0: 1}, None):
            notified("core", moved)
            await feed.round()
            frames.append(one.take() or b"")
            rows[:] = [b"2"]
        return frames

    first, second = asyncio.run(seen())
    assert b"event: page" in first
    assert b'"leave":[0],"enter":[{"at":0,"row":2}]' in second
