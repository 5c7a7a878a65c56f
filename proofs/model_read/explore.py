"""Trying schedules: all with few preemptions, or some at random."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from proofs.checker import Mutant, Violation, smallest
from proofs.model_read.database import State
from proofs.model_read.play import Chooser, Replay
from proofs.model_read.scenarios import Scenario

_begun: dict[tuple[str, str], list[State]] = {}
"""Where the runs of a scenario begin, so that what happens before them happens once."""


class Run(NamedTuple):
    """What became of one schedule."""

    violation: Violation | None
    choices: list[str]
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
                world.check_end(scenario.may_end)
        except Violation as broken:
            violation = broken
        world.play.over = True
    return Run(violation, world.play.choices, world.watch.checked)


class Walk:
    """Chooses at random: either at every step, or (`priorities`) the first actor in a random order goes on until it is made the
    last one, so that others stand still for long (Burckhardt's PCT)."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.priorities: dict[str, float] | None = {} if random.random() < 0.6 else None
        self.calm = random.choice((0.0, 0.5, 0.8, 0.95))
        self.unrest = random.choice((0.01, 0.03, 0.1))

    def choose(self, choices: Sequence[str], last: str, state: Callable[[], object]) -> str:
        actors = [choice for choice in choices if not choice.startswith("!")]
        if len(actors) < len(choices) and (not actors or self.random.random() < 0.04):
            if self.priorities is not None:
                self.priorities.clear()
            return self.random.choice([choice for choice in choices if choice.startswith("!")])
        if self.priorities is None:
            return last if last == actors[0] and self.random.random() < self.calm else self.random.choice(actors)
        for actor in actors:
            self.priorities.setdefault(actor, self.random.random())
        if self.random.random() < self.unrest:
            self.priorities[actors[0]] = min(self.priorities.values()) - 1
        return max(actors, key=self.priorities.__getitem__)


@dataclass
class _Node:
    """A place in the tree of schedules."""

    left: list[str]
    """What is to be tried here, the one that is being tried first."""
    spent: dict[str, int]
    """Preemptions on the way here, and with each choice."""


class Exhaustive:
    """Depth first over all schedules of a scenario, by running it again and again.

    Only those that interrupt an actor that could have gone on at most so many times (`preemptions`). A schedule ends where
    another one has been in the same state with as many preemptions left: what could follow is tried from there.
    """

    def __init__(self, preemptions: int) -> None:
        self.preemptions = preemptions
        self.path: list[_Node] = []
        self.depth = 0
        self.seen: dict[object, int] = {}
        """The fewest preemptions with which each state was reached."""

    def schedules(self) -> Iterator[Exhaustive]:
        """Itself, once for each schedule, to be given to a run."""
        while True:
            self.depth = 0
            yield self
            del self.path[self.depth :]
            while self.path and len(self.path[-1].left) == 1:
                self.path.pop()
            if not self.path:
                return
            self.path[-1].left.pop(0)

    def choose(self, choices: Sequence[str], last: str, state: Callable[[], object]) -> str | None:
        if self.depth == len(self.path):
            before = self.path[-1].spent[self.path[-1].left[0]] if self.path else 0
            here = hash((state(), last))
            if self.seen.get(here, before + 1) <= before:
                return None
            self.seen[here] = before
            spent = {choice: before + _preempts(choice, choices, last) for choice in choices}
            self.path.append(_Node([choice for choice in choices if spent[choice] <= self.preemptions], spent))
        node = self.path[self.depth]
        self.depth += 1
        assert node.left[0] in choices, "the same choices before, and another run"
        return node.left[0]


def _preempts(choice: str, choices: Sequence[str], last: str) -> bool:
    return not choice.startswith("!") and last in choices and choice != last


@dataclass
class Tried:
    """What an exploration came to. `complete` where every schedule within the bounds was tried."""

    schedules: int = 0
    commits: int = 0
    complete: bool = False

    def run(self, scenario: Scenario, chooser: Chooser, mutant: Mutant | None) -> None:
        """Raises Found, with the smallest schedule near this one that breaks the same promise."""
        done = run(scenario, chooser, mutant)
        self.schedules += 1
        self.commits += done.commits
        if done.violation is not None:
            raise smallest(
                scenario.name,
                done.violation,
                done.choices,
                lambda choices: run(scenario, Replay(choices), mutant).violation,
            )


def search(
    scenario: Scenario, mutant: Mutant | None = None, *, preemptions: Iterable[int] = range(5), schedules: int = 10**9
) -> Tried:
    """All schedules with no preemption, then with one, and so on: most that breaks is broken by few (Musuvathi's CHESS).

    So many of them at most. Raises Found.
    """
    tried = Tried()
    for bound in preemptions:
        for schedule in Exhaustive(bound).schedules():
            if tried.schedules >= schedules:
                return tried
            tried.run(scenario, schedule, mutant)
    tried.complete = True
    return tried


def wander(
    scenario: Scenario, seed: int, mutant: Mutant | None = None, *, walks: int = 10**9, seconds: float = 1e9
) -> Tried:
    """Random schedules. Raises Found."""
    tried = Tried()
    ends = time.monotonic() + seconds
    while tried.schedules < walks and time.monotonic() < ends:
        tried.run(scenario, Walk(Random(f"{seed} {scenario.name} {tried.schedules}")), mutant)
    return tried
