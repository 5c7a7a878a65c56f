"""The world of one run: a database with the first version live, a log, and the product made to see only these."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any
from uuid import UUID

import psycopg

from infra.log import clients, partitioner, source, topics
from infra.log.topics import Topic
from infra.settings import Settings
from projections.engine.live import tail
from projections.engine.operate import replaying
from projections.engine.rebuild import build_locks as claims
from projections.engine.rebuild import build_sessions as builders
from projections.engine.rebuild import builds, filling, switch, workers
from projections.engine.rebuild import load as local
from projections.engine.rebuild import stalled_loaders as twins
from projections.engine.store import commit, positions
from projections.engine.views import sql_views as people
from projections.engine.views.view import View
from proofs.model_read.client import Connection
from proofs.model_read.log import TOPIC, Log
from proofs.model_read.oracle import READER, Oracle, Violation, Watch
from proofs.model_read.play import LOST, Actor, First, Play
from proofs.model_read.postgres import Database, Key, Row, Tables
from proofs.model_read.views import code

TOPIC_ID = "topic"
_WITH_A_CLOCK = (builders, builds, claims, filling, people, replaying, source, switch, tail, twins)
NOON = datetime(2020, 1, 1, 12, tzinfo=UTC)


@cache
def settings() -> Settings:
    return Settings(database_url="postgresql://model", kafka_bootstrap="model:9092", events_topic=TOPIC)


@dataclass
class World:
    """A run's database, log, actors and watch. `seen` is the newest that any reader saw, by stream."""

    log: Log
    views: Mapping[str, View]
    faults: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.database = self._database()
        self.oracle = Oracle(self.log)
        self.sets: dict[str, Mapping[str, int]] = {}
        self.watch = Watch(self.oracle, self.sets)
        self.watch.restored(self.database.committed)
        self.database.on_publish = self.watch.published
        self.database.now = self.noon
        self.play = Play(self.database, self.faults)
        self.seen: dict[str, int] = {}
        self.loads_itself = False
        """Whoever rebuilds loads the parts itself, one after the other, as for a small log."""
        self.retries_parts = False
        """Each part of a load is given to two workers, as where one was thought to be lost."""
        self.backs: tuple[int, ...] = (1, 2, 4)
        """How many commits a restore may take back."""
        self.play.may_restore = lambda: [back for back in self.backs if back < len(self.database.history)]
        self.play.restore = self._restore
        self.number = 1
        self.seconds = 0
        self.loaders = 0
        self.restored = False
        self.at_end: set[str] = set()
        """Agents that had folded all there is, as they believed."""
        self.pings = False
        """Agents notice that their connection is gone, and make another, before they use it."""

    def _database(self) -> Database:
        return Database(first_tables(self.log, self.views), _keys())

    @contextmanager
    def around(self) -> Iterator[None]:
        """While it lasts, the product's clients of PostgreSQL, Kafka, the clock and chance are the model's."""
        undo = []
        for owner, name, new in self._replaced():
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)
        try:
            yield
        finally:
            for owner, name, old in reversed(undo):
                setattr(owner, name, old)

    def _replaced(self) -> list[tuple[Any, str, Any]]:
        clock = _Clock(self)
        return [
            (psycopg, "connect", self.connect),
            (clients, "range_consumer", self.log.consumer),
            (topics, "describe", self._describe),
            *((module, "time", clock) for module in _WITH_A_CLOCK),
            (commit, "sleep", clock.sleep),
            *((logging.getLogger(f"projections.engine.{name}"), "disabled", True) for name in ("work", "commit")),
            (workers, "run", self.work),
            (tail, "AHEAD", tail.AHEAD),  # a scenario may lower it
            *((module, "uuid4", self.uuid) for module in (builds, positions)),
        ]

    def connect(self, conninfo: str, *, application_name: str, **options: Any) -> Connection:
        play = self.play
        play.check_alive()
        session = self.database.connect(application_name, options)
        session.owner = play.current.process if play.current else ""
        return Connection(play, session)

    def _restore(self, back: int) -> None:
        """The database goes back by so many commits. Who looks at it now sees older states, of which nothing is promised."""
        tables = self.database.history[-1 - back]
        self.database.restore(tables)
        self.watch.restored(tables)
        self.seen.clear()
        self.restored = True

    def work(
        self,
        task: Any,
        arguments: Iterable[Any],
        _processes: int,
        advance: Any = lambda _count: None,
        *,
        memory_mb: int | None = None,
    ) -> list[Any]:
        """`workers.run`: each part of a load is an actor of its own, who goes on when whoever started it is gone."""
        if task is not local.load or self.loads_itself:
            return [task(argument, advance) for argument in arguments]
        started: list[list[tuple[Actor, list[Any]]]] = []
        for part in arguments:
            copies = []
            for _ in range(2 if self.retries_parts else 1):
                self.loaders += 1
                done: list[Any] = []
                actor = self.play.add(f"load{self.loaders}", partial(_load, task, part, done))
                actor.helps = True
                copies.append((actor, done))
            started.append(copies)
        while not all(any(actor.done for actor, _ in copies) for copies in started):
            self.play.sleep(0.1)
        ended = [next(one for one in copies if one[0].done) for copies in started]
        for actor, _ in ended:
            if actor.error is not None:
                raise actor.error
        return [done[0] for _, done in ended]

    def solo(self, name: str, run: Callable[[], Any]) -> None:
        """Somebody acts alone, before the play."""
        self.alone(lambda: self.play.add(name, run))

    def alone(self, start: Callable[[], object]) -> None:
        """Whoever this starts acts alone, before the play or after it."""
        before, self.play = self.play, Play(self.database)
        start()
        self.play.run(First())
        for actor in self.play.actors.values():
            if actor.error is not None:
                raise actor.error
        for session in list(self.database.sessions):
            session.end(psycopg.OperationalError(LOST))
        self.play = before

    def saw(self, known: Mapping[str, int], seen: Mapping[str, int]) -> None:
        """A reader's answer, by account; `known` is what had been seen when it was asked. Raises Violation."""
        if older := {a: (number, seen.get(a, 0)) for a, number in known.items() if seen.get(a, 0) < number}:
            raise Violation(READER, f"seen before, and now: {older}")
        for account, number in seen.items():
            self.seen[account] = max(number, self.seen.get(account, 0))

    def uuid(self) -> UUID:
        self.number += 1
        return UUID(int=self.number)

    def noon(self) -> datetime:
        """Later each time."""
        self.seconds += 1
        return NOON + timedelta(seconds=self.seconds)

    def _describe(self, _settings: Settings, name: str) -> Topic:
        ends = self.oracle.ends
        return Topic(name, TOPIC_ID, len(ends), dict.fromkeys(ends, 0), ends)


def _load(task: Any, part: Any, done: list[Any]) -> None:
    done.append(task(part))


class _Clock:
    """`time` for the product's modules."""

    def __init__(self, world: World) -> None:
        self.world = world

    def monotonic(self) -> float:
        return self.world.play.now

    def sleep(self, seconds: float) -> None:
        self.world.play.sleep(seconds)


@cache
def _keys() -> dict[str, tuple[str, ...]]:
    keys = {}
    for version in (1, 2):
        for view in code(version, more=True).values():
            partition = ("_partition",) if view.kind == "summary" else ()
            keys[view.table_name] = (*(column.name for column in view.key), *partition)
    return keys


def first_tables(log: Log, views: Mapping[str, View]) -> Tables:
    """What migrations and the agent's first start leave."""
    reading = {"next_offset": 0, "epoch": -1, "seq": 0, "command_offset": -1}
    tables: dict[str, dict[Key, Row]] = {name: {} for name in ("build_positions", "build_parts", "parked", "skips")}
    tables["topics"] = {
        (TOPIC,): {
            "topic": TOPIC,
            "topic_id": TOPIC_ID,
            "partitions": len(log.records),
            "partitioner": partitioner.NAME,
        }
    }
    tables["positions"] = {
        ("core", TOPIC, partition): {
            "agent": "core",
            "topic": TOPIC,
            "topic_id": TOPIC_ID,
            "partition": partition,
            "generation": UUID(int=1),
            **reading,
        }
        for partition in log.records
    }
    tables["live"], tables["builds"], tables["people"] = {}, {}, {}
    for number, view in enumerate(views.values()):
        table = view.table_name
        tables[table] = {}
        tables["live"][view.name,] = {
            "view": view.name,
            "agent": "core",
            "version": view.version,
            "table_name": table,
        }
        build = UUID(int=1_000 + number)
        tables["builds"][build,] = build_row(build, view, table, "live", NOON)
        tables["people"][view.name,] = {"view": view.name, "tables": (table,)}
    for view in code(2).values():
        tables.setdefault(view.table_name, {})
    return tables


def build_row(build: UUID, view: View, table: str, state: str, created: datetime) -> Row:
    return {
        "id": build,
        "view": view.name,
        "version": view.version,
        "agent": "core",
        "table_name": table,
        "state": state,
        "code_set": None,
        "shape": view.shape,
        "created_at": created,
        "as_of": None,
    }
