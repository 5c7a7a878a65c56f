"""Rule 6 as a matter of time: can live writers fence each other for ever, although nothing goes wrong any more?

With the rule there are finitely many states, however often writers may open, and from each an answer to every command can be
reached. Without it there is a round in which everyone acts, and which may be repeated for ever in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from proofs.checker import Violation
from proofs.model.setting import Bounds, Setting
from proofs.model.world import AGENT, APPENDS, World

UNLIMITED = 10**9


@dataclass
class Graph:
    """All states without faults, openings without bound."""

    states: int
    openings: int
    """The most that any run needs."""
    in_vain: int
    """States from which no step leads to all answers any more: a run that gets there goes on for ever."""


def all_runs(bounds: Bounds, *, alike: bool = True) -> Graph:
    """Where can a run end up that takes, at last, every step that is possible again and again?"""
    first = World(Setting(bounds, alike=alike))
    first.openings = UNLIMITED
    numbers = {first.print(): 0}
    before: list[set[int]] = [set()]
    queue = [first]
    for number, world in enumerate(queue):
        for choice in world.choices():
            after = world.after(choice)
            then = numbers.setdefault(after.print(), len(queue))
            if then == len(queue):
                queue.append(after)
                before.append(set())
            before[then].add(number)
    # what was answered stays so
    reach = {number for number, world in enumerate(queue) if world.answered}
    todo = [*reach]
    for number in todo:
        todo += before[number] - reach
        reach |= before[number]
    return Graph(len(queue), UNLIMITED - min(world.openings for world in queue), len(queue) - len(reach))


def fair_rounds(world: World) -> None:
    """Every order in which everyone may act, round after round. Raises Violation for one that goes on in vain."""
    for order in permutations((*world.handlers, APPENDS, AGENT)):
        try:
            world.settle(order, "6")
        except Violation as violation:
            violation.add_note(f"in this order: {', '.join(order)}")
            raise
