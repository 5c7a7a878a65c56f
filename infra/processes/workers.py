"""Worker processes that fold the whole log: one task per partition, spread over a few processes.

They are spawned, never forked: threads and sockets of librdkafka and libpq do not survive a fork. A worker ends with its parent,
however that ends, so that no worker loads for a builder that has ended.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_handles
from multiprocessing.synchronize import Event
from typing import Any, TypeVar

from infra.errors import SamefoldError
from infra.processes.code_identity import CODE, require_code
from infra.processes.memory import folding

T = TypeVar("T")
R = TypeVar("R")

FEW_RECORDS = 100_000
"""Up to so many records, starting processes takes longer than folding in this one."""
TICK_S = 0.1

Advance = Callable[[int], None]
"""Called with how many more records have been folded."""


class WorkerDied(SamefoldError):
    """A worker process ended without a result."""


class Stopped(SamefoldError):
    """A task was stopped because another one failed."""


def processes_for(records: int, wanted: int | None = None) -> int:
    """How many processes to use for so many records in all: `wanted`, else what the size is worth."""
    if wanted is not None:
        return wanted
    return 1 if records <= FEW_RECORDS else max(os.cpu_count() or 1, 1)


def run(
    task: Callable[[T, Advance], R], arguments: Iterable[T], processes: int, advance: Advance = lambda _count: None
) -> list[R]:
    """`task(argument, advance)` for each argument; the results in the arguments' order.

    With one process, the tasks run in this one. Otherwise `task`, arguments and results are pickled. The first error
    stops the other tasks and is raised. Raises WorkerDied, WrongCode where this machine's code has changed since this process
    started, and MemoryShort: see `memory`.
    """
    waiting = list(arguments)
    if processes <= 1 or len(waiting) <= 1:
        with folding() as check_memory:

            def checked(count: int) -> None:
                advance(count)
                check_memory()

            return [task(argument, checked) for argument in waiting]
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    counts = context.Array("q", len(waiting), lock=False)
    with ProcessPoolExecutor(
        min(processes, len(waiting)), mp_context=context, initializer=_begin, initargs=(stop, counts, CODE)
    ) as pool:
        try:
            futures = [pool.submit(_task, task, argument, slot) for slot, argument in enumerate(waiting)]
            _watch(futures, counts, advance)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise WorkerDied(
                "A worker process ended before its part was done.",
                "If it was short of memory, use fewer with --processes. Then run the command again.",
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _watch(futures: list[Future[R]], counts: Any, advance: Advance) -> None:
    """Report the progress until all are done. Raises the first error."""
    reported = 0
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=TICK_S)
        now = sum(counts)
        advance(now - reported)
        reported = now
        for future in done:
            future.result()


_shared: list[tuple[Event, Any, Mapping[str, str]]] = []
"""What a worker process gets at its start: the stop event, the counts, and its parent's code."""


def _begin(stop: Event, counts: Any, code: Mapping[str, str]) -> None:
    _shared.append((stop, counts, code))
    # Ctrl-C reaches the whole group: the parent handles it and stops the tasks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        try:
            wait_for_handles([parent.sentinel])
        finally:  # also when waiting fails
            os._exit(1)


def _task(task: Callable[[T, Advance], R], argument: T, slot: int) -> R:
    ((stop, counts, code),) = _shared
    require_code(code)

    with folding() as check_memory:

        def advance(count: int) -> None:
            counts[slot] += count
            if stop.is_set():
                raise Stopped("Another part failed.")
            check_memory()

        return task(argument, advance)
