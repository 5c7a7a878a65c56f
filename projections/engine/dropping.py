"""Dropping tables of views that readers do not see any more."""

from __future__ import annotations

from collections.abc import Sequence

from infra.database.connect import connect, naming
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.builds import Build, State, builds_of, claim, end_loaders, exists, lock_builds, remove_table
from projections.engine.view import View


class NotDroppable(SamefoldError):
    """A table is live or being built, or there is none."""


def droppable(settings: Settings, view: str, which: str) -> list[Build]:
    """The builds of a version (`2`), or of a table, whose tables are there and may go. Raises NotDroppable."""
    with naming(settings), connect(settings, "samefold views") as connection:
        named = [b for b in builds_of(connection, [view]) if which in (b.table, str(b.version), f"v{b.version}")]
        found = [b for b in named if b.state in (State.OLD, State.ABANDONED) and exists(connection, b.table)]
    if not found:
        states = ", ".join(f"{build.table} is {build.state}" for build in named)
        raise NotDroppable(
            f"View '{view}' has no table {which} that could be dropped{f': {states}' if states else ''}.",
            "Only old and abandoned tables can be: `samefold views --json` lists them.",
        )
    return found


def drop_tables(settings: Settings, builds: Sequence[Build], view: View | None) -> None:
    """Drop these tables; nobody can go back to them afterwards. `view` is this code's version of the view.

    The table that this code's version got from its migration is emptied, not dropped: rebuilds are made like it.
    Raises NotDroppable when one has come back to life, BuildAlive, TableBusy.
    """
    with naming(settings), connect(settings, "samefold views", statement_timeout_ms=0) as connection:
        for name in sorted({build.view for build in builds}):
            claim(connection, name)
        with connection.transaction():
            for build in lock_builds(connection, [build.id for build in builds]):
                if build.state not in (State.OLD, State.ABANDONED):
                    raise NotDroppable(f"{build.table} is {build.state} by now.", "Nothing was dropped.")
            connection.execute(
                "update builds set state = 'abandoned' where id = any(%s)", ([build.id for build in builds],)
            )
        for build in builds:
            end_loaders(connection, build.id)
            remove_table(connection, build, keep=view is not None and build.table == view.table_name)
