"""make test-all + prove: one fault of each kind is enough to see each promise kept; each point and each way takes minutes.

Real processes, real Kafka, real PostgreSQL, under load: each fault takes effect, and what the judge sees is right all the while.
The long run is `make prove PART=chaos`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from infra.processes import faultpoints
from proofs.chaos import process_faults, wire_faults
from proofs.chaos.field import Field
from proofs.chaos.stumbles import JOBS, How, Job, shut_down_at_once, stumble, terminate_sessions

TRIES = 4
"""A point may be one that a process does not come to this time: the other one has all partitions just now."""

EACH = pytest.mark.prove(part="chaos")

Fault = Callable[[], bool]
AT_POLICIES: list[faultpoints.Point] = [*faultpoints.RELAY, "rows sent"]


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
            for done in [pool.submit(run, lane) for lane in lanes]:
                done.result()
    except BaseException:
        print(field.logs())
        raise


def cuts(field: Field, whose: wire_faults.Whose) -> list[Fault]:
    return [partial(wire_faults.cut, field, whose, half) for half in wire_faults.HALVES]


@pytest.mark.slow
def test_killed_frozen_and_cut_off_once(field: Field) -> None:
    handler, agent, policies = field.crew.handlers[0], field.crew.agents[0], field.crew.policies[0]
    take_effect(
        field,
        [
            partial(process_faults.kill, field, handler, "commit sent"),
            partial(process_faults.freeze, field, field.crew.handlers[1], "commit sent"),
        ],
        [
            partial(process_faults.freeze, field, agent, "batch read"),
            partial(wire_faults.cut, field, "COMMIT", "answer"),
        ],
        [partial(process_faults.kill, field, policies, "wish sent")],
        [
            partial(process_faults.kill, field, None, "switch written"),
            partial(process_faults.rebuilt, field, ["balances"]),
        ],
    )


@EACH
def test_killed_at_each_point(field: Field) -> None:
    handler, agent = random.choice(field.crew.handlers), random.choice(field.crew.agents)
    take_effect(
        field,
        [partial(process_faults.kill, field, handler, point) for point in faultpoints.HANDLER],
        [partial(process_faults.kill, field, agent, point) for point in faultpoints.AGENT],
        [
            *(partial(process_faults.kill, field, None, point) for point in faultpoints.BUILDER),
            partial(process_faults.rebuilt, field, ["balances", "statement"]),
        ],
    )
    points = (*faultpoints.HANDLER, *faultpoints.AGENT, *faultpoints.BUILDER)
    assert {f"killed: {point}" for point in points} <= field.effects.by_kind.keys()


@EACH
def test_policies_killed_and_frozen_at_each_point(field: Field) -> None:
    first, second = field.crew.policies
    take_effect(
        field,
        [partial(process_faults.kill, field, first, point) for point in AT_POLICIES],
        [partial(process_faults.freeze, field, second, point) for point in AT_POLICIES],
        cuts(field, "wish"),
    )
    assert {f"killed: {point}" for point in faultpoints.RELAY} <= field.effects.by_kind.keys()


@EACH
def test_frozen_past_all_timeouts_at_some_points(field: Field) -> None:
    """At half of them, others each time."""
    handlers, agents = random.sample(faultpoints.HANDLER, 4), random.sample(faultpoints.AGENT, 4)
    take_effect(
        field,
        [partial(process_faults.freeze, field, random.choice(field.crew.handlers), point) for point in handlers],
        [partial(process_faults.freeze, field, random.choice(field.crew.agents), point) for point in agents],
        [partial(process_faults.freeze, field, None, point) for point in random.sample(faultpoints.BUILDER, 3)],
    )


@EACH
def test_requests_and_answers_held_and_cut_on_the_wire(field: Field) -> None:
    take_effect(
        field,
        [
            partial(wire_faults.produce_answer_held, field),
            partial(wire_faults.produce_request_held, field),
            *cuts(field, "produce"),
        ],
        [partial(wire_faults.commit_held, field), *cuts(field, "COMMIT")],
        cuts(field, "switch COMMIT"),
    )


@EACH
def test_agents_that_come_and_go(field: Field) -> None:
    take_effect(
        field,
        [partial(process_faults.rebalance, field, 2)],
        [partial(process_faults.freeze, field, random.choice(field.crew.handlers))],
    )


def others() -> list[tuple[How, Job]]:
    """Two ways and one more, while other commands of the command line run."""
    how: How = random.choice(("frozen for 20 s", "stopped for 5 s", "restarted"))
    return list(zip(("frozen for 4 s", "killed", how), random.sample(JOBS, 3), strict=True))


@EACH
def test_the_database_stumbles(field: Field) -> None:
    stumbles = [partial(stumble, field, "database", how, job) for how, job in others()]
    take_effect(field, [*stumbles, *(partial(one, field) for one in (terminate_sessions, shut_down_at_once))])


@pytest.mark.slow
def test_the_broker_stumbles(field: Field) -> None:
    take_effect(field, [partial(stumble, field, "broker", "frozen for 4 s", "send")])


@EACH
def test_the_broker_stumbles_in_other_ways(field: Field) -> None:
    take_effect(field, [partial(stumble, field, "broker", how, job) for how, job in others()])
