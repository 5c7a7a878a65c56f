"""Rule 6 as a matter of time: can live writers fence each other for ever, although nothing goes wrong any more?

With the rule there are finitely many states, however often writers may open, and all that is left at last are states in which every
command has its answer. Without it there is a round in which everyone acts, and which may be repeated for ever in vain.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import permutations

from proofs.model.history import Violation
from proofs.model.setting import Bounds, Parts, Setting
from proofs.model.settle import AGENT, APPENDS, settle
from proofs.model.world import World

UNLIMITED = 10**9


@dataclass
class Graph:
    """All states without faults, openings without bound."""

    states: int
    seconds: float
    openings: int
    """The most that any run needs."""
    ends: int
    """Sets of states that, once entered, are never left."""
    unanswered_ends: int
    """Those of them in which a command has no answer: a run that is caught there goes on in vain for ever."""


def all_runs(bounds: Bounds, parts: Parts | None = None) -> Graph:
    """Where can a run end up that takes, at last, every step that is possible again and again?"""
    setting = Setting(bounds, parts)
    begin = time.process_time()
    with setting.parts.in_force():
        first = World(setting)
        first.openings = UNLIMITED
        numbers = {first.print(): 0}
        answered = [first.answered]
        after: list[list[int]] = []
        fewest = UNLIMITED
        queue = [first]
        for world in queue:
            found: set[int] = set()
            for choice in world.choices():
                then = world.after(choice)
                number = numbers.setdefault(then.print(), len(numbers))
                if number == len(answered):
                    answered.append(then.answered)
                    queue.append(then)
                found.add(number)
            after.append(sorted(found))
            fewest = min(fewest, world.openings)
    ends = [part for part in components(after) if all(then in part for state in part for then in after[state])]
    in_vain = [end for end in ends if not all(answered[state] for state in end)]
    return Graph(len(queue), time.process_time() - begin, UNLIMITED - fewest, len(ends), len(in_vain))


def components(after: list[list[int]]) -> list[set[int]]:
    """The strongly connected components of a graph, by Tarjan's algorithm without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[set[int]] = []
    for root in range(len(after)):
        if root in index:
            continue
        work = [(root, 0)]
        while work:
            node, child = work.pop()
            if child == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            for position in range(child, len(after[node])):
                then = after[node][position]
                if then not in index:
                    work += [(node, position + 1), (then, 0)]
                    break
                if then in on_stack:
                    low[node] = min(low[node], index[then])
            else:
                if low[node] == index[node]:
                    cut = stack.index(node)
                    found.append(set(stack[cut:]))
                    on_stack -= found[-1]
                    del stack[cut:]
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
    return found


def fair_rounds(world: World) -> None:
    """Every order in which everyone may act, round after round. Raises Violation for one that goes on in vain."""
    for order in permutations((*world.handlers, APPENDS, AGENT)):
        try:
            settle(world, order, "6")
        except Violation as violation:
            violation.add_note(f"in this order: {', '.join(order)}")
            raise
