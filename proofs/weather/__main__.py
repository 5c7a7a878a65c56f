"""`python -m proofs.weather --months 1 --seed 1`: months of outages, deployments, restored and lost databases, in minutes each.

At the end of each month every process must have ended, or have been shown as stuck with its reason and brought to its end by a
command that the documentation names; no money was lost or made, and each post arrived. A line FOUND says what is wrong.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from proofs.weather.clock import remove_clock, start_under_the_clock
from proofs.weather.endpoints import GONE, KINDS
from proofs.weather.month import Month
from tools.testing.fixtures import in_memory

LENGTH = timedelta(days=30)
SHORTEST, LONGEST = timedelta(minutes=1), timedelta(days=7)
GIVES_UP = "endpoint tracking 500"
"""For a week: all attempts fail."""
DEPLOYMENTS = ("deployment", "deployment kafka_away", "deployment postgres_away")
OFTEN = (
    *("calm", "handlers_away", "agents_away", "policies_away", "kafka_away", "postgres_away", "all_away"),
    *("endpoint tracking", "endpoint tracking", "endpoint archive", "unnamed archive", "unnamed tracking"),
    *("database_restored", "database_restored", "database_restored"),
)


def weathers(chance: random.Random) -> Iterator[tuple[str, timedelta]]:
    """What a month brings, and for how long: a minute to a week, as many short ones as long ones."""
    once = [*("database_lost", "database_lost"), chance.choice(DEPLOYMENTS), f"endpoint tracking {GONE}", GIVES_UP]
    chance.shuffle(once)
    left = LENGTH
    while once or left > timedelta():
        is_once = once and (left <= timedelta() or chance.random() < 0.2)
        what = once.pop() if is_once else chance.choice(OFTEN)
        length = SHORTEST * math.exp(chance.random() * math.log(LONGEST / SHORTEST))
        if what == GIVES_UP:
            length = LONGEST
        if what == "endpoint archive":  # so that no post to it becomes a dead letter, and their order is kept
            length = min(length, timedelta(days=1))
        if what in ("endpoint archive", "endpoint tracking"):
            what += f" {chance.choice([kind for kind in KINDS if kind != GONE])}"
        left -= length
        yield what, length


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.weather", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="begin months for so long")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    asked = parser.parse_args()
    start_under_the_clock()
    began, seed, found, total = time.monotonic(), asked.seed, 0, Counter[str]()
    while time.monotonic() - began < asked.minutes * 60:
        folder = Path(tempfile.mkdtemp(prefix="samefold-month-", dir=in_memory()))
        pieces = list(weathers(random.Random(seed)))
        try:
            with Month(folder, seed) as month:
                for what, length in pieces:
                    print(f"  {what} for {length}", flush=True)
                    month.weather(what, length)
                counted = month.end()
                print(f"seed {seed}: {dict(counted)}; stuck and repaired: {month.repaired()}", flush=True)
                total.update(counted)
        except Exception as error:
            found += 1
            print(f"FOUND seed {seed}: {error!r}", flush=True)
        finally:
            if asked.keep:
                print(f"  {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
        total["months"] += 1
        seed += 1
    remove_clock()
    print(f"{total['months']} months: {dict(total)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
