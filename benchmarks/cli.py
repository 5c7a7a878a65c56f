"""`samefold bench`: how fast the product's own processes are, compared with what a user would pick instead."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

ALL = "all"
NAMES = ("handle", "project", "rebuild", "spark", "latency", "http", "switch", "jvm", "crud")
"""Each is a module with `run`, in the order in which `all` runs them."""


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    name: Annotated[str, typer.Argument(help=f"Which: {ALL}, {', '.join(NAMES)}.")] = ALL,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender, taken in turns; medians are told.")] = 3,
    scale: Annotated[
        float, typer.Option(min=0.001, max=10, help="Of all sizes: 0.1 for a quick look that proves nothing.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of all input.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results (JSON) and plots (SVG); by default bench in the data folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each benchmark, a line each.")
    ] = False,
) -> None:
    """Measure the product's own processes and their peers, on a stack of its own in a temporary folder.

    A run whose end state is not the one that an independent fold of its input demands is void: exit code 1, and no figures.
    """
    from benchmarks.report import Report
    from benchmarks.stage import Options, bench_on_own_stack
    from infra.processes.interrupts import one_interrupt
    from infra.settings import Settings
    from infra.terminal import Stages

    if name not in (ALL, *NAMES):
        raise typer.BadParameter(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}, and {ALL}")
    report = Report((out or Settings().data_dir / "bench").expanduser().resolve(), quiet=as_json)
    options = Options(rounds, scale, seed)
    with one_interrupt():
        for one in NAMES if name == ALL else [name]:
            with Stages() as stages, bench_on_own_stack(options, stages) as stage:
                result = import_module(f"benchmarks.{one}").run(stage)
            report.add(result, options)
