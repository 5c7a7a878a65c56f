"""Migrations of what was never released: rewritten where the code has changed, so that one migration makes a version's table."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from alembic.autogenerate import render_python_code
from alembic.migration import MigrationContext
from alembic.operations.ops import CreateIndexOp, CreateTableOp, UpgradeOps
from psycopg import sql

from domain.engine.released import FOLDER, read
from infra.database import revisions
from infra.database.connect import Connection
from infra.database.own_tables import VIEW_TABLE
from infra.database.revisions import VIEWS
from infra.database.roles import settle
from projections.engine.rebuild.builds import LEFT, builds_of, comment_on
from projections.engine.views.core_views import OUTCOMES
from projections.engine.views.indexes import digest_in, index_name
from projections.engine.views.sql_views import is_in_sql_view, replace_sql_view
from projections.engine.views.tables import table_of, to_add_indexes, to_make
from projections.engine.views.view import View
from tools.migrations.indexes import planned_indexes
from tools.scaffold.parts import tidy

_OPERATIONS = {"create_table", "create_index", "drop_index"}


class _Statement(NamedTuple):
    """A statement of a migration: `op.create_table("rooms_v1", …, comment="…")`, or one that makes or drops an index."""

    place: ast.stmt
    operation: str
    table: str
    index: str


def in_releases() -> Callable[[str, int], bool]:
    """Whether a version of a view or state is in the record of releases, or of Samefold's own."""
    found = dict[str, int]()
    for file in FOLDER.glob("*.json"):
        for name, was in read(file.stem)["views"].items():
            found[name] = max(found.get(name, 0), was["version"])
    return lambda name, version: name == OUTCOMES or found.get(name, 0) >= version


def stale(views: Iterable[View], is_released: Callable[[str, int], bool]) -> dict[str, View]:
    """By their tables, the unreleased views whose migrations make these otherwise than the code declares them."""
    text = "".join(one.file.read_text() for one in revisions.revisions().values() if one.branch == VIEWS)
    return {
        view.table_name: view for view in views if not is_released(view.name, view.version) and _is_stale(view, text)
    }


def rewrite(views: Mapping[str, View], is_released: Callable[[str, int], bool]) -> list[Path]:
    """Write unreleased tables as the code declares them, and leave out those of views that it no longer has.

    Indexes that a migration's author named are left to him. Returns the changed files. Raises MigrationsConflict, SyntaxError.
    """
    files = [one.file for one in revisions.revisions().values() if one.branch == VIEWS]
    texts = {file: file.read_text() for file in files}
    others = stale(views.values(), is_released)
    changed = []
    for file, text in texts.items():
        edits = dict[ast.stmt, str]()
        for one in (found := list(_statements(ast.parse(text, file)))):
            table = VIEW_TABLE.fullmatch(one.table)
            if not table or is_released(table["view"], int(table["version"])):
                continue
            if one.table in others and one.operation == "create_table":
                edits[one.place] = _rendered(others[one.table])
            elif table["view"] not in views or (one.table in others and digest_in(one.table, one.index)):
                edits[one.place] = ""
        if edits:
            if not any(edits.values()) and len(edits) == len(found):
                edits[found[0].place] = "    pass\n"
            _write(file, text, edits)
            changed.append(file)
    return changed


def _statements(module: ast.Module) -> Iterator[_Statement]:
    for node in ast.walk(module):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name("op"), attr=operation), args=args) as call):
                named = {word.arg: word.value for word in call.keywords}
                names = [one.value for one in (*args, named.get("table_name")) if isinstance(one, ast.Constant)]
                if operation in _OPERATIONS and names:
                    table = names[0] if operation == "create_table" else names[1] if names[1:] else ""
                    yield _Statement(node, operation, str(table), str(names[0]))


def _is_stale(view: View, migrations: str) -> bool:
    """Whether migrations make the version's table otherwise than the view declares it."""
    table = view.table_name
    made = {digest for (of, digest), (kind, _) in planned_indexes().items() if of == table and kind == "create"}
    wanted = {digest_in(table, index_name(table, order)) for order in view.indexes}
    return f'"{table}"' in migrations and (view.comment not in migrations or made != wanted)


def _rendered(view: View) -> str:
    """The statements that make the table and its indexes."""
    table = table_of(view)
    indexes = [CreateIndexOp.from_index(index) for index in sorted(table.indexes, key=lambda one: str(one.name))]
    for index in indexes:
        index.if_not_exists = True
    body = render_python_code(
        UpgradeOps([CreateTableOp.from_table(table), *indexes]),
        migration_context=MigrationContext.configure(dialect_name="postgresql"),
    )
    lines = [f"    {line.removeprefix('    ')}\n" for line in body.splitlines() if not line.strip().startswith("# ###")]
    return "".join(lines)


def _write(file: Path, text: str, edits: Mapping[ast.stmt, str]) -> None:
    lines = text.splitlines(keepends=True)
    for place, new in sorted(edits.items(), key=lambda edit: -edit[0].lineno):
        lines[place.lineno - 1 : place.end_lineno] = [new]
    written = "".join(lines)
    if "import postgresql" not in written:  # where it is not used, it is tidied away
        written = written.replace(
            "from alembic import op\n", "from alembic import op\nfrom sqlalchemy.dialects import postgresql\n", 1
        )
    (new_file := file.with_suffix(".new")).write_text(written)
    tidy(new_file, "F401,I")
    new_file.replace(file)


def remake(connection: Connection, views: Iterable[View]) -> None:
    """Make the tables of these versions anew, as migrations make them now, that still have another shape and that nobody uses."""
    used = {build.table for build in builds_of(connection) if build.state not in LEFT}
    for view in views:
        table = view.table_name
        found = connection.execute(
            "select obj_description(to_regclass(quote_ident(%s)), 'pg_class')", (table,)
        ).fetchone()
        if table in used or found in (None, (None,), (view.comment,)):
            continue
        with connection.transaction():
            if is_shown := is_in_sql_view(connection, view.name, table, is_right=False):
                replace_sql_view(connection, view.name, without=table)
            connection.execute(sql.SQL("drop table {}").format(sql.Identifier(table)))
            for statement in (*to_make(view, table), *to_add_indexes(view, table).values()):
                connection.execute(statement)
            comment_on(connection, table, view.comment)
            settle(connection, table)
            if is_shown:
                replace_sql_view(connection, view.name, first=table)
