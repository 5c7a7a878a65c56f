"""What a task may hold: rows and states that do not fit are refused by name, before the machine begins to swap.

A task looks now and then at what its process holds and at what is free. A container's limit counts as the machine's
(cgroup v2); an executor's own limit (`spark.executor.pyspark.memory`) comes as Python's MemoryError.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.errors import SamefoldError

LOOK_S = 0.5
KEEP_FREE = 0.05
"""Of all memory: below that, the next step is the swap or the kernel's killer."""
SMALL = 256 << 20
"""A process that holds no more than this is not the one that is too big."""
CGROUP = Path("/sys/fs/cgroup")

CURE = (
    "Take fewer processes at once (--processes), give it more memory, or let machines share it "
    "(--engine spark --master …, docs/operating.md). More partitions make smaller tasks."
)


class MemoryShort(SamefoldError):
    """What a task has to keep until its end does not fit into memory."""


@contextmanager
def folding(most_mb: int | None) -> Iterator[Callable[[], None]]:
    """While a task folds: no garbage collector, and a function to call often, which raises MemoryShort.

    `most_mb` is what the process may hold; without, until hardly anything is free. What a fold makes lives as long as the
    fold; the collector, looking through it again and again, took half of a load's time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield _Room(most_mb).look
    except MemoryError as error:
        raise MemoryShort(f"A task could get no more memory; it held {_held() >> 20:,} MB.", CURE) from error
    finally:
        if was:
            gc.enable()


class _Room:
    def __init__(self, most_mb: int | None) -> None:
        self._most = None if most_mb is None else most_mb << 20
        self._next = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        held = _held()
        if self._most is not None and held > self._most:
            raise MemoryShort(
                f"A task holds {held >> 20:,} MB, more than the {self._most >> 20:,} that it may (SAMEFOLD_TASK_MEMORY_MB).",
                CURE,
            )
        if self._most is None and held > SMALL:
            free, total = free_and_total()
            if free < total * KEEP_FREE:
                raise MemoryShort(
                    f"A task holds {held >> 20:,} MB, and of {total >> 20:,} MB only {free >> 20:,} are free.", CURE
                )


def _held() -> int:
    return int(psutil.Process().memory_info().rss)


def free_and_total() -> tuple[int, int]:
    """Bytes that can still be had, and all there are, of this machine or this container, whichever has less free."""
    machine = psutil.virtual_memory()
    found = [(int(machine.available), int(machine.total))]
    try:
        limit = int((CGROUP / "memory.max").read_text())  # `max` where there is none
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # the cache of files is given back when it is needed
        found.append((limit - used + int(statistics.get("inactive_file", 0)), limit))
    except (OSError, ValueError):
        pass
    return min(found)
