"""Checks both stores twice a second, for all requests: are they available and consistent, and how far behind are the agents?

While they are inconsistent (another topic, other partitions, other views than this code's), requests are refused: answers could be
wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from confluent_kafka import KafkaError, KafkaException
from psycopg_pool import AsyncConnectionPool

from api.problems import problem_of
from commands import release
from commands.outcomes import ReadModelNotSetUp
from domain.engine.contexts import has_personal_fields
from infra.database.connect import named_error, named_errors
from infra.database.deadline import ended_after
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.contract import Contract, require_promised
from infra.log.topics import Topic
from infra.observability.logs import StatusLog
from infra.processes.process_end import Thread
from infra.settings import Settings
from projections.engine.live.lag import VIEWS
from projections.engine.live.startup import set_difference
from projections.engine.store.command_types import CommandType
from projections.engine.store.positions import AGENTS
from projections.engine.views.core_views import code_set
from projections.engine.views.view import CORE, View

log = logging.getLogger(__name__)

CHECK_S = 0.5
COMPARE_S = 5.0
"""How often the topics are compared with the contract."""
DATABASE_S = 2.0
"""The deadline for PostgreSQL."""
KAFKA_S = 2.0
"""The deadline for the brokers."""
PATIENCE_S = 5.0
"""How long the brokers may be silent before commands are refused.

Until then commands are appended and wait for their acknowledgement: a pause of the broker or another leader costs time, but no
answer. Beyond, the client learns at once that nothing was appended. Where no broker is reachable the producer knows that at once.
"""


class NotLooked(SamefoldError):
    """The process has just started and has not checked the stores yet."""

    is_public = True


class OtherViewsLive(SamefoldError):
    """A view that this request needs is not live in this code's version."""

    is_public = True


class CommandNotLive(SamefoldError):
    """No handler that knows this command has started yet."""

    is_public = True


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """The state of both stores at one moment, `at` of `time.monotonic()`."""

    at: float
    positions: Mapping[str, Mapping[int, int]]
    """{agent: {partition: next offset}}, of agents with live views, and of policies."""
    ends: Mapping[int, int]
    """Of the log, by partition; read after the positions, so never behind them."""
    views: Sequence[tuple[str, int, str | None]]
    """What each view or policy leaves out: the rows of `VIEWS`."""
    commands: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By partition, how far commands are decided, and their end. Of repeated ones only what handlers reported shows it."""

    def behind(self, agent: str) -> int:
        """Records that the log holds and the agent has not folded."""
        at = self.positions.get(agent, {})
        return sum(max(end - at.get(partition, 0), 0) for partition, end in self.ends.items())


class StoreChecks:
    """`seen` is the newest complete snapshot; `failures` has what is wrong now, by subject.

    The subjects: kafka and database, unavailable or refusing us; topics, recreated or changed; contract, where the positions in the
    database are of other topics; views, where another write model is live than this code's; inbox, which only webhooks need;
    start, before the first check.
    """

    def __init__(
        self, settings: Settings, pool: AsyncConnectionPool[Any], name: str, views: Mapping[str, View]
    ) -> None:
        self.seen: HealthSnapshot | None = None
        self.live: Mapping[str, int] = {}
        """The live views' versions, by name."""
        self.types: frozenset[CommandType] = frozenset()
        """The commands that some handler knows."""
        self.kafka = clients.Connection(name)
        """Of the producer of commands, which knows at once that no broker is reachable, and tries again after a good check."""
        self.kafka_answered = False
        """At the last check."""
        self.failures: dict[str, SamefoldError] = {
            "start": NotLooked("This process has just started.", "Try again in a moment.")
        }
        self._versions = code_set(dict(views))
        self._write_model = [name for name, view in views.items() if view.is_system]
        self._settings = settings
        self._pool = pool
        self._status = StatusLog(log, name)
        self._thread = Thread("store checks")
        self._admin: topics.Admin
        self._commands: Mapping[int, tuple[int, int]] = {}
        self._kafka_at = float("-inf")
        self._topics: tuple[Topic, Topic] | None = None
        self.watches: list[topics.Watch] = []
        """Of the topics of commands, and of the inbox."""
        self._compare_at = 0.0
        self._listeners: list[Callable[[], None]] = []
        self.with_inbox = False
        """Whether the topic of webhooks' messages is needed, too."""
        self._inbox: Topic | None = None
        self.on_topics: Callable[[Topic], None] = lambda _topic: None
        """Called once, in a thread, for each topic that is appended to, when it is known."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call it after each check, in the event loop. It must not block nor raise."""
        self._listeners.append(listener)

    def topics(self) -> tuple[Topic, Topic]:
        """(commands, events) as they are now. Raises Problem 503 where they can't be used; an unavailable PostgreSQL does not."""
        error = self.failures.get("topics") or self.failures.get("contract")
        if error is None and self._topics is not None:
            return self._topics
        raise problem_of(error or self.failures.get("kafka") or self.failures["start"])

    def inbox(self) -> Topic:
        """The topic of webhooks' messages. Raises Problem 503 where it can't be used; an unavailable PostgreSQL does not."""
        self.topics()
        if error := self.failures.get("inbox"):
            raise problem_of(error)
        if self._inbox is None or self.kafka.away.is_set() or "kafka" in self.failures:
            raise problem_of(clients.away(self._settings, KafkaError(KafkaError._ALL_BROKERS_DOWN)))
        return self._inbox

    def require(self, *views: str) -> None:
        """Raises the named error of what is wrong for commands, NotLooked last. Of views only these count."""
        if self.kafka.away.is_set():
            raise clients.away(self._settings, KafkaError(KafkaError._ALL_BROKERS_DOWN))
        wrong = (error for subject, error in self.failures.items() if subject not in ("views", "inbox"))
        for error in sorted(wrong, key=lambda error: isinstance(error, NotLooked)):
            raise error.with_traceback(None)  # else it would keep the frames of all requests that it is raised in
        self.require_live(*views)

    def require_live(self, *views: str) -> None:
        """Raises ReadModelNotSetUp, OtherViewsLive unless all of these are live in this code's version."""
        if not self.live:
            raise ReadModelNotSetUp("No view is live yet.", "If no agent is starting, start one: `samefold run agent`.")
        now = {name: self.live[name] for name in views if name in self.live}
        if difference := set_difference(now, {name: self._versions[name] for name in views}):
            what = difference.partition(". ")[0]
            raise OtherViewsLive(
                f"{what[:1].upper()}{what[1:]}.",
                "`samefold rebuild` with this code makes its own views live; if newer code made others live, restart this process "
                "with it.",
            )

    async def require_command(self, kind: CommandType) -> None:
        """Raises CommandNotLive where no handler knows the command: appended, it would be rejected as malformed, for good.

        Raises DatabaseUnavailable too: it is looked up again, as its first handler may just have started.
        """
        if kind not in self.types:
            with named_errors(self._settings):
                async with self._pool.connection() as connection:
                    cursor = await connection.execute("select context, type from command_types")
                    self.types = frozenset(CommandType(*row) for row in await cursor.fetchall())
        if kind not in self.types:
            raise CommandNotLive(
                f"No handler that knows '{kind}' has started yet.",
                "Start one of this release (`samefold run handler`); those of the release before may go on. If one runs, it "
                "waits: `samefold doctor` names what for.",
            )

    async def keep_checking(self) -> None:
        """Check the stores until this is cancelled."""
        self._admin = topics.Admin(self._settings, KAFKA_S)
        try:
            while True:
                started = time.monotonic()
                await self._check()
                for listener in self._listeners:
                    listener()
                await asyncio.sleep(max(started + CHECK_S - time.monotonic(), 0.05))
        finally:
            self._thread.close(lambda: None)

    async def _check(self) -> None:
        rows = ends = None
        with self._about("database"):
            names = [self._settings.commands_topic, self._settings.events_topic]
            async with self._pool.connection() as connection:
                with ended_after(connection, DATABASE_S):
                    cursor = await connection.execute(_SEEN, (self._settings.events_topic, names))
                rows = await cursor.fetchone()
        if self._topics is None or time.monotonic() >= self._compare_at:
            with self._about("kafka"):
                await self._ask_topics()
        if self._topics:
            with self._about("kafka"):
                ends = await self._thread.run(partial(topics.ends, self._topics[1], self._admin))
        self.kafka_answered = ends is not None
        if ends is not None:
            self._kafka_at = time.monotonic()
            self.kafka.seen()
        if rows is None:
            return
        folded, live, contracts, left_out, types = (part or () for part in rows)
        promised = {name: Contract(name, *contract) for name, *contract in contracts}
        self.live = dict(live)
        self.types = frozenset(CommandType(*one) for one in types)
        with self._about("views"):
            self.require_live(*self._write_model)
        if self._topics:
            with self._about("contract"):
                for topic in self._topics:
                    if promise := promised.get(topic.name):  # a missing one: the first handler or agent will record it
                        require_promised(promise, Contract.of(topic))
            self.failures.pop("start", None)
        if ends is not None:
            positions: dict[str, dict[int, int]] = {}
            commands = dict(self._commands)
            for agent, partition, next_offset, command in folded:
                positions.setdefault(agent, {})[partition] = next_offset
                if agent == CORE and partition in commands:
                    reported, end = commands[partition]
                    commands[partition] = max(reported, command + 1), end
            self.seen = HealthSnapshot(time.monotonic(), positions, ends, left_out, commands)

    @contextmanager
    def _about(self, subject: str) -> Iterator[None]:
        """Note in `failures` what the block raises, or that the subject is as it should be."""
        try:
            yield
        except psycopg.Error as error:
            self._is_wrong(subject, named_error(error, self._settings))
        except (clients.KafkaUnavailable, KafkaException) as error:  # silent, or it refuses us or this topic
            if time.monotonic() - self._kafka_at > PATIENCE_S:
                away = error if isinstance(error, clients.KafkaUnavailable) else clients.away(self._settings, error)
                self._is_wrong("kafka", away, "away")
        except SamefoldError as error:
            self._is_wrong("topics" if subject == "kafka" else subject, error)
        else:
            self._is_well(subject)

    def _is_wrong(self, subject: str, error: SamefoldError, kind: str = "") -> None:
        # with its frames, which may hold the error, it would keep a client of Kafka and its threads
        self.failures[subject] = error.with_traceback(None)
        # a new service is in this state until its first agent has started
        level = logging.INFO if isinstance(error, ReadModelNotSetUp) else logging.WARNING
        self._status.wrong(subject, str(error), kind, level)

    def _is_well(self, subject: str) -> None:
        self.failures.pop(subject, None)
        self._status.well(subject, f"{subject}: available and consistent")

    def _ask_commands(self, commands: Topic) -> None:
        """What no request depends on: unknown where this process may not ask for the handlers' group."""
        self._commands = {}
        with suppress(KafkaException, SamefoldError):
            reported = release.decided(self._settings, commands.partitions, KAFKA_S)
            ends = topics.ends(commands, self._admin)
            self._commands = {partition: (reported.get(partition, 0), end) for partition, end in ends.items()}

    async def _ask_topics(self) -> None:
        """Create missing topics at the first check, as handlers and agents do; later, compare them with the contract."""
        if self._topics is None or not self.watches:
            self._topics = await self._thread.run(partial(topics.ensure, self._settings))
            await self._thread.run(partial(self.on_topics, self._topics[0]))
            also = [self._settings.keys_topic] if has_personal_fields() else []
            self.watches = [topics.Watch(self._settings, self._topics, self._status, self._admin, also)]
        else:
            await self._thread.run(self.watches[0].check)
        if self.with_inbox:
            with self._about("inbox"):
                await self._ask_inbox()
        await self._thread.run(partial(self._ask_commands, self._topics[0]))
        self._is_well("topics")
        self._compare_at = time.monotonic() + COMPARE_S

    async def _ask_inbox(self) -> None:
        if self._inbox is None:
            inbox = await self._thread.run(partial(topics.ensure_inbox, self._settings))
            await self._thread.run(partial(self.on_topics, inbox))
            self.watches.append(topics.Watch(self._settings, [], self._status, self._admin, [inbox.name]))
            self._inbox = inbox
        else:
            await self._thread.run(self.watches[1].check)


_SEEN = f"""
select
  (select json_agg(json_build_array(agent, partition, next_offset, command_offset))
     from positions where topic = %s and agent in {AGENTS}),
  (select json_agg(json_build_array(view, version)) from live),
  (select json_agg(json_build_array(topic, topic_id, partitions, partitioner)) from topics where topic = any(%s)),
  (select json_agg(json_build_array(view, streams, stopped)) from ({VIEWS}) v),
  (select json_agg(json_build_array(context, type)) from command_types)
"""  # noqa: S608
