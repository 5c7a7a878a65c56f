"""`python -m proofs.model`: see the package."""

from __future__ import annotations

import argparse
import random
import sys
import time

from proofs.model.configurations import LARGE
from proofs.model.explore import Explored, Found, explore
from proofs.model.setting import Bounds
from proofs.model.table import table
from proofs.model.traces import regenerate
from proofs.model.walk import shrunk, walk


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proofs.model", description="The write side under a model checker.")
    parser.add_argument("--minutes", type=float, default=10, help="for the large worlds, half of it for random walks")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the first walk")
    parser.add_argument("--table", action="store_true", help="promise, check, mutants killed, as Markdown")
    parser.add_argument(
        "--traces", action="store_true", help="search for the shortest trace of each mutant and store it"
    )
    arguments = parser.parse_args()
    if arguments.traces:
        regenerate()
    elif arguments.table:
        text, holds = table()
        print(text)
        sys.exit(not holds)
    else:
        sys.exit(not attack(arguments.minutes * 60, arguments.seed))


def attack(seconds: float, seed: int) -> bool:
    """Large worlds for half the time, each as far as its share goes, then random walks; whether every promise was kept."""
    print(f"seed: {seed}", flush=True)
    end = time.monotonic() + seconds
    share = seconds / 2 / len(LARGE)
    for name, bounds in LARGE.items():
        try:
            explored = searched(name, bounds, share)
        except Found as found:
            print(f"\n{name}: {found}")
            return False
        print(f"\r{name}: {described(explored)}", flush=True)
    walks = 0
    while time.monotonic() < end:
        walked = walk(seed + walks)
        walks += 1
        if walked.violation:
            print(f"\n{shrunk(walked)}")
            return False
        if walks % 500 == 0:
            print(f"\r{walks:,} walks", end="", flush=True)
    print(f"\r{walks:,} walks from seed {seed}: every promise kept", flush=True)
    return True


def searched(name: str, bounds: Bounds, seconds: float) -> Explored:
    def progress(explored: Explored) -> None:
        print(f"\r{name}: {described(explored)}", end="", flush=True)

    return explore(bounds, settle_every=50, seconds=seconds, progress=progress)


def described(explored: Explored) -> str:
    return (
        f"{explored.states:,} states{' (all)' if explored.complete else ''}, {explored.transitions:,} transitions, "
        f"{explored.settled:,} settled, {explored.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
