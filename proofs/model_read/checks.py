"""How the scenarios are attacked, and their mutants (`mutants.txt`)."""

from __future__ import annotations

import time
from itertools import cycle
from pathlib import Path
from random import Random

from proofs.checker import Checker, Found, Mutant, Violation, mutants_in
from proofs.explore import retraced, walk
from proofs.model_read.explore import run, search, wander
from proofs.model_read.oracle import LOST, POSITIONS, READER, ROWS, SET, STOPPED
from proofs.model_read.play import Replay
from proofs.model_read.policy_oracle import COPY, ONCE, ORDER, OUTBOX
from proofs.model_read.reader_world import FAULTS, RECORDS, ReaderWorld, log_with_holes, reader_of
from proofs.model_read.scenarios import SCENARIOS

TURN_S = 5.0
"""For one scenario."""
SYSTEMATIC = 40
"""So many schedules are tried in order before they are tried by chance."""
WALKS = 600
READER_STEPS = 80
PROMISES = {
    ROWS: "each commit: each table that is live, ready or old, and each loaded part",
    POSITIONS: "each commit (but for a restore); they are readings of the log",
    SET: "each commit of an agent that moves positions",
    READER: "each answer, by the API's statement and by the SQL view for people",
    LOST: "agents that believe to be at the end; one more alone, and then all tables",
    STOPPED: "each process's end",
    OUTBOX: "each commit, but for marks of the relay",
    COPY: "each commit: each activation that is said to be in the topic is there, as it is",
    ONCE: "the end: each wish as the version in force means it, and the follow-up of its outcome",
    ORDER: "the end: first appearances of commands are in the order of their events",
    RECORDS: "what passes the compare-and-set is all that the log holds there; the end, once faults stop",
}
FILE = Path(__file__).with_name("mutants.txt")
MUTANTS = mutants_in(FILE)


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


CHECKER = Checker(
    "proofs.model_read", {name: (name, where) for name, where in PROMISES.items()}, FILE, replayed, find, attack
)
