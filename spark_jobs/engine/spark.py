"""The Spark engine: one Spark task per argument, which runs the same function as a local process.

A task reads its part of the log itself and writes or compares in place. Nothing is shuffled and hardly anything
goes through the JVM: Spark distributes tasks, retries those whose process was lost, and returns the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from psycopg import sql

from infra.database.connect import connect, named_errors
from infra.errors import SamefoldError
from infra.processes.code_identity import CODE
from infra.processes.engines import Argument
from infra.processes.workers import Advance
from spark_jobs.engine.services import Services, WrongDatabase
from spark_jobs.engine.session import SparkUnfit, first_line, is_local
from spark_jobs.engine.task import CodeMissing, Failure, Returned, Task, pack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A = TypeVar("A", bound=Argument)
R = TypeVar("R")

TICK_S = 0.1
STOP_S = 10.0


class SparkGaveUp(SamefoldError):
    """Spark ended the job: a task's process was lost too often, or Spark itself ended."""


class Spark:
    """Runs tasks on a Spark session, which the caller stops."""

    name = "spark"

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        self.slots: int = session.sparkContext.defaultParallelism

    def run(self, task: Callable[[A, Advance], R], arguments: Sequence[A], records: int, advance: Advance) -> list[R]:  # noqa: ARG002
        if not arguments:
            return []
        with named_errors(arguments[0].settings):
            return [one.value for one in _run(self.session.sparkContext, task, arguments, advance)]


def _run(
    context: Any, task: Callable[[Any, Advance], Any], arguments: Sequence[Argument], advance: Advance
) -> list[Returned]:
    """One Spark job, run in a thread, so that the caller's can show progress, receive Ctrl-C and cancel the job.

    Returns the results in the order of the arguments. Raises what a task raised, SparkGaveUp, psycopg.Error.
    """
    from pyspark import InheritableThread
    from pyspark.accumulators import AddingAccumulatorParam

    settings, name = arguments[0].settings, f"samefold_{uuid4().hex}"
    failed = context.accumulator((), AddingAccumulatorParam(()))
    work = Task(CODE, name, attempts_of(context), failed)
    sender = Services.of(settings)
    sent = [pack(sender, slot, task, argument) for slot, argument in enumerate(arguments)]
    folded, reported = [0] * len(arguments), 0
    ended: list[list[Returned] | BaseException] = []

    def collect() -> None:
        try:
            context.setJobGroup(name, "samefold", interruptOnCancel=True)
            ended.append(context.parallelize(sent, len(sent)).map(work).collect())
        except BaseException as error:
            ended.append(error)

    with connect(settings, "samefold progress") as listening:
        listening.execute(sql.SQL("listen {}").format(sql.Identifier(name)))
        thread = InheritableThread(target=collect, daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not failed.value:
                for note in listening.notifies(timeout=TICK_S):
                    slot, count = map(int, note.payload.split())
                    # a later attempt begins at 0 again
                    folded[slot] = max(folded[slot], count)
                advance(sum(folded) - reported)
                reported = sum(folded)
        finally:
            if thread.is_alive():
                context.cancelJobGroup(name)
                thread.join(STOP_S)
        failures: Sequence[Failure] = failed.value
        if failures:
            error = failures[0].error()
            if isinstance(error, WrongDatabase):
                listening.execute("select")  # fails if it is the same server, restarted
            raise error
    [returned] = ended
    if isinstance(returned, BaseException):
        raise _gave_up(returned) from returned
    advance(sum(one.folded for one in returned) - reported)
    return returned


def attempts_of(context: Any) -> int:
    """How many attempts Spark makes at a task: one for `local[2]`, four for `local[2,4]` and on a cluster."""
    master = str(context.master)
    if is_local(master):
        _, _, rest = master.partition(",")
        return int(rest.rstrip("]")) if rest else 1
    return int(context.getConf().get("spark.task.maxFailures", "4"))


def _gave_up(error: BaseException) -> SamefoldError:
    text = first_line(error)
    if "ModuleNotFoundError" in str(error):
        return CodeMissing(
            f"Executors can't import this code: {text}",
            "Ship the very same code and packages to the executors: docs/operating.md.",
        )
    if found := re.search(r"Cannot run program \"[^\"]*\"[^\n]*|\[PYTHON_VERSION_MISMATCH\][^\n]*", str(error)):
        return SparkUnfit(
            f"Executors can't run the configured Python: {found[0][:500]}",
            "PYSPARK_PYTHON must name one that each executor has, of the driver's version, with its packages: docs/operating.md.",
        )
    return SparkGaveUp(
        f"Spark ended the job: {text}",
        "If a process was killed, it was short of memory: see docs/operating.md. Nothing is half done; run the command again.",
    )
