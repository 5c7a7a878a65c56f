"""Tasks for worker processes in tests, in a module of little: each process imports it anew."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from infra.processes.workers import Advance
from projections.engine.fold.errors import PoisonEvent


def double(number: int, advance: Advance) -> int:
    advance(number)
    return 2 * number


def fail_on_three(number: int, advance: Advance) -> int:
    if number == 3:
        raise PoisonEvent("balances", "accounts/3", 7, partition=3, offset=9, cause=ValueError("no"))
    while True:
        advance(1)  # raises when another task has failed
        time.sleep(0.01)  # slow work, which the failure must cut short


def ask_for_too_much(_number: int, _advance: Advance) -> int:
    raise MemoryError


def die(number: int, _advance: Advance) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def report_and_wait(path: str, advance: Advance) -> None:
    """Tells its process id, then works until it is told to stop."""
    Path(path).with_suffix(f".{os.getpid()}").touch()
    while True:
        advance(1)
        time.sleep(0.01)  # slow work
