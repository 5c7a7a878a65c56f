"""Which migrations this code has, and whether the database is at the newest: asked by every process at its start.

Read from the files themselves, without Alembic, whose import alone would cost a restart a third of a second.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from infra.database.connect import Connection, DatabaseBehind
from infra.errors import SamefoldError

SCRIPTS = Path(__file__).parent / "migrations"

_ASSIGNED = re.compile(r"^(revision|down_revision)\b[^=\n]*=(.*)$", re.MULTILINE)
_NAME = re.compile(r"""["']([^"']+)["']""")


class DatabaseAhead(SamefoldError):
    """The database was migrated by newer code than this."""


class MigrationsConflict(SamefoldError):
    """Two migrations have the same number, or follow the same one: two branches each added one."""


class Migration(NamedTuple):
    """One file of migrations, and of which others it is the successor."""

    file: str
    follows: set[str]


def revisions() -> dict[str, Migration]:
    """This code's migrations by name. Raises MigrationsConflict."""
    found: dict[str, Migration] = {}
    for file in sorted((SCRIPTS / "versions").glob("*.py")):
        named = {variable: set(_NAME.findall(value)) for variable, value in _ASSIGNED.findall(file.read_text())}
        (revision,) = named["revision"]
        if revision in found:
            raise _conflict(found[revision].file, file.name, f"both are '{revision}'", revision)
        found[revision] = Migration(file.name, named["down_revision"])
    return found


def head() -> str | None:
    """This code's newest migration; None where somebody deleted them to start with their own. Raises MigrationsConflict."""
    there = revisions()
    newest = sorted(there.keys() - set[str]().union(*(one.follows for one in there.values())))
    if len(newest) > 1:
        files = [there[revision].file for revision in newest]
        raise _conflict(", ".join(files[:-1]), files[-1], "none follows another", newest[-2])
    return newest[0] if newest else None


def _conflict(first: str, second: str, why: str, before: str) -> MigrationsConflict:
    number = f"{len(list((SCRIPTS / 'versions').glob('*.py'))):04d}"
    after = f"{number}_{second.removesuffix('.py').lstrip('0123456789_-') or 'migration'}.py"
    return MigrationsConflict(
        f"Two branches each added a migration, {first} and {second}: {why}.",
        f"Let the one that was deployed nowhere yet follow the other. If that is {second}, in infra/database/migrations/versions: "
        f'`git mv {second} {after}`, and in it `revision = "{number}"` and `down_revision = "{before}"`.',
    )


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
