"""make test + test-all + prove: the reader alone takes seconds; of schedules on PostgreSQL, 0.1 s each, there are thousands.
The read side's promises over the schedules of small worlds."""

from __future__ import annotations

import pytest

from proofs.explore import explore
from proofs.model_read.explore import search, wander
from proofs.model_read.reader_world import ReaderWorld, log_with_holes, short_log
from proofs.model_read.scenarios import SCENARIOS

pytestmark = pytest.mark.usefixtures("model_database")

ANY_NUMBER = 10**6


@pytest.mark.parametrize(
    ("preemptions", "least"),
    [
        pytest.param(1, 30, marks=pytest.mark.slow),
        pytest.param(ANY_NUMBER, 400, marks=pytest.mark.prove(part="models")),
    ],
)
def test_two_agents_that_both_own_a_partition_in_every_schedule(preemptions: int, least: int) -> None:
    tried = search(SCENARIOS["two agents"], preemptions=[preemptions])
    assert tried.complete
    assert tried.schedules > least


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_some_schedules_of_each_scenario(name: str) -> None:
    assert wander(SCENARIOS[name], 1, walks=3).commits > 0


@pytest.mark.parametrize(
    ("faults", "least"),
    [
        ({"lose": 1, "twice": 1, "other": 1, "restore": 1}, 800),
        ({"assign": 1, "unknown": 1, "unapplied": 1}, 1_200),
        ({"revoke": 1, "assign": 1, "restore": 1}, 1_300),
        ({"away": 1, "unknown": 1, "unapplied": 1, "other": 1}, 550),
        ({"set": 2, "other": 1, "unknown": 1}, 400),
    ],
    ids=str,
)
def test_the_reader_in_everything_that_can_happen(faults: dict[str, int], least: int) -> None:
    explored = explore("a reader", ReaderWorld(short_log(), faults), settle_every=7)
    assert explored.complete
    assert explored.states > least


def test_the_reader_of_a_log_with_holes() -> None:
    assert explore("a reader", ReaderWorld(log_with_holes(), {"lose": 1}), settle_every=7).states > 1_300
