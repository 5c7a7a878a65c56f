"""Rule 6: without faults every run ends, however often writers may open; without the rule two fence each other for ever."""

import pytest

from proofs.model.explore import Found, explore
from proofs.model.lacking import ResumesFromTheGroup
from proofs.model.liveness import all_runs, components, fair_rounds
from proofs.model.setting import Bounds, Parts
from tests.engine.commands.mutants import OpensUnasked

# seconds of the processor, however many others want it
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO_WRITERS = Bounds(("fill 1 a", "spend 1 b"), births=2, faults=0)


def test_every_run_without_faults_ends_with_every_command_answered() -> None:
    graph = all_runs(TWO_WRITERS)
    assert graph.ends > 0
    assert graph.unanswered_ends == 0
    assert graph.openings <= 5  # each writer's first, and those after a doubt that the group confirmed


def test_a_run_that_ends_in_vain_is_noticed() -> None:
    one_command = Bounds(("fill 1 a",), births=2, faults=0)
    assert all_runs(one_command).unanswered_ends == 0
    assert all_runs(one_command, Parts(handler=ResumesFromTheGroup)).unanswered_ends > 0


def test_no_round_in_which_everyone_acts_is_in_vain_from_any_state() -> None:
    world = Bounds(("fill 1 a",), births=2, openings=4, faults=0, prompt=False)
    explored = explore(world, settle_every=1, at_last=fair_rounds)
    assert explored.complete
    assert explored.settled == explored.states


def test_writers_that_open_unasked_fence_each_other_for_ever() -> None:
    world = Bounds(("fill 1 a",), births=2, faults=0, prompt=False)
    with pytest.raises(Found, match=r"^6: "):
        explore(world, Parts(writer=OpensUnasked), settle_every=1, at_last=fair_rounds, shortest=True, seconds=30)


def test_components_are_found() -> None:
    # 0 → 1 ⇄ 2 → 3, 3 → 3; and 4 → 0
    assert sorted(map(sorted, components([[1], [2], [1, 3], [3], [0]]))) == [[0], [1, 2], [3], [4]]
