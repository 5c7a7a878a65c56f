"""Pages of a view as server-sent events: the page, and then what leaves it and what enters it.

Each question is read once after a batch, for all who ask it. Changes are places in the list that the client was sent last: so a
client needs no key, and a slow one, which missed states in between, gets the changes since its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import msgspec
from fastapi.sse import format_sse_event

from api.feeds import PASSING, Feed, Watcher
from api.view_reader import ViewReader, content_tag
from api.waits import Moved, Notifications
from infra.access import Rows
from projections.engine.views.pages import Page
from projections.engine.views.queries import Found
from projections.engine.views.view import View

log = logging.getLogger(__name__)

QUESTION_S = 2.0
"""A question that takes longer ends its streams: the others wait for it."""


Places: TypeAlias = tuple[bytes, ...] | None
"""Digests of the rows of a list; None: there is none."""


class Listed(NamedTuple):
    """A page as a caller sees it, for whom there are `only` those rows; None: all."""

    only: Rows | None
    page: Page


class Listing:
    """The state of a page; `tag` identifies it."""

    def __init__(self, found: Found, rows: Sequence[msgspec.Raw], repairs: int = 0) -> None:
        self.moment = _moment(found, repairs)
        self.has_personal = found.has_personal
        self._rows, self._stopped = rows, found.stopped
        self._more = {"position": str(found.position), "parked": found.parked}
        self._frames: dict[str, bytes] = {}
        # of the rows alone, without the rows: watchers keep those that their clients have
        self.places = None if found.stopped else tuple(hashlib.sha256(row).digest()[:16] for row in rows)
        self.tag = f"stopped-{found.stopped[1]}" if found.stopped else content_tag(*rows, b"%a" % found.parked)

    def frame(self, tag: str | None, places: Places) -> bytes:
        """What a client is sent that has the state with this tag and these places."""
        known = "" if tag is None or places is None else tag
        if known not in self._frames:
            members: dict[str, Any]
            if self._stopped:
                code, at = self._stopped
                event, members = "stopped", {"code": code, "since": at}
            elif known and places is not None:
                event, members = "changes", self._changes(places)
            else:
                event, members = "page", {"items": self._rows}
            body = msgspec.json.encode(members | self._more)
            self._frames[known] = format_sse_event(event=event, id=self.tag, data_str=body.decode())
        return self._frames[known]

    def _changes(self, before: Sequence[bytes]) -> dict[str, Any]:
        """Places of the list before that leave it, and the rows that enter it at places of the list as it is now."""
        stay = _stay(before, self.places or ())
        gone, known = {*range(len(before))}.difference(stay), {*stay.values()}
        enter = [{"at": place, "row": row} for place, row in enumerate(self._rows) if place not in known]
        return {"leave": sorted(gone), "enter": enter}


def _stay(before: Sequence[bytes], after: Sequence[bytes]) -> dict[int, int]:
    """Places before and after of as many rows as can stay in their order: the longest increasing subsequence.

    It takes n log n steps: `difflib` takes n², where rows are equal, and all other requests of the process wait.
    """
    there = dict(zip(_numbered(before), range(len(before)), strict=True))
    pairs = [(there[row], place) for place, row in enumerate(_numbered(after)) if row in there]
    ends, last, previous = list[int](), list[int](), list[int]()
    for number, (place, _) in enumerate(pairs):
        length = bisect_left(ends, place)
        ends[length : length + 1], last[length : length + 1] = [place], [number]
        previous.append(last[length - 1] if length else -1)
    stay, number = dict[int, int](), last[-1] if last else -1
    while number >= 0:
        (was, now), number = pairs[number], previous[number]
        stay[was] = now
    return stay


def _numbered(rows: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Equal rows are told apart: they are the first, the second and so on."""
    seen = defaultdict[bytes, Iterator[int]](count)
    return [(row, next(seen[row])) for row in rows]


class ListWatcher(Watcher):
    """A watch on a page. `tag` is that of the state that the client has."""

    def __init__(self, tag: str | None) -> None:
        super().__init__()
        self._tag = tag
        self._places: Places = None
        self._newest: Listing | None = None

    def offer(self, state: Listing) -> None:
        if state is not self._newest:
            self._newest = state
            self.wake()

    def take(self) -> bytes | None:
        state = self._newest
        if state is None:
            return None
        frame = None if state.tag == self._tag else state.frame(self._tag, self._places)
        self._tag, self._places = state.tag, state.places
        return frame


class ListFeed(Feed[Listed, ListWatcher]):
    """All watchers of pages of one view."""

    def __init__(self, view: View, views: ViewReader, notifications: Notifications) -> None:
        super().__init__(view, views, notifications)
        self._states: dict[Listed, Listing] = {}
        self._repairs = 0
        """Notifications without a position: rows may have changed where the agent's position has not, as in a replay."""

    def _notified(self, agent: str, moved: Moved) -> None:
        self._repairs += moved is None
        super()._notified(agent, moved)

    async def round(self) -> None:
        """One query tells whether anything moved. Then each question is read that is older, also if another one fails."""
        # who comes meanwhile may have seen more than this round does
        before = {listed: tuple(watchers) for listed, watchers in self.watchers.items()}
        now = _moment(await self.views.by_keys(self.view, ()), self._repairs)
        self._states = {listed: state for listed, state in self._states.items() if listed in before}
        for listed, watchers in before.items():
            state = self._states.get(listed)
            # a person may be forgotten without a batch
            if state is None or state.moment != now or state.has_personal:
                try:
                    async with asyncio.timeout(QUESTION_S):
                        state = await self._read(listed)
                except PASSING as error:
                    log.debug("watching a page of %s: %s", self.view.name, error)
                    continue
                except TimeoutError:
                    log.warning(
                        "a live list of %s ends: its question takes longer than %g s", self.view.name, QUESTION_S
                    )
                    for watcher in watchers:
                        watcher.end()
                    continue
                self._states[listed] = state
            for watcher in watchers:
                watcher.offer(state)

    async def _read(self, listed: Listed) -> Listing:
        repairs = self._repairs
        found = await self.views.page(self.view, listed.page, listed.only)
        return Listing(found, await self.views.shown(found), repairs)


def _moment(found: Found, repairs: int) -> Hashable:
    """What says whether rows may differ: the table, how far it is folded, whether it is stopped, and how often it was repaired."""
    return found.table, str(found.position), found.stopped, repairs
