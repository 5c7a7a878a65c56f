"""make test + test-all + prove: the smallest worlds take seconds, larger ones minutes. No promise of docs/protocol.md is broken in
any state of small worlds, nor by chance in larger ones; without rule 6, writers fence each other for ever."""

from copy import deepcopy
from random import Random

import pytest

from proofs.explore import explore
from proofs.model.checks import MUTANTS, ONE, SMALL, TWO
from proofs.model.clone import fingerprint
from proofs.model.liveness import all_runs, fair_rounds
from proofs.model.setting import APPEND_FAULTS, Bounds, Setting
from proofs.model.world import World

SMALLEST = ("one writer, any fault", "two writers, no room", "a switch")
LARGEST = ("one writer, any two faults", "two writers, no fault, slow answers", "two writers, no fault")
"""The last one's states are all visited below too."""


def ring(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in SMALLEST else [pytest.mark.prove(part="models") if name in LARGEST else pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=ring(name)) for name in SMALL])
def test_every_state_keeps_every_promise(name: str) -> None:
    explored = explore(name, World(Setting(SMALL[name])), settle_every=10)
    print(f"{name}: {explored}")
    assert explored.complete
    assert explored.settled > 0


# ── rule 6 ──


@pytest.mark.prove(part="models")
def test_every_run_without_faults_ends_with_every_command_answered() -> None:
    graph = all_runs(Bounds(TWO, births=2, faults=0))
    assert graph.in_vain == 0
    assert graph.openings <= 5  # each writer's first, and those that the group confirmed


def test_a_run_that_ends_in_vain_is_noticed() -> None:
    bounds = Bounds(ONE, births=2, faults=0)
    assert all_runs(bounds).in_vain == 0
    with MUTANTS["resume after what counts, not from the group's offset"].in_force():
        assert all_runs(bounds, alike=False).in_vain > 0


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.prove(part="models"))])
def test_no_round_in_which_everyone_acts_is_in_vain_from_any_state(every: int) -> None:
    world = World(Setting(Bounds(ONE, births=2, openings=3, faults=0, prompt=False)))
    explored = explore("rule 6", world, settle_every=every, settle=fair_rounds)
    assert explored.complete
    assert explored.settled == explored.states // every > 0


# ── what a search rests on: copies that are complete, prints that tell states apart ──

SETTING = Setting(Bounds(TWO, births=2, openings=3, faults=2, kinds=APPEND_FAULTS))


def worlds(seed: int) -> list[World]:
    """Of one way, each made from the one before."""
    random = Random(seed)
    found = [World(SETTING)]
    while len(found) < 60 and (choices := found[-1].choices()):
        found.append(found[-1].after(random.choice(choices)))
    return found


def prints(world: World) -> list[object]:
    return [fingerprint(deepcopy(handler.writer)) for handler in world.handlers.values()]


def test_what_comes_after_a_world_leaves_it_as_it_was() -> None:
    changed = 0
    for world in [world for seed in range(10) for world in worlds(seed)]:
        before = prints(world)
        for choice in world.choices():
            changed += prints(world.after(choice)) != before
            assert prints(world) == before
    assert changed > 0


def test_worlds_of_one_print_have_the_same_choices() -> None:
    # names tell appends apart that are alike in everything else: so kinds, not numbers
    kinds = {
        (world.print(), frozenset(choice.split()[0] for choice in world.choices()))
        for seed in range(300)
        for world in worlds(seed)
    }
    assert len({number for number, _ in kinds}) == len(kinds) > 1_000
