"""`samefold rebuild balances` with its watch out: `python -m benchmarks.rebuilding`, the product's own function.

Prints one JSON object for each of `--times` rebuilds in a row: when each stage began and ended, and what was folded. Times are in
seconds since the epoch. With `--engine spark`, all run in one session on `local[2]`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.child import flags, tell
from benchmarks.other_code import VIEW
from benchmarks.processes import Cpu
from infra.processes.engines import Engine, Local

MASTER = "local[2]"


class _Watched:
    """A progress that writes down when something happened."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.first_step_at = 0.0
        self.first_step = 0

    def begin(self, stage: str, _total: int | None = None) -> None:
        self.began[stage] = time.time()

    def advance(self, count: int) -> None:
        if not self.first_step and count:
            self.first_step_at, self.first_step = time.time(), count


def main() -> None:
    given = flags("times", engine=("local", "spark"))
    with _engine(given.engine) as engine:
        for _ in range(given.times):
            _rebuild(VIEW, engine)


def _rebuild(view: str, engine: Engine) -> None:
    from infra.settings import Settings
    from projections.engine.rebuild.rebuild import rebuild
    from projections.engine.views.core_views import all_views

    watched = _Watched()
    cpu = Cpu({"rebuild": [os.getpid()]})
    began = time.time()
    result = rebuild(Settings(), [view], all_views(), engine_for=lambda _records: engine, progress=watched)
    told = {
        "began": {"rebuild": began} | watched.began,
        "first_step_at": watched.first_step_at,
        "first_step": watched.first_step,
        "ended": time.time(),
        "commits": result.commits,
        "tables": result.tables,
        "load_s": result.load_ms / 1000,
        "index_s": result.index_ms / 1000,
        "cpu_s": cpu.spent()["rebuild"],
        "switch_s": result.switched.switch_ms / 1000 if result.switched else 0.0,
    }
    tell(told)


@contextmanager
def _engine(name: str) -> Iterator[Engine]:
    if name == "local":
        yield Local()
        return
    from spark_jobs.engine.session import session
    from spark_jobs.engine.spark import Spark

    with session("bench", MASTER) as spark:
        yield Spark(spark)


if __name__ == "__main__":
    main()
