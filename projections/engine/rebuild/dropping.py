"""Drop tables that readers do not see any more, and tables of the past."""

from __future__ import annotations

from collections.abc import Sequence

from infra.database.connect import connect, named_errors
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.rebuild.builds import (
    OF_THE_PAST,
    Build,
    BuildState,
    abandon,
    builds_of,
    end_loaders,
    exists,
    lock_builds,
    remove_table,
)
from projections.engine.rebuild.claims import BuildAlive, builder, claim, try_claim
from projections.engine.store.positions import stopped_views
from projections.engine.views.view import View

LEFT = (BuildState.OLD, BuildState.ABANDONED)


class NotDroppable(SamefoldError):
    """A table is live, or does not exist."""


def droppable(settings: Settings, view: str, which: str) -> list[Build]:
    """A version's (`2`) old and abandoned builds, or the build of one table that is not live, whose tables exist.

    Raises NotDroppable.
    """
    with named_errors(settings), connect(settings, "samefold views") as connection:
        of_view = [build for build in builds_of(connection, [view]) if exists(connection, build.table)]
        stopped = {one.table for one in stopped_views(connection)}
    named = [build for build in of_view if which in (build.table, str(build.version), f"v{build.version}")]
    found = [b for b in named if b.state in LEFT or (b.table == which and b.state is not BuildState.LIVE)]
    found = [build for build in found if build.table not in stopped]
    if not found:
        states = {b.table: "stopped" if b.table in stopped else b.state for b in named or of_view}
        there = ", ".join(f"{table} is {state}" for table, state in states.items())
        raise NotDroppable(
            f"View '{view}' has no table {which} that could be dropped{f': {there}' if there else ''}.",
            "Old and abandoned tables can be, by version or name, others that are not live by name: `samefold views` lists them.",
        )
    return found


def drop_tables(settings: Settings, builds: Sequence[Build], view: View | None) -> None:
    """Drop these tables; no switch can go back to them afterwards. `view` is this code's version of the view.

    The table that this code's version got from its migration is emptied, not dropped: rebuilds are made like it.
    Raises NotDroppable when one has gone live, BuildAlive while a process builds or switches one, TableBusy.
    """
    past = [build for build in builds if build.state in OF_THE_PAST]
    left = [build for build in builds if build.state not in OF_THE_PAST]
    was = {build.id: build.state for build in left}
    with builder(settings, "views drop") as connection:
        for build in past:
            if not try_claim(connection, str(build.id)):
                raise BuildAlive(f"{build.table} is still being made.", "Wait until it is ready, or end what makes it.")
        for name in sorted({build.view for build in left}):
            claim(connection, name)
        with connection.transaction():
            for build in lock_builds(connection, list(was)):
                if build.state not in (*LEFT, was[build.id]):
                    raise NotDroppable(f"{build.table} is {build.state} by now.", "Nothing was dropped.")
            connection.execute("update builds set state = 'abandoned' where id = any(%s)", (list(was),))
        for build in left:
            end_loaders(connection, build.id)
            remove_table(connection, build, keep=view is not None and build.table == view.table_name)
        for build in past:
            abandon(connection, build)
