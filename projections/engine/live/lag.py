"""How far agents are behind the log, and for how long: from repeated looks at their positions and the log's end, and nothing else.

Times are of a monotonic clock, in seconds. They are as old as the first look that saw them: whoever has just begun to look knows of
nothing before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

GAP_S = 5.0
"""After a longer pause between two looks nobody knows whether a position moved in between."""
KEPT = 1_000
"""Ends remembered of a partition; beyond it every second one is forgotten, and what waits looks younger than it is by one step."""


class PartitionLag(NamedTuple):
    """One agent's in one partition."""

    records: int
    seconds: float
    """How long the first record that is not folded has been waiting."""
    still: float
    """For how long the position has not moved although there was something to fold."""


@dataclass(slots=True)
class _Standing:
    next_offset: int
    since: float


class Lags:
    """`now` has the lag of each (agent, partition) as of the last look."""

    def __init__(self) -> None:
        self.now: dict[tuple[str, int], PartitionLag] = {}
        self._ends: dict[int, deque[tuple[float, int]]] = {}
        self._standing: dict[tuple[str, int], _Standing] = {}
        self._last = float("-inf")

    def saw(self, at: float, positions: Mapping[str, Mapping[int, int]], ends: Mapping[int, int]) -> None:
        """`positions` are {agent: {partition: next offset}}, `ends` {partition: offset after the last record}, read after them."""
        self.now = dict.fromkeys(self.now, PartitionLag(0, 0.0, 0.0))  # of agents that are retired, from now on
        if at - self._last > GAP_S:
            self._standing.clear()
        self._last = at
        for partition, end in ends.items():
            seen = self._ends.setdefault(partition, deque())
            if not seen or end > seen[-1][1]:
                seen.append((at, end))
        for agent, offsets in positions.items():
            for partition, end in ends.items():
                self._saw(at, (agent, partition), offsets.get(partition, 0), end)
        self._forget(positions)

    def _saw(self, at: float, who: tuple[str, int], next_offset: int, end: int) -> None:
        standing = self._standing.get(who)
        if standing is None or next_offset != standing.next_offset or next_offset >= end:
            standing = self._standing[who] = _Standing(next_offset, at)
        if next_offset >= end:
            self.now[who] = PartitionLag(0, 0.0, 0.0)
            return
        since = next(seen for seen, known in self._ends[who[1]] if known > next_offset)
        self.now[who] = PartitionLag(end - next_offset, at - since, at - standing.since)

    def _forget(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        for partition, seen in self._ends.items():
            slowest = min((offsets.get(partition, 0) for offsets in positions.values()), default=0)
            while len(seen) > 1 and seen[0][1] <= slowest:
                seen.popleft()
            if len(seen) > KEPT:
                self._ends[partition] = deque([*list(seen)[:-1:2], seen[-1]])
        for who in [who for who in self._standing if who[0] not in positions]:
            del self._standing[who]
