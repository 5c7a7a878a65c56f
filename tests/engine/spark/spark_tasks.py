"""Tasks for Spark's executors in tests. Whatever one shows, it shows in files of a folder that the test looks at."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark import TaskContext

from infra.processes import faultpoints
from infra.processes.workers import Advance
from infra.settings import Settings
from projections.engine.operate.verify import PartitionTask, Verified, verify_partition
from projections.engine.rebuild.load import Loaded, Part, load
from tools.testing.waiting import until


@dataclass(frozen=True, slots=True)
class Order:
    """Something to do."""

    settings: Settings
    number: int
    folder: Path
    error: Exception | None = None
    times: int = 1_000_000
    """So many attempts fail."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A part, and where to do what to it."""

    settings: Settings
    part: Part
    folder: Path
    point: str = ""


def attempt() -> int:
    context = TaskContext.get()
    return int(context.attemptNumber()) if context else 0


def leave(folder: Path, name: str) -> None:
    (folder / f"{name}.{attempt()}.{os.getpid()}").touch()


def seen(folder: Path, name: str) -> int:
    """How many have left that."""
    return len(list(folder.glob(f"{name}.*")))


def double(order: Order, advance: Advance) -> int:
    advance(order.number)
    return 2 * order.number


def fail(order: Order, advance: Advance) -> int:
    """Raises the order's error, the first `times` times; without one, works until it is stopped."""
    leave(order.folder, f"began-{order.number}")
    if order.error is None:
        work(order, advance)
    elif attempt() < order.times:
        raise order.error
    return order.number


def work(order: Order, advance: Advance) -> None:
    """For a minute, telling a record every 10 ms."""
    for _ in range(6_000):
        advance(1)
        time.sleep(0.01)  # slow work, which others' failure must cut short
    leave(order.folder, f"ended-{order.number}")


def die(order: Order, _advance: Advance) -> int:
    leave(order.folder, f"began-{order.number}")
    if attempt() < order.times:
        os.kill(os.getpid(), signal.SIGKILL)
    return order.number


def load_staged(staged: Staged, advance: Advance) -> Loaded:
    """Load a part, and at a fault point, in the first attempt, do what the mode says."""
    part = replace(staged.part, settings=staged.settings)
    mode, _, point = staged.point.partition(" at ")
    which = f"{part.partition}.{part.share.number}"

    def hook(here: str) -> None:
        if here != point:
            return
        leave(staged.folder, f"reached-{which}")
        match mode:
            case "die" if attempt() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill the executor" if attempt() == 0:
                _kill_the_executor()
            case "wait for a twin" if attempt() == 0:
                until(lambda: seen(staged.folder, f"twin-{which}") > 0, "another attempt of the part runs")

    leave(staged.folder, f"began-{which}")
    if mode == "wait for a twin" and attempt() > 0:
        leave(staged.folder, f"twin-{which}")
    faultpoints.hook = hook
    try:
        return load(part, advance)
    finally:
        faultpoints.hook = None


def _kill_the_executor() -> None:
    """The JVM above this process and its daemon."""
    import psutil

    java = next(parent for parent in psutil.Process().parents() if parent.name().startswith("java"))
    java.kill()
    time.sleep(60)  # until it takes us along


def compare_and_die_once(task: PartitionTask, advance: Advance) -> Verified:
    """Compare, and once, when all is compared, die."""
    result = verify_partition(task, advance)
    mark = task.settings.data_dir / "died"
    if task.partition == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return result
