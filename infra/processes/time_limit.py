"""A time limit for the author's functions: decisions, and the folds of views and policies.

A timer's signal checks the main thread's stack ten times within the limit, so a quick call costs nothing. A call that a *watched*
function makes is logged when it lasts, then ended by `TooSlow`, raised where it stands. That is safe: it is pure, and the watched
function, which is never interrupted itself, or its caller catches that. Where Python can't end it, the process ends, with all
stacks in its log. Checks and processor time are counted, not seconds: a freeze of the process ends no call.
"""

import atexit
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

from infra.errors import in_words

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

LOOKS = 10
"""Within the limit."""
PATIENCE = 3
"""Limits after which a call that can't be ended ends the process: one in C, or one that catches TooSlow."""

_watched: dict[CodeType, Callable[[Mapping[str, Any]], str]] = {}
_calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
_serves = threading.Event()


class TooSlow(BaseException):
    """An author's function lasted longer than the limit. No Exception, which the function might catch."""


SLOW: Final = "too-slow:"
FAULTS: Final = BaseException
"""What an author's function may raise: the process does not end with it. Its signals have handlers that raise nothing."""


def watched(what: Callable[[Mapping[str, Any]], str]) -> Callable[[F], F]:
    """Limit each call that this function makes. `what` names the work, from its local variables."""

    def mark(function: F) -> F:
        _watched[function.__code__] = what
        return function

    return mark


def limit_calls(limit_s: float) -> None:
    """From now on, limit the calls that watched functions make in the main thread, which must be this one; 0: no longer."""
    watch = _Watch(limit_s)
    faulthandler.register(
        signal.SIGPROF, file=sys.__stderr__ or sys.stderr, chain=True
    )  # writes all stacks; then it kills
    signal.signal(signal.SIGALRM, watch.look)
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # without its handler, the signal would end the process
    signal.setitimer(signal.ITIMER_REAL, limit_s / LOOKS, limit_s / LOOKS)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE * limit_s)
    if limit_s:
        threading.Thread(target=watch.end_waiting, name="time limit", daemon=True).start()


@contextmanager
def calls_limited(limit_s: float) -> Iterator[None]:
    """Limit calls as `limit_calls` does, within it only. Another's alarm, like a test's, is as it was afterwards."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    limit_calls(limit_s)
    try:
        yield
    finally:
        limit_calls(0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def serve_main_thread(work: Callable[[], T]) -> T:
    """Do the work in a thread, and the calls of `in_main_thread` meanwhile in this one, the main thread."""
    with ThreadPoolExecutor(1) as pool:
        _serves.set()
        done = pool.submit(work)
        done.add_done_callback(lambda _: _calls.put(_serves.clear))
        while _serves.is_set():
            _calls.get()()
        return done.result()


def in_main_thread(work: Callable[[], T]) -> T:
    """The work's result, in the main thread where that serves others: no other thread can be interrupted."""
    if not _serves.is_set() or threading.current_thread() is threading.main_thread():
        return work()
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    _calls.put(call)
    return done.result()


def _name(function: object) -> str:
    """Without what is bound to it, which may be personal."""
    names = (getattr(function, one, None) for one in ("__module__", "__qualname__"))
    return ".".join(filter(None, names)) or type(function).__name__


@watched(lambda local: _name(local["function"]))
def limited(function: Callable[..., T], *arguments: Any) -> T:
    """What an author's function returns. It then raises an Exception, whatever it raises and however long it takes."""
    try:
        return function(*arguments)
    except Exception:
        raise
    except FAULTS as error:
        raise RuntimeError(in_words(error)) from None


class _Watch:
    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._call: FrameType | None = None
        """The call at the last check. As long as it is kept, no other frame is the same object."""
        self._looks = 0

    def look(self, _signal: int, frame: FrameType | None) -> None:
        stack, watched_by = self._count(frame)
        if self._looks < LOOKS:
            signal.setitimer(signal.ITIMER_PROF, PATIENCE * self.limit_s)
        else:
            raise TooSlow(f"{SLOW} it takes longer than {self.limit_s:g} s")
        if self._looks == 1 and watched_by is not None:
            # without the values of variables, which may be personal
            names = [f"{one.f_code.co_name} ({Path(one.f_code.co_filename).name}:{one.f_lineno})" for one in stack[:12]]
            what = _watched[watched_by.f_code](watched_by.f_locals)
            log.warning("%s takes longer than %g s: %s", what, self.limit_s / LOOKS, " < ".join(names))

    def end_waiting(self) -> None:
        """End the process where a call waits in C, which no signal's exception ends, and uses no processor's time."""
        own = _Watch(self.limit_s)
        while signal.getsignal(signal.SIGALRM) == self.look:
            time.sleep(self.limit_s / LOOKS)
            own._count(sys._current_frames().get(threading.main_thread().ident or 0))
            if own._looks == PATIENCE * LOOKS:
                os.kill(os.getpid(), signal.SIGPROF)

    def _count(self, frame: FrameType | None) -> tuple[list[FrameType], FrameType | None]:
        """Count a check of the call on this stack. Returns the call's frames, and the watched function's."""
        stack: list[FrameType] = []
        while frame is not None and frame.f_code not in _watched:
            stack.append(frame)
            frame = frame.f_back
        call = stack[-1] if frame is not None and stack else None
        self._looks = self._looks + 1 if call is not None and call is self._call else 0
        self._call = call
        return stack, frame
