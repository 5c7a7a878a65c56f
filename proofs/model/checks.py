"""The worlds that are searched exhaustively or walked through by chance, and those that mutants break (`mutants.txt`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from proofs.checker import Checker, Found, Mutant, Violation, mutants_in
from proofs.explore import explore, retraced, walk
from proofs.model.liveness import fair_rounds
from proofs.model.setting import FAULTS, Bounds, Era, Setting
from proofs.model.world import World

ONE = ("fill 1 a",)
TWO = ("fill 1 a", "spend 1 b")
"""What the second does depends on the first."""
TWICE = ("spend 1 a", "spend 1 a")
"""One refusal, asked for twice."""
THREE = (*TWO, "spend 1 b")
"""The third is the second, sent again."""
REFUSED_TWICE = ("spend 1 a", "fill 1 b", "spend 1 a")
"""The third would be accepted if the first answer were forgotten."""
SWITCH = (Era("g", 1, 1), Era("h", 2, 0))
"""To another version of the write model."""
REPAIR = (Era("g", 1, 1), Era("h", 1, 0))
"""A build whose rows are a cent off is replaced by one of the same version that is right."""
RESTORE = frozenset({"restore"})

SMALL = {
    "one writer, any two faults": Bounds(TWO, births=1, openings=3, faults=2),
    "one writer, any fault": Bounds(THREE, births=1, openings=3, faults=1),
    "one writer, any fault, slow answers, late news": Bounds(
        REFUSED_TWICE, births=1, openings=2, faults=1, split=True, prompt=False
    ),
    "two writers, no fault": Bounds(TWO, births=2, openings=4, faults=0),
    "two writers, no fault, slow answers": Bounds(TWO, births=2, openings=2, faults=0, split=True),
    "two writers, any fault": Bounds(ONE, births=2, openings=2, faults=1),
    "two writers, a restore": Bounds(TWICE, births=2, openings=2, faults=1, kinds=RESTORE),
    "two writers, late news": Bounds(ONE, births=2, openings=3, faults=1, kinds=frozenset({"late"}), prompt=False),
    "two writers, no room": Bounds(TWO, births=2, openings=3, faults=0, run_ahead=1),
    "a switch": Bounds(("fill 1 a", "spend 2 b"), births=2, openings=3, faults=0, eras=SWITCH, prologue=1),
    "a repair and a restore": Bounds(
        ("fill 1 a", "fill 1 b", "spend 3 c"), births=1, openings=3, faults=1, eras=REPAIR, prologue=1
    ),
}
LARGE = {
    f"{births} writers, any {faults} faults, {openings} openings: {', '.join(commands)}": Bounds(
        commands, births, openings, faults, split=faults > 1
    )
    for births, faults in ((1, 3), (2, 1), (2, 2), (3, 0), (3, 1))
    for openings in (3, 4)
    for commands in (ONE, TWICE, TWO, THREE, REFUSED_TWICE)
}
STEPS = 150
"""Of a walk, before the faults stop."""
WEIGHTS = {"go": 15, "hears": 15, "takes": 15, "lands": 30, "agent": 12} | {
    "born": 1,
    "switch": 0.5,
    "late": 3,
    "restore": 1.5,
    "crash": 0.5,
    "assign": 1,
}
"""How often a walk takes a kind of choice; any other fault 2."""


def _weight(choice: str) -> float:
    return WEIGHTS.get(choice.partition(" ")[0], 2)


def world_of(random: Random) -> World:
    """One with several writers, two purses, repeated ids and decisions that depend on what was decided before."""
    commands = []
    for _ in range(random.randint(4, 8)):
        kind = random.choice(["fill", "spend", "spend"])
        text = f"{kind} {random.randint(1, 3)} c{random.randint(1, 6)} {random.randint(1, 2)}"
        commands.append(text + (f" @{random.randint(0, 2)}" if random.random() < 0.15 else ""))
    bounds = Bounds(
        tuple(commands),
        births=random.randint(2, 6),
        openings=random.randint(6, 16),
        faults=random.randint(0, 12),
        kinds=frozenset(random.sample(sorted(FAULTS), random.randint(1, len(FAULTS)))),
        run_ahead=random.choice([2, 3, 5, 8]),
        batch=3,
        split=random.random() < 0.5,
        prompt=random.random() < 0.3,
    )
    return World(Setting(bounds))


def attack(seconds: float, seed: int) -> str:
    """All worlds for half the time, each as far as its share goes, then walks. Raises Found."""
    end = time.monotonic() + seconds
    worlds = SMALL | LARGE
    for number, (name, bounds) in enumerate(worlds.items()):
        share = (end - seconds / 2 - time.monotonic()) / (len(worlds) - number)
        explored = explore(name, World(Setting(bounds)), settle_every=50, seconds=share)
        print(f"{name}: {explored}", flush=True)
    walks = 0
    while time.monotonic() < end:
        chance = Random(seed + walks)
        walk(f"walk {seed + walks}", world_of(chance), chance, STEPS, _weight)
        walks += 1
    return f"{len(worlds)} worlds and {walks:,} walks from seed {seed}"


# ── mutants ──


def bounds_of(text: str) -> Bounds:
    """Commands | kinds of faults, one of each | more bounds."""
    commands, kinds, more = ([part.strip() for part in text.split("|")] + ["", ""])[:3]
    some = frozenset(kinds.split())
    bounds: dict[str, object] = {"births": 1, "openings": 2}
    for word in more.split():
        name, is_given, number = word.partition("=")
        match name:
            case "switch" | "repair":
                bounds |= {"eras": SWITCH if name == "switch" else REPAIR, "prologue": 1}
            case "late-news":
                bounds["prompt"] = False
            case _:
                bounds[name] = int(number) if is_given else True
    listed = tuple(command.strip() for command in commands.split(","))
    return Bounds(listed, faults=len(some), kinds=some, **bounds)  # type: ignore[arg-type]


def world(mutant: Mutant) -> World:
    """In which it breaks its promise, with all writers as they are now."""
    alike = all(edit.file.startswith("commands/") for edit in mutant.edits)
    return World(Setting(bounds_of(mutant.world), mutant.promise, alike=alike))


EVENTUALLY: dict[str, Callable[[World], object]] = {"F": World.settle, "6": fair_rounds}
"""Promises about what happens at last are broken after the choices, when the faults have stopped."""


def replayed(mutant: Mutant, lacking: bool) -> Violation | None:
    if lacking:
        with mutant.in_force():
            return replayed(mutant, lacking=False)

    def settle(end: World) -> None:
        EVENTUALLY.get(mutant.promise, World.settle)(end)
        end.settle()

    return retraced(world(mutant), mutant.choices, settle)


def find(mutant: Mutant, seconds: float = 60) -> Found | None:
    """Its shortest choices, breadth first."""
    with mutant.in_force():
        try:
            explore(
                mutant.name,
                world(mutant),
                shortest=True,
                passes_over=lambda violation: violation.promise != mutant.promise,
                settle_every=int(mutant.promise in EVENTUALLY),
                settle=EVENTUALLY.get(mutant.promise, World.settle),
                seconds=seconds,
            )
        except Found as found:
            return found
    return None


FILE = Path(__file__).with_name("mutants.txt")
MUTANTS = mutants_in(FILE)
CHECKER = Checker("proofs.model", FILE, replayed, find, attack)
