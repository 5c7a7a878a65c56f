"""Which engine a command's work runs on.

    with engine_for(engine, master, processes) as engines:
        rebuild(settings, names, views, engine_for=engines, processes=processes, …)

Spark, if it comes to that, starts at the first call and stops with the `with`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal, get_args

from infra.errors import SamefoldError
from infra.settings import Settings
from infra.terminal import stderr
from projections.engine.rebuild.engines import Engine, EngineFor, Local

Name = Literal["auto", "local", "spark"]

CORE_PER_S = 100_000
"""Records that one core folds and loads in a second, roughly: docs/benchmarks.md has 190,000 to 236,000 on two."""
WORTH_S = 60.0
"""A load that takes this machine no longer is not worth starting executors for."""


class WrongEngine(SamefoldError):
    """There is no such engine, or it does not go with the other options."""

    exit_code = 2


def engine_for(
    engine: str = "auto",
    master: str | None = None,
    processes: int | None = None,
    *,
    tell: Callable[[str], None] | None = None,
) -> Chosen:
    """The choice between `auto`, `local` and `spark`: an EngineFor that says, by `tell` (standard error), what it chose and why.

    `auto` takes Spark where a master is known that is not this machine (`master`, else the setting `spark_master`) and the log
    is long: on one machine the same cores fold no quicker for a JVM between them. Raises WrongEngine.
    """
    if engine not in get_args(Name):
        raise WrongEngine(f"There is no engine '{engine}'.", "They are auto, local and spark.")
    if engine == "local" and master is not None:
        raise WrongEngine("--master goes with --engine spark or auto.", "Leave out one of the two.")
    return Chosen(engine, master or Settings().spark_master, processes, tell or _print)


class Chosen:
    """An EngineFor, and a `with` at whose end Spark stops, if it was started."""

    def __init__(self, engine: str, master: str | None, processes: int | None, tell: Callable[[str], None]) -> None:
        self._engine = engine
        self._master = master
        self._processes = processes
        self._tell = tell
        self._stack = ExitStack()
        self._spark: Engine | None = None

    def __enter__(self) -> EngineFor:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._spark = None

    def __call__(self, records: int) -> Engine:
        use_spark, why = self._decide(records)
        self._tell(why)
        if not use_spark:
            return Local(self._processes)
        if self._spark is None:
            self._spark = self._start()
        return self._spark

    def _decide(self, records: int) -> tuple[bool, str]:
        from spark_jobs.session import LOCAL, is_local, submitted

        if self._engine == "spark":
            where = "as submitted" if submitted() and self._master is None else self._master or LOCAL
            return True, f"engine: spark ({where}), as asked"
        if self._engine == "local":
            return False, "engine: local, as asked"
        cores = self._processes or os.cpu_count() or 1
        seconds = records / (CORE_PER_S * cores)
        size = f"{records:,} records take this machine about {_duration(seconds)}"
        if self._master is None or is_local(self._master):
            return False, f"engine: local; {size}, and no cluster is configured (--master, SAMEFOLD_SPARK_MASTER)"
        if seconds <= WORTH_S:
            return False, f"engine: local; {size}, too little to be worth a cluster"
        return True, f"engine: spark ({self._master}); {size}"

    def _start(self) -> Engine:
        from spark_jobs.engine import Spark
        from spark_jobs.session import LOCAL, session, submitted

        master = self._master or (None if submitted() else LOCAL)
        return Spark(self._stack.enter_context(session("job", master)))


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"


def _print(text: str) -> None:
    stderr.print(text, soft_wrap=True, markup=False)
