"""Ctrl-C and SIGTERM for commands that start others and must stop them in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def one_interrupt(is_ending: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Either signal raises KeyboardInterrupt in the block, once, and not while it is ending."""
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if not (interrupted or is_ending()):
            interrupted = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        yield
    except Exception:
        # code in C that was interrupted raises errors of its own
        if interrupted:
            raise KeyboardInterrupt from None
        raise
