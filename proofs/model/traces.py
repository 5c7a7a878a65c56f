"""The shortest trace of each mutant, as a file of choices: replayed in milliseconds, and found again by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from proofs.model.explore import Explored, Found, explore
from proofs.model.history import Violation
from proofs.model.liveness import fair_rounds
from proofs.model.mutants import MUTANTS, Mutant
from proofs.model.setting import Parts, Setting
from proofs.model.settle import settle
from proofs.model.world import Choice, World

FOLDER = Path(__file__).parent / "traces"

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


def replay(mutant: Mutant, trace: Sequence[Choice], parts: Parts) -> Violation | None:
    """What that very trace breaks, and then the end of all faults. What can't happen any more after another course is left out."""
    setting = Setting(mutant.bounds, parts, mutant.promise)
    with parts.in_force():
        world = World(setting)
        try:
            for choice in trace:
                if choice in world.choices():
                    world = world.after(choice)
            if mutant.promise == "6":
                fair_rounds(world)
            settle(world)
        except Violation as violation:
            return violation
    return None


def write(name: str, found: Found) -> None:
    mutant = MUTANTS[name]
    lines = [
        f"# without: {mutant.guarantee}",
        f"# breaks {found.violation}",
        *(["# once the faults have stopped"] if found.settled else []),
        *(" ".join(choice) for choice in found.trace),
    ]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


def stored(name: str) -> list[Choice]:
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    return [tuple(line.split()) for line in lines if not line.startswith("#")]


def regenerate() -> None:
    """Search for all of them anew, and say what was found."""
    for name in MUTANTS:
        found = search(name)
        if isinstance(found, Found):
            write(name, found)
            print(f"{name}: {len(found.trace)} choices, {found.violation}"[:120], flush=True)
        else:
            print(f"{name}: NOT FOUND in {found}", flush=True)
