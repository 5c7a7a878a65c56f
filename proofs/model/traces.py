"""The shortest trace of each mutant (`traces.txt`): replayed in milliseconds, and found again by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from proofs import traces
from proofs.model.explore import Explored, Found, explore
from proofs.model.history import Violation
from proofs.model.liveness import fair_rounds
from proofs.model.mutants import MUTANTS, Mutant
from proofs.model.setting import Bounds, Parts, Setting
from proofs.model.settle import settle
from proofs.model.world import World

FILE = Path(__file__).with_name("traces.txt")

EVENTUALLY: dict[str, Callable[[World], object]] = {"F": settle, "6": fair_rounds}
"""Promises about what happens at last are broken after the trace, when the faults have stopped."""


def search(name: str, seconds: float = 60) -> Found | Explored:
    """A shortest trace of the mutant, breadth first; or what was explored without one."""
    mutant = MUTANTS[name]
    try:
        return explore(
            mutant.bounds,
            mutant.parts(),
            shortest=True,
            only=mutant.promise,
            settle_every=int(mutant.promise in EVENTUALLY),
            at_last=EVENTUALLY.get(mutant.promise, settle),
            seconds=seconds,
        )
    except Found as found:
        return found


def replay(mutant: Mutant, trace: Sequence[str], parts: Parts) -> Violation | None:
    """What this trace breaks in the mutant's world with these parts."""
    return retraced(mutant.bounds, trace, parts, mutant.promise)[0]


def retraced(
    bounds: Bounds, trace: Sequence[str], parts: Parts, promise: str = ""
) -> tuple[Violation | None, list[str]]:
    """What these choices break, and then the end of all faults; and the choices that could be taken.

    With `promise`, other broken rules are passed over.
    """
    taken: list[str] = []
    with parts.in_force():
        world = World(Setting(bounds, parts, promise))
        try:
            for text in trace:
                choice = tuple(text.split())
                if choice in world.choices():
                    taken.append(text)
                    world.do(choice)
            if promise == "6":
                fair_rounds(world)
            settle(world)
        except Violation as violation:
            return violation, taken
    return None, taken


def regenerate() -> None:
    """Search for all traces again and store them. One that is not found in time stays as it was."""
    found = traces.read(FILE)
    for name in MUTANTS:
        one = search(name)
        if isinstance(one, Found):
            found[name] = traces.Trace(str(one.violation), [" ".join(choice) for choice in one.trace])
            print(f"{name}: {len(one.trace)} choices, {one.violation}"[:120], flush=True)
        else:
            print(f"{name}: NOT FOUND in {one}", flush=True)
    traces.write(FILE, found)
