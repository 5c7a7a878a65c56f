"""How the scenarios are attacked, and their mutants (`mutants.txt`)."""

from __future__ import annotations

import time
from itertools import cycle
from pathlib import Path
from random import Random

from proofs.checker import Checker, Found, Mutant, Violation
from proofs.explore import retraced, walk
from proofs.model_read.explore import run, search, wander
from proofs.model_read.play import Replay
from proofs.model_read.reader_world import FAULTS, ReaderWorld, log_with_holes, reader_of
from proofs.model_read.scenarios import SCENARIOS

TURN_S = 5.0
"""For one scenario."""
SYSTEMATIC = 40
"""So many schedules are tried in order before they are tried by chance."""
WALKS = 600
READER_STEPS = 80
FILE = Path(__file__).with_name("mutants.txt")


def a_reader() -> ReaderWorld:
    """In which each mutant of the reader breaks its promise."""
    return ReaderWorld(log_with_holes(), dict.fromkeys(FAULTS, 2) | {"lose": 1})


def read_by_chance(seed: str, walks: int) -> None:
    """The agent's `Reader` alone. Raises Found."""
    for number in range(walks):
        random = Random(f"{seed} {number}")
        walk(f"a reader, {number}", reader_of(random), random, random.randrange(READER_STEPS))


def attack(seconds: float, seed: int) -> str:
    """Random schedules of all scenarios in turn, and random walks of a reader. Raises Found."""
    ends = time.monotonic() + seconds
    schedules = commits = readers = 0
    for number, scenario in enumerate(cycle(SCENARIOS.values())):
        if (left := ends - time.monotonic()) <= 0:
            break
        tried = wander(scenario, seed + number, seconds=min(TURN_S, left, seconds / len(SCENARIOS)))
        schedules, commits, readers = schedules + tried.schedules, commits + tried.commits, readers + 300
        read_by_chance(f"{seed} {number}", 300)
        print(f"{scenario.name}: {tried.schedules} schedules, {tried.commits} states checked", flush=True)
    return f"{schedules} schedules of {len(SCENARIOS)} scenarios, {commits} states checked, {readers} walks of a reader"


def replayed(mutant: Mutant, lacking: bool) -> Violation | None:
    if scenario := SCENARIOS.get(mutant.world):
        return run(scenario, Replay(mutant.choices), mutant if lacking else None).violation
    if lacking:
        with mutant.in_force():
            return retraced(a_reader(), mutant.choices)
    return retraced(a_reader(), mutant.choices)


def find(mutant: Mutant) -> Found | None:
    """With few preemptions first, then by chance."""
    try:
        if scenario := SCENARIOS.get(mutant.world):
            search(scenario, mutant, schedules=SYSTEMATIC)
            wander(scenario, 1, mutant, walks=WALKS)
        else:
            with mutant.in_force():
                for number in range(10_000):
                    walk(mutant.world, a_reader(), Random(number), READER_STEPS)
    except Found as found:
        return found
    return None


CHECKER = Checker("proofs.model_read", FILE, replayed, find, attack)
