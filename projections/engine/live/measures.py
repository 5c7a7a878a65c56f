"""What an agent's batches amount to and how far it is behind, for its metrics: told once a batch, and once a look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from infra.log.rule import Void
from infra.observability import metrics
from projections.engine.live.lag import PartitionLag
from projections.engine.store.commit import BatchResult, Fate


def tell_lags(lags: Mapping[tuple[str, int], PartitionLag], parked: Mapping[str, int]) -> None:
    """The lag of each (agent, partition), and the number of parked streams of each live view."""
    for (agent, partition), lag in lags.items():
        metrics.LAG_EVENTS.labels(agent, str(partition)).set(lag.records)
        metrics.LAG_SECONDS.labels(agent, str(partition)).set(lag.seconds)
    for view, streams in parked.items():
        metrics.PARKED_STREAMS.labels(view).set(streams)


class Measures:
    """Of one agent's batches, which several threads may apply."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._fates = {fate: metrics.AGENT_BATCHES.labels(agent, fate) for fate in Fate}
        self._batch_commits = metrics.AGENT_BATCH_COMMITS.labels(agent)
        self._batch_seconds = metrics.AGENT_BATCH_SECONDS.labels(agent)
        self._commits = metrics.AGENT_COMMITS.labels(agent)
        self._events = metrics.AGENT_EVENTS.labels(agent)
        self._rows = metrics.AGENT_ROWS.labels(agent)

    def fate(self, fate: Fate) -> None:
        self._fates[fate].inc()

    def applied(self, result: BatchResult, commits: int, seconds: float) -> None:
        """A batch's transaction has committed."""
        self._batch_commits.observe(commits)
        self._batch_seconds.observe(seconds)
        self._commits.inc(commits)
        self._events.inc(result.events)
        self._rows.inc(result.rows)
        for why in result.retries:
            metrics.AGENT_RETRIES.labels(self._agent, why).inc()
        for one in result.parked:
            metrics.AGENT_PARKED.labels(self._agent, one.view).inc()

    def void(self, voids: Iterable[Sequence[Void]]) -> None:
        """Records without any effect, that the position has passed."""
        for void in filter(None, voids):
            for why, count in Counter(one.reason for one in void).items():
                metrics.AGENT_VOID.labels(self._agent, why).inc(count)
