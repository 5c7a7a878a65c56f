"""A time limit for the author's functions: decisions, and folds of views and policies.

A timer's signal looks at the main thread's stack, ten times within the limit, so a call that is quick costs nothing. A call is one
that a *watched* function of ours makes. One that lasts is logged, then ended by `TooSlow`, raised where it stands. That is safe
because it is pure, and because the watched function itself is never interrupted: it catches `TooSlow`, and nothing of its own is
half done. Looks are counted, not seconds, so a process that was frozen ends nothing.

Only the main thread can be interrupted. `in_main_thread` lends it to the others.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LOOKS = 10
"""Within the limit."""
PATIENCE = 3
"""How many times the limit an author's function may last that can't be ended; then the process is."""
STUCK = 86
"""The exit code of such a process, where Python itself still runs."""
DEEPEST = 12
"""Functions of a stack that are logged, the innermost first."""

_watched: dict[CodeType, Callable[[Mapping[str, Any]], str]] = {}
_lent: list[SimpleQueue[Callable[[], None] | None]] = []
"""The calls of other threads, where the main thread makes them."""


class TooSlow(BaseException):
    """An author's function lasted longer than the limit. No Exception: the function's own `except` must not keep it."""


def watched(what: Callable[[Mapping[str, Any]], str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Limit each call that this function makes. It must catch TooSlow. `what` names the work, from its local variables."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        _watched[function.__code__] = what
        return function

    return mark


def limit_calls(limit_s: float) -> None:
    """From now on, limit the calls that watched functions make in the main thread, which must be this one."""
    watch = _Watch(limit_s)
    signal.signal(signal.SIGALRM, watch.look)
    signal.setitimer(signal.ITIMER_REAL, watch.every_s, watch.every_s)
    threading.Thread(target=_require_interpreter, args=(limit_s,), name="time limit", daemon=True).start()


def serve_main_thread(work: Callable[[], T]) -> T:
    """Do the work in a thread, and make the calls of `in_main_thread` meanwhile. In the main thread only."""
    calls = SimpleQueue[Callable[[], None] | None]()
    _lent.append(calls)
    done: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(done, work), name="work", daemon=True).start()
    done.add_done_callback(lambda _: calls.put(None))
    while (call := calls.get()) is not None:
        call()
    return done.result()


def in_main_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result, of the main thread where that serves others, else of this one. Raises what it raises."""
    if not _lent or threading.current_thread() is threading.main_thread():
        return function(*args, **kwargs)
    done: Future[T] = Future()
    _lent[0].put(lambda: _fulfil(done, lambda: function(*args, **kwargs)))
    return done.result()


def _fulfil(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class _Watch:
    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.every_s = limit_s / LOOKS
        self._call: FrameType | None = None
        """The call at the last look. As long as it is kept, no other frame is the same object."""
        self._looks = 0

    def look(self, _signal: int, frame: FrameType | None) -> None:
        stack: list[FrameType] = []
        while frame is not None and frame.f_code not in _watched:
            stack.append(frame)
            frame = frame.f_back
        call = stack[-1] if frame is not None and stack else None
        if call is None or frame is None or call is not self._call:
            self._call, self._looks = call, 0
            return
        self._looks += 1
        seconds = self._looks * self.every_s
        if self._looks == 1:
            what = _watched[frame.f_code](frame.f_locals)
            log.warning("%s takes longer than %.3g s: %s", what, seconds, _in_words(stack))
        elif self._looks >= PATIENCE * LOOKS:
            log.critical("it can't be ended, so this process ends: %s", _in_words(stack))
            logging.shutdown()
            os._exit(STUCK)
        elif self._looks >= LOOKS:
            raise TooSlow(f"too-slow: {call.f_code.co_name} takes longer than {self.limit_s:g} s")


def _in_words(stack: list[FrameType]) -> str:
    """Without the values of any variable: they may be personal."""
    return " < ".join(f"{one.f_code.co_name} ({_file(one)}:{one.f_lineno})" for one in islice(stack, DEEPEST))


def _file(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}"


def _require_interpreter(limit_s: float) -> None:
    """End the process where a function in C keeps Python from running, even this thread, with all stacks on standard error.

    The timer counts the processor's time, so a process that was frozen goes on.
    """
    faulthandler.register(signal.SIGPROF, file=sys.__stderr__, chain=True)
    while True:
        signal.setitimer(signal.ITIMER_PROF, PATIENCE * limit_s)
        time.sleep(limit_s / LOOKS)
