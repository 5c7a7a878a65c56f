"""A process that folds: of views' agents, or of policies. Ends at SIGTERM or SIGINT, or by an error."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, Protocol

from infra.observability import logs, metrics
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import exit_code_of
from infra.processes.time_limit import limit_calls, serve_main_thread
from infra.settings import Settings

SWITCH_INTERVAL_S = 0.001
"""With Python's default, each answer of the database waits up to 5 ms for the interpreter's lock."""


class Serving(Protocol):
    """What a process does."""

    def stop(self) -> None:
        """Let `run` return. In the event loop only."""

    async def run(self) -> None:
        """Raises the error that ended it."""


def serve(who: str, make: Callable[[Settings], Serving], log: logging.Logger) -> NoReturn:
    """Run what this makes until SIGTERM or SIGINT. Exit code 0, or 1 after an error."""
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.log_level != "DEBUG":
        # they log ordinary rebalances as errors; real errors are raised, and this process logs them
        for library in ("aiokafka", "faust", "mode", "psycopg"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    collect_seldom()

    def work() -> None:
        metrics.serve(settings)
        loop, serving = asyncio.new_event_loop(), make(settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(serving.stop))
        limit_calls(settings.decide_limit_s)
        serve_main_thread(lambda: loop.run_until_complete(serving.run()))

    # not sys.exit, which would wait for requests to an unavailable broker; an exit at any moment is safe
    os._exit(exit_code_of(work, log, who))
