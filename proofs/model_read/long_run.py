"""Random schedules of all scenarios in turn, with a line about it now and then."""

from __future__ import annotations

import sys
import time
from itertools import cycle

from proofs.model_read import traces
from proofs.model_read.explore import Found, shrink, wander
from proofs.model_read.reader_world import ReaderBroken, reader_walks
from proofs.model_read.scenarios import SCENARIOS, Scenario

TURN_S = 5.0


def long_run(seed: int, seconds: float) -> int:
    """The exit code: 1 where a promise was broken, and then how, as short as it can be told."""
    print(f"seed {seed}; {len(SCENARIOS)} scenarios, {seconds:.0f} s", flush=True)
    began = time.monotonic()
    schedules = steps = commits = readers = 0
    for number, scenario in enumerate(cycle(SCENARIOS.values())):
        left = seconds - (time.monotonic() - began)
        if left <= 0:
            print(
                f"\n{schedules} schedules, {steps} steps, {commits} states checked, {readers} walks of a reader: all kept"
            )
            return 0
        found = wander(scenario, seed + number, seconds=min(TURN_S, left, seconds / len(SCENARIOS)))
        schedules, steps, commits = schedules + found.schedules, steps + found.steps, commits + found.commits
        if found.broken is not None:
            return _tell(scenario, found)
        try:
            readers += reader_walks(f"{seed} {number}", 300)
        except ReaderBroken as broken:
            print(f"\n{broken}")
            return 1
        _live(
            f"{time.monotonic() - began:5.0f} s  {schedules} schedules  {steps} steps  {commits} states  {scenario.name}"
        )

    raise AssertionError("a cycle has no end")


def _live(line: str) -> None:
    if sys.stdout.isatty():
        print(f"\r{line:<110}", end="", flush=True)
    else:
        print(line, flush=True)


def _tell(scenario: Scenario, found: Found) -> int:
    assert found.broken is not None
    short = shrink(scenario, found.broken)
    print(f"\nBROKEN in {scenario.name}: {short.violation}")
    for who, what in short.story:
        print(f"  {who:<10} {what}")
    print(f"by {traces.folded(short.choices)}")
    return 1
