"""Steady load until SIGTERM: `python -m benchmarks.background --first 100 --accounts 1000 --rate 1000 --seed 1`.

Deposits of one cent. Says when it begins, and prints how many were sent in how many milliseconds, as the last line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.child import flags, tell, until_terminated
from benchmarks.fill import fill_commands
from benchmarks.workload import Order, deposits
from infra.settings import Settings

TICK_S = 0.005


def main() -> None:
    given = flags("first", "accounts", "rate", "seed")
    ended = until_terminated()
    sent = 0
    began = time.monotonic()

    def orders() -> Iterator[Order]:
        nonlocal sent, began
        endless = deposits(given.first, given.accounts, None, given.seed)
        began = time.monotonic()
        tell("begun")
        while not ended.is_set():
            due = int((time.monotonic() - began) * given.rate)
            while sent < due:
                sent += 1
                yield next(endless)
            time.sleep(TICK_S)

    fill_commands(Settings(), orders(), lambda _: None)
    tell([sent, round(1000 * (time.monotonic() - began))])


if __name__ == "__main__":
    main()
