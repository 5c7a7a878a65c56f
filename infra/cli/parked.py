"""`samefold parked`: streams that a view could not take, and what to do about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from projections.engine.operate.replaying import Replayed
    from projections.engine.store.parking import ParkedStream
    from projections.engine.views.view import View

Name = Annotated[str, typer.Argument(help="A view.")]
Stream = Annotated[str, typer.Argument(help="A stream's name, e.g. rooms/12.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    parked = typer.Typer(
        help='Streams that a view with ON_POISON = "park" left out from a poisonous event on.', no_args_is_help=True
    )
    parked.command("list")(list_)
    parked.command()(show)
    parked.command()(replay)
    parked.command()(drop)
    app.add_typer(parked, name="parked")


def list_(as_json: Json = False) -> None:
    """All parked streams of tables that are live."""
    from rich.markup import escape
    from rich.table import Table

    from infra.terminal import print_json, stdout

    found = _parked()
    if as_json:
        print_json([_as_json(one) for one in found])
        return
    if not found:
        stdout.print("Nothing is parked.")
        return
    table = Table("view", "stream", "since version", "at", "parked", "why")
    for one in found:
        where = f"{one.partition}:{one.since_offset}"
        parked_at = f"{one.parked_at:%Y-%m-%d %H:%M:%S}"
        table.add_row(one.view, escape(one.stream), str(one.since_version), where, parked_at, escape(one.error))
    stdout.print(table)


def show(view: Name, stream: Stream, as_json: Json = False) -> None:
    """A parked stream, and its events that are not in the view."""
    import json

    from rich.markup import escape
    from rich.table import Table

    from infra.database.connect import connect, naming
    from infra.settings import Settings
    from infra.terminal import print_json, stdout
    from projections.engine.operate.replaying import NotParked, parked_events
    from projections.engine.store.positions import read_positions

    settings = Settings()
    one = next((one for one in _parked() if (one.view, one.stream) == (view, stream)), None)
    with naming(settings), connect(settings, "samefold parked") as connection:
        positions = read_positions(connection, _view(view).agent, settings.events_topic)
    if one is None or positions is None:
        raise NotParked(f"Stream {stream} is not parked in view '{view}'.", "`samefold parked list` shows what is.")
    events = parked_events(settings, one, positions.readings[one.partition])
    if as_json:
        listed = [{"version": version, "type": kind, "data": json.loads(data)} for version, kind, data in events]
        print_json(_as_json(one) | {"events": listed})
        return
    stdout.print(f"{escape(stream)} is parked in {view} since version {one.since_version}: {escape(one.error)}")
    table = Table("version", "event", "data")
    for version, kind, data in events:
        table.add_row(str(version), kind, escape(data.decode()))
    stdout.print(table)
    stdout.print(f"`samefold parked replay {view} {stream}` once the code is right, or `samefold parked drop …`.")


def replay(view: Name, stream: Stream, as_json: Json = False) -> None:
    """Fold the stream's events into the view with this code, in order. One that fails again stays parked from there."""
    from infra.settings import Settings
    from projections.engine.operate.replaying import replay as run

    _tell(run(Settings(), _view(view), stream), as_json=as_json)


def drop(
    view: Name,
    stream: Stream,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Leave the first parked event out of the view for good, in every later build too, and replay the rest."""
    from infra.settings import Settings
    from projections.engine.operate.replaying import drop as run

    if not yes:
        typer.confirm(f"Leave the poisonous event of {stream} out of '{view}' for good?", abort=True, err=True)
    _tell(run(Settings(), _view(view), stream), as_json=as_json)


def _tell(done: Replayed, *, as_json: bool) -> None:
    from rich.markup import escape

    from infra.terminal import print_json, stdout

    if as_json:
        print_json(
            {
                "view": done.view,
                "stream": done.stream,
                "events": done.events,
                "dropped": done.dropped,
                "parked_since": done.parked.version if done.parked else None,
                "error": done.parked.error if done.parked else None,
                "abandoned": list(done.abandoned),
            }
        )
    else:
        if done.dropped is not None:
            stdout.print(f"Event {done.dropped} of {escape(done.stream)} is left out of {done.view} for good.")
        stdout.print(f"{done.events:,} events folded into {done.view}.")
        for table in done.abandoned:
            stdout.print(f"{table} holds the dropped event and can't be gone back to: rebuild it if you need it.")
        if done.parked is not None:
            stdout.print(
                f"[red]{escape(done.stream)} is parked again, since version {done.parked.version}: "
                f"{escape(done.parked.error)}[/red]"
            )
    if done.parked is not None:
        raise typer.Exit(1)


def _parked() -> list[ParkedStream]:
    from infra.database.connect import connect, naming
    from infra.settings import Settings
    from projections.engine.store.parking import parked_streams

    settings = Settings()
    with naming(settings), connect(settings, "samefold parked") as connection:
        return parked_streams(connection, live_only=True)


def _view(name: str) -> View:
    from projections.engine.rebuild.rebuild import UnknownView
    from projections.engine.views.core_views import all_views

    views = all_views()
    if name not in views:
        raise UnknownView(f"There is no view '{name}'.", f"The views are {', '.join(views)}.")
    return views[name]


def _as_json(one: ParkedStream) -> dict[str, Any]:
    return {
        "view": one.view,
        "table": one.table,
        "stream": one.stream,
        "partition": one.partition,
        "since_offset": one.since_offset,
        "since_version": one.since_version,
        "error": one.error,
        "parked_at": one.parked_at,
    }
