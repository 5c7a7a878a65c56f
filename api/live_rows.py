"""Rows of a view as server-sent events: all watched rows are read in one query after each batch of the view's agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from api.feeds import Feed, State, stopped
from api.view_reader import Values, parked_since, row_members, row_tag
from infra.access import Rows
from projections.engine.views.queries import Found, Shape

CHUNK = 1_000
"""Keys in one query."""


class Watched(NamedTuple):
    """A row as a caller sees it, for whom there are `only` those rows; None: all."""

    only: Rows | None
    key: Values


class RowFeed(Feed[Watched]):
    """All watchers of rows of one view."""

    async def round(self) -> None:
        by_shape: defaultdict[Shape, list[Watched]] = defaultdict(list)
        for watched in self.watchers:
            by_shape[watched.only.shape if watched.only else ()].append(watched)
        for of_shape in by_shape.values():
            for start in range(0, len(of_shape), CHUNK):
                await self._read(of_shape[start : start + CHUNK])

    async def _read(self, some: Sequence[Watched]) -> None:
        """Read these rows, whose `only` are of one shape, with one query."""
        keys, only = [key for _, key in some], [rows for rows, _ in some if rows is not None]
        # who comes meanwhile may have seen more than this query does
        before = [tuple(self.watchers.get(watched, ())) for watched in some]
        found = await self.views.by_keys(self.view, keys, only)
        shown = await self.views.shown(found)
        rows = {row.number: json for row, json in zip(found.rows, shown, strict=True)}
        for number, (watched, watchers) in enumerate(zip(some, before, strict=True), start=1):
            state = self._state(found, watched, rows.get(number))
            for watcher in watchers:
                watcher.offer(state)

    def _state(self, found: Found, watched: Watched, row: msgspec.Raw | None) -> State:
        if found.stopped is not None:  # for all watchers alike: it says nothing about a row
            return stopped(found)
        since = parked_since(self.view, found, watched.key)
        if since is not None and not (row is None and watched.only):  # that would reveal the row
            return State(found, "parked", f"parked-{since}", since_version=since)
        if row is None:
            return State(found, "gone", "gone")
        return State(found, "row", row_tag(self.view, found, row), **row_members(self.view, found, row))
