"""The worlds that are searched exhaustively or walked through by chance, and those that mutants break (`mutants.txt`)."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

from proofs.checker import Checker, Found, Mutant, Violation
from proofs.explore import explore, retraced, walk
from proofs.model_source.world import World


def world_of(topic: str, versions: str, faults: str, *, by_id: bool = False) -> World:
    left = dict.fromkeys(("kill", "copy", "restore", "switch"), 0) | dict.fromkeys(faults.split(), 1)
    return World(tuple(topic.split()), by_id, tuple((int(version), None) for version in versions), tuple(left.items()))


SMALL = {
    "two receivers": world_of("m n", "11", "kill"),
    "a repeated id": world_of("m n m", "11", "kill", by_id=True),
    "a repeated id, an aborted transaction and a restore": world_of(
        "m m x marker", "1", "kill copy restore", by_id=True
    ),
    "a switch": world_of("m n", "112", "kill switch"),
    "a switch and a restore": world_of("m x marker m", "12", "copy restore switch", by_id=True),
}
LARGE = {
    "two receivers and a restore": world_of("m n", "11", "kill copy restore"),
    "a switch, a restore and two messages": world_of("m n", "12", "kill copy restore switch"),
    "a switch, a restore and a repeated id": world_of("m n m", "12", "copy restore switch", by_id=True),
}
FILE = Path(__file__).with_name("mutants.txt")
STEPS = 60
WEIGHTS = {"restore": 0.5, "copy": 0.5, "switch": 0.5}


def _by_chance(random: Random) -> World:
    topic = [*(random.choice("mnopq") for _ in range(random.randint(2, 6))), "x marker"]
    random.shuffle(topic)
    by_id = len({*topic}) < len(topic) or random.random() < 0.5
    faults = "kill copy restore switch"
    return world_of(" ".join(topic), random.choice(["11", "12", "112", "122"]), faults, by_id=by_id)


def attack(seconds: float, seed: int) -> str:
    """Random walks. Raises Found."""
    ends, walks = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        random = Random(f"{seed} {walks}")
        world = _by_chance(random)
        walk(f"a source, {walks}", world, random, STEPS, lambda choice: WEIGHTS.get(choice.partition(" ")[0], 1))
        walks += 1
    return f"{walks:,} walks of a source"


def replayed(mutant: Mutant, lacking: bool) -> Violation | None:
    world = (SMALL | LARGE)[mutant.world]
    if not lacking:
        return retraced(world, mutant.choices)
    with mutant.in_force():
        return retraced(world, mutant.choices)


def find(mutant: Mutant) -> Found | None:
    """As few choices as break it."""
    try:
        with mutant.in_force():
            explore(mutant.world, (SMALL | LARGE)[mutant.world], settle_every=1, shortest=True)
    except Found as found:
        return found
    return None


CHECKER = Checker("proofs.model_source", FILE, replayed, find, attack)
