"""`samefold views`: what readers see, what this code has, how far behind; and dropping tables nobody needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from projections.engine.operate.overview import Overview, ViewNow
    from projections.engine.rebuild.builds import Build


def register(app: typer.Typer) -> None:
    views = typer.Typer(invoke_without_command=True, help="What readers see, and what this code has.")
    views.callback()(show)
    views.command()(drop)
    app.add_typer(views, name="views")


def show(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Per view: version in the code and live, table, agent, lag, parked streams, builds."""
    if context.invoked_subcommand is not None:
        return
    from infra.settings import Settings
    from infra.terminal import print_json
    from projections.engine.operate.overview import overview
    from projections.engine.views.core_views import all_views

    found = overview(Settings(), all_views())
    if as_json:
        print_json(_as_json(found))
    else:
        _tell(found)


def drop(
    view: Annotated[str, typer.Argument(help="A view.")],
    which: Annotated[str, typer.Argument(help="A version, for all its tables that are not needed, or a table's name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Drop tables that readers do not see: old ones, ones that were abandoned, and by its name any other that is not live."""
    from infra.settings import Settings
    from infra.terminal import print_json, stdout
    from projections.engine.rebuild.dropping import drop_tables, droppable
    from projections.engine.views.core_views import all_views

    settings, views = Settings(), all_views()
    builds = droppable(settings, view, which)
    names = ", ".join(build.table for build in builds)
    if not yes:
        back = "" if all(build.as_of for build in builds) else " Going back to it then needs a rebuild."
        typer.confirm(f"Drop {names}?{back}", abort=True, err=True)
    drop_tables(settings, builds, views.get(view))
    if as_json:
        print_json({"dropped": [build.table for build in builds]})
    else:
        stdout.print(f"Dropped {names}.")


def _tell(found: Overview) -> None:
    from rich.table import Table

    from infra.terminal import stdout

    table = Table("view", "code", "live", "table", "agent", "parked", "other tables")
    for view in found.views:
        table.add_row(
            view.name,
            f"v{view.code.version}" if view.code else "–",
            f"v{view.live.version}" if view.live else "–",
            view.live.table if view.live else "–",
            view.live.agent if view.live else view.code.agent if view.code else "–",
            str(len(view.parked)) if view.parked else "–",
            ", ".join(f"{build.table} ({_what(build)})" for build in _others(view)) or "–",
        )
    stdout.print(table)
    for agent, now in found.agents.items():
        at = " ".join(f"{partition}:{reading.next_offset}" for partition, reading in now.positions.items())
        behind = f"{now.lag.records:,} records, {now.lag.seconds:,.1f} s behind" if now.lag.records else "up to date"
        stdout.print(f"agent {agent}: {behind}; at {at or 'no position yet'}", soft_wrap=True)
        if now.difference:
            stdout.print(f"  [yellow]{now.difference}[/yellow]", soft_wrap=True)
    for agent in found.retired:
        stdout.print(f"agent {agent}: retired, none of its views is live; its processes may end", soft_wrap=True)


def _others(view: ViewNow) -> list[Build]:
    return [build for build in view.builds if build.state != "live"]


def _what(build: Build) -> str:
    return f"{build.state}, as of {build.as_of}" if build.as_of else build.state


def _as_json(found: Overview) -> dict[str, Any]:
    return {
        "views": {
            view.name: {
                "code": view.code.version if view.code else None,
                "live": view.live.version if view.live else None,
                "table": view.live.table if view.live else None,
                "agent": view.live.agent if view.live else view.code.agent if view.code else None,
                "parked": len(view.parked),
                "builds": [
                    {
                        "table": b.table,
                        "version": b.version,
                        "state": b.state,
                        "as_of": b.as_of,
                        "positions": {p: at.next_offset for p, at in sorted(b.positions.items())},
                        "created_at": b.created_at,
                    }
                    for b in view.builds
                ],
            }
            for view in found.views
        },
        "agents": {
            agent: {
                "positions": {partition: reading.next_offset for partition, reading in now.positions.items()},
                "lag": {"records": now.lag.records, "seconds": round(now.lag.seconds, 1)},
                "difference": now.difference,
            }
            for agent, now in found.agents.items()
        },
        "retired": list(found.retired),
    }
