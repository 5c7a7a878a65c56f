"""The read side's promises, over every schedule of small worlds; and each guarantee switched off, which must be noticed."""

from __future__ import annotations

import pytest

from tests.model_read.explore import exhaust
from tests.model_read.mutants import MUTANTS
from tests.model_read.scenarios import SCENARIOS


def test_two_agents_that_both_own_a_partition_fold_each_event_once() -> None:
    found = exhaust(SCENARIOS["two agents"])
    assert found.broken is None
    assert found.complete
    assert found.schedules > 500


@pytest.mark.parametrize("name", MUTANTS)
def test_without_a_guarantee_a_promise_is_broken(name: str) -> None:
    mutant = MUTANTS[name]
    assert exhaust(SCENARIOS[mutant.scenario], mutant.switch_off, seconds=20).broken is not None
