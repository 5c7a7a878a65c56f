"""Waiting in tests: for a condition that has a name, until one deadline that is the same for all."""

import os
import time
from collections.abc import Callable

ROUNDS = 200_000
QUICK_S = 0.005
"""What the rounds take on a machine on a good day."""


def _slowness() -> float:
    """How many times slower than on a good day this machine is now, 1 at least: the best of five counts."""

    def count_s() -> float:
        began = time.perf_counter()
        for _ in range(ROUNDS):
            pass
        return time.perf_counter() - began

    return max(1.0, min(count_s() for _ in range(5)) / QUICK_S)


SLOWNESS = float(os.environ.setdefault("TEST_SLOWNESS", f"{_slowness():.1f}"))
"""Measured once for a run: the workers of `pytest -n` take it from the environment, which may also set it."""

DEADLINE_S = 240 * SLOWNESS
"""The longest wait of any test for anything: far beyond what it takes, so that only what never comes fails."""

PAUSE_S = 0.02


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until the condition holds. Raises AssertionError, which names `what`, where it does not by the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s in vain: {what}"
        time.sleep(PAUSE_S)
