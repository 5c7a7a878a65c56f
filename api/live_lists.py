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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec

from api.feeds import PASSING, Feed, Places, State, Watcher, stopped
from api.view_reader import ViewReader, content_tag
from api.waits import Moved, Notifications
from infra.access import Rows
from projections.engine.views.pages import Page
from projections.engine.views.queries import Found
from projections.engine.views.view import View

log = logging.getLogger(__name__)

QUESTION_S = 5.0
"""A question that takes longer ends its streams: the others wait for it. The wait for a connection counts, which fails sooner."""


class Listed(NamedTuple):
    """A page as a caller sees it, for whom there are `only` those rows; None: all."""

    only: Rows | None
    page: Page


class Listing(State):
    """The state of a page."""

    def __init__(self, found: Found, rows: Sequence[msgspec.Raw]) -> None:
        self._rows, self._parked = rows, found.parked
        super().__init__(found, "page", content_tag(*rows, b"%a" % found.parked), items=rows, parked=found.parked)
        self.places = tuple(hashlib.sha256(row).digest()[:16] for row in rows)

    def news(self, before: Places) -> tuple[str, Mapping[str, Any]]:
        """The page, or places of the list before that leave it, and rows that enter it at places of the list as it is now."""
        if before is None:
            return super().news(before)
        stay = _stay(before, self.places or ())
        gone, known = {*range(len(before))}.difference(stay), {*stay.values()}
        enter = [{"at": place, "row": row} for place, row in enumerate(self._rows) if place not in known]
        return "changes", {"leave": sorted(gone), "enter": enter, "parked": self._parked}


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


class ListFeed(Feed[Listed]):
    """All watchers of pages of one view."""

    def __init__(self, view: View, views: ViewReader, notifications: Notifications) -> None:
        super().__init__(view, views, notifications)
        self._states: dict[Listed, tuple[Hashable, State]] = {}
        self._new: list[Listed] = []
        """Questions that nobody asked before."""
        self._late: set[Listed] = set()
        """Those that took too long the last time."""
        self._repairs = 0
        """Notifications without a position: rows may have changed where the agent's position has not, as in a replay."""

    def _notified(self, agent: str, moved: Moved) -> None:
        self._repairs += moved is None
        super()._notified(agent, moved)

    def enter(self, watched: Listed, watcher: Watcher) -> Watcher:
        if watched not in self.watchers:
            self._new.append(watched)
        return super().enter(watched, watcher)

    def leave(self, watched: Listed, watcher: Watcher) -> None:
        super().leave(watched, watcher)
        if watched not in self.watchers:
            self._states.pop(watched, None)

    async def round(self) -> None:
        """One query tells whether anything moved. Then each question is read that is older, also if another one fails.

        New ones are read first: a round may have many.
        """
        # who comes meanwhile may have seen more than this round does
        before = {listed: _alive(watchers) for listed, watchers in self.watchers.items()}
        self._new.clear()
        self._late &= before.keys()
        now = _moment(await self.views.by_keys(self.view, ()), self._repairs)
        self._states = {listed: state for listed, state in self._states.items() if before.get(listed)}
        for listed, watchers in before.items():
            while self._new:
                await self._send(self._new.pop(0))
            if self._states.get(listed, (None,))[0] != now:
                await self._send(listed)
            else:
                _offer(self._states[listed], watchers)

    async def _send(self, listed: Listed) -> None:
        """Read a question for those who ask it by now."""
        if not (watchers := _alive(self.watchers.get(listed, ()))):
            return
        try:
            async with asyncio.timeout(QUESTION_S):
                state = await self._read(listed)
        except PASSING as error:
            log.debug("watching a page of %s: %s", self.view.name, error)
        except TimeoutError:
            # once, the database may have been away
            if listed in self._late:
                log.warning("a live list of %s ends: its question takes longer than %g s", self.view.name, QUESTION_S)
                for watcher in watchers:
                    watcher.end()
            self._late ^= {listed}
        else:
            self._late.discard(listed)
            if listed in self.watchers:
                self._states[listed] = state
            _offer(state, watchers)

    async def _read(self, listed: Listed) -> tuple[Hashable, State]:
        repairs = self._repairs
        found = await self.views.page(self.view, listed.page, listed.only)
        state = stopped(found, parked=found.parked) if found.stopped else Listing(found, await self.views.shown(found))
        # a person may be forgotten without a batch: it is read again each time
        return None if found.has_personal else _moment(found, repairs), state


def _offer(state: tuple[Hashable, State], watchers: Iterable[Watcher]) -> None:
    for watcher in watchers:
        watcher.offer(state[1])


def _alive(watchers: Iterable[Watcher]) -> list[Watcher]:
    """A client that does not read is still there when its watch has ended."""
    return [one for one in watchers if not one.is_ended]


def _moment(found: Found, repairs: int) -> Hashable:
    """What says whether rows may differ: the table, how far it is folded, whether it is stopped, and how often it was repaired."""
    return found.table, str(found.position), found.stopped, repairs
