"""Migrations, by Alembic, configured in code: no file holds a path or a connection string.

They only go forward. A view's table is created, never altered or dropped: each version has its own, and `samefold rebuild` with the
older code goes back. Only its indexes come and go (`indexes.py`). The branch `core` is Samefold's and comes with it; `samefold db
revision` writes the branch `views`.
"""

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations.ops import CreateTableOp, MigrationScript, UpgradeOps
from alembic.script import ScriptDirectory
from alembic.util import rev_id
from sqlalchemy.pool import NullPool

from infra.database import revisions, schema
from infra.database.connect import (
    LOCK_TIMEOUT_MS,
    Connection,
    connect,
    is_transient,
    named_error,
    named_errors,
    patient_ms,
    session,
)
from infra.database.own_tables import VIEW_TABLE
from infra.database.revisions import BRANCHES, CORE, VIEWS
from infra.database.roles import settle
from infra.errors import SamefoldError
from infra.processes.engines import SILENT, Progress
from infra.settings import Settings
from projections.engine.rebuild.indexing import HINT as INDEXES_HINT
from projections.engine.rebuild.indexing import compare
from projections.engine.views import core_views
from projections.engine.views.sql_views import ensure_sql_views
from projections.engine.views.tables import table_of
from tools.migrations.indexes import Indexed, settle_indexes
from tools.migrations.indexes import operations as index_operations
from tools.scaffold.parts import tidy

FILE_TEMPLATE = "%(year)d_%(month).2d_%(day).2d_%(rev)s_%(slug)s"

_LOCK = 0x53414D45464F4C44  # "SAMEFOLD": upgrades wait for each other


class ViewChangedShape(SamefoldError):
    """A view's columns, key or state differ from those of its version's table."""


class SchemaDrift(SamefoldError):
    """The database's tables are not those that the code declares."""


class Upgraded(NamedTuple):
    """The database's newest migrations before and after, and the indexes that were made and dropped beside live traffic."""

    before: list[str]
    after: list[str]
    indexes: Indexed


def upgrade(settings: Settings, progress: Progress = SILENT) -> Upgraded:
    """Make and drop indexes, apply this code's migrations, and make missing SQL views.

    Raises DatabaseAhead, MigrationsConflict, ViewInUse.
    """

    with named_errors(settings):
        # outside of the migrations' transaction, for whose end it would wait
        indexes = settle_indexes(settings, progress)
        with connected(settings) as connection:
            connection.execute(sa.text("set local lock_timeout = 0"))  # another upgrade may take long
            connection.execute(sa.text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            connection.execute(sa.text(f"set local lock_timeout = {LOCK_TIMEOUT_MS}"))
            revisions.heads()
            before = _applied(connection)
            revisions.require_known(before)
            command.upgrade(_config(connection), "heads")
            driver = connection.connection.driver_connection
            assert isinstance(driver, psycopg.Connection)
            settle(driver)
            after = _applied(connection)
        with connect(settings, "samefold db") as plain:
            ensure_sql_views(plain, {view.name: view.table_name for view in core_views.all_views().values()})
    return Upgraded(before, after, indexes)


def revise(settings: Settings, message: str) -> Path | None:
    """Write the migration of `views` from the database to what the code declares; None if there is nothing to do.

    Raises ViewChangedShape, DatabaseBehind, DatabaseAhead, MigrationsConflict.
    """

    with connected(settings) as connection:
        revisions.require_heads(_applied(connection))
        place, label = _next()
        config = _config(connection)
        return _written(command.revision(config, message, autogenerate=True, branch_label=label, **place))


def revise_without_database(message: str) -> Path | None:
    """Write the migration of `views` with each table and index that no other one makes; None if there is nothing to do.

    It needs no database.
    """
    made = "".join(one.file.read_text() for one in revisions.revisions().values() if one.branch == VIEWS)
    tables = [
        table
        for table in declared().sorted_tables
        if branch_of(table.name) == VIEWS and not re.search(rf"create_table\(\s*[\"']{table.name}[\"']", made)
    ]
    operations = [*map(CreateTableOp.from_table, tables), *index_operations()]
    if not operations:
        return None
    body = render_python_code(
        UpgradeOps(operations), migration_context=MigrationContext.configure(dialect_name="postgresql")
    )
    place, label = _next()
    scripts = ScriptDirectory.from_config(_config())
    return _written(
        scripts.generate_revision(rev_id(), message, upgrades=body, imports="", branch_labels=label, **place)
    )


def check(settings: Settings) -> None:
    """Compare the database's tables with the code's. Raises SchemaDrift, ViewChangedShape, DatabaseBehind, DatabaseAhead."""

    with connected(settings) as connection:
        revisions.require_heads(_applied(connection))
        context = MigrationContext.configure(connection, opts={"include_object": include_object})
        script = produce_migrations(context, declared())
        add_indexes(script.upgrade_ops)
        for branch, hint in _HINTS.items():
            found = _of(branch, script.upgrade_ops)
            if not found.is_empty():
                differences = "; ".join(_in_words(diff) for diff in found.as_diffs())
                raise SchemaDrift(f"The database's tables differ from the code's: {differences}.", hint)
    with session(settings, "samefold db") as plain:
        if found := compare(plain, core_views.all_views().values()):
            raise SchemaDrift(f"Of the tables' indexes, {', '.join(map(str, found))}.", INDEXES_HINT)


_HINTS = {
    CORE: "One of Samefold's own tables was changed by hand. Change it back.",
    VIEWS: "Run `samefold db revision -m '…'`, read what it wrote, then `samefold db upgrade`.",
}


def declared() -> sa.MetaData:
    """The tables that the code declares: the engine's own, and one for each view's version."""
    metadata = sa.MetaData()
    for table in schema.metadata.sorted_tables:
        table.to_metadata(metadata)
    for view in core_views.all_views().values():
        table_of(view, metadata=metadata)
    return metadata


def branch_of(table: str) -> str:
    """The branch whose migrations create a table."""
    found = VIEW_TABLE.fullmatch(table)
    return CORE if (found["view"] == core_views.OUTCOMES if found else table in schema.metadata.tables) else VIEWS


def include_object(thing: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """Leave out tables of older versions and other builds: they are no drift, and no migration drops them.

    So are indexes of views' tables: `add_indexes` adds those that were declared, and somebody may have made others by hand.
    """
    if kind == "index":
        return not VIEW_TABLE.fullmatch(thing.table.name)
    return not (kind == "table" and reflected and compare_to is None and name and VIEW_TABLE.fullmatch(name))


def only_new(context: Any, _revision: Any, directives: list[MigrationScript]) -> None:
    """Keep what autogenerate found in its own branch, and write no empty migration. Raises ViewChangedShape."""
    script = directives[0]
    add_indexes(script.upgrade_ops)
    if not getattr(context.config.cmd_opts, "autogenerate", False):  # `alembic check` compares both branches
        return
    head = str(script.head)
    known = revisions.revisions()
    branch = known[head].branch if head in known else CORE if head.startswith(f"{CORE}@") else VIEWS
    script.upgrade_ops = mine = _of(branch, script.upgrade_ops)
    if mine.is_empty():
        directives.clear()


def add_indexes(operations: UpgradeOps | None) -> None:
    """Add what the migrations lack of the declared indexes. Raises ViewChangedShape."""
    refuse_changed_views(operations)
    if operations:
        operations.ops.extend(index_operations())


def refuse_changed_views(operations: UpgradeOps | None) -> None:
    """Raises ViewChangedShape when an operation alters an existing version's table."""
    for operation in operations.ops if operations else ():
        table = getattr(operation, "table_name", "")
        found = VIEW_TABLE.fullmatch(table)
        if found and type(operation).__name__ != "CreateTableOp":
            view, version = found["view"], int(found["version"])
            raise ViewChangedShape(
                f"View '{view}' changed its shape: raise its version to {version + 1}, or run the rebuild again.",
                f"Its version is in domain/{view.removeprefix('streams_')}.py as STATE_VERSION."
                if view.startswith("streams_")
                else f"Its version is in projections/{view}.py; then `samefold db revision`.",
            )


@contextmanager
def connected(settings: Settings) -> Iterator[sa.Connection]:
    """A connection within one transaction, for Alembic. Raises DatabaseUnavailable, DatabaseRefused."""
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: _without_autocommit(settings), poolclass=NullPool
    )
    try:
        with engine.begin() as connection:
            yield connection
    except sa.exc.DBAPIError as error:
        # other errors are defects of a migration: their traceback shows the line
        if isinstance(error.orig, psycopg.Error) and (
            is_transient(error.orig) or isinstance(error.orig, psycopg.errors.InsufficientPrivilege)
        ):
            raise named_error(error.orig, settings) from error
        raise
    finally:
        engine.dispose()


def _without_autocommit(settings: Settings) -> Connection:
    connection = connect(settings, "samefold db", statement_timeout_ms=0)
    # what Alembic does in Python between two statements takes seconds on a busy machine
    connection.execute(f"set idle_in_transaction_session_timeout = {patient_ms(settings)}".encode())
    connection.autocommit = False
    return connection


def _applied(connection: sa.Connection) -> list[str]:
    return sorted(MigrationContext.configure(connection).get_current_heads())


def _of(branch: str, operations: UpgradeOps | None) -> UpgradeOps:
    ops = operations.ops if operations else []
    return UpgradeOps([one for one in ops if branch_of(getattr(one, "table_name", "")) == branch])


def _next() -> tuple[dict[str, Any], str | None]:
    """The place of the next migration of `views`, and the branch's name if it is the first, which depends on today's core."""
    heads = revisions.heads()
    if VIEWS in heads:
        return {"head": heads[VIEWS]}, None
    return {"head": "base", "version_path": str(BRANCHES[VIEWS]), "depends_on": heads[CORE]}, VIEWS


def _written(found: Any) -> Path | None:
    """The file that Alembic wrote, formatted if the formatter is installed."""
    if found is None or isinstance(found, list):
        return None
    written = Path(found.path)
    tidy(written, "F401,I")
    return written


def _config(connection: sa.Connection | None = None) -> Config:
    """The same as `[tool.alembic]` in pyproject.toml says to Alembic's own command line; env.py takes the connection."""
    config = Config(cmd_opts=Namespace(quiet=True, autogenerate=True), attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("version_locations", os.pathsep.join(map(str, BRANCHES.values())))
    config.set_main_option("path_separator", "os")
    config.set_main_option("file_template", FILE_TEMPLATE.replace("%", "%%"))
    return config


def _in_words(diff: Any) -> str:
    if isinstance(diff, list):
        return ", ".join(_in_words(one) for one in diff)
    kind, *what = diff
    names = [getattr(one, "name", None) or str(one) for one in what if one is not None]
    return f"{kind.replace('_', ' ')} {' '.join(names)}"
