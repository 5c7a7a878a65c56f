"""Steady load until SIGTERM: `python -m benchmarks.background --first 100 --accounts 1000 --rate 1000 --seed 1`.

Deposits of one cent. Prints how many were sent in how many milliseconds, as the last line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.child import flags, tell, until_terminated
from benchmarks.fill import fill_commands
from benchmarks.processes import Process
from benchmarks.stage import Bench, World
from benchmarks.workload import Order, deposits
from infra.settings import Settings

TICK_S = 0.005


@dataclass(frozen=True, slots=True)
class Background:
    """The load's process; what it sent is known when it has ended."""

    process: Process

    def sent(self) -> int:
        return self._told()[0]

    def rate(self) -> float:
        """Sent per second: what the machine made of the rate that was asked for."""
        sent, milliseconds = self._told()
        return 1000 * sent / milliseconds

    def _told(self) -> tuple[int, int]:
        sent, milliseconds = json.loads(self.process.last_line())
        return sent, milliseconds


@contextmanager
def background(bench: Bench, world: World, first: int, accounts: int, rate: int, seed: int) -> Iterator[Background]:
    given = {"first": first, "accounts": accounts, "rate": rate, "seed": seed}
    with bench.process(world, "background", "benchmarks.background", **given) as process:
        yield Background(process)


def main() -> None:
    given = flags("first", "accounts", "rate", "seed")
    ended = until_terminated()
    sent = 0
    began = time.monotonic()

    def orders() -> Iterator[Order]:
        nonlocal sent, began
        endless = deposits(given.first, given.accounts, None, given.seed)
        began = time.monotonic()
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
