"""How far agents are behind the log, and for how long, from repeated observations of their positions and the log's end.

Times are seconds of a monotonic clock. A lag is as old as the first observation that saw it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from infra.observability import metrics
from projections.engine.store.positions import LIVE
from projections.engine.views.queries import MOST_PARKED
from projections.engine.views.sql_views import STOPPED
from projections.engine.views.view import POLICY

GAP_S = 5.0
"""After a longer pause between two observations, it is unknown whether a position moved."""
KEPT = 1_000
"""Ends remembered per partition. Beyond it every second one is dropped, so the lag appears at most one step younger."""


class PartitionLag(NamedTuple):
    """One agent's lag in one partition."""

    records: int
    seconds: float
    """How long the first record that is not folded yet has been waiting."""
    still: float
    """How long the position has not moved although there were records to fold."""


class Lags:
    """`now` is the lag of each (agent, partition) as of the last observation."""

    def __init__(self) -> None:
        self.now: dict[tuple[str, int], PartitionLag] = {}
        self._ends: dict[int, deque[tuple[float, int]]] = {}
        self._standing: dict[tuple[str, int], tuple[int, float]] = {}
        """By (agent, partition): the next offset, and since when it has been that."""
        self._last = float("-inf")

    def saw(self, at: float, positions: Mapping[str, Mapping[int, int]], ends: Mapping[int, int]) -> None:
        """`positions` are {agent: {partition: next offset}}, `ends` {partition: offset after the last record}, read after them."""
        self.now = dict.fromkeys(self.now, PartitionLag(0, 0.0, 0.0))  # stays for retired agents
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

    def _saw(self, at: float, where: tuple[str, int], next_offset: int, end: int) -> None:
        """`where` is (agent, partition)."""
        standing = self._standing.get(where)
        if standing is None or next_offset != standing[0] or next_offset >= end:
            standing = self._standing[where] = next_offset, at
        if next_offset >= end:
            self.now[where] = PartitionLag(0, 0.0, 0.0)
            return
        since = next(seen for seen, known in self._ends[where[1]] if known > next_offset)
        self.now[where] = PartitionLag(end - next_offset, at - since, at - standing[1])

    def _forget(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        for partition, seen in self._ends.items():
            slowest = min((offsets.get(partition, 0) for offsets in positions.values()), default=0)
            while len(seen) > 1 and seen[0][1] <= slowest:
                seen.popleft()
            if len(seen) > KEPT:
                self._ends[partition] = deque([*list(seen)[:-1:2], seen[-1]])
        self._standing = {where: standing for where, standing in self._standing.items() if where[0] in positions}


VIEWS = f"""
select l.view,
       (select count(*) from (
         select from parked p where p.table_name = l.table_name order by stream limit {MOST_PARKED}) p) as streams,
       (select 'new-database' from activations where number = 1 and posts_from is null and '{POLICY}' || policy = l.view) as stopped
  from {LIVE} l union all select view, 0, code from {STOPPED} s
"""  # noqa: S608
"""How many streams a live view, or a policy, leaves out, up to MOST_PARKED; and the code of the reason why it is stopped."""
WISHES = ("command", "timer", "post")
"""The kinds of wishes."""
_WAITING = ", ".join(
    f"coalesce(extract(epoch from now() - min(since) filter (where waits and kind = '{kind}')), 0)::float"
    for kind in WISHES
)
OUTBOX = f"""
select a.policy, count(w.policy) filter (where dead is null), count(dead), {_WAITING}
  from (select distinct policy from activations) a left join (
    select policy, dead, case when due is null then 'command' else 'timer' end as kind, greatest(due, wished_at) as since,
           sent_at is null and dead is null and (due is null or due <= now()) as waits
      from outbox where kind = 'send' or dead is not null
     union all select policy, dead, 'post', wished_at, dead is null from posts) w on w.policy = a.policy group by a.policy
"""  # noqa: S608
"""By policy: open wishes, dead letters, and for how many seconds the oldest due wish of each kind has not been sent."""


STUCK = f"""
select policy, count(stream) from (select distinct policy from activations) a left join (
  select policy, stream from outbox where dead is not null
   union select policy, stream from posts where dead is not null
   union select substr(view, {len(POLICY) + 1}), stream from parked where starts_with(view, '{POLICY}')) s
 using (policy) group by policy
"""  # noqa: S608
"""How many processes of a policy are stuck. Indexes have the dead letters: what else waits costs nothing."""


def tell_outbox(found: Iterable[tuple[Any, ...]]) -> None:
    """Set the metrics of the outbox from the rows of `OUTBOX`."""
    for policy, wishes, dead, *waiting in found:
        metrics.OUTBOX_OPEN.labels(policy).set(wishes)
        metrics.OUTBOX_DEAD.labels(policy).set(dead)
        for kind, seconds in zip(WISHES, waiting, strict=True):
            metrics.OUTBOX_UNSENT_SECONDS.labels(policy, kind).set(max(seconds, 0))


def tell_lags(lags: Mapping[tuple[str, int], PartitionLag], views: Iterable[tuple[str, int, str | None]]) -> None:
    """Set the metrics: the lag of each (agent, partition), and what each view or policy leaves out, from the rows of `VIEWS`."""
    for (agent, partition), lag in lags.items():
        metrics.LAG_EVENTS.labels(agent, str(partition)).set(lag.records)
        metrics.LAG_SECONDS.labels(agent, str(partition)).set(lag.seconds)
        metrics.LAG_STILL_SECONDS.labels(agent, str(partition)).set(lag.still)
    known = {view: (streams, stopped) for view, streams, stopped in views}
    for gauge in (metrics.PARKED_STREAMS, metrics.VIEW_STOPPED):
        for gone in {one.labels["view"] for metric in gauge.collect() for one in metric.samples} - known.keys():
            gauge.remove(gone)
    for view, (streams, stopped) in known.items():
        metrics.PARKED_STREAMS.labels(view).set(streams)
        metrics.VIEW_STOPPED.labels(view).set(stopped is not None)


def standing_still(lags: Mapping[tuple[str, int], PartitionLag], longest_s: float) -> dict[str, str]:
    """By agent, where it has been for longest without a move although there were records, if for longer than this."""
    still = sorted((one for one in lags.items() if one[1].still > longest_s), key=lambda one: one[1].still)
    return {
        who: f"partition {at} has not moved for {lag.still:.0f} s, {lag.records} records behind"
        for (who, at), lag in still
    }
