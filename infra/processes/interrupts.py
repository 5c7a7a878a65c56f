"""Ctrl-C, SIGTERM and the end of the terminal (SIGHUP), for commands that start others and must stop them in order."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def ending_signals() -> list[signal.Signals]:
    """The signals that end a command; not SIGHUP where it is ignored, as under `nohup`."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


@contextmanager
def one_interrupt(is_ending: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Each of these signals raises KeyboardInterrupt in the block, once, and not while it is ending."""
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if not (interrupted or is_ending()):
            interrupted = True
            raise KeyboardInterrupt

    for number in ending_signals():
        signal.signal(number, interrupt)
    try:
        yield
    except Exception:
        # code in C that was interrupted raises errors of its own
        if interrupted:
            raise KeyboardInterrupt from None
        raise
