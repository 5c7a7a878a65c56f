"""The PostgreSQL of the runs: one embedded server per process, its states read and put back, its lock waits observed.

A run begins from a state that was recorded before, which is cheaper than a database of its own: rows are compared, and only tables
that differ are written again. Sessions are kept open between runs for the same reason.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, TransactionStatus
from psycopg.pq.abc import PGconn

from infra.settings import Settings
from proofs.model_read.views import code
from tests.engine.projections.viewkit import make_tables
from tools.dev.postgres import Postgres

Row = Mapping[str, Any]
Tables = Mapping[str, list[Row]]

TOPIC = "events"
TIMES = {"sent_at", "at", "wished_at"}
VACUUM = 300
"""Runs after which dead rows are cleared away."""
_SERVER = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "jit": "off",
    "max_connections": "200",
    # the last one to wait finds the deadlock at once, before the schedule goes on
    "deadlock_timeout": "1ms",
}
_END_SESSION = (
    b"rollback; select pg_advisory_unlock_all(); unlisten *; deallocate all; reset all; set application_name = ''"
)
_RELATIONS = """
select c.relname, c.relkind::text,
       case when c.relkind = 'v' then pg_get_viewdef(c.oid)
            else coalesce((select string_agg(i.indexrelid::regclass::text, ' ' order by 1) from pg_index i
                            where i.indrelid = c.oid), '') end
  from pg_class c where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'v')
   and not c.relname = any(%s) order by c.relname
"""
_LOCKED = """
select coalesce(array_agg(c.relname), '{}') from pg_locks l join pg_class c on c.oid = l.relation
 where l.granted and l.locktype = 'relation' and l.mode = 'AccessExclusiveLock' and c.relnamespace = 'public'::regnamespace
"""
_CATALOG = """
(select string_agg(concat(c.oid, ' ', c.xmin), ',' order by c.oid) from pg_class c
  where c.relnamespace = 'public'::regnamespace) ||
(select string_agg(concat(r.oid, ' ', r.xmin), ',' order by r.oid) from pg_rewrite r where r.oid > 16384)
"""


@dataclass(frozen=True, eq=False)
class State:
    """What is committed at one moment: the rows of each table, as JSON has them, in order; what the tables and SQL views are."""

    tables: Tables
    relations: Mapping[str, tuple[str, str]]
    """Kind, and indexes or the query."""

    @cached_property
    def content(self) -> int:
        """Equal for states that hold the same, at whatever time."""
        rows = tuple((name, tuple(map(_timeless, rows))) for name, rows in sorted(self.tables.items()))
        return hash((rows, tuple(sorted(self.relations.items()))))


def _timeless(row: Row) -> str:
    return repr({name: bool(value) if name in TIMES else value for name, value in row.items()})


class Database:
    """One database, of which one run at a time makes use."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.observer = psycopg.connect(settings.database, autocommit=True)
        self.observer.execute("set session_replication_role = replica")  # what is put back is not cascaded
        self._relations: Mapping[str, tuple[str, str]] = {}
        self._dumps: dict[frozenset[str], str] = {}
        self._last = State({}, {})
        self._catalog = ""
        self._idle: list[PGconn] = []
        self._runs = 0
        self.empty = self.now()
        """Tables as migrations make them; what a run changes about one is put back from a copy."""
        self.observer.execute("create schema pristine")
        for name in self.empty.tables:
            self.observer.execute(f'create table pristine."{name}" (like public."{name}" including all)')

    # ── sessions ──

    def session(self, name: str) -> PGconn:
        """A session of the server, which looks as if it had just begun."""
        while self._idle:
            found = self._idle.pop()
            statement = sql.SQL("set application_name = {}").format(sql.Literal(name[:63])).as_bytes(self.observer)
            found.exec_(statement)
            if found.status == ConnStatus.OK:
                return found
            found.finish()
        new = pq.PGconn.connect(make_conninfo(self.settings.database, application_name=name[:63]).encode())
        new.nonblocking = 1
        return new

    def end(self, session: PGconn) -> None:
        """End it: its transaction is undone and its locks are gone when this returns."""
        if session.status == ConnStatus.OK and session.transaction_status != TransactionStatus.ACTIVE:
            session.exec_(_END_SESSION)
            if session.status == ConnStatus.OK:
                self._idle.append(session)
                return
        if session.status == ConnStatus.OK:
            self.terminate(session)
        session.finish()

    def terminate(self, session: PGconn) -> None:
        """As an administrator ends a session: the client notices with its next statement."""
        self.observer.execute("select pg_terminate_backend(%s, 10000)", (session.backend_pid,))

    def cancel(self, session: PGconn) -> None:
        """Have the server give up the statement under way."""
        self.observer.execute("select pg_cancel_backend(%s)", (session.backend_pid,))

    def waiting(self, pids: Collection[int]) -> set[int]:
        """Those that wait for others' locks, and not in a circle, which the server is about to break."""
        found = self.observer.execute("select p, pg_blocking_pids(p) from unnest(%s::int[]) p", (list(pids),))
        holders = {pid: set(others) for pid, others in found if others}
        return {pid for pid in holders if pid not in _reached(holders, pid)}

    # ── states ──

    def now(self) -> State:
        """What is committed. What an open transaction has locked against all others is as it was when that took the lock."""
        found = self.observer.execute(_LOCKED).fetchone()
        locked = frozenset(found[0] if found else ())
        while True:
            dump = self._dumps.get(locked)
            try:
                row = self.observer.execute(dump).fetchone() if dump else None
            except psycopg.errors.UndefinedTable:
                row = None
            if row is not None and row[0] == self._catalog:
                # a row that was written again stands elsewhere in its table, if there is room: that is no other state
                rows = {name: sorted(rows or [], key=repr) for name, rows in json.loads(row[1]).items()}
                rows |= {name: self._last.tables[name] for name in locked & self._last.tables.keys()}
                self._last = State(rows, self._relations)
                return self._last
            self._read_catalog(locked)

    def _read_catalog(self, locked: frozenset[str]) -> None:
        found = self.observer.execute(f"select {_CATALOG}").fetchone()
        assert found is not None
        self._catalog = found[0]
        before = {name: relation for name, relation in self._relations.items() if name in locked}
        rest = self.observer.execute(_RELATIONS, [list(locked)])
        self._relations = before | {name: (kind, text) for name, kind, text in rest}
        tables = [name for name, (kind, _) in self._relations.items() if kind == "r" and name not in locked]
        pairs = ", ".join(f"'{name}', (select json_agg(t) from \"{name}\" t)" for name in tables)
        self._dumps = {locked: f"select {_CATALOG}, json_build_object({pairs})::text"}

    def put_back(self, state: State) -> None:
        """Make `state` what is committed. No session may be under way."""
        now = self.now()
        if statements := [*_relations(now, state, self.empty.tables), *_rows(now, state)]:
            self.observer.execute("; ".join(statements))
        self._runs += 1
        if self._runs % VACUUM == 0:
            self.observer.execute("vacuum")

    def close(self) -> None:
        for session in self._idle:
            session.finish()
        self.observer.close()


def _reached(holders: Mapping[int, set[int]], pid: int) -> set[int]:
    """All those whom it waits for, over others as well."""
    seen: set[int] = set()
    todo = set(holders[pid])
    while todo:
        one = todo.pop()
        seen.add(one)
        todo |= holders.get(one, set()) - seen
    return seen


def _relations(now: State, to: State, pristine: Iterable[str]) -> list[str]:
    """What makes the tables and SQL views those of `to`, before their rows."""
    changed = [name for name, relation in now.relations.items() if to.relations.get(name) != relation]
    made = [name for name, relation in to.relations.items() if now.relations.get(name) != relation]
    if not changed and not made:
        return []
    # a table can't go while a view reads it
    views = [name for name, (kind, _) in now.relations.items() if kind == "v"]
    dropped = [*views, *(name for name in changed if now.relations[name][0] == "r")]
    made = [name for name, (kind, _) in to.relations.items() if kind == "v" or name in made]
    statements = [f'drop {"view" if now.relations[name][0] == "v" else "table"} "{name}"' for name in dropped]
    for name in sorted(made, key=lambda name: to.relations[name][0]):
        kind, text = to.relations[name]
        if kind == "v":
            statements.append(f'create view "{name}" as {text.rstrip(";")}')
            continue
        like = max((one for one in pristine if name.startswith(one)), key=len)
        parts = "all" if text else "all excluding indexes"
        statements.append(f'create table "{name}" (like pristine."{like}" including {parts})')
    return statements


def _rows(now: State, to: State) -> list[str]:
    statements = []
    for name, rows in to.tables.items():
        same = now.relations.get(name) == to.relations[name]
        if same and now.tables[name] == rows:
            continue
        if same:
            statements.append(f'delete from "{name}"')
        if rows:
            text = json.dumps(rows).replace("'", "''")
            statements.append(f'insert into "{name}" select * from json_populate_recordset(null::"{name}", \'{text}\')')
    return statements


@cache
def database() -> Database:
    """This process's own, with the tables of all that may run. It is gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="samefold-model-"))
    folder.chmod(0o711)
    server = Postgres(folder)

    def remove() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    server.start()
    with psycopg.connect(server.url(), autocommit=True) as connection:
        for name, value in _SERVER.items():
            connection.execute(sql.SQL("alter system set {} = {}").format(sql.Identifier(name), sql.Literal(value)))
    server.stop()
    server.start()
    settings = Settings(database_url=server.url(), kafka_bootstrap="model:9092", events_topic=TOPIC)
    make_tables(settings, {"balances": code(2)["balances"]})
    make_tables(settings, code(1, more=True))  # last: the SQL view is over the table that the first start makes live
    found = Database(settings)
    atexit.register(found.observer.close)
    return found
