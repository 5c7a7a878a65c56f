"""Both stores are checked twice a second, for all requests: are they there, is all as promised, how far behind are agents?

A promise that is broken (another topic, other partitions, other views than this code's) stays so until everything is as it was: the
API says so and answers nothing else, because what it said could be wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psycopg
from confluent_kafka import KafkaException
from psycopg_pool import AsyncConnectionPool

from commands.outcomes import ReadModelNotSetUp
from infra.database.connect import named
from infra.database.deadline import ended_after
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.topics import Topic
from infra.observability.logs import StatusLog
from infra.settings import Settings
from projections.engine.live.startup import Contract, require_promised, set_difference
from projections.engine.rebuild.switch import Pointer
from projections.engine.store.command_types import CommandType
from projections.engine.views.core_views import code_set
from projections.engine.views.view import View

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_S = 0.5
COMPARE_S = 5.0
"""How often the topics are compared with what was promised."""
DATABASE_S = 2.0
"""How long PostgreSQL may take to answer."""
KAFKA_S = 2.0
"""How long the brokers may take for an answer."""
PATIENCE_S = 5.0
"""How long the brokers may be silent before commands are refused for it.

Until then they are appended, and wait for their acknowledgement: a pause of the broker or another leader costs them time, no
answer. That the ends of the log are known no newer makes the read model look nearer to them by what is appended in that time.
Beyond, a caller would rather hear at once, and for certain, that nothing was appended. Where no broker is reachable at all the
producer knows it at once.
"""


class NotLooked(SamefoldError):
    """The process has just started and knows nothing yet."""

    is_public = True


class OtherViewsLive(SamefoldError):
    """A view that is asked for is not live in this code's version."""

    is_public = True


class CommandNotLive(SamefoldError):
    """No handler that knows this command has been there yet."""

    is_public = True


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """What both stores said, within a moment. `at` is of `time.monotonic()`."""

    at: float
    live: Mapping[str, Pointer]
    """By view."""
    positions: Mapping[str, Mapping[int, int]]
    """{agent: {partition: next offset}}, of those that have live views."""
    ends: Mapping[int, int]
    """Of the log, by partition; read after the positions, so that they can't be behind them."""
    parked: Mapping[str, int]
    """Streams that a live view leaves out, by view; views without any are left out."""

    def behind(self, agent: str) -> int:
        """Records that the log holds and the agent has not folded."""
        at = self.positions.get(agent, {})
        return sum(max(end - at.get(partition, 0), 0) for partition, end in self.ends.items())


class StoreChecks:
    """`seen` is the newest complete snapshot; `failures` says, by subject, what is wrong now.

    The subjects: kafka and database, which are unavailable or refuse us; topics, which are not those they were; contract, which is
    not that of the database's positions; views, where the write model that is live is not this code's; start, until there was a
    check. `live` are the views that are live, by name, and `types` the commands; `views` are all of this code's views.
    """

    def __init__(
        self, settings: Settings, pool: AsyncConnectionPool[Any], name: str, views: Mapping[str, View]
    ) -> None:
        self.seen: HealthSnapshot | None = None
        self.live: Mapping[str, Pointer] = {}
        self.types: frozenset[CommandType] = frozenset()
        self.kafka_answered = False
        """At the last check."""
        self.failures: dict[str, SamefoldError] = {
            "start": NotLooked("This process has just started.", "Ask again in a moment.")
        }
        self._versions = code_set(dict(views))
        self._write_model = [name for name, view in views.items() if view.is_system]
        self._settings = settings
        self._pool = pool
        self._said = StatusLog(log, name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store checks")
        self._admin: topics.Admin
        self._kafka_at = float("-inf")
        self._topics: tuple[Topic, Topic] | None = None
        self._compare_at = 0.0
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have it called after each check, in the event loop. It must not block nor raise."""
        self._listeners.append(listener)

    def topics(self) -> tuple[Topic, Topic]:
        """(commands, events). Raises the named error that makes them unusable; PostgreSQL being unavailable is none."""
        for subject in ("topics", "contract"):
            if error := self.failures.get(subject):
                raise error
        if self._topics is None:
            raise self.failures.get("kafka") or self.failures["start"]
        return self._topics

    def require(self, *views: str) -> None:
        """Raises the named error of whatever is wrong; of views, with these alone. That nothing was checked yet, if that is all."""
        wrong = (error for subject, error in self.failures.items() if subject != "views")
        for error in sorted(wrong, key=lambda error: isinstance(error, NotLooked)):
            raise error
        self.require_live(*views)

    def require_live(self, *views: str) -> None:
        """Raises ReadModelNotSetUp, OtherViewsLive where one of these is not live in this code's version."""
        if not self.live:
            raise ReadModelNotSetUp("No view is live yet.", "Start an agent: `samefold run agent`.")
        now = {name: self.live[name].version for name in views if name in self.live}
        if difference := set_difference(now, {name: self._versions[name] for name in views}):
            what, _, cure = difference.partition(". ")
            raise OtherViewsLive(f"{what[:1].upper()}{what[1:]}.", cure)

    async def find_command(self, kind: CommandType) -> None:
        """Ask the database at once about a command that was not live at the last check: its first handler may just have come."""
        if kind not in self.types:
            async with self._pool.connection() as connection:
                cursor = await connection.execute("select context, type from command_types")
                self.types = frozenset(CommandType(*row) for row in await cursor.fetchall())

    def require_command(self, kind: CommandType) -> None:
        """Raises CommandNotLive: sent before, it would be malformed, and would stay so."""
        if kind not in self.types:
            raise CommandNotLive(
                f"No handler that knows '{kind}' has been there yet.",
                "Start one of this release (`samefold run handler`), beside those of the release before.",
            )

    async def keep_checking(self) -> None:
        """Until it is cancelled."""
        self._admin = topics.Admin(self._settings, KAFKA_S)
        try:
            while True:
                started = time.monotonic()
                await self._check()
                for listener in self._listeners:
                    listener()
                await asyncio.sleep(max(started + CHECK_S - time.monotonic(), 0.05))
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _check(self) -> None:
        rows = await self._told("database", self._ask_database())
        if self._topics is None or time.monotonic() >= self._compare_at:
            await self._told("kafka", self._ask_topics())
        ends = (
            await self._told("kafka", self._in_thread(partial(topics.ends, self._topics[1], self._admin)))
            if self._topics
            else None
        )
        self.kafka_answered = ends is not None
        if ends is not None:
            self._kafka_at = time.monotonic()
        if rows is None:
            return
        promised = {name: Contract(name, *contract) for name, *contract in rows[2] or ()}
        self.live = {view: Pointer(view, agent, version, table) for view, agent, version, table in rows[1] or ()}
        self.types = frozenset(CommandType(*one) for one in rows[4] or ())
        self._judge("views", partial(self.require_live, *self._write_model))
        if self._topics:
            self._judge("contract", partial(_require_contract, self._topics, promised))
            self.failures.pop("start", None)
        if ends is not None:
            positions: dict[str, dict[int, int]] = {}
            for agent, partition, next_offset in rows[0] or ():
                positions.setdefault(agent, {})[partition] = next_offset
            self.seen = HealthSnapshot(time.monotonic(), self.live, positions, ends, dict(rows[3] or ()))

    async def _told(self, subject: str, asked: Awaitable[T]) -> T | None:
        """What was asked for, or None and the reason in `failures`."""
        try:
            found = await asked
        except psycopg.Error as error:
            self._is_wrong(subject, named(error, self._settings))
        except clients.KafkaAway as error:
            self._is_silent(error)
        except KafkaException as error:  # it answers, but not to us, or not of this topic
            self._is_silent(clients.away(self._settings, error))
        except SamefoldError as error:
            self._is_wrong("topics", error)
        else:
            self._is_well(subject)
            return found
        return None

    def _judge(self, subject: str, require: Callable[[], None]) -> None:
        try:
            require()
        except SamefoldError as error:
            self._is_wrong(subject, error)
        else:
            self._is_well(subject)

    def _is_silent(self, error: clients.KafkaAway) -> None:
        if time.monotonic() - self._kafka_at > PATIENCE_S:
            self._is_wrong("kafka", error, "away")

    def _is_wrong(self, subject: str, error: SamefoldError, kind: str = "") -> None:
        self.failures[subject] = error
        self._said.wrong(subject, str(error), kind)

    def _is_well(self, subject: str) -> None:
        self.failures.pop(subject, None)
        self._said.well(subject, f"{subject}: as it should be again")

    async def _ask_database(self) -> Any:
        names = [self._settings.commands_topic, self._settings.events_topic]
        async with self._pool.connection() as connection:
            with ended_after(connection, DATABASE_S):
                cursor = await connection.execute(_SEEN, (self._settings.events_topic, names))
            return await cursor.fetchone()

    async def _ask_topics(self) -> None:
        """Create them at the first check if they are missing, as handlers and agents do; later, compare."""
        if self._topics is None:
            self._topics = await self._in_thread(partial(topics.ensure, self._settings))
        else:
            for topic in self._topics:
                now = await self._in_thread(partial(topics.describe, self._settings, topic.name, admin=self._admin))
                topics.require_same(topic, now)
        self._is_well("topics")
        self._compare_at = time.monotonic() + COMPARE_S

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _require_contract(now: tuple[Topic, Topic], promised: Mapping[str, Contract]) -> None:
    """Raises ContractBroken. What is not promised yet, the first handler or agent will write down."""
    for topic in now:
        if promise := promised.get(topic.name):
            require_promised(promise, Contract.of(topic))


_SEEN = """
select
  (select json_agg(json_build_array(agent, partition, next_offset))
     from positions where topic = %s and agent in (select agent from live)),
  (select json_agg(json_build_array(view, agent, version, table_name)) from live),
  (select json_agg(json_build_array(topic, topic_id, partitions, partitioner)) from topics where topic = any(%s)),
  (select json_agg(json_build_array(view, streams))
     from (select l.view, count(*) as streams from parked join live l using (table_name) group by l.view) p),
  (select json_agg(json_build_array(context, type)) from command_types)
"""
