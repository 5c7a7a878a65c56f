"""`samefold rebuild`: other tables for readers, made from the log; and tables of the past."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from infra.database.connect import session
from infra.settings import Settings
from projections.engine.fold.as_of import parse_as_of
from projections.engine.rebuild.rebuild import old_builds, views_named
from projections.engine.rebuild.rebuild import rebuild as run
from projections.engine.rebuild.time_travel import look_back
from projections.engine.views.core_views import all_views
from spark_jobs.engine.choose import engine_for
from tools.cli import EngineName, Json, Master, Processes, Tasks, Wait
from tools.cli.switch import NOTHING, Interrupted, switched, telling_what_became
from tools.terminal import Output, Stages, Text, plain, show, stderr


def rebuild(
    views: Annotated[list[str] | None, typer.Argument(help="Views; by default all that this code needs.")] = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            help="A table of the past, to query: as of a time (2026-11-21T14:30:00+01:00, or -15m), or at positions "
            "(0:123,1:456; partitions that are not named are folded to their ends). Needs --no-switch."
        ),
    ] = None,
    no_switch: Annotated[bool, typer.Option("--no-switch", help="Stop when the tables are ready.")] = False,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="End a rebuild or switch of the same views that runs now.")
    ] = False,
    engine: EngineName = "auto",
    master: Master = None,
    processes: Processes = None,
    tasks: Tasks = None,
    wait: Wait = 60,
    as_json: Json = False,
) -> None:
    """Rebuild views from the log while agents keep working, and make them live in one short transaction.

    Views that this code no longer has leave with the same switch. Killed at any moment, it does no harm: run it again.
    """
    names = views or []
    why: list[str] = []
    if as_of is not None:
        _refuse_past(names, no_switch=no_switch, abandon=abandon)
        moment = parse_as_of(as_of, datetime.now(UTC))
        chosen = views_named(names, all_views())
        try:
            with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=why.append) as engines:
                past = look_back(Settings(), chosen, moment, tasks=tasks, engine_for=engines, progress=stages)
        except KeyboardInterrupt:
            raise Interrupted(
                "Interrupted. The unfinished table of the past was abandoned.", "Nothing else was touched."
            ) from None
        show(plain(past) | {"engine_because": why[-1] if why else None}, _past, as_json=as_json)
        return
    if names and not as_json:
        _offer(names)
    with (
        telling_what_became(names),
        Stages(quiet=as_json) as stages,
        engine_for(engine, master, processes, tell=why.append) as engines,
    ):
        rebuilt = run(
            Settings(),
            names,
            all_views(),
            make_live=not no_switch,
            end_others=abandon,
            tasks=tasks,
            engine_for=engines,
            progress=stages,
            wait_s=wait,
        )
    result = plain(rebuilt) | {"engine_because": why[-1] if why else None}
    result["switch"] = result.pop("switched")
    show(result, _rebuilt, as_json=as_json)


def _refuse_past(names: list[str], *, no_switch: bool, abandon: bool) -> None:
    if not no_switch:
        raise typer.BadParameter("the past never goes live: add --no-switch", param_hint="'--as-of'")
    if abandon:
        raise typer.BadParameter("tables of the past block no rebuild", param_hint="'--abandon'")
    if not names:
        raise typer.BadParameter("name the views to look at", param_hint="'--as-of'")


def _offer(names: list[str]) -> None:
    """Say where going back to a table that is there would do."""
    settings = Settings()
    asked = [view for name, view in all_views().items() if name in names]
    with session(settings, "samefold rebuild") as connection:
        for build in old_builds(connection, asked):
            stderr.print(
                f"{build.table} is of this version too: `samefold switch {build.view} {build.version}` would only catch it up.",
                soft_wrap=True,
            )


def _rebuilt(found: dict[str, Any]) -> Output:
    if not found["tables"] and not found["removed"]:
        yield NOTHING
        return
    for view, table in found["tables"].items():
        rows = f"{found['rows'][view]:,} rows" if view in found["rows"] else "built before"
        yield f"{view}: {table}, {rows}"
    yield from _filled(found)
    if found["switch"] is None:
        yield "Ready, and not live yet: `samefold switch` switches to newer versions, `samefold switch VIEW VERSION` to any."
    else:
        yield from switched(found["switch"])


def _past(found: dict[str, Any]) -> Output:
    at = ",".join(f"{partition}:{offset}" for partition, offset in found["positions"].items())
    yield f"As of {found['as_of']}: everything before {at}"
    yield from _filled(found)
    for view, table in found["tables"].items():
        rows = Text(f"{view}: {table}, {found['rows'][view]:,} rows", "green")
        yield rows.append("; it stays as it is until it is dropped", "default")
        yield f"  {found['queries'][view]};"
        yield f"  samefold views drop {view} {table}"


def _filled(found: dict[str, Any]) -> Output:
    if found["engine_because"]:
        yield found["engine_because"]
    for view, count in sorted(found["parked"].items()):
        left_out = Text(f"{view} leaves out {count:,} streams, each from an event on that it can't fold", "yellow")
        yield left_out.append(": `samefold parked list` says why", "default")
    if found["load_ms"]:
        rate = found["events"] / (found["load_ms"] / 1000)
        yield (
            f"{found['commits']:,} commits, {found['events']:,} events; start-up {found['start_up_ms']:,.0f} ms, "
            f"load {found['load_ms']:,.0f} ms ({rate:,.0f} events/s), keys and indexes {found['index_ms']:,.0f} ms"
        )
