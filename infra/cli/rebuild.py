"""`samefold rebuild`, `samefold switch`: other tables for readers, made from the log or there already; and tables of the past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.errors import SamefoldError

if TYPE_CHECKING:
    from projections.engine.rebuild.filling import Filled
    from projections.engine.rebuild.rebuild import Rebuilt
    from projections.engine.rebuild.switch import Switched
    from projections.engine.rebuild.time_travel import LookedBack

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Worker processes; by default as many as the log's size is worth, up to the cores."),
]


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
        bool, typer.Option("--abandon", help="End whoever builds or switches the same views just now.")
    ] = False,
    engine: Annotated[str, typer.Option(help="auto, local or spark; auto chooses by the log's size.")] = "auto",
    master: Annotated[str | None, typer.Option(help="Where Spark runs: spark://…, k8s://…, yarn, local[2].")] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Build views anew from the log, beside live traffic, and make them live in one short transaction.

    Views that this code no longer has leave with the same switch. Killed at any moment, it does no harm: run it again.
    """
    if as_of is not None:
        _look_back(views or [], as_of, no_switch, abandon, engine, master, processes, as_json)
        return
    from infra.settings import Settings
    from infra.terminal import Stages, print_json
    from projections.engine.rebuild.rebuild import rebuild as run
    from projections.engine.views.core_views import all_views
    from spark_jobs.choose import engine_for

    if views and not as_json:
        _offer(views)
    why: list[str] = []
    with (
        _telling_what_became(views or []),
        Stages(quiet=as_json) as stages,
        engine_for(engine, master, processes, tell=why.append) as engines,
    ):
        result = run(
            Settings(),
            views or [],
            all_views(),
            make_live=not no_switch,
            end_others=abandon,
            engine_for=engines,
            processes=processes,
            progress=stages,
        )
    if as_json:
        print_json(_rebuilt(result, why))
    else:
        _tell_rebuilt(result, why)


def _look_back(
    names: list[str],
    as_of: str,
    no_switch: bool,
    abandon: bool,
    engine: str,
    master: str | None,
    processes: int | None,
    as_json: bool,
) -> None:
    from datetime import UTC, datetime

    from infra.settings import Settings
    from infra.terminal import Stages, print_json
    from projections.engine.fold.as_of import parse_as_of
    from projections.engine.rebuild.rebuild import views_named
    from projections.engine.rebuild.time_travel import look_back
    from projections.engine.views.core_views import all_views
    from spark_jobs.choose import engine_for

    if not no_switch:
        raise typer.BadParameter("the past never goes live: add --no-switch", param_hint="'--as-of'")
    if abandon:
        raise typer.BadParameter("tables of the past stand in nobody's way", param_hint="'--abandon'")
    if not names:
        raise typer.BadParameter("name the views to look at", param_hint="'--as-of'")
    moment = parse_as_of(as_of, datetime.now(UTC))
    chosen = views_named(names, all_views())
    why: list[str] = []
    try:
        with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=why.append) as engines:
            result = look_back(Settings(), chosen, moment, engine_for=engines, progress=stages)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. What was built of the past is given up.", "Nothing else was touched.") from None
    if as_json:
        print_json(_looked_back(result, why))
    else:
        _tell_looked_back(result, why)


def switch(
    view: Annotated[str | None, typer.Argument(help="A view; without, all that this code needs.")] = None,
    version: Annotated[int | None, typer.Argument(help="Its version, which must be this code's.")] = None,
    as_json: Json = False,
) -> None:
    """Make tables live that exist already: ready ones, or old ones, which is going back (from the older version's code).

    Without a view, commands that this code does not know are not waited for any more either: they are malformed from then on.
    So it is refused while handlers of a release run that know them.
    """
    from commands.release import require_alone
    from infra.database.connect import connect, naming
    from infra.settings import Settings
    from infra.terminal import Stages, print_json, stdout
    from projections.engine.rebuild.rebuild import go_to
    from projections.engine.store.command_types import drop_other_types, live_types, own_types
    from projections.engine.views.core_views import all_views

    settings, views = Settings(), all_views()
    if view in views and version not in (None, views[view].version):
        raise typer.BadParameter(
            f"this code has {view} v{views[view].version}; to make v{version} live, run the code that has it"
        )
    if view is None:
        with naming(settings), connect(settings, "samefold switch") as connection:
            unknown = live_types(connection) - own_types()
        require_alone(settings, unknown)
    with _telling_what_became([view] if view else []), Stages(quiet=as_json) as stages:
        result = go_to(settings, [view] if view else [], views, progress=stages)
        if view is None:
            with naming(settings), connect(settings, "samefold switch") as connection:
                # they may have been started meanwhile: to switch can take minutes
                require_alone(settings, live_types(connection) - own_types())
                gone = tuple(map(str, drop_other_types(connection, settings.events_topic)))
                result = replace(result, removed=(*result.removed, *gone))
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
    from projections.engine.rebuild.rebuild import old_builds
    from projections.engine.views.core_views import all_views

    settings = Settings()
    asked = [view for name, view in all_views().items() if name in names]
    with naming(settings), connect(settings, "samefold rebuild") as connection:
        for build in old_builds(connection, asked):
            stderr.print(
                f"{build.table} is of this version too: `samefold switch {build.view} {build.version}` would only catch it up.",
                soft_wrap=True,
            )


@contextmanager
def _telling_what_became(names: list[str]) -> Iterator[None]:
    """Ctrl-C becomes Interrupted, which says what readers see now, and whether that is what they saw before."""
    before = _live(names)
    try:
        yield
    except KeyboardInterrupt:
        now = _live(names)
        if new := [f"{view} in {table}" for view, table in now.items() if table != before.get(view)]:
            said = f"Interrupted, but the switch had been made: {', '.join(new)}."
        else:
            said = "Interrupted. Readers see what they saw before."
        raise Interrupted(said, "`samefold views` shows what there is. It can be run again at any time.") from None


def _live(names: list[str]) -> dict[str, str]:
    from infra.database.connect import connect, naming
    from infra.settings import Settings
    from projections.engine.rebuild.switch import pointers

    settings = Settings()
    with naming(settings), connect(settings, "samefold rebuild") as connection:
        return {view: at.table for view, at in pointers(connection).items() if view in names or not names}


def _tell_rebuilt(result: Rebuilt, why: list[str]) -> None:
    from infra.terminal import stdout

    if not result.tables and not result.removed:
        stdout.print("Nothing to do: what is live is what this code has.")
        return
    for view, table in result.tables.items():
        rows = f"{result.rows[view]:,} rows" if view in result.rows else "built before"
        stdout.print(f"{view}: {table}, {rows}")
    _tell_filled(result, why)
    if result.switched is None:
        stdout.print(
            "Ready, and not live yet: `samefold switch` switches to newer versions, `samefold switch VIEW VERSION` to any."
        )
    else:
        _tell(result.switched)


def _tell_looked_back(result: LookedBack, why: list[str]) -> None:
    from infra.terminal import stdout

    at = ",".join(f"{partition}:{offset}" for partition, offset in result.positions.items())
    stdout.print(f"As of {result.as_of}: everything before {at}", soft_wrap=True)
    _tell_filled(result, why)
    for view, table in result.tables.items():
        stdout.print(
            f"[green]{view}: {table}, {result.rows[view]:,} rows[/green]; it stays as it is until it is dropped"
        )
        stdout.print(f"  {result.queries[view]};", soft_wrap=True, markup=False)
        stdout.print(f"  samefold views drop {view} {table}", soft_wrap=True)


def _tell_filled(result: Filled, why: list[str]) -> None:
    from infra.terminal import stdout

    for reason in why:
        stdout.print(reason, soft_wrap=True, markup=False)
    for view, count in sorted(result.parked.items()):
        stdout.print(
            f"[yellow]{view} leaves out {count:,} streams, each from an event on that it can't take[/yellow]: "
            "`samefold parked list` says why",
            soft_wrap=True,
        )
    if result.load_ms:
        rate = result.events / (result.load_ms / 1000)
        stdout.print(
            f"{result.commits:,} commits, {result.events:,} events; start-up {result.start_up_ms:,.0f} ms, "
            f"load {result.load_ms:,.0f} ms ({rate:,.0f} events/s), keys and indexes {result.index_ms:,.0f} ms",
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


def _rebuilt(result: Rebuilt, why: list[str]) -> dict[str, Any]:
    return {
        "tables": result.tables,
        "removed": result.removed,
        **_filled(result, why),
        "switch": _switched(result.switched) if result.switched else None,
    }


def _looked_back(result: LookedBack, why: list[str]) -> dict[str, Any]:
    return {
        "as_of": result.as_of,
        "positions": result.positions,
        "tables": result.tables,
        "queries": result.queries,
        **_filled(result, why),
    }


def _filled(result: Filled, why: list[str]) -> dict[str, Any]:
    return {
        "commits": result.commits,
        "events": result.events,
        "rows": result.rows,
        "parked": result.parked,
        "engine": result.engine,
        "engine_because": why[-1] if why else None,
        "start_up_ms": round(result.start_up_ms, 1),
        "load_ms": round(result.load_ms, 1),
        "index_ms": round(result.index_ms, 1),
    }
