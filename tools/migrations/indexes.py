"""Indexes of views' tables: the operations of migrations, and what is made and dropped before them, beside live traffic.

A migration names an index, so that new code starts when it is there. To make or drop one within a migration's transaction would
keep the agents waiting. So an upgrade does it before, `concurrently`, on all tables of the version. Killed meanwhile, it leaves an
invalid index, which the next one makes again.
"""

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from graphlib import TopologicalSorter
from typing import NamedTuple

import psycopg
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.operations.ops import CreateIndexOp, DropIndexOp
from psycopg import errors, sql

from infra.database import revisions
from infra.database.connect import Connection, as_login, connect, who
from infra.errors import SamefoldError
from infra.processes.engines import Progress
from infra.settings import Settings
from projections.engine.rebuild.claims import by_whom, session_name, try_claim
from projections.engine.rebuild.indexing import compare, make
from projections.engine.views import core_views
from projections.engine.views.indexes import index_name, is_index_name
from projections.engine.views.tables import table_of

log = logging.getLogger(__name__)

_TURN = "all indexes"
"""What upgrades claim in turn; no view has such a name. To wait for a lock would hold a snapshot, for which others would wait."""
_PAUSE_S = 0.5


class Indexed(NamedTuple):
    """The names of indexes."""

    made: list[str]
    dropped: list[str]


def operations() -> list[CreateIndexOp | DropIndexOp]:
    """What the migrations lack to make the declared indexes, and no others of a declaration."""
    planned, found = _planned(), list[CreateIndexOp | DropIndexOp]()
    for view in core_views.all_views().values():
        table = table_of(view)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            if planned.pop(str(index.name), ("drop", ""))[0] == "drop":
                found.append(made := CreateIndexOp.from_index(index))
                made.if_not_exists = True
        found += [
            DropIndexOp(name, table.name, if_exists=True)
            for name, (kind, of) in planned.items()
            if kind == "create" and of == table.name and is_index_name(table.name, name)
        ]
    return found


def _planned() -> dict[str, tuple[str, str]]:
    """What the migrations do last with each index that they name, and its table."""
    there = revisions.revisions()
    found = {}
    for one in TopologicalSorter({name: migration.follows for name, migration in there.items()}).static_order():
        for kind, name, table in _OPERATION.findall(there[one].file.read_text()):
            found[name] = kind, table
    return found


_OPERATION = re.compile(r"""\bop\.(create|drop)_index\(\s*["']([^"']+)["'],\s*(?:table_name\s*=\s*)?["']([^"']+)""")


@Operations.implementation_for(CreateIndexOp, replace=True)
def _create_index(operations: Operations, operation: CreateIndexOp) -> None:
    """As Alembic does it, unless the index is there: even then PostgreSQL would keep writers waiting until the migration ends."""
    if operation.if_not_exists and not operations.migration_context.as_sql:
        name = sa.func.to_regclass(sa.func.quote_ident(operation.index_name))
        if operations.get_bind().scalar(sa.select(name.is_not(None))):
            return
    index = operation.to_index(operations.migration_context)
    operations.impl.create_index(index, if_not_exists=bool(operation.if_not_exists))


def settle_indexes(settings: Settings, progress: Progress) -> Indexed:
    """Make the declared indexes that existing tables of this code's versions lack, and drop those that are no longer declared.

    Only what migrations name, so that none of them is forgotten. Upgrades take turns. Nothing that agents and readers do waits for
    this; it waits for the end of transactions that are older than an index. Raises DatabaseAhead, MigrationsConflict.
    """
    views, done = core_views.all_views(), Indexed([], [])
    planned = {name: kind for name, (kind, _) in _planned().items()}
    with connect(settings, session_name("db upgrade"), statement_timeout_ms=0) as connection:
        _take_turn(connection)
        revisions.heads()
        applied = revisions.applied(connection)
        revisions.require_known(applied)  # older code must not drop what newer code has made
        if not applied:
            return done
        connection.execute("set lock_timeout = 0")  # neither agents nor readers wait behind this
        found = compare(connection, views.values())
        for name in found.invalid:
            _drop(settings, connection, name, progress)
        for one in found.missing:
            if planned.get(index_name(one.view.table_name, one.order)) == "create":
                # a rebuild may have dropped the table since
                with suppress(errors.UndefinedTable), _shown(settings, connection, one.name, progress):
                    make(connection, one, concurrently=True)
                    done.made.append(one.name)
        # of the other tables, names do not tell which index of the migrations they are like
        kept = {one.view.name for one in found.undeclared if planned.get(one.name) == "create"}
        for gone in found.undeclared:
            if gone.view.name not in kept:
                _drop(settings, connection, gone.name, progress)
                done.dropped.append(gone.name)
    return done


def _take_turn(connection: Connection) -> None:
    is_told = False
    while not try_claim(connection, _TURN):
        if not is_told:
            log.warning("another upgrade makes indexes; this one waits for it%s", by_whom(connection, _TURN))
            is_told = True
        time.sleep(_PAUSE_S)


def _drop(settings: Settings, connection: Connection, name: str, progress: Progress) -> None:
    with _shown(settings, connection, f"drop {name}", progress):
        connection.execute(sql.SQL("drop index concurrently if exists {}").format(sql.Identifier(name)))


@contextmanager
def _shown(settings: Settings, connection: Connection, what: str, progress: Progress) -> Iterator[None]:
    """Show how far the connection is with this, and for which sessions it waits."""
    progress.begin(what)
    is_over = threading.Event()
    [(pid,)] = connection.execute("select pg_backend_pid()")  # of a pooler, the connection has another

    def show() -> None:
        stage, seen, told = "", 0, set[int]()
        with suppress(psycopg.Error, SamefoldError), connect(settings, "samefold db progress") as second:
            while not is_over.wait(_PAUSE_S):
                with as_login(second):
                    row = second.execute(_PROGRESS, (pid,)).fetchone()
                    [(blocking,)] = second.execute("select pg_blocking_pids(%s)", (pid,))
                for other in {*blocking} - told:
                    told.add(other)
                    log.warning("%s waits until a transaction ends: %s", what, who(second, [other]))
                if row is None:
                    continue
                phase, total, now = row
                if phase != stage:
                    stage, seen = phase, 0
                    progress.begin(f"{what}, {phase}", total or None)
                progress.advance(max(0, now - seen))
                seen = now

    watch = threading.Thread(target=show, name="progress of an index", daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


_PROGRESS = """
select phase, case kind when 'waiting' then lockers_total when 'loading' then tuples_total else blocks_total end,
       case kind when 'waiting' then lockers_done when 'loading' then tuples_done else blocks_done end
  from pg_stat_progress_create_index, substring(phase from 'waiting|loading') kind where pid = %s
"""
"""Steps in all and done of what PostgreSQL is doing."""
