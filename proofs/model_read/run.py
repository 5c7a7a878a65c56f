"""One run of a scenario, with what must hold checked after every commit and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

from infra.errors import SamefoldError
from projections.engine.views.view import View
from proofs.checker import Mutant, Violation
from proofs.model_read.actors import Agent
from proofs.model_read.database import State
from proofs.model_read.oracle import LOST, STOPPED, positions_of
from proofs.model_read.play import Chooser, unexpected
from proofs.model_read.policies import PolicyWorld
from proofs.model_read.scenarios import Scenario
from proofs.model_read.views import code
from proofs.model_read.world import World

_begun: dict[tuple[str, str], list[State]] = {}
"""Where the runs of a scenario begin, so that what happens before them happens once."""


@dataclass(frozen=True)
class Run:
    """What became of one schedule."""

    violation: Violation | None
    choices: list[str]
    story: list[tuple[str, str]]
    commits: int


def run(scenario: Scenario, chooser: Chooser, mutant: Mutant | None = None) -> Run:
    """With the product as the mutant has it. Raises errors of the model itself."""
    world = scenario.kind(scenario.log(), scenario.views(), scenario.faults)
    violation = None
    which = scenario.name, mutant.name if mutant else ""
    with world.around(), mutant.in_force() if mutant else nullcontext():
        if which not in _begun:
            _begun[which] = world.begin(scenario.before)
        world.begin_again(_begun[which])
        for start in scenario.actors:
            start(world)
        try:
            if world.play.run(chooser):
                _check_end(world, scenario)
        except Violation as broken:
            violation = broken
        world.play.over = True
    story = world.play.story
    return Run(violation, [choice for choice, _ in story], story, world.watch.checked)


def _check_end(world: World, scenario: Scenario) -> None:
    """No process ended without a reason; and one more agent, alone, folds the rest. Raises Violation."""
    if isinstance(world, PolicyWorld):
        world.check_policies_end(scenario.may_end)
        return
    for name, error in unexpected(world.play, scenario.may_end):
        if isinstance(error, Violation):
            raise error
        raise Violation(STOPPED, f"{name} ended: {type(error).__name__}: {error}") from error
    live = {row["view"]: row["version"] for row in world.tables["live"]}
    views = next((some for some in _codes() if {n: v.version for n, v in some.items()} == live), None)
    if views is None:
        raise Violation(LOST, f"no code has the set that is live: {live}")
    if not world.restored and any(world.sets[name] == live for name in world.at_end & world.sets.keys()):
        _require_ends(world)
    world.sets["settler"] = live
    try:
        world.alone(lambda: Agent(world, "settler", views, sorted(world.log.records), 100).start())
    except SamefoldError as error:
        raise Violation(STOPPED, f"settling ended: {type(error).__name__}: {error}") from error
    _require_ends(world)
    world.oracle.check(world.tables)


def _require_ends(world: World) -> None:
    at = {partition: reading[0] for partition, reading in positions_of(world.tables).items()}
    if at != world.oracle.ends:
        raise Violation(LOST, f"folded up to {at}, but the log ends at {world.oracle.ends}")


@cache
def _codes() -> list[Mapping[str, View]]:
    return [
        code(version, system=system, more=more)
        for version in (1, 2)
        for system in (True, False)
        for more in (True, False)
    ]
