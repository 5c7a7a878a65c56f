"""Steady load until SIGTERM: `python -m benchmarks.background --first 100 --accounts 1000 --rate 1000 --seed 1`.

Deposits of one cent. Prints how many were sent in how many milliseconds, as the last line.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

TICK_S = 0.005


def main() -> None:
    from benchmarks.fill import fill_commands
    from benchmarks.workload import Order, order_id
    from infra.settings import Settings

    parser = argparse.ArgumentParser(prog="python -m benchmarks.background")
    for name in ("--first", "--accounts", "--rate", "--seed"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    chance = random.Random(given.seed)
    sent = 0
    began = time.monotonic()

    def orders() -> Iterator[Order]:
        nonlocal sent, began
        began = time.monotonic()
        while not ended.is_set():
            due = int((time.monotonic() - began) * given.rate)
            while sent < due:
                sent += 1
                yield Order(given.first + chance.randrange(given.accounts), 1, order_id(chance))
            time.sleep(TICK_S)

    fill_commands(Settings(), orders(), lambda _: None)
    sys.stdout.write(f"{sent} {round(1000 * (time.monotonic() - began))}\n")


if __name__ == "__main__":
    main()
