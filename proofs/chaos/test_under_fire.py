"""make test-all: one fault of each kind is enough to see each promise kept; each point and each way takes minutes.

Real processes, real Kafka, real PostgreSQL, under load: each fault takes effect, and what the judge sees is right all the while.
The long run, in which each point and each way must take effect, is `make prove PART=chaos`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from proofs.chaos import process_faults, wire_faults
from proofs.chaos.field import Field
from proofs.chaos.stumbles import stumble

TRIES = 4
"""A point may be one that a process does not come to this time: the other one has all partitions just now."""

Fault = Callable[[], bool]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _judged(field: Field) -> Iterator[None]:
    snapshots = field.judge.seen.snapshots
    yield
    field.sound()
    assert field.all_violations() == [], field.logs()
    assert field.judge.seen.snapshots > snapshots


def take_effect(field: Field, *lanes: Sequence[Fault]) -> None:
    """The faults of a lane one after the other, the lanes at the same time."""

    def run(lane: Sequence[Fault]) -> None:
        for fault in lane:
            assert any(fault() for _ in range(TRIES)), f"{fault} never took effect"

    try:
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(run, lanes))
    except BaseException:
        print(field.logs())
        raise


def test_killed_frozen_and_cut_off_once(field: Field) -> None:
    (first, second), agent, policies = field.crew.handlers, field.crew.agents[0], field.crew.policies[0]
    kill, freeze = partial(process_faults.kill, field), partial(process_faults.freeze, field)
    take_effect(
        field,
        [partial(kill, first, "commit sent"), partial(freeze, second, "commit sent")],
        [partial(freeze, agent, "batch read"), partial(wire_faults.cut, field, "COMMIT", "answer")],
        [partial(kill, policies, "wish sent")],
        [partial(process_faults.resumed, field)],
        [partial(kill, None, "switch written"), partial(process_faults.rebuilt, field, ["balances"])],
    )


def test_the_broker_stumbles(field: Field) -> None:
    take_effect(field, [partial(stumble, field, "broker", "frozen for 4 s", "send")])
