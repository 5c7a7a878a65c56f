"""The memory that a rebuild's task may use: it stops with a named error before the machine begins to swap.

A task regularly checks how much memory is free. A container's limit counts as the machine's
(cgroup v2); an executor's own limit (`spark.executor.pyspark.memory`) raises Python's MemoryError.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.errors import SamefoldError

CHECK_S = 0.5
KEEP_FREE = 0.05
"""Part of all memory. With less, the machine begins to swap or the kernel kills the process."""
SMALL = 256 << 20
"""Bytes. A smaller process is not the one that is too big."""
CGROUP = Path("/sys/fs/cgroup")

HINT = (
    "Run fewer processes at once (--processes), add memory, or use several machines "
    "(--engine spark --master …, docs/operating.md). More tasks (--tasks) keep fewer rows each."
)


class MemoryShort(SamefoldError):
    """A task's rows and states do not fit into memory."""


@contextmanager
def folding() -> Iterator[Callable[[], None]]:
    """Switch the garbage collector off while a task folds; yields a function to call often, which raises MemoryShort.

    The objects that a fold makes live as long as the fold, and the collector, visiting them again and again, took half of a load's
    time.
    """
    due = 0.0

    def check() -> None:
        """At most every CHECK_S."""
        nonlocal due
        if (now := time.monotonic()) < due:
            return
        due = now + CHECK_S
        free, total = free_and_total()
        if free < total * KEEP_FREE and (used := _used()) > SMALL:
            raise MemoryShort(
                f"A task uses {used >> 20:,} MB, and of {total >> 20:,} MB only {free >> 20:,} are free.", HINT
            )

    was = gc.isenabled()
    gc.disable()
    try:
        yield check
    except MemoryError as error:
        raise MemoryShort(f"A task that used {_used() >> 20:,} MB got no more memory.", HINT) from error
    finally:
        if was:
            gc.enable()


def _used() -> int:
    return int(psutil.Process().memory_info().rss)


def free_and_total() -> tuple[int, int]:
    """Free and total bytes of this machine or this container, whichever has less free."""
    machine = psutil.virtual_memory()
    found = [(int(machine.available), int(machine.total))]
    try:
        limit = int((CGROUP / "memory.max").read_text())  # `max` where there is none
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # the kernel frees its file cache when memory is needed
        found.append((limit - used + int(statistics.get("inactive_file", 0)), limit))
    except (OSError, ValueError):
        pass
    return min(found)
