"""PostgreSQL as the read side sees it: statement snapshots, row and table locks, savepoints, sessions that end.

READ COMMITTED: a statement sees what was committed when it began, and its own transaction's writes. Whoever meets a row that
another transaction has locked waits; afterwards the newest version of that row is looked at again, everything else still is
as it was when the statement began (EvalPlanQual). That is what makes a fence beside the locked row worthless.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import psycopg
from psycopg import errors

Row = Mapping[str, Any]
Key = tuple[Any, ...]
Place = tuple[str, Key | None]
"""A row's table and key; a table as a whole with None."""
Tables = Mapping[str, Mapping[Key, Row]]
Steps = Generator[None, None, "Result"]
"""A statement under way: yields while it has to wait for a lock."""


class Lock(StrEnum):
    """Row locks as PostgreSQL has them, and those of tables that matter here."""

    KEY_SHARE = "for key share"
    NO_KEY = "for no key update"
    UPDATE = "for update"
    USE = "access share or row exclusive"
    OWN = "share row exclusive"
    WRITE = "row exclusive"
    EXCLUSIVE = "access exclusive"


_CONFLICTS = {
    frozenset({Lock.KEY_SHARE, Lock.UPDATE}),
    frozenset({Lock.NO_KEY}),
    frozenset({Lock.NO_KEY, Lock.UPDATE}),
    frozenset({Lock.UPDATE}),
    frozenset({Lock.OWN}),
    frozenset({Lock.OWN, Lock.WRITE}),
    frozenset({Lock.EXCLUSIVE}),
    *(frozenset({Lock.EXCLUSIVE, other}) for other in (Lock.USE, Lock.OWN, Lock.WRITE)),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement answers."""

    rows: Sequence[tuple[Any, ...]] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A statement as sent: its text with white space made even, its parameters, how it is carried out."""

    text: str
    parameters: Any
    run: Callable[[Statement, Any], Steps]
    local: bool = False
    """Nobody else can notice it, nor it anybody else: needs no place of its own in a schedule."""
    sent: Any = None
    """What the product sent, for a real server."""


@dataclass(slots=True)
class Footprint:
    """What one step touched: two steps of different sessions commute unless these meet."""

    read: set[Place] = field(default_factory=set)
    locked: set[Place] = field(default_factory=set)
    published: set[Place] = field(default_factory=set)
    everything: bool = False

    def meets(self, other: Footprint) -> bool:
        if self.everything or other.everything:
            return True
        return (
            _meet(self.published, other.read)
            or _meet(self.read, other.published)
            or _meet(self.published, other.published)
            or _meet(self.locked, other.locked)
        )


def _meet(some: set[Place], others: set[Place]) -> bool:
    if not some or not others:
        return False
    if not some.isdisjoint(others):
        return True
    whole, other_whole = ({t for t, key in places if key is None} for places in (some, others))
    return any(t in whole for t, _ in others) or any(t in other_whole for t, _ in some)


@dataclass(slots=True)
class Transaction:
    """`written` is the newest last: one layer per savepoint. A `snapshot` of its own only under REPEATABLE READ."""

    explicit: bool
    snapshot: Tables | None = None
    repeatable: bool = False
    written: list[tuple[str, dict[Place, Row | None]]] = field(default_factory=lambda: [("", {})])
    failed: bool = False

    def own(self, place: Place) -> tuple[bool, Row | None]:
        for _, layer in reversed(self.written):
            if place in layer:
                return True, layer[place]
        return False, None

    def places(self) -> dict[Place, Row | None]:
        merged: dict[Place, Row | None] = {}
        for _, layer in self.written:
            merged.update(layer)
        return merged


class Session:
    """One connection's server side. `todo` is what was sent and not answered; `answers` are for the client."""

    def __init__(self, database: Database, pid: int, name: str, options: Mapping[str, str]) -> None:
        self.database = database
        self.pid = pid
        self.name = name
        self.options = options
        self.owner = ""
        """The actor whose connection it is."""
        self.cut = False
        """The client has lost it; it may work on for a while."""
        self.transaction: Transaction | None = None
        self.todo: list[Call] = []
        self.answers: list[Result | psycopg.Error] = []
        self.ended: psycopg.Error | None = None
        self.steps: Steps | None = None
        self.waits_for: tuple[set[Session], Place, Lock] | None = None
        self.footprint = Footprint()
        self.tells: str = ""

    @property
    def under_way(self) -> bool:
        """Whether a statement has begun, and waits or has waited."""
        return self.steps is not None

    @property
    def blocked(self) -> bool:
        """Whether the statement under way waits for a lock that is still held."""
        if self.waits_for is None:
            return False
        _, place, mode = self.waits_for
        return bool(self.database.holders(self, place, mode))

    def step(self) -> bool:
        """Carry the statement under way on to its end, or to a lock; whether it ended. Local ones after it go along."""
        call = self.todo[0]
        self.tells = call.text
        self.footprint = Footprint()
        try:
            if self.steps is None:
                self.steps = self._begin(call)
            self.waits_for = None
            next(self.steps)
        except StopIteration as stop:
            self._answer(stop.value)
        except psycopg.Error as error:
            self.fail(error)
        else:
            return False
        while self.todo and self.todo[0].local:
            self._locally()
        return True

    def locally(self, call: Call) -> Result:
        """Carry out a local statement. Raises psycopg.Error."""
        self.todo.append(call)
        self._locally()
        answer = self.answers.pop()
        if isinstance(answer, psycopg.Error):
            raise answer
        return answer

    def _locally(self) -> None:
        steps = self._begin(self.todo[0])
        try:
            next(steps)
        except StopIteration as stop:
            self._answer(stop.value)
        except psycopg.Error as error:
            self.fail(error)

    def _begin(self, call: Call) -> Steps:
        if (
            self.transaction is not None
            and self.transaction.failed
            and call.text.split()[0] not in ("rollback", "commit")
        ):
            return _refuse(errors.InFailedSqlTransaction("current transaction is aborted"))
        if self.transaction is None and call.text.split()[0] not in ("begin", "rollback"):
            self.transaction = Transaction(explicit=False)
        return call.run(Statement(self), call.parameters)

    def _answer(self, result: Result) -> None:
        self.todo.pop(0)
        self.steps = None
        self.answers.append(result)
        if self.transaction is not None and not self.transaction.explicit:
            self.publish()

    def fail(self, error: psycopg.Error) -> None:
        """The statement under way ends with an error, and with it, up to the next sync, what was sent behind it."""
        self.steps = None
        self.waits_for = None
        self.todo.clear()
        self.answers.append(error)
        if self.transaction is not None:
            if self.transaction.explicit:
                self.transaction.failed = True
                if len(self.transaction.written) == 1:
                    # there is no savepoint to go back to: the locks are gone at once, not with the rollback
                    self.footprint.locked |= self.database.release(self)
            else:
                self.abort()

    def publish(self) -> None:
        """Commit: what the transaction wrote is there for every statement from now on."""
        transaction, self.transaction = self.transaction, None
        if transaction is not None and not transaction.failed:
            self.database.publish(self, transaction.places())
        self._let_go()

    def abort(self) -> None:
        self.transaction = None
        self._let_go()

    def _let_go(self) -> None:
        self.footprint.locked |= self.database.release(self)
        self.database.changes += 1

    def end(self, error: psycopg.Error) -> None:
        """The server ends the session: whatever it was doing is undone."""
        if self.ended is not None:
            return
        self.ended = error
        self.footprint = Footprint(everything=True)
        self.steps = None
        self.waits_for = None
        if self.todo:
            self.todo.clear()
            self.answers.append(error)
        self.abort()
        self.database.forget(self)


def _refuse(error: psycopg.Error) -> Steps:
    raise error
    yield


class Statement:
    """What a statement may do, in the transaction of its session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.database = session.database
        transaction = session.transaction
        if transaction is not None and transaction.repeatable:
            if transaction.snapshot is None:
                transaction.snapshot = self.database.committed
            self.snapshot = transaction.snapshot
        else:
            self.snapshot = self.database.committed

    @property
    def transaction(self) -> Transaction:
        assert self.session.transaction is not None
        return self.session.transaction

    def table(self, table: str) -> dict[Key, Row]:
        """The rows that the statement sees. Raises UndefinedTable."""
        self.session.footprint.read.add((table, None))
        self._require(table)
        seen = dict(self.snapshot.get(table, {}))
        for _, layer in self.transaction.written:
            for (name, key), row in layer.items():
                if name == table and key is not None:
                    if row is None:
                        seen.pop(key, None)
                    else:
                        seen[key] = row
        return seen

    def where(self, table: str, **equal: Any) -> list[Row]:
        """The rows seen that have these values, in the order of their keys."""
        rows = sorted(self.table(table).items())
        return [row for _, row in rows if all(row[name] == value for name, value in equal.items())]

    def one(self, table: str, key: Key) -> Row | None:
        """The row of that key as the statement sees it."""
        self.session.footprint.read.add((table, key))
        self._require(table)
        mine, row = self.transaction.own((table, key))
        return row if mine else self.snapshot.get(table, {}).get(key)

    def _require(self, table: str) -> None:
        """Whether a table is there is asked of now, not of the snapshot."""
        mine, made = self.transaction.own((table, None))
        if not (made is not None if mine else table in self.database.committed):
            raise errors.UndefinedTable(f'relation "{table}" does not exist')

    def newest(self, table: str, key: Key) -> Row | None:
        """The row as it is now; to be asked only of a row that this transaction has locked."""
        mine, row = self.transaction.own((table, key))
        return row if mine else self.database.committed.get(table, {}).get(key)

    def lock(self, place: Place, mode: Lock) -> Generator[None, None, None]:
        """Take a lock, waiting as long as others hold one that does not go with it. Raises DeadlockDetected."""
        self.session.footprint.locked.add(place)
        while holders := self.database.holders(self.session, place, mode):
            self.session.waits_for = (holders, place, mode)
            if self.database.in_a_circle(self.session):
                raise errors.DeadlockDetected("deadlock detected")
            yield
            self.session.footprint.locked.add(place)
        self.database.take(self.session, place, mode)

    def use(self, table: str, mode: Lock = Lock.USE) -> Generator[None, None, None]:
        """Lock a table as a whole."""
        yield from self.lock((table, None), mode)

    def newest_rows(self, table: str) -> dict[Key, Row]:
        """All rows as they are now; to be asked only of a table that this transaction has locked against everybody."""
        rows = dict(self.database.committed.get(table, {}))
        for (name, key), row in self.transaction.places().items():
            if name == table and key is not None:
                if row is None:
                    rows.pop(key, None)
                else:
                    rows[key] = row
        return rows

    def create(self, table: str) -> None:
        self.transaction.written[-1][1][table, None] = {}

    def drop(self, table: str) -> None:
        self.transaction.written[-1][1][table, None] = None

    def put(self, table: str, key: Key, row: Row | None) -> None:
        """Write a row that is locked; None deletes it."""
        self.transaction.written[-1][1][table, key] = row

    def update(
        self, table: str, wanted: Callable[[Row], bool], new: Mapping[str, Any] | Callable[[Row], Mapping[str, Any]]
    ) -> Generator[None, None, int]:
        """`update table set … where …`; how many rows."""
        yield from self.use(table, Lock.WRITE)
        count = 0
        for key, row in sorted(self.table(table).items()):
            if wanted(row):
                yield from self.lock((table, key), Lock.NO_KEY)
                newest = self.newest(table, key)
                if newest is not None and wanted(newest):
                    self.put(table, key, {**newest, **(new(newest) if callable(new) else new)})
                    count += 1
        return count

    def delete(self, table: str, wanted: Callable[[Row], bool]) -> Generator[None, None, int]:
        yield from self.use(table, Lock.WRITE)
        count = 0
        for key, row in sorted(self.table(table).items()):
            if wanted(row):
                yield from self.lock((table, key), Lock.UPDATE)
                newest = self.newest(table, key)
                if newest is not None and wanted(newest):
                    self.put(table, key, None)
                    count += 1
        return count

    def insert(
        self, table: str, key: Key, row: Row, on_conflict: Callable[[Row], Row | None] | None = None
    ) -> Generator[None, None, bool]:
        """Whether the row was written. With `on_conflict`, a row that is there is updated to what it says, or left alone.

        Raises UniqueViolation without.
        """
        yield from self.use(table, Lock.WRITE)
        yield from self.lock((table, key), Lock.NO_KEY)
        there = self.newest(table, key)
        if there is None:
            self._require(table)
            self.put(table, key, row)
            return True
        if on_conflict is None:
            raise errors.UniqueViolation(f"duplicate key value violates unique constraint of {table}: {key}")
        changed = on_conflict(there)
        if changed is not None:
            self.put(table, key, changed)
        return changed is not None

    def upsert(self, table: str, key: Key, row: Row) -> Generator[None, None, bool]:
        """Insert the row, or put it in the place of the one that is there."""
        written = yield from self.insert(table, key, row, lambda _there: row)
        return written


class Database:
    """All sessions and what is committed. `changes` rises with every transaction's end."""

    def __init__(self, tables: Tables, keys: Mapping[str, tuple[str, ...]]) -> None:
        self.committed: Tables = tables
        self.keys = keys
        """The primary keys of views' tables, by the name of the version's first table."""
        self.sessions: list[Session] = []
        self.history: list[Tables] = [tables]
        """What was committed, the newest last: a restore may bring any of it back."""
        self.changes = 0
        self.now: Callable[[], Any] = lambda: None
        """The time of day, for columns that default to it."""
        self.on_publish: Callable[[Session, Mapping[Place, Row | None]], None] = lambda _session, _written: None
        self._locks: dict[Place, list[tuple[Session, Lock]]] = {}
        self._claims: dict[Any, Session] = {}
        self._pids = 0

    def connect(self, name: str, options: Mapping[str, str]) -> Session:
        self._pids += 1
        session = Session(self, self._pids, name, options)
        self.sessions.append(session)
        return session

    def forget(self, session: Session) -> None:
        self.sessions.remove(session)
        self._claims = {what: owner for what, owner in self._claims.items() if owner is not session}
        self.changes += 1

    def publish(self, session: Session, written: Mapping[Place, Row | None]) -> None:
        if not written:
            return
        session.footprint.published |= written.keys()
        new = dict(self.committed)
        for table in {table for table, _ in written}:
            if (table, None) in written and written[table, None] is None:
                new.pop(table, None)
                continue
            rows = {} if (table, None) in written else dict(new.get(table, {}))
            for (name, key), row in written.items():
                if name == table and key is not None:
                    if row is None:
                        rows.pop(key, None)
                    else:
                        rows[key] = row
            new[table] = rows
        self.committed = new
        self.history.append(new)
        self.on_publish(session, written)

    def restore(self, tables: Tables) -> None:
        """The server goes back to an older state; no session survives that."""
        for session in list(self.sessions):
            session.end(psycopg.OperationalError("server closed the connection unexpectedly"))
        self.committed = tables
        self.history.append(tables)
        self.changes += 1

    def holders(self, session: Session, place: Place, mode: Lock) -> set[Session]:
        """Those who hold a lock there that does not go with this one."""
        held = self._locks.get(place, ())
        return {owner for owner, other in held if owner is not session and frozenset({mode, other}) in _CONFLICTS}

    def take(self, session: Session, place: Place, mode: Lock) -> None:
        held = self._locks.setdefault(place, [])
        if (session, mode) not in held:
            held.append((session, mode))

    def release(self, session: Session) -> set[Place]:
        """Let go of all its locks; where they were."""
        gone = set()
        for place, held in list(self._locks.items()):
            kept = [(owner, mode) for owner, mode in held if owner is not session]
            if len(kept) < len(held):
                gone.add(place)
                self._locks[place] = kept
            if not kept:
                del self._locks[place]
        return gone

    def in_a_circle(self, session: Session) -> bool:
        """Whether it waits, over others, for itself."""
        seen: set[Session] = set()
        waiting = [session]
        while waiting:
            one = waiting.pop()
            for other in self.holders(one, *one.waits_for[1:]) if one.waits_for else ():
                if other is session:
                    return True
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return False

    def claim(self, session: Session, what: Any) -> bool:
        """A session's advisory lock, which it may take several times."""
        return self._claims.setdefault(what, session) is session

    def unclaim(self, session: Session, what: Any) -> None:
        if self._claims.get(what) is session:
            del self._claims[what]
            self.changes += 1

    def holder(self, what: Any) -> Session | None:
        """The session that holds an advisory lock."""
        return self._claims.get(what)

    def named(self, prefix: str) -> Iterable[Session]:
        return [session for session in self.sessions if session.name.startswith(prefix)]
