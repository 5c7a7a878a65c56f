"""`samefold rebuild`, `samefold switch`: other tables for readers, made from the log or there already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from projections.engine.rebuild import Rebuilt
    from projections.engine.switch import Switched

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Worker processes; by default as many as the log's size is worth, up to the cores."),
]


def register(app: typer.Typer) -> None:
    app.command()(rebuild)
    app.command()(switch)


def rebuild(
    views: Annotated[list[str] | None, typer.Argument(help="Views; without, all that this code needs.")] = None,
    no_switch: Annotated[bool, typer.Option("--no-switch", help="Stop when the builds are ready.")] = False,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Build views anew from the log, beside live traffic, and make them live in one short transaction.

    Views that this code no longer has leave with the same switch. Killed at any moment, it does no harm: run it again.
    """
    from infra.settings import Settings
    from infra.terminal import Stages, print_json, stdout
    from projections.engine.rebuild import rebuild as run
    from projections.engine.system import all_views

    if views and not as_json:
        _offer(views)
    with Stages(quiet=as_json) as stages:
        result = run(
            Settings(), views or [], all_views(), make_live=not no_switch, processes=processes, progress=stages
        )
    if as_json:
        print_json(_rebuilt(result))
        return
    if not result.tables and not result.removed:
        stdout.print("Nothing to do: what is live is what this code has.")
        return
    for view, table in result.tables.items():
        rows = f"{result.rows[view]:,} rows" if view in result.rows else "built before"
        stdout.print(f"{view}: {table}, {rows}")
    if result.load_ms:
        rate = result.events / (result.load_ms / 1000)
        stdout.print(
            f"{result.commits:,} commits, {result.events:,} events; load {result.load_ms:,.0f} ms ({rate:,.0f} events/s), "
            f"keys and indexes {result.index_ms:,.0f} ms"
        )
    if result.switched is None:
        stdout.print("Ready, and not live yet: `samefold switch` makes it so.")
    else:
        _tell(result.switched)


def switch(
    view: Annotated[str | None, typer.Argument(help="A view; without, all that this code needs.")] = None,
    version: Annotated[int | None, typer.Argument(help="Its version, which must be this code's.")] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Make tables live that exist already: ready ones, or old ones, which is going back (from the older version's code)."""
    from infra.settings import Settings
    from infra.terminal import print_json, stdout
    from projections.engine.rebuild import go_to
    from projections.engine.system import all_views

    views = all_views()
    if view in views and version not in (None, views[view].version):
        raise typer.BadParameter(
            f"this code has {view} v{views[view].version}; to make v{version} live, run the code that has it"
        )
    result = go_to(Settings(), [view] if view else [], views, processes=processes)
    if as_json:
        print_json(_switched(result))
    elif not result.tables and not result.removed:
        stdout.print("Nothing to do: what is live is what this code has.")
    else:
        _tell(result)


def _offer(names: list[str]) -> None:
    """Say where going back to a table that is there would do."""
    from infra.database.connect import connect, naming
    from infra.settings import Settings
    from infra.terminal import stderr
    from projections.engine.rebuild import old_builds
    from projections.engine.system import all_views

    settings = Settings()
    asked = [view for name, view in all_views().items() if name in names]
    with naming(settings), connect(settings, "samefold rebuild") as connection:
        for build in old_builds(connection, asked):
            stderr.print(
                f"{build.table} is of this version too: `samefold switch {build.view} {build.version}` would only catch it up.",
                soft_wrap=True,
            )


def _tell(result: Switched) -> None:
    from infra.terminal import stdout

    stdout.print(
        f"catch-up {result.catch_up_ms:,.0f} ms ({result.commits:,} commits), switch {result.switch_ms:,.0f} ms, "
        f"agents stood still for {result.gap_ms:,.1f} ms"
    )
    for view, table in result.tables.items():
        stdout.print(f"[green]{view} is live in {table}[/green]")
    for view in result.removed:
        stdout.print(f"{view} is not in this code, and not live any more")


def _switched(result: Switched) -> dict[str, Any]:
    return {
        "tables": dict(result.tables),
        "removed": list(result.removed),
        "catch_up_ms": round(result.catch_up_ms, 1),
        "switch_ms": round(result.switch_ms, 1),
        "gap_ms": round(result.gap_ms, 1),
        "commits": result.commits,
        "tries": result.tries,
    }


def _rebuilt(result: Rebuilt) -> dict[str, Any]:
    return {
        "tables": result.tables,
        "removed": result.removed,
        "commits": result.commits,
        "events": result.events,
        "rows": result.rows,
        "load_ms": round(result.load_ms, 1),
        "index_ms": round(result.index_ms, 1),
        "switch": _switched(result.switched) if result.switched else None,
    }
