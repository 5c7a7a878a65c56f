"""`samefold rebuild`, `samefold switch`: other tables for readers, made from the log or there already; and tables of the past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.errors import SamefoldError
from tools.cli import EngineName, Json, Master, Processes, Wait

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTHING = "Nothing to do: what is live is what this code has."


class Interrupted(SamefoldError):
    """Ctrl-C in the midst of a rebuild or a switch, neither of which leaves anything half done."""

    exit_code = 130


def register(app: typer.Typer) -> None:
    app.command()(rebuild)
    app.command()(switch)


def rebuild(
    views: Annotated[list[str] | None, typer.Argument(help="Views; without, all that this code needs.")] = None,
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
    wait: Wait = 60,
    as_json: Json = False,
) -> None:
    """Rebuild views from the log while agents keep working, and make them live in one short transaction.

    Views that this code no longer has leave with the same switch. Killed at any moment, it does no harm: run it again.
    """
    from datetime import UTC, datetime

    from infra.settings import Settings
    from projections.engine.fold.as_of import parse_as_of
    from projections.engine.rebuild.rebuild import rebuild as run
    from projections.engine.rebuild.rebuild import views_named
    from projections.engine.rebuild.time_travel import look_back
    from projections.engine.views.core_views import all_views
    from spark_jobs.choose import engine_for
    from tools.terminal import Stages, plain, show

    names = views or []
    why: list[str] = []
    if as_of is not None:
        _refuse_past(names, no_switch=no_switch, abandon=abandon)
        moment = parse_as_of(as_of, datetime.now(UTC))
        chosen = views_named(names, all_views())
        try:
            with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=why.append) as engines:
                past = look_back(Settings(), chosen, moment, engine_for=engines, progress=stages)
        except KeyboardInterrupt:
            raise Interrupted(
                "Interrupted. What was built of the past is given up.", "Nothing else was touched."
            ) from None
        show(plain(past) | {"engine_because": why[-1] if why else None}, _past, as_json=as_json)
        return
    if names and not as_json:
        _offer(names)
    with (
        _telling_what_became(names),
        Stages(quiet=as_json) as stages,
        engine_for(engine, master, processes, tell=why.append) as engines,
    ):
        rebuilt = run(
            Settings(),
            names,
            all_views(),
            make_live=not no_switch,
            end_others=abandon,
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


def switch(
    view: Annotated[str | None, typer.Argument(help="A view; without, all that this code needs.")] = None,
    version: Annotated[int | None, typer.Argument(help="Its version, which must be this code's.")] = None,
    wait: Wait = 60,
    as_json: Json = False,
) -> None:
    """Make tables live that exist already: ready ones, or old ones, which is going back (from the older version's code).

    Without a view, commands that this code does not know are not waited for any more either: they are malformed from then on.
    So it is refused while handlers of a release run that know them, and while policies have wished them.
    """
    from commands.release import require_alone
    from infra.database.connect import session
    from infra.settings import Settings
    from projections.engine.rebuild.rebuild import go_to
    from projections.engine.store.command_types import drop_other_types, live_types, own_types, require_unwished
    from projections.engine.store.event_types import drop_other_event_types
    from projections.engine.views.core_views import all_views
    from tools.terminal import Stages, plain, show

    settings, views = Settings(), all_views()
    if view in views and version not in (None, views[view].version):
        raise typer.BadParameter(
            f"this code has {view} v{views[view].version}; to make v{version} live, run the code that has it"
        )
    if view is None:
        with session(settings, "samefold switch") as connection:
            unknown = live_types(connection) - own_types()
            require_unwished(connection)
        require_alone(settings, unknown)
    with _telling_what_became([view] if view else []), Stages(quiet=as_json) as stages:
        result = go_to(settings, [view] if view else [], views, progress=stages, wait_s=wait)
        if view is None:
            with session(settings, "samefold switch") as connection:
                # they may have been started meanwhile: to switch can take minutes
                require_alone(settings, live_types(connection) - own_types())
                gone = tuple(map(str, drop_other_types(connection, settings.events_topic)))
                drop_other_event_types(connection)
                result = replace(result, removed=(*result.removed, *gone))
    show(plain(result), _switched, as_json=as_json)


def resume(
    views: Annotated[list[str] | None, typer.Argument(help="Stopped views; without, all but journals.")] = None,
    as_json: Json = False,
) -> None:
    """Fold stopped views on with this code, from where they stopped, and make them live again."""
    from infra.processes.time_limit import calls_limited
    from infra.settings import Settings
    from projections.engine.rebuild.rebuild import resume as run
    from projections.engine.views.core_views import all_views
    from tools.terminal import Stages, plain, show

    settings = Settings()
    limit = calls_limited(settings.decide_limit_s)  # what stopped the view may not end here either
    with _telling_what_became(views or []), limit, Stages(quiet=as_json) as stages:
        result = run(settings, views or [], all_views(), progress=stages)
    show(plain(result), _switched, as_json=as_json)


def _offer(names: list[str]) -> None:
    """Say where going back to a table that is there would do."""
    from infra.database.connect import session
    from infra.settings import Settings
    from projections.engine.rebuild.rebuild import old_builds
    from projections.engine.views.core_views import all_views
    from tools.terminal import stderr

    settings = Settings()
    asked = [view for name, view in all_views().items() if name in names]
    with session(settings, "samefold rebuild") as connection:
        for build in old_builds(connection, asked):
            stderr.print(
                f"{build.table} is of this version too: `samefold switch {build.view} {build.version}` would only catch it up.",
                soft_wrap=True,
            )


@contextmanager
def _telling_what_became(names: list[str]) -> Iterator[None]:
    """Turn Ctrl-C into Interrupted, whose message says what readers see now."""
    before = _live(names)
    try:
        yield
    except KeyboardInterrupt:
        now = _live(names)
        if new := [f"{view} in {table}" for view, table in now.items() if table != before.get(view)]:
            message = f"Interrupted, but the switch had been made: {', '.join(new)}."
        else:
            message = "Interrupted. Readers see what they saw before."
        raise Interrupted(message, "`samefold views` shows what there is. It can be run again at any time.") from None


def _live(names: list[str]) -> dict[str, str]:
    from infra.database.connect import session
    from infra.settings import Settings
    from projections.engine.rebuild.switch import pointers

    settings = Settings()
    with session(settings, "samefold rebuild") as connection:
        return {view: at.table for view, at in pointers(connection).items() if view in names or not names}


def _rebuilt(found: dict[str, Any]) -> Iterator[RenderableType]:
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
        yield from _switched(found["switch"])


def _past(found: dict[str, Any]) -> Iterator[RenderableType]:
    from tools.terminal import Text

    at = ",".join(f"{partition}:{offset}" for partition, offset in found["positions"].items())
    yield f"As of {found['as_of']}: everything before {at}"
    yield from _filled(found)
    for view, table in found["tables"].items():
        rows = Text(f"{view}: {table}, {found['rows'][view]:,} rows", "green")
        yield rows.append("; it stays as it is until it is dropped", "default")
        yield f"  {found['queries'][view]};"
        yield f"  samefold views drop {view} {table}"


def _filled(found: dict[str, Any]) -> Iterator[RenderableType]:
    from tools.terminal import Text

    if found["engine_because"]:
        yield found["engine_because"]
    for view, count in sorted(found["parked"].items()):
        left_out = Text(f"{view} leaves out {count:,} streams, each from an event on that it can't take", "yellow")
        yield left_out.append(": `samefold parked list` says why", "default")
    if found["load_ms"]:
        rate = found["events"] / (found["load_ms"] / 1000)
        yield (
            f"{found['commits']:,} commits, {found['events']:,} events; start-up {found['start_up_ms']:,.0f} ms, "
            f"load {found['load_ms']:,.0f} ms ({rate:,.0f} events/s), keys and indexes {found['index_ms']:,.0f} ms"
        )


def _switched(found: dict[str, Any]) -> Iterator[RenderableType]:
    from tools.terminal import Text

    if not found["tables"] and not found["removed"]:
        yield NOTHING
        return
    yield (
        f"catch-up {found['catch_up_ms']:,.0f} ms ({found['commits']:,} commits), switch {found['switch_ms']:,.0f} ms, "
        f"agents paused for {found['gap_ms']:,.1f} ms"
    )
    for view, table in found["tables"].items():
        yield Text(f"{view} is live in {table}", "green")
    for view in found["removed"]:
        yield f"{view} is not in this code, and not live any more"
