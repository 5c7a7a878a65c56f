"""Migrations: Alembic, told all it needs by code, so that no file holds a path or a connection string.

They only go forward, and they only make tables of views, never alter or drop them: a version's table is for ever what it
was, and going back is a switch (`samefold rebuild` with the older code).
"""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import produce_migrations
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations.ops import MigrationScript, UpgradeOps
from sqlalchemy.pool import NullPool

from infra.database import revisions, schema
from infra.database.connect import Connection, connect
from infra.errors import SamefoldError
from infra.settings import Settings

T = TypeVar("T")

VIEW_TABLE = re.compile(r"(?P<view>.+)_v(?P<version>\d+)(_(r|asof_)\d+)?")

_LOCK = 0x53414D45464F4C44  # "SAMEFOLD": two upgrades at once take turns


class ViewChangedShape(SamefoldError):
    """A view's columns, key or state differ from its version's table."""


class SchemaDrift(SamefoldError):
    """The database's tables are not those that the code declares."""


def upgrade(settings: Settings) -> tuple[str | None, str | None]:
    """Bring the database to this code's newest migration; the revisions before and after.

    Raises DatabaseAhead, MigrationsConflict.
    """

    def act(connection: sa.Connection, config: Config) -> tuple[str | None, str | None]:
        connection.execute(sa.text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        after = revisions.head()
        before = MigrationContext.configure(connection).get_current_revision()
        revisions.require_known(before)
        command.upgrade(config, "head")
        return before, after

    return _with(settings, act)


def revise(settings: Settings, message: str) -> Path | None:
    """Write the migration that leads from the database to what the code declares; None where there is nothing to do.

    Raises ViewChangedShape, DatabaseBehind, DatabaseAhead, MigrationsConflict.
    """

    def act(connection: sa.Connection, config: Config) -> Path | None:
        revisions.require_head(MigrationContext.configure(connection).get_current_revision())
        number = f"{len(revisions.revisions()) + 1:04d}"
        written = command.revision(config, message, autogenerate=True, rev_id=number)
        if written is None or isinstance(written, list):
            return None
        _tidy(Path(written.path))
        return Path(written.path)

    return _with(settings, act)


def check(settings: Settings) -> None:
    """Raises SchemaDrift, ViewChangedShape, DatabaseBehind or DatabaseAhead; returns where code and database agree."""

    def act(connection: sa.Connection, _config: Config) -> None:
        revisions.require_head(MigrationContext.configure(connection).get_current_revision())
        context = MigrationContext.configure(connection, opts={"include_object": include_object})
        script = produce_migrations(context, declared())
        refuse_changed_views(script.upgrade_ops)
        if script.upgrade_ops is not None and not script.upgrade_ops.is_empty():
            found = "; ".join(_in_words(diff) for diff in script.upgrade_ops.as_diffs())
            raise SchemaDrift(
                f"The database's tables are not those that the code declares: {found}.",
                "Run `samefold db revision -m '…'`, read what it wrote, then `samefold db upgrade`.",
            )

    _with(settings, act)


def declared() -> sa.MetaData:
    """Every table that the code declares: the engine's own, and one for each view's version."""
    from projections.engine.views.core_views import all_views
    from projections.engine.views.tables import table_of

    metadata = sa.MetaData()
    for table in schema.metadata.sorted_tables:
        table.to_metadata(metadata)
    for view in all_views().values():
        table_of(view, metadata=metadata)
    return metadata


def include_object(_object: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """Tables of older versions, other builds and the past are not drift, and never dropped by a migration."""
    return not (kind == "table" and reflected and compare_to is None and name and VIEW_TABLE.fullmatch(name))


def only_new(_context: Any, _revision: Any, directives: list[MigrationScript]) -> None:
    """What autogenerate found becomes a migration only if it is something, and leaves versions' tables alone."""
    script = directives[0]
    refuse_changed_views(script.upgrade_ops)
    if script.upgrade_ops is None or script.upgrade_ops.is_empty():
        directives.clear()


def refuse_changed_views(operations: UpgradeOps | None) -> None:
    """Raises ViewChangedShape when an operation alters an existing version's table."""
    for operation in operations.ops if operations else ():
        table = getattr(operation, "table_name", "")
        found = VIEW_TABLE.fullmatch(table)
        if found and type(operation).__name__ != "CreateTableOp":
            view, version = found["view"], int(found["version"])
            raise ViewChangedShape(
                f"View '{view}' changed its shape: raise its version to {version + 1}, or run the rebuild again.",
                f"Its version stands in domain/{view.removeprefix('streams_')}.py as STATE_VERSION."
                if view.startswith("streams_")
                else f"Its version stands in projections/{view}.py; then `samefold db revision`.",
            )


def _with(settings: Settings, act: Callable[[sa.Connection, Config], T]) -> T:
    """Act in one transaction of a connection of ours, which Alembic uses too."""
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: _without_autocommit(settings), poolclass=NullPool
    )
    try:
        with engine.begin() as connection:
            config = _config()
            config.attributes["connection"] = connection
            return act(connection, config)
    finally:
        engine.dispose()


def _without_autocommit(settings: Settings) -> Connection:
    connection = connect(settings, "samefold db", statement_timeout_ms=0)
    connection.autocommit = False
    return connection


def _tidy(migration: Path) -> None:
    """Format a migration as the rest of the code, where the formatter is installed."""
    if find_spec("ruff") is not None:
        for arguments in (["check", "--select=I", "--fix"], ["format"]):
            subprocess.run([sys.executable, "-m", "ruff", *arguments, "--quiet", str(migration)], check=False)


def _config() -> Config:
    config = Config(cmd_opts=Namespace(quiet=True))
    config.set_main_option("script_location", str(revisions.SCRIPTS))
    config.set_main_option("path_separator", "os")
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    return config


def _in_words(diff: Any) -> str:
    if isinstance(diff, list):
        return ", ".join(_in_words(one) for one in diff)
    kind, *what = diff
    names = [getattr(one, "name", None) or str(one) for one in what if one is not None]
    return f"{kind.replace('_', ' ')} {' '.join(names)}"
