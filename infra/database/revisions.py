"""Which migrations this code has, and whether the database is at the newest: asked by every process at its start.

Read from the files themselves, without Alembic, whose import alone would cost a restart a third of a second.
"""

from __future__ import annotations

import re
from pathlib import Path

from infra.database.connect import Connection, DatabaseBehind
from infra.errors import SamefoldError

SCRIPTS = Path(__file__).parent / "migrations"

_ASSIGNED = re.compile(r"^(revision|down_revision)\b[^=\n]*=(.*)$", re.MULTILINE)
_NAME = re.compile(r"""["']([^"']+)["']""")


class DatabaseAhead(SamefoldError):
    """The database was migrated by newer code than this."""


def revisions() -> dict[str, set[str]]:
    """This code's migrations: each one's name, and of which others it is the successor."""
    found = {}
    for file in sorted((SCRIPTS / "versions").glob("*.py")):
        named = {variable: set(_NAME.findall(value)) for variable, value in _ASSIGNED.findall(file.read_text())}
        (revision,) = named["revision"]
        found[revision] = named["down_revision"]
    return found


def head() -> str | None:
    """This code's newest migration; None where somebody deleted them to start with their own."""
    there = revisions()
    newest = sorted(there.keys() - set[str]().union(*there.values()))
    if len(newest) > 1:
        raise SamefoldError(
            f"There are several newest migrations: {', '.join(newest)}.",
            "Two branches each added one: let the later one follow the other, by its number and its `down_revision`.",
        )
    return newest[0] if newest else None


def require_known(revision: str | None) -> None:
    """Raises DatabaseAhead for a revision that this code does not have."""
    if revision is not None and revision not in revisions():
        raise DatabaseAhead(
            f"The database is at migration {revision}, which this code does not have: newer code was here.",
            "Deploy that newer code. Going back to this code needs no migration backwards: its tables are still there.",
        )


def require_head(revision: str | None) -> None:
    """Raises DatabaseAhead for a revision that this code does not have, DatabaseBehind for one that is not the newest."""
    require_known(revision)
    newest = head()
    if revision != newest:
        raise DatabaseBehind(
            f"The database is at migration {revision or 'none'}, this code needs {newest}.",
            "Run `samefold db upgrade`.",
        )


def require_schema(connection: Connection) -> None:
    """Raises DatabaseBehind or DatabaseAhead unless the database is at this code's newest migration."""
    there = connection.execute("select to_regclass('alembic_version')").fetchone()
    row = connection.execute("select version_num from alembic_version").fetchone() if there and there[0] else None
    require_head(row[0] if row else None)
