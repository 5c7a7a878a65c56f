"""Streams that a view or policy with ON_POISON = "park" left out from a poisonous event on."""

import json
from typing import Annotated, Any

import typer

from infra.database.connect import session
from infra.settings import Settings
from policies.engine.operate import require_policy
from policies.engine.outbox import view_of
from projections.engine.operate import replaying
from projections.engine.operate.replaying import NotParked, Replayed, parked_events
from projections.engine.store.parking import Dropped, ParkedStream, dropped_events, parked_streams
from projections.engine.store.positions import read_positions
from projections.engine.views.core_views import all_views
from projections.engine.views.view import POLICY, View
from tools import terminal
from tools.cli import Json, StreamName, ViewName, Yes, confirm, new_app

app = new_app(__doc__, no_args_is_help=True)


@app.command("list")
def list_(
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Show the events that were left out for good instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """All parked streams of tables that are live."""
    settings = Settings()
    with session(settings, "samefold parked") as connection:
        if dropped:
            terminal.show(dropped_events(connection), _dropped, as_json=as_json)
        else:
            terminal.show(parked_streams(connection, live_only=True), _parked, as_json=as_json)


def _parked(found: list[ParkedStream]) -> terminal.Output:
    if not found:
        yield "Nothing is parked."
        return
    columns = ("view", "stream", "since version", "at", "parked", "why")
    at = "{0.partition}:{0.since_offset}".format
    parked = ((one.view, one.stream, one.since_version, at(one), f"{one.parked_at:%F %T}", one.error) for one in found)
    yield terminal.table(columns, parked)


def _dropped(found: list[Dropped]) -> terminal.Output:
    if not found:
        yield "Nothing was dropped."
        return
    rows = ((one.view, one.stream, one.version, f"{one.at:%F %T}", one.error) for one in found)
    yield terminal.table(("view", "stream", "version", "dropped", "why"), rows)


@app.command()
def show(view: ViewName, stream: StreamName, as_json: Json = False) -> None:
    """A parked stream, and its events that are not in the view."""
    settings = Settings()
    with session(settings, "samefold parked") as connection:
        parked = {(one.view, one.stream): one for one in parked_streams(connection, live_only=True)}
        positions = read_positions(connection, _view(view).agent, settings.events_topic)
    one = parked.get((view, stream))
    if one is None or positions is None:
        raise NotParked(
            f"Stream {stream} is not parked in view '{view}'.", "`samefold parked list` shows those that are."
        )
    found = parked_events(settings, one, positions.readings[one.partition])
    events = [{"version": version, "type": kind, "data": json.loads(data)} for version, kind, data in found]

    def text(result: dict[str, Any]) -> terminal.Output:
        yield f"{stream} is parked in {view} since version {result['since_version']}: {result['error']}"
        rows = ((event["version"], event["type"], json.dumps(event["data"], ensure_ascii=False)) for event in events)
        yield terminal.table(("version", "event", "data"), rows)
        yield f"`samefold parked replay {view} {stream}` once the code is right, or `samefold parked drop …`."

    terminal.show(terminal.opened(settings, terminal.plain(one) | {"events": events}), text, as_json=as_json)


@app.command()
def replay(view: ViewName, stream: StreamName, as_json: Json = False) -> None:
    """Fold the stream's events into the view with this code, in order. One that fails again stays parked from there."""
    _show(replaying.replay(Settings(), _view(view), stream), as_json=as_json)


@app.command()
def drop(
    view: ViewName,
    stream: StreamName,
    version: Annotated[int | None, typer.Option(help="Only if this is the first parked event.")] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Leave the first parked event out of the view for good, in every later build too, and replay the rest."""
    known = _view(view)
    confirm(f"Leave the poisonous event of {stream} out of '{view}' for good?", yes=yes)
    _show(replaying.drop(Settings(), known, stream, version), as_json=as_json)


def _show(done: Replayed, *, as_json: bool) -> None:
    def text(result: dict[str, Any]) -> terminal.Output:
        if result["dropped"] is not None:
            yield f"Event {result['dropped']} of {result['stream']} is left out of {result['view']} for good."
        yield f"{result['events']:,} events folded into {result['view']}."
        for table in result["abandoned"]:
            yield f"{table} holds the dropped event and can't be gone back to: rebuild it if you need it."
        if result["parked_since"] is not None:
            again = f"{result['stream']} is parked again, since version {result['parked_since']}: {result['error']}"
            yield terminal.Text(again, "red")

    since = done.parked and {"parked_since": done.parked.version, "error": done.parked.error}
    result = terminal.plain(done) | (since or {"parked_since": None, "error": None})
    del result["parked"]
    terminal.show(result, text, as_json=as_json)
    if done.parked is not None:
        raise typer.Exit(1)


def _view(name: str) -> View:
    from projections.engine.rebuild.rebuild import views_named  # brings SQLAlchemy, which the list does without

    if name.startswith(POLICY):
        return view_of(require_policy(name.removeprefix(POLICY)), with_outcomes=False)
    [view] = views_named([name], all_views())
    return view
