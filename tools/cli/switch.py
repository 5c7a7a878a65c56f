"""`samefold switch`: other tables for readers, which are there already."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer

from commands.release import require_alone
from infra.database.connect import session
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.rebuild.rebuild import go_to
from projections.engine.rebuild.switch import pointers
from projections.engine.store.command_types import drop_other_types, live_types, own_types, require_unwished
from projections.engine.store.event_types import drop_other_event_types
from projections.engine.views.core_views import all_views
from tools.cli import Json, Wait
from tools.terminal import Output, Stages, Text, plain, show

NOTHING = "Nothing to do: what is live is what this code has."


class Interrupted(SamefoldError):
    """Ctrl-C in the midst of a rebuild or a switch, neither of which leaves anything half done."""

    exit_code = 130


def switch(
    view: Annotated[str | None, typer.Argument(help="A view; by default all that this code needs.")] = None,
    version: Annotated[int | None, typer.Argument(help="Its version, which must be this code's.")] = None,
    wait: Wait = 60,
    as_json: Json = False,
) -> None:
    """Make tables live that exist already: ready ones, or old ones, which is going back (from the older version's code).

    Without a view, commands that this code does not know are not waited for any more either: they are malformed from then on.
    So it is refused while handlers of a release run that know them, and while policies have wished them.
    """
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
    with telling_what_became([view] if view else []), Stages(quiet=as_json) as stages:
        result = go_to(settings, [view] if view else [], views, progress=stages, wait_s=wait)
        if view is None:
            with session(settings, "samefold switch") as connection:
                # they may have been started meanwhile: to switch can take minutes
                require_alone(settings, live_types(connection) - own_types())
                gone = tuple(map(str, drop_other_types(connection, settings.events_topic)))
                drop_other_event_types(connection)
                result = replace(result, removed=(*result.removed, *gone))
    show(plain(result), switched, as_json=as_json)


@contextmanager
def telling_what_became(names: list[str]) -> Iterator[None]:
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
        raise Interrupted(message, "`samefold views` shows the tables. Run the command again at any time.") from None


def _live(names: list[str]) -> dict[str, str]:
    settings = Settings()
    with session(settings, "samefold rebuild") as connection:
        return {view: at.table for view, at in pointers(connection).items() if view in names or not names}


def switched(found: dict[str, Any]) -> Output:
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
