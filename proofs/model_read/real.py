"""A real PostgreSQL in the model's place: the same schedules must give the same answers, waits, errors and rows on both.

Each session is a connection with a thread, which carries out a statement when it is its turn in the schedule; whether it waits for
a lock is asked of the server. Timeouts are off, for a schedule takes its time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from random import Random
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from infra.settings import Settings
from projections.engine.store.commit import prepare
from projections.engine.views.sql_views import replace_sql_view
from proofs.model_read.client import Connection, Copy
from proofs.model_read.explore import Replay, Walk
from proofs.model_read.play import Chooser
from proofs.model_read.postgres import Call, Database, Footprint, Result, Session, Transaction
from proofs.model_read.scenarios import Scenario
from proofs.model_read.sql import UnknownStatement, call_of
from proofs.model_read.views import code
from proofs.model_read.world import World, first_tables
from tests.engine.viewkit import make_tables

connect_really = psycopg.connect
DEADLINE_S = 20.0
COMPARED = ("positions", "live", "build_positions", "build_parts", "parked", "skips", "builds")


class RealSession(Session):
    """A session of the server."""

    def __init__(self, database: RealDatabase, connection: psycopg.Connection[Any], name: str) -> None:
        super().__init__(database, connection.info.backend_pid, name, {})
        self.real = database
        self.connection = connection
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._came = threading.Event()
        self._begun = False
        self._found: Result | psycopg.Error = Result()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except psycopg.Error as error:
                self._found = error
            self._came.set()

    def _carry_out(self, call: Call) -> None:
        if isinstance(call.sent, Copy):
            with self.connection.cursor().copy(call.sent.statement) as copy:
                copy.set_types(call.sent.types)
                for row in call.sent.rows:
                    copy.write_row(row)
            self._found = Result()
        else:
            cursor = self.connection.execute(call.sent, call.parameters)
            self._found = Result(cursor.fetchall() if cursor.description else [], cursor.rowcount)

    @property
    def under_way(self) -> bool:
        return self._begun

    @property
    def blocked(self) -> bool:
        return self._begun and not self._came.is_set() and not self._settles()

    def _settles(self) -> bool:
        """Wait until the statement has ended, and then True, or waits for somebody's lock."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._came.wait(0.002):
            if self.real.waits(self.pid):
                return self._came.is_set()
            assert time.monotonic() < deadline, f"no answer to {self.todo[0].text}"
        return True

    def step(self) -> bool:
        call = self.todo[0]
        self.tells = call.text
        self.footprint = Footprint(everything=True)
        if not self._begun:
            self._begun = True
            self._came.clear()
            self._jobs.put(lambda: self._carry_out(call))
        if not self._settles():
            return False
        self._begun = False
        self._take(self._found)
        while self.todo and self.todo[0].local:
            self._take(self._now(self.todo[0]))
        return True

    def locally(self, call: Call) -> Result:
        found = self._now(call)
        self._look_at_transaction()
        if isinstance(found, psycopg.Error):
            raise found
        return found

    def _now(self, call: Call) -> Result | psycopg.Error:
        if call.text.startswith("set "):
            return Result()
        try:
            self._carry_out(call)
        except psycopg.Error as error:
            return error
        return self._found

    def _take(self, found: Result | psycopg.Error) -> None:
        self.answers.append(found)
        self.todo.pop(0)
        if isinstance(found, psycopg.Error):
            self.todo.clear()
        self._look_at_transaction()

    def _look_at_transaction(self) -> None:
        """`transaction` tells the client whether there is anything to roll back."""
        idle = self.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        self.transaction = None if idle else _SOME
        self.database.changes += idle

    def end(self, error: psycopg.Error) -> None:
        if self.ended is None:
            self.ended = error
            self._jobs.put(None)
            self.connection.close()
            self.database.sessions.remove(self)
            self.database.changes += 1


_SOME = Transaction(explicit=True)


class RealDatabase(Database):
    """What a world asks of its database, of a real one."""

    def __init__(self, settings: Settings) -> None:
        super().__init__({"positions": {}}, {})
        self.settings = settings
        self._monitor = connect_really(settings.database, autocommit=True)

    def connect(self, name: str, _options: Mapping[str, Any]) -> RealSession:
        connection = connect_really(self.settings.database, autocommit=True, application_name=name[:63])
        prepare(connection)
        session = RealSession(self, connection, name)
        self.sessions.append(session)
        return session

    def waits(self, pid: int) -> bool:
        row = self._monitor.execute("select cardinality(pg_blocking_pids(%s)) > 0", (pid,)).fetchone()
        return bool(row and row[0])

    def close(self) -> None:
        for session in list(self.sessions):
            session.end(psycopg.OperationalError("over"))
        self._monitor.close()


class RealWorld(World):
    """A world whose database is a real one, empty before."""

    def __init__(self, settings: Settings, scenario: Scenario) -> None:
        self.settings = settings
        super().__init__(scenario.log(), scenario.views())
        self._fill()

    def _database(self) -> Database:
        return RealDatabase(self.settings)

    def connect(self, conninfo: str, *, application_name: str, **options: Any) -> Connection:
        self.play.check_alive()
        session = self.database.connect(application_name, options)
        session.owner = self.play.current.process if self.play.current else ""
        return Connection(self.play, session, _call_of)

    def _fill(self) -> None:
        make_tables(self.settings, {**self.views})
        make_tables(self.settings, {"balances": code(2)["balances"]})
        tables = first_tables(self.log, self.views)
        with connect_really(self.settings.database, autocommit=True) as connection:
            for name in ("topics", "positions", "live", "builds"):
                for row in tables[name].values():
                    known = {**row, "code_set": "{}"} if name == "builds" else row
                    statement = sql.SQL("insert into {} ({}) values ({})").format(
                        sql.Identifier(name),
                        sql.SQL(", ").join(map(sql.Identifier, known)),
                        sql.SQL(", ").join([sql.Placeholder()] * len(known)),
                    )
                    connection.execute(statement, list(known.values()))
            for view in self.views:
                replace_sql_view(connection, view)


def _call_of(query: Any, parameters: Any) -> Call:
    """What the model never sees, since its tables have neither constraints nor indexes, is done at once."""
    try:
        return call_of(query, parameters)
    except UnknownStatement:
        return Call("", parameters, lambda *_: iter(()), True, query)  # type: ignore[arg-type]


def compare(settings: Settings, scenario: Scenario, seed: str) -> tuple[int, int]:
    """Play a random schedule on the model and then on the real server; the steps taken, and those that waited.

    Raises AssertionError where they differ.
    """
    model = World(scenario.log(), scenario.views())
    model.play.eager = True  # on the real server, its choices say so already
    _play(model, scenario, Walk(Random(seed)))
    story = model.play.story
    real = RealWorld(settings, scenario)
    try:
        _play(real, scenario, Replay([choice for choice, _ in story]))
        ended = {name: actor.error for name, actor in real.play.actors.items() if actor.error is not None}
        for number, (wanted, found) in enumerate(zip(story, real.play.story, strict=False)):
            assert _told(*found) == _told(*wanted), f"step {number} is {found}, and {wanted} on the model; {ended}"
        assert len(real.play.story) == len(story)
        expected = {name: _comparable(rows.values()) for name, rows in model.database.committed.items()}
        for name in (*COMPARED, *(name for name in expected if "_v" in name)):
            assert _stored(settings, name) == expected[name], f"other rows in {name}"
    finally:
        assert isinstance(real.database, RealDatabase)
        real.database.close()
    return len(story), sum(what.endswith("waits") for _, what in story)


def _play(world: World, scenario: Scenario, chooser: Chooser) -> None:
    with world.around():
        scenario.before(world)
        scenario.build(world)
        world.play.run(chooser)


def _told(who: str, what: str) -> tuple[str, str]:
    """A step, without the columns of a SQL view, which the model does not know."""
    return who, what[:28] if what.startswith("create") else what


def _stored(settings: Settings, table: str) -> list[str]:
    with connect_really(settings.database, autocommit=True, row_factory=dict_row) as connection:
        return _comparable(connection.execute(sql.SQL("select * from {}").format(sql.Identifier(table))).fetchall())


def _comparable(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Rows as text, without what is of the hour or only the real one has."""
    return sorted(
        repr(sorted((name, _plain(value)) for name, value in row.items() if name not in _NOT_COMPARED)) for row in rows
    )


_NOT_COMPARED = {"at", "created_at", "parked_at", "code_set"}


def _plain(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    return sorted(value.items()) if isinstance(value, dict) else str(value)
