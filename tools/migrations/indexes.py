"""Indexes of views' tables: the operations of migrations, and what is made and dropped before them, beside live traffic.

A migration names an index, so that new code starts when it is there. To make or drop one within a migration's transaction would
keep the agents waiting. So an upgrade does it before, `concurrently`, on all tables of the version. Killed meanwhile, it leaves an
invalid index, which the next one makes again.
"""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from graphlib import TopologicalSorter
from typing import NamedTuple

import psycopg
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.operations.ops import CreateIndexOp, DropIndexOp
from psycopg import errors

from infra.database import revisions
from infra.database.connect import Connection, as_login, connect, who
from infra.errors import SamefoldError
from infra.processes.engines import Progress
from infra.settings import Settings
from projections.engine.rebuild.claims import session_name
from projections.engine.rebuild.indexing import compare, mend, turn
from projections.engine.views import core_views
from projections.engine.views.indexes import digest_in
from projections.engine.views.tables import table_of

log = logging.getLogger(__name__)

_LOOK_S = 0.5


class Indexed(NamedTuple):
    """The names of indexes."""

    made: list[str]
    dropped: list[str]


def operations() -> list[CreateIndexOp | DropIndexOp]:
    """What the migrations lack to make the declared indexes, and no others of a declaration."""
    planned, found = planned_indexes(), list[CreateIndexOp | DropIndexOp]()
    for view in core_views.all_views().values():
        table = table_of(view)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            kind, _ = planned.pop((table.name, digest_in(table.name, str(index.name))), ("drop", ""))
            if kind == "drop":
                found.append(made := CreateIndexOp.from_index(index))
                made.if_not_exists = True
        found += [
            DropIndexOp(name, table.name, if_exists=True)
            for (of, _), (kind, name) in planned.items()
            if kind == "create" and of == table.name
        ]
    return found


def planned_indexes() -> dict[tuple[str, str | None], tuple[str, str]]:
    """What the migrations do last with an index, and its name; by the version's first table and the digest in the name.

    An index that a migration's author named is left to him.
    """
    there = revisions.revisions()
    found = dict[tuple[str, str | None], tuple[str, str]]()
    for one in TopologicalSorter({name: migration.follows for name, migration in there.items()}).static_order():
        for kind, name, table in _OPERATION.findall(there[one].file.read_text()):
            if digest := digest_in(table, name):
                found[table, digest] = kind, name
    return found


_OPERATION = re.compile(r"""\bop\.(create|drop)_index\(\s*["']([^"']+)["'],\s*(?:table_name\s*=\s*)?["']([^"']+)""")


@Operations.implementation_for(CreateIndexOp, replace=True)
def _create_index(operations: Operations, operation: CreateIndexOp) -> None:
    """As Alembic does it, unless the index is there: even then PostgreSQL would keep writers waiting until the migration ends.

    Nor if a later migration drops it.
    """
    table = str(operation.table_name)
    if operation.if_not_exists and not operations.migration_context.as_sql:
        if planned_indexes().get((table, digest_in(table, str(operation.index_name))), ("", ""))[0] == "drop":
            return
        name = sa.func.to_regclass(sa.func.quote_ident(operation.index_name))
        if operations.get_bind().scalar(sa.select(name.is_not(None))):
            return
    index = operation.to_index(operations.migration_context)
    operations.impl.create_index(index, if_not_exists=bool(operation.if_not_exists))


def settle_indexes(settings: Settings, progress: Progress) -> Indexed:
    """Make the declared indexes that existing tables of this code's versions lack, and drop those that are no longer declared.

    Only what this code's migrations make or drop last: so none is forgotten there, and what newer code has made stays. Upgrades
    take turns. Nothing that agents and readers do waits for this; it waits for transactions that are older than an index.

    Raises DatabaseAhead, MigrationsConflict.
    """
    done, planned = Indexed([], []), planned_indexes()
    with connect(settings, session_name("db upgrade"), statement_timeout_ms=0) as connection, turn(connection):
        revisions.heads()
        applied = revisions.applied(connection)
        revisions.require_known(applied)
        if not applied:
            return done
        connection.execute("set lock_timeout = 0")  # neither agents nor readers wait behind this
        for one in compare(connection, core_views.all_views().values()):
            kind, _ = planned.get((one.view.table_name, digest_in(one.table, one.name)), ("", ""))
            if kind == ("create" if one.order else "drop"):
                # a rebuild may have dropped the table since
                with suppress(errors.UndefinedTable), _shown(settings, connection, f"{kind} {one.name}", progress):
                    mend(connection, one, concurrently=True)
                    (done.made if one.order else done.dropped).append(one.name)
    return done


@contextmanager
def _shown(settings: Settings, connection: Connection, what: str, progress: Progress) -> Iterator[None]:
    """Show how far the connection is with this, and for which sessions it waits."""
    progress.begin(what)
    is_over = threading.Event()
    [(pid,)] = connection.execute("select pg_backend_pid()")  # of a pooler, the connection has another

    def show() -> None:
        stage, seen, told = "", 0, set[int]()
        with suppress(psycopg.Error, SamefoldError), connect(settings, "samefold db progress") as second:
            while not is_over.wait(_LOOK_S):
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
