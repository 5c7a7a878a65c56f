"""The migrations that this code has, and whether the database has them all. Every process checks that at its start.

There are two branches: `core`, Samefold's tables, and `views`, the tables of this service's contexts and views. They are read from
the files, without Alembic: importing it would cost each start a third of a second.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from infra.database.connect import Connection, DatabaseBehind
from infra.errors import SamefoldError

ROOT = Path(__file__).parents[2]
CORE, VIEWS = "core", "views"
BRANCHES: Final = {
    CORE: ROOT / "infra" / "database" / "migrations",
    VIEWS: ROOT / "projections" / "migrations",
}
"""The folder of each branch's migrations."""

_ASSIGNED = re.compile(r"^(revision|down_revision|depends_on)\b[^=\n]*=(.*)$", re.MULTILINE)
_NAME = re.compile(r"""["']([^"']+)["']""")


class DatabaseAhead(SamefoldError):
    """The database was migrated by newer code than this."""


class MigrationsConflict(SamefoldError):
    """Two migrations of a branch have the same id or follow the same one, or one follows a migration that is missing."""


class Migration(NamedTuple):
    """A migration's file, and the migrations that come before it: of its own branch, and of the other."""

    file: Path
    branch: str
    follows: set[str]
    depends_on: set[str]


def revisions() -> dict[str, Migration]:
    """This code's migrations by id. Raises MigrationsConflict."""
    found: dict[str, Migration] = {}
    for branch, folder in BRANCHES.items():
        for file in sorted(folder.glob("[!.]*.py")):
            named = {variable: set(_NAME.findall(value)) for variable, value in _ASSIGNED.findall(file.read_text())}
            if "revision" not in named:
                continue
            (revision,) = named["revision"]
            if revision in found:
                raise MigrationsConflict(
                    f"Two migrations have the same id '{revision}': {found[revision].file.name} and {file.name}.",
                    f"Give the one that was deployed nowhere yet an id of its own: a new `revision` in {_path(file)}.",
                )
            found[revision] = Migration(file, branch, named["down_revision"], named.get("depends_on", set()))
    for migration in found.values():
        if missing := migration.follows - found.keys():
            raise MigrationsConflict(
                f"{migration.file.name} follows migration '{min(missing)}', whose file is missing.",
                "Restore that file from git: databases that have its tables need it.",
            )
    return found


def heads() -> dict[str, str]:
    """The newest migration of each branch that has any. Raises MigrationsConflict."""
    there = revisions()
    followed = set[str]().union(*(one.follows for one in there.values()))
    newest: dict[str, str] = {}
    for revision, migration in there.items():
        if revision in followed:
            continue
        if migration.branch in newest:
            other = there[newest[migration.branch]].file
            raise MigrationsConflict(
                f"Two migrations follow the same one: {other.name} and {migration.file.name}.",
                f"Let the one that was deployed nowhere yet follow the other. If that is {migration.file.name}: write "
                f'`down_revision = "{newest[migration.branch]}"` in {_path(migration.file)}.',
            )
        newest[migration.branch] = revision
    return newest


def require_known(applied: Iterable[str]) -> None:
    """Raises DatabaseAhead where the database has migrations that this code does not have."""
    unknown = sorted(set(applied) - revisions().keys())
    if unknown:
        raise DatabaseAhead(
            f"The database is at migration {', '.join(unknown)}, which this code does not have: newer code migrated it.",
            "Deploy that newer code. Migrations only go forward.",
        )


def require_heads(applied: Iterable[str]) -> None:
    """Raises DatabaseAhead for migrations that this code does not have, DatabaseBehind where its newest are missing.

    `applied` are the rows of `alembic_version`, which names no migration that another one there follows or depends on.
    """
    rows = sorted(applied)
    require_known(rows)
    there, known = revisions(), set[str]()
    waiting = list(rows)
    while waiting:
        if (revision := waiting.pop()) not in known:
            known.add(revision)
            waiting += there.keys() & (there[revision].follows | there[revision].depends_on)
    missing = [revision for revision in heads().values() if revision not in known]
    if missing:
        raise DatabaseBehind(
            f"The database is at migration {' and '.join(rows) or 'none'}, this code needs {' and '.join(missing)}.",
            "Run `samefold db upgrade`.",
        )


def require_schema(connection: Connection) -> None:
    """Raises DatabaseBehind or DatabaseAhead unless the database has this code's newest migrations."""
    require_heads(applied(connection))


def applied(connection: Connection) -> list[str]:
    """The rows of `alembic_version`; none where nothing was migrated yet."""
    there = connection.execute("select to_regclass('alembic_version')").fetchone()
    rows = connection.execute("select version_num from alembic_version").fetchall() if there and there[0] else []
    return [row[0] for row in rows]


def _path(file: Path) -> str:
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
