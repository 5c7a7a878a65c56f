"""A process of agents, policies, handlers or the publisher: it serves until SIGTERM or SIGINT, or until an error ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol, TypeAlias

from infra.observability import logs, metrics
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import exit_code_of
from infra.processes.time_limit import limit_calls, serve_main_thread
from infra.settings import Settings

SWITCH_INTERVAL_S = 0.001
"""With Python's default, each answer of the database waits up to 5 ms for the interpreter's lock."""

Blocking: TypeAlias = tuple[Callable[[], object], Callable[[], object]]
"""What runs, and what lets it return. A signal's handler calls the second in the main thread, in the middle of the first."""


class Serving(Protocol):
    """What a process does."""

    def stop(self) -> None:
        """Let `run` return. In the event loop only."""

    async def run(self) -> None:
        """Raises the error that ended it."""


def serve(who: str, make: Callable[[Settings], Serving], log: logging.Logger) -> NoReturn:
    """Run what this makes until SIGTERM or SIGINT. Exit code 0, or 1 after an error."""

    def made(settings: Settings) -> Blocking:
        if settings.log_level != "DEBUG":
            # they log ordinary rebalances as errors; real errors are raised, and this process logs them
            for library in ("aiokafka", "faust", "mode", "psycopg"):
                logging.getLogger(library).setLevel(logging.CRITICAL)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop, serving = asyncio.new_event_loop(), make(settings)
        return (
            lambda: serve_main_thread(lambda: loop.run_until_complete(serving.run())),
            partial(loop.call_soon_threadsafe, serving.stop),
        )

    serve_blocking(who, made, log)


def in_a_thread(stop: Callable[[], object]) -> Callable[[], None]:
    """For what sets an event: a signal's handler would deadlock if its own thread holds the event's lock at that moment."""
    return lambda: threading.Thread(target=stop).start()


def serve_blocking(who: str, make: Callable[[Settings], Blocking], log: logging.Logger) -> NoReturn:
    """The same for what blocks."""
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    collect_seldom()

    def work() -> None:
        metrics.serve(settings)
        run, stop = make(settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop())
        limit_calls(settings.decide_limit_s)
        run()

    # not sys.exit, which would wait for requests to an unavailable broker; an exit at any moment is safe
    os._exit(exit_code_of(work, log, who))
