"""Worlds that are values, of which all states are visited, or a way through them by chance."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol, Self, TypeVar

from proofs.checker import Found, Violation, smallest


class World(Protocol):
    """What may happen next is a list of choices, each a few words, and after one there is another world."""

    def choices(self) -> list[str]: ...

    def print(self) -> object:
        """Hashable; equal for worlds with the same future."""

    def after(self, choice: str) -> Self:
        """Raises Violation."""

    def settle(self) -> object:
        """Whether all ends well once nothing goes wrong any more: this world stays as it is. Raises Violation."""


W = TypeVar("W", bound=World)


@dataclass
class Explored:
    states: int = 0
    transitions: int = 0
    settled: int = 0
    complete: bool = False
    """Every reachable state was visited."""

    def __str__(self) -> str:
        whole = " (all)" if self.complete else ""
        return f"{self.states:,} states{whole}, {self.transitions:,} transitions, {self.settled:,} settled"


Path = tuple["Path | None", str]
"""How a state was reached: the path before, and the last choice."""


def explore(
    name: str,
    first: W,
    *,
    settle_every: int = 0,
    shortest: bool = False,
    seconds: float = float("inf"),
    passes_over: Callable[[Violation], bool] = lambda _violation: False,
    settle: Callable[[W], object] = lambda world: world.settle(),
) -> Explored:
    """Visit every state, or as many as `seconds` allow; promises are checked in all of them, and from every so-manieth
    (`settle_every`) all must end well. `shortest`: breadth first, so that what is found is as short as any; else depth first, in
    little memory. What `passes_over` holds of ends a path, not the search. Raises Found.
    """
    explored = Explored()
    deadline = time.monotonic() + seconds
    seen = {first.print()}
    frontier: deque[tuple[W, Path | None]] = deque([(first, None)])
    take = frontier.popleft if shortest else frontier.pop
    while frontier:
        world, path = take()
        explored.states += 1
        if not explored.states % 256 and time.monotonic() > deadline:
            return explored
        if settle_every and explored.states % settle_every == 0:
            explored.settled += 1
            try:
                settle(world)
            except Violation as violation:
                if not passes_over(violation):
                    raise Found(name, violation, _choices(path)) from violation
        for choice in world.choices():
            explored.transitions += 1
            try:
                after = world.after(choice)
            except Violation as violation:
                if not passes_over(violation):
                    raise Found(name, violation, _choices((path, choice))) from violation
                continue
            number = after.print()
            if number not in seen:
                seen.add(number)
                frontier.append((after, (path, choice)))
    explored.complete = True
    return explored


def _choices(path: Path | None) -> list[str]:
    choices = []
    while path is not None:
        path, choice = path
        choices.append(choice)
    return choices[::-1]


def walk(name: str, first: W, random: Random, steps: int, weight: Callable[[str], float] = lambda _choice: 1) -> None:
    """A way by chance, to where all must end well. Raises Found, with as few choices as do."""
    choices: list[str] = []
    world = first
    try:
        while len(choices) < steps and (some := world.choices()):
            choices += random.choices(some, [weight(choice) for choice in some])
            world = world.after(choices[-1])
        world.settle()
    except Violation as violation:
        raise smallest(name, violation, choices, lambda fewer: retraced(first, fewer)) from violation


def retraced(
    world: W, choices: Iterable[str], settle: Callable[[W], object] = lambda world: world.settle()
) -> Violation | None:
    """What these choices break, or the end after them; those that can't be made are left out."""
    try:
        for choice in choices:
            if choice in world.choices():
                world = world.after(choice)
        settle(world)
    except Violation as violation:
        return violation
    return None
