"""make test: nothing but functions.

How far an agent is behind the log, in records and in seconds, and for how long it has not moved.
"""

from __future__ import annotations

import pickle

from projections.engine.live.lag import GAP_S, KEPT, Lags, PartitionLag


def test_lag_is_counted_from_when_what_waits_was_first_seen() -> None:
    lags = Lags()
    lags.saw(0.0, {"core": {0: 10}}, {0: 10})
    assert lags.now == {("core", 0): PartitionLag(0, 0.0, 0.0)}
    lags.saw(1.0, {"core": {0: 10}}, {0: 12})
    lags.saw(2.0, {"core": {0: 11}}, {0: 20})
    assert lags.now == {("core", 0): PartitionLag(9, 1.0, 0.0)}
    lags.saw(4.0, {"core": {0: 12}}, {0: 20})
    assert lags.now == {("core", 0): PartitionLag(8, 2.0, 0.0)}
    lags.saw(5.0, {"core": {0: 12}, "slow": {}}, {0: 20})
    assert lags.now == {("core", 0): PartitionLag(8, 3.0, 1.0), ("slow", 0): PartitionLag(20, 3.0, 0.0)}
    lags.saw(6.0, {"core": {0: 20}}, {0: 20})  # `slow` is retired
    assert lags.now == dict.fromkeys([("core", 0), ("slow", 0)], PartitionLag(0, 0.0, 0.0))


def test_a_pause_in_looking_is_no_standing_still() -> None:
    lags = Lags()
    lags.saw(0.0, {"core": {0: 1}}, {0: 9})
    lags.saw(1.0, {"core": {0: 1}}, {0: 9})
    assert lags.now["core", 0].still == 1.0
    after = 1.0 + GAP_S + 1
    lags.saw(after, {"core": {0: 1}}, {0: 9})
    assert lags.now["core", 0] == PartitionLag(8, after, 0.0)


def test_a_lag_without_an_end_takes_no_more_and_more_memory() -> None:
    lags = Lags()
    for at in range(5 * KEPT):
        lags.saw(float(at), {"core": {0: 0}}, {0: at + 1})
    assert len(pickle.dumps(lags)) < 50 * KEPT
    assert lags.now["core", 0] == PartitionLag(5 * KEPT, 5 * KEPT - 1, 5 * KEPT - 1)
