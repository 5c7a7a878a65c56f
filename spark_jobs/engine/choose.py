"""The choice of the engine that a command runs on.

    with engine_for(engine, master, processes, tell=print) as engines:
        rebuild(settings, names, views, engine_for=engines, …)

Spark, where it is chosen, starts at the first call and stops at the end of the `with`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from infra.errors import SamefoldError
from infra.processes.engines import Engine, EngineFor, Local
from spark_jobs.engine.session import LOCAL, is_local, session, submitted

CORE_PER_S = 100_000
"""Records that one core folds and loads in a second, roughly: Samefold measured 190,000 to 236,000 on two."""
WORTH_S = 60.0
"""A load that takes this machine no longer is not worth starting executors for."""


class WrongEngine(SamefoldError):
    """There is no such engine, or it does not go with the other options."""

    exit_code = 2


@contextmanager
def engine_for(
    engine: str = "auto", master: str | None = None, processes: int | None = None, *, tell: Callable[[str], None]
) -> Iterator[EngineFor]:
    """An EngineFor that chooses between `auto`, `local` and `spark`, and reports choice and reason by `tell`.

    Raises WrongEngine.
    """
    if engine not in ("auto", "local", "spark"):
        raise WrongEngine(f"There is no engine '{engine}'.", "They are auto, local and spark.")
    if engine == "local" and master is not None:
        raise WrongEngine("--master goes with --engine spark or auto.", "Leave out one of the two.")
    started: list[Engine] = []
    with ExitStack() as stack:

        def choice(records: int) -> Engine:
            use_spark, why = choose(engine, master, processes, records)
            tell(why)
            if not use_spark:
                return Local(processes)
            if not started:
                from spark_jobs.engine.spark import Spark

                where = master or (None if submitted() else LOCAL)
                started.append(Spark(stack.enter_context(session("job", where))))
            return started[0]

        yield choice


def choose(engine: str, master: str | None, processes: int | None, records: int) -> tuple[bool, str]:
    """Whether to use Spark, and why.

    `auto` uses Spark when a master is known that is not this machine and the log is long: on one machine the same cores fold no
    faster through a JVM.
    """
    if engine == "spark":
        where = "as submitted" if submitted() and master is None else master or LOCAL
        return True, f"engine: spark ({where}), as asked"
    if engine == "local":
        return False, "engine: local, as asked"
    seconds = records / (CORE_PER_S * (processes or os.cpu_count() or 1))
    size = f"{records:,} records take this machine {_duration(seconds)}"
    if master is None or is_local(master):
        return False, f"engine: local; {size}, and no cluster is named (--master)"
    if seconds <= WORTH_S:
        return False, f"engine: local; {size}, too little to be worth a cluster"
    return True, f"engine: spark ({master}); {size}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    return f"about {seconds:,.0f} s" if seconds < 120 else f"about {seconds / 60:,.0f} min"
