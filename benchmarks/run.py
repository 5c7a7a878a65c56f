"""Runs benchmarks on a stack of their own, which is gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks import handle, http, latency, project, rebuild, spark, switching
from benchmarks.results import Result
from benchmarks.stage import Bench, Options
from infra.dev.stack import Stack
from projections.engine.rebuild.progress import Progress

Benchmark = Callable[[Bench], Result]

BENCHMARKS: Mapping[str, Benchmark] = {
    "handle": handle.run,
    "project": project.run,
    "rebuild": rebuild.run,
    "spark": spark.run,
    "latency": latency.run,
    "http": http.run,
    "switch": switching.run,
}
"""All benchmarks by name, in the order in which `all` runs them."""


def run(name: str, options: Options, progress: Progress) -> Result:
    """Run a benchmark on a fresh stack in a temporary folder.

    Raises RunVoid where an end state is wrong, BenchmarkStalled, and whatever keeps the parts from working.
    """
    with _stack() as stack:
        logs = stack.folder / "logs"
        logs.mkdir()
        return BENCHMARKS[name](Bench(options, stack, logs, progress))


@contextmanager
def _stack() -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="samefold-bench-"))
    folder.chmod(0o711)  # where root may not make a user namespace, PostgreSQL runs as nobody and must get in
    stack = Stack(folder)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
        shutil.rmtree(folder, ignore_errors=True)
