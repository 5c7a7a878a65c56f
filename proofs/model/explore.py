"""Every state of a small world, each visited once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from proofs.model.history import Violation
from proofs.model.setting import Bounds, Parts, Setting
from proofs.model.settle import settle
from proofs.model.world import Choice, World

Path = tuple["Path | None", Choice | None]
"""How a state was reached: the path before, and the last choice."""


@dataclass
class Explored:
    """What a search has seen."""

    states: int = 0
    transitions: int = 0
    settled: int = 0
    """States from which the faults stopped and everything was answered (promise F)."""
    seconds: float = 0.0
    """Of this process, on the processor."""
    complete: bool = False
    """Every reachable state within the bounds was visited."""


@dataclass
class Found(Exception):
    """A promise is broken after these choices; `settled` if only once the faults had stopped."""

    violation: Violation
    trace: list[Choice]
    settled: bool
    states: int
    """Visited before it was found."""

    def __str__(self) -> str:
        return "\n".join([str(self.violation), *(" ".join(choice) for choice in self.trace)])


def explore(
    bounds: Bounds,
    parts: Parts | None = None,
    *,
    settle_every: int = 0,
    shortest: bool = False,
    seconds: float = float("inf"),
    only: str = "",
    at_last: Callable[[World], object] = settle,
    progress: Callable[[Explored], None] | None = None,
) -> Explored:
    """Visit every state within the bounds, or as many as `seconds` allow; promises are checked in all of them.

    `settle_every`: promise F is checked from every so-manieth state. `at_last`: how the faults end then. `shortest`: breadth first,
    so that a trace is as short as any; else depth first, in little memory. `only`: a violation of another promise ends that path,
    not the search. Raises Found.
    """
    setting = Setting(bounds, parts, only)
    explored = Explored()
    begin, deadline = time.process_time(), time.monotonic() + seconds
    with setting.parts.in_force():
        first = World(setting)
        seen = {first.print()}
        frontier: deque[tuple[World, Path]] = deque([(first, (None, None))])
        take = frontier.popleft if shortest else frontier.pop
        while frontier:
            world, path = take()
            explored.states += 1
            if settle_every and explored.states % settle_every == 0:
                explored.settled += 1
                try:
                    at_last(world)
                except Violation as violation:
                    if not only or violation.promise == only:
                        raise Found(violation, trace(path), settled=True, states=explored.states) from violation
            if not explored.states % 256:
                explored.seconds = time.process_time() - begin
                if progress and not explored.states % 16384:
                    progress(explored)
                if time.monotonic() > deadline:
                    return explored
            for choice in world.choices():
                explored.transitions += 1
                try:
                    after = world.after(choice)
                except Violation as violation:
                    if not only or violation.promise == only:
                        raise Found(
                            violation, trace((path, choice)), settled=False, states=explored.states
                        ) from violation
                    continue
                number = after.print()
                if number not in seen:
                    seen.add(number)
                    frontier.append((after, (path, choice)))
    explored.seconds = time.process_time() - begin
    explored.complete = True
    return explored


def trace(path: Path) -> list[Choice]:
    choices = []
    while path[0] is not None and path[1] is not None:
        choices.append(path[1])
        path = path[0]
    return choices[::-1]
