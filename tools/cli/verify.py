"""`samefold verify`: the read models against a fold of the log."""

from functools import partial
from typing import Annotated, Any

import typer

from infra.settings import Settings
from projections.engine.operate.verify import verify as run
from projections.engine.rebuild.rebuild import views_named
from projections.engine.views.core_views import all_views
from spark_jobs.engine.choose import engine_for
from tools.cli import EngineName, Json, Master, Processes
from tools.terminal import Output, Stages, Text, plain, show, stderr, table


def verify(
    views: Annotated[list[str] | None, typer.Argument(help="Views; by default all.")] = None,
    engine: EngineName = "auto",
    master: Master = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Compare rows and positions with a fold of the log while agents keep working. Exit code 1 if anything differs."""
    known = all_views()
    asked = {view.name: view for view in views_named(views or known, known)}
    why: list[str] = []
    tell = why.append if as_json else partial(stderr.print, soft_wrap=True, markup=False)
    with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=tell) as engines:
        found = run(Settings(), asked, engine_for=engines, progress=stages)
    result = {
        "differences": found.differences,
        "commits": found.commits,
        "positions": plain(found.positions),
        "stopped": found.stopped,
        "views": {
            name: {"table": one.table, "rows": one.rows, "differences": one.total, "shown": plain(one.differences)}
            for name, one in found.views.items()
        },
        "engine_because": why[-1] if why else None,
    }
    show(result, _text, as_json=as_json)
    if found.differences:
        raise typer.Exit(1)


def _text(found: dict[str, Any]) -> Output:
    views = found["views"]
    rows = (
        (
            name,
            one["table"],
            f"{one['rows']:,}",
            Text(f"{one['differences']:,}", "red" if one["differences"] else "green"),
        )
        for name, one in views.items()
    )
    yield table(("view", "table", "rows", "differences"), rows)
    for name in found["stopped"]:
        yield Text(f"{name} is stopped, so not compared: `samefold views` says why", "yellow")
    for difference in found["positions"]:
        yield Text(_sentence(difference), "red")
    for name, one in views.items():
        for difference in one["shown"]:
            yield Text(_sentence(difference), "red")
        if (more := one["differences"] - len(one["shown"])) > 0:
            yield Text(f"{name}: and {more:,} more", "red")
    yield f"{found['commits']:,} commits folded, {found['differences']:,} differences"


def _sentence(difference: dict[str, Any]) -> str:
    where = f"{difference['view']} ({_values(difference['key'])})"
    expected, found = difference["expected"], difference["found"]
    match difference["what"]:
        case "missing":
            return f"{where} is missing; the log says {_values(expected)}"
        case "extra":
            return f"{where} should not be there: {_values(found)}"
        case "poison":
            return f"{where} can't be folded, and is not on record as parked: {expected}"
        case _:
            changed = (
                f"{name} is {found[name]}, the log says {value}"
                for name, value in expected.items()
                if found[name] != value
            )
            return f"{where} differs: {'; '.join(changed)}"


def _values(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.items())
