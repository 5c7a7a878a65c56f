"""What readers see, and what this code has."""

from typing import Annotated, Any

import typer

from infra.processes.time_limit import calls_limited
from infra.settings import Settings
from projections.engine.operate.overview import Overview, overview
from projections.engine.rebuild.builds import drop_tables, droppable
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from tools import terminal
from tools.cli import Json, ViewName, Yes, confirm, new_app

app = new_app(__doc__)


@app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: Json = False) -> None:
    """Per view: version in the code and live, table, agent, lag, parked streams, builds."""
    if context.invoked_subcommand is not None:
        return
    terminal.show(_result(overview(Settings(), all_views())), _text, as_json=as_json)


@app.command()
def resume(
    views: Annotated[list[str] | None, typer.Argument(help="Stopped views; by default all but journals.")] = None,
    as_json: Json = False,
) -> None:
    """Fold stopped views on with this code, from where they stopped, and make them live again."""
    from projections.engine.rebuild.rebuild import resume as run  # brings SQLAlchemy, which the others do without
    from tools.cli.switch import switched, telling_what_became

    settings = Settings()
    limit = calls_limited(settings.decide_limit_s)  # what stopped the view may not end here either
    with telling_what_became(views or []), limit, terminal.Stages(quiet=as_json) as stages:
        result = run(settings, views or [], all_views(), progress=stages)
    terminal.show(terminal.plain(result), switched, as_json=as_json)


@app.command()
def drop(
    view: ViewName,
    which: Annotated[str, typer.Argument(help="A version, for all its tables that are not needed, or a table's name.")],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Drop tables that are not live: old and abandoned ones, or any one by its name."""
    settings = Settings()
    builds = droppable(settings, view, which)
    names = ", ".join(build.table for build in builds)
    back = "" if all(build.as_of for build in builds) else " Going back to it then needs a rebuild."
    confirm(f"Drop {names}?{back}", yes=yes)
    drop_tables(settings, builds, all_views().get(view))
    result = {"dropped": [build.table for build in builds]}
    terminal.show(result, lambda _: [f"Dropped {names}."], as_json=as_json)


def _result(found: Overview) -> dict[str, Any]:
    return {
        "views": {
            view.name: {
                "code": view.code.version if view.code else None,
                "live": view.live.version if view.live and not view.stopped else None,
                "stopped": view.stopped and terminal.plain(view.stopped) | {"how": _how(view.code)},
                "table": view.live.table if view.live else None,
                "agent": view.live.agent if view.live else view.code.agent if view.code else None,
                "parked": len(view.parked),
                "builds": [
                    {
                        "table": build.table,
                        "version": build.version,
                        "state": build.state,
                        "as_of": build.as_of,
                        "positions": {p: at.next_offset for p, at in sorted(build.positions.items())},
                        "created_at": build.created_at,
                    }
                    for build in view.builds
                ],
            }
            for view in found.views
        },
        "agents": {
            agent: {
                "positions": {partition: reading.next_offset for partition, reading in now.positions.items()},
                "lag": now.lag,
                "difference": now.difference,
            }
            for agent, now in found.agents.items()
        },
        "retired": found.retired,
    }


def _how(code: View | None) -> str:
    """The command by which a stopped view goes on, or, where this code has none of that name, leaves."""
    if code is None:
        return "switch"
    return "rebuild" if code.kind == "journal" else "views resume"


def _text(found: dict[str, Any]) -> terminal.Output:
    def row(name: str, view: dict[str, Any]) -> tuple[Any, ...]:
        others = [
            f"{build['table']} ({build['state']}{', as of ' + build['as_of'] if build['as_of'] else ''})"
            for build in view["builds"]
            if build["table"] != view["table"]
        ]
        versions = [view[which] and f"v{view[which]}" for which in ("code", "live")]
        if view["stopped"]:
            versions[1] = terminal.Text("stopped", "red")
        return name, *versions, view["table"], view["agent"], view["parked"] or None, ", ".join(others)

    columns = ("view", "code", "live", "table", "agent", "parked", "other tables")
    yield terminal.table(columns, (row(name, view) for name, view in found["views"].items()))
    for name, view in found["views"].items():
        if why := view["stopped"]:
            at = f"event {why['stream_version']} of {why['stream']} (partition {why['partition']}, offset {why['offset']})"
            yield terminal.Text(f"{name} stopped at {at}, {why['stopped_at']:%F %T}: {why['error']}", "red")
            if view["code"]:
                yield f"  Correct projections/{name}.py, then `samefold {why['how']} {name}`."
            else:
                yield f"  This code has no such view: each switch of its agent removes it, `samefold switch {name}` at once."
    for agent, now in found["agents"].items():
        at = " ".join(f"{partition}:{offset}" for partition, offset in now["positions"].items())
        lag = now["lag"]
        behind = f"{lag.records:,} records, {lag.seconds:,.1f} s behind" if lag.records else "up to date"
        yield f"agent {agent}: {f'{behind}; at {at}' if at else 'has not started yet'}"
        if now["difference"]:
            yield terminal.Text(f"  {now['difference']}", "yellow")
    for agent in found["retired"]:
        yield f"agent {agent}: retired, none of its views is live; its processes may end"
