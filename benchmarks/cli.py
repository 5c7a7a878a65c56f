"""`samefold bench`: how fast the product's own processes are, compared with what a user would pick instead."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

ALL = "all"
NAMES = (
    "handle",
    "project",
    "rebuild",
    "spark",
    "scan",
    "latency",
    "http",
    "switch",
    "jvm",
    "crud",
    "reads",
    "pages",
    "growth",
    "overload",
    "starts",
)
"""Each is a module with `run`, in the order in which `all` runs them."""
GROWTH = ("commits", "views", "partitions", "processes", "indexes")
"""Its parts, each with a result of its own."""


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
    part: Annotated[str | None, typer.Option(help=f"Of growth, one of its parts: {', '.join(GROWTH)}.")] = None,
    commits: Annotated[int, typer.Option(min=2, max=50, help="Of growth: millions of commits in the longest log.")] = 8,
    profile: Annotated[
        bool, typer.Option("--profile", help="Sample our processes and PostgreSQL's statements, too; figures suffer.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each benchmark, a line each.")
    ] = False,
) -> None:
    """Measure the product's own processes and their peers, on a stack of its own in a temporary folder.

    A run whose end state is not the one that an independent fold of its input demands is void: exit code 1, and no figures.
    """
    from benchmarks.profile import Profile
    from benchmarks.report import Report
    from benchmarks.stage import Options, bench_on_own_stack
    from infra.processes.interrupts import one_interrupt
    from infra.settings import Settings
    from tools.terminal import Stages

    if name not in (ALL, *NAMES):
        raise typer.BadParameter(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}, and {ALL}")
    if part is not None and (part not in GROWTH or name != "growth"):
        raise typer.BadParameter(f"only growth has parts; they are {', '.join(GROWTH)}", param_hint="--part")
    report = Report((out or Settings().data_dir / "bench").expanduser().resolve(), quiet=as_json)
    turns = [
        (one, of)
        for one in (NAMES if name == ALL else [name])
        for of in ((part,) if part else GROWTH if one == "growth" else ("",))
    ]
    with one_interrupt():
        for one, of in turns:
            options = Options(rounds, scale, seed, of, commits if name == "growth" else 8)
            profiled = Profile(report.folder, f"{one}-{of}" if of else one) if profile else None
            with Stages() as stages, bench_on_own_stack(options, stages, profile=profiled) as stage:
                result = import_module(f"benchmarks.{one}").run(stage)
            report.add(result, options)
