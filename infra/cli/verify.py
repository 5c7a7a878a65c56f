"""`samefold verify`: the read models against a fold of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from projections.engine.verify.verify import Difference, Verified


def register(app: typer.Typer) -> None:
    app.command()(verify)


def verify(
    views: Annotated[list[str] | None, typer.Argument(help="Views; without, all.")] = None,
    engine: Annotated[str, typer.Option(help="auto, local or spark; auto chooses by the log's size.")] = "auto",
    master: Annotated[str | None, typer.Option(help="Where Spark runs: spark://…, k8s://…, yarn, local[2].")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes of the local engine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare rows and positions with a fold of the log, beside live traffic. Exit code 1 when anything differs."""
    from infra.settings import Settings
    from infra.terminal import Stages, print_json
    from projections.engine.rebuild.rebuild import UnknownView
    from projections.engine.verify.verify import verify as run
    from projections.engine.views.core_views import all_views
    from spark_jobs.choose import engine_for

    known = all_views()
    if unknown := [name for name in views or [] if name not in known]:
        raise UnknownView(f"There is no view {', '.join(unknown)}.", f"The views are {', '.join(known)}.")
    asked = {name: known[name] for name in views or known}
    why: list[str] = []
    tell = why.append if as_json else None
    with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=tell) as engines:
        result = run(Settings(), asked, engine_for=engines, progress=stages)
    if as_json:
        print_json({**_as_json(result), "engine_because": why[-1] if why else None})
    else:
        _tell(result)
    if result.differences:
        raise typer.Exit(1)


def _tell(result: Verified) -> None:
    from rich.markup import escape
    from rich.table import Table

    from infra.terminal import stdout

    table = Table("view", "table", "rows", "differences")
    for name, compared in result.views.items():
        colour = "red" if compared.total else "green"
        table.add_row(name, compared.table, f"{compared.rows:,}", f"[{colour}]{compared.total:,}[/{colour}]")
    stdout.print(table)
    for difference in result.positions:
        stdout.print(f"[red]{escape(_sentence(difference))}[/red]", soft_wrap=True)
    for compared in result.views.values():
        for difference in compared.differences:
            stdout.print(f"[red]{escape(_sentence(difference))}[/red]", soft_wrap=True)
        if (more := compared.total - len(compared.differences)) > 0:
            stdout.print(f"[red]{compared.view}: and {more:,} more[/red]")
    stdout.print(f"{result.commits:,} commits folded, {result.differences:,} differences")


def _sentence(difference: Difference) -> str:
    key = ", ".join(f"{name}={value}" for name, value in difference.key.items())
    where = f"{difference.view} ({key})"
    match difference.what:
        case "missing":
            return f"{where} is missing; the log says {_values(difference.expected)}"
        case "extra":
            return f"{where} should not be there: {_values(difference.found)}"
        case "poison":
            return f"{where} can't be folded, and is not on record as parked: {difference.expected}"
        case "changed" | "position":
            return f"{where} differs: {_changed(difference)}"


def _values(row: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.items())


def _changed(difference: Difference) -> str:
    assert isinstance(difference.expected, dict)
    assert isinstance(difference.found, dict)
    pairs = ((name, value, difference.found[name]) for name, value in difference.expected.items())
    return "; ".join(
        f"{name} is {found}, the log says {expected}" for name, expected, found in pairs if expected != found
    )


def _as_json(result: Verified) -> dict[str, Any]:
    return {
        "differences": result.differences,
        "commits": result.commits,
        "positions": [_difference(difference) for difference in result.positions],
        "views": {
            name: {
                "table": compared.table,
                "rows": compared.rows,
                "differences": compared.total,
                "shown": [_difference(difference) for difference in compared.differences],
            }
            for name, compared in result.views.items()
        },
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "what": difference.what,
        "partition": difference.partition,
        "key": difference.key,
        "expected": difference.expected or None,
        "found": difference.found or None,
    }
