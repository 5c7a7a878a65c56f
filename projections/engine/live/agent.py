"""The agent's process, `python -m projections.engine.live.agent --agent core`: Faust around the reader and the worker.

Faust runs a service that fetches, agents that fold, and channels between them, with one message per batch. Faust's own consumer
is off, because it acknowledges failed messages, and so are its producer, tables and web server. The consumer group only assigns
partitions: positions come from the database, and records through librdkafka.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import faust
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, errors
from aiokafka.helpers import create_ssl_context
from confluent_kafka import KafkaError
from faust.app import BootStrategy
from faust.serializers import codecs

from infra.database.connect import DatabaseUnavailable
from infra.log import clients, names, topics
from infra.log.clients import KafkaUnavailable
from infra.log.records import Record
from infra.observability import logs, metrics
from infra.processes.faultpoints import reach
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import Parts, exit_code_of
from infra.processes.time_limit import limit_calls, serve_main_thread
from infra.settings import Settings
from projections.engine.live.log_reader import LogReader
from projections.engine.live.reader import (
    MAX_AGE_S,
    Action,
    Apply,
    Reader,
    ReadPositions,
    Seek,
    Stop,
    Wait,
    WaitForNewerCode,
)
from projections.engine.live.worker import Worker
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.event_types import own_event_types
from projections.engine.views.core_views import agent_views, code_set

log = logging.getLogger(__name__)

T = TypeVar("T")

codecs.get_codec("raw")  # so that codecs of other packages are there by now, too
for _codec in codecs.codecs.keys() - {"json", "raw"}:
    del codecs.codecs[_codec]  # Faust's `pickle` runs whatever code a record holds

CHECK_S = 5.0
"""How often the topic is compared with the contract."""
GROUP_CHECK_MS = 1_000
FAUST_S = 1.0
"""How often to check whether Faust still runs."""
LEAVE_S = 4.0
"""At the end, how long to wait for a broker that is unavailable."""
LANES = 2
"""Batches of different partitions at once: while PostgreSQL writes one, another is folded."""
SWITCH_INTERVAL_S = 0.001
"""With Python's default, each answer of the database waits up to 5 ms for the interpreter's lock."""


class _WithoutKafka(BootStrategy):  # type: ignore[misc]
    enable_kafka = False
    enable_web = False


class _App(faust.App):  # type: ignore[misc]
    BootStrategy = _WithoutKafka
    logger = logging.getLogger("faust.samefold")

    async def on_first_start(self) -> None:
        """Prevents Faust from making folders for its tables."""


class Agent:
    """One agent: a worker, fed by a reader. `run` returns after `stop`, or raises the error that ended it."""

    def __init__(self, settings: Settings, work: Worker, reader: Reader, name: str) -> None:
        self.settings = settings
        self.name = name
        self.code = reader.code
        self.group = names.agents(settings.group_prefix, work.agent) + what_it_knows(self.code, own_event_types())
        self.work = work
        self.lanes = [_Thread("database") for _ in range(reader.lanes)]
        self.reader = reader
        self.error: BaseException | None = None
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self.parts = Parts(f"agent {name}", self.stop)
        self._status = logs.StatusLog(log, f"agent {name}")
        self._app: Any = None
        self._channels: list[Any] = []
        self._fetcher = _Fetcher(settings)
        self.consumer: Any = None

    async def run(self) -> None:
        """Fold until `stop`. Raises SamefoldError."""
        log.info("agent %s: starting in the group %s", self.name, self.group)
        self.parts.callbacks()
        self.parts.task("start and watch", self._serve())
        await self._ended.wait()
        await self.parts.cancel()
        if self._app is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._app.stop(), LEAVE_S)
            # of a consumer of Faust's own, which is never started, and so never closes it
            self._app.consumer._thread.thread_loop.close()
        self._fetcher.close()
        for number, lane in enumerate(self.lanes):
            lane.close(partial(self.work.close, number))
        if self.error is not None:
            raise self.error

    def stop(self, error: BaseException | None = None) -> None:
        """End with an error or cleanly. Only the first call counts."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()
            self._changed.set()

    async def _serve(self) -> None:
        events = await self._started()
        self._app = self._make_app()
        await self._app.start()
        self.parts.task("Faust", self._faust())
        await self._watch(events)

    # ── Faust ──

    def _make_app(self) -> Any:
        """The Faust app: a service that fetches and, for each lane, an agent that applies batches."""
        # a broker's address is required, but the app does not connect to it
        app = _App(self.group, broker="kafka://", web_enabled=False, topic_disable_leader=True)
        app.producer_only = True
        self._channels = [app.channel(maxsize=1) for _ in self.lanes]
        outer = self

        async def fold(batches: Any) -> None:
            await outer.parts.within("fold", outer._folding(batches))

        folding = [app.agent(channel, name=f"fold-{n}")(fold) for n, channel in enumerate(self._channels)]

        @app.service
        class Fetch(faust.Service):  # type: ignore[misc]
            logger = logging.getLogger("faust.samefold")

            async def on_start(self) -> None:
                for agent in folding:
                    await self.add_runtime_dependency(agent)
                app.flow_control.resume()  # otherwise sends to the channel wait for ever

            @faust.Service.task  # type: ignore[untyped-decorator]
            async def _group(self) -> None:
                await outer.parts.within("group", outer._in_group())

            @faust.Service.task  # type: ignore[untyped-decorator]
            async def _fetch(self) -> None:
                await outer.parts.within("fetch", outer._fetching())

            async def on_stop(self) -> None:
                await outer._leave()

        return app

    async def _faust(self) -> None:
        """Wait until Faust stops by itself."""
        while not self._app.should_stop:  # noqa: ASYNC110  # Faust has no event for it
            await asyncio.sleep(FAUST_S)

    # ── Kafka ──

    async def _in_group(self) -> None:
        """Stay a member of the consumer group until the end."""
        while not self._ended.is_set():
            try:
                await self._join()
                while not self._ended.is_set():
                    # returns no records, but raises the group's errors
                    await self.consumer.getmany(timeout_ms=GROUP_CHECK_MS)
                    self._status.well("group", "a member of Kafka's group again")
            except errors.GroupAuthorizationFailedError:
                denied = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
                raise clients.denied(self.settings, denied, f"Read of group '{self.group}'") from None
            except errors.KafkaError as error:
                what = f"Kafka's group is unavailable, joining again until it succeeds: {error}"
                self._status.wrong("group", what, type(error).__name__)
                await self._leave()
                await asyncio.sleep(0.5)

    async def _join(self) -> None:
        self.consumer = AIOKafkaConsumer(**_consumer_settings(self.settings, self.group, self.name))
        self.consumer.subscribe([self.settings.events_topic], listener=_Rebalance(self, self.consumer))
        await self.consumer.start()

    async def _leave(self) -> None:
        consumer, self.consumer = self.consumer, None
        if consumer is not None:
            self._do(self.reader.assigned(()))
            try:
                await asyncio.wait_for(consumer.stop(), LEAVE_S / 2)
            except (errors.KafkaError, TimeoutError) as error:
                log.info("agent %s: could not leave Kafka's group: %s", self.name, error or "timeout")

    async def _fetching(self) -> None:
        """Pass fetched records to the reader until the end."""
        while not self._ended.is_set():
            try:
                await self._fetch_once()
            except KafkaUnavailable as error:
                self._status.wrong("kafka", error.message, "away")
                await self._pause(0.1)
            except DatabaseUnavailable as error:  # it has the archive's manifest
                self._status.wrong("database", error.message, "away")
                await self._pause(0.1)

    async def _fetch_once(self) -> None:
        wanted = self.reader.fetching
        if not wanted:
            self._changed.clear()
            await self._pause(0.05)
            self._do(self.reader.tick(self._now()))
            return
        wait = 0.1 if self.reader.due is None else max(self.reader.due - self._now(), 0.0)
        taken = await self._fetcher.take(wanted, self.settings.batch, wait)
        for partition, (records, end) in taken.items():
            self._do(self.reader.records(partition, records, end, self._now()))
        if taken:
            self._status.well("kafka", "Kafka is available again")
        else:
            self._do(self.reader.tick(self._now()))

    # ── the reader's actions ──

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ReadPositions():
                    self.parts.task("positions", self._read_positions(action), may_return=True)
                case Seek(partition=partition, offset=offset):
                    self._status.well(f"partition {partition}", f"continues partition {partition}")
                    self._fetcher.seek(partition, offset)
                    reach("seek done")
                case Apply(lane=lane):
                    self.parts.task("channel", self._channels[lane].send(value=action), may_return=True)
                case Wait(why=why):
                    self._status.wrong("set", f"holding: {why}")
                case WaitForNewerCode(error=error) as newer:
                    self._status.wrong(f"partition {error.partition}", newer.why)
                case Stop(error=error):
                    self.stop(error)
        self._changed.set()

    async def _read_positions(self, action: ReadPositions) -> None:
        if action.after:
            await asyncio.sleep(action.after)
            if action.turn != self.reader.turn:
                return
        try:
            positions = await self.lanes[0].run(partial(self.work.positions, action.turn))
            reach("positions read")
        except (DatabaseUnavailable, KafkaUnavailable) as error:
            self._status.wrong("database", error.message, "away")
            self._do(self.reader.away(action.turn))
            return
        self._status.well("database", "the database is available again")
        actions = self.reader.positions(action.turn, positions)
        if actions and not any(isinstance(one, Wait) for one in actions):  # none of an earlier turn
            self._status.well("set", f"folding: the live set is this code's, {_in_words(self.code)}")
        self._do(actions)

    async def _folding(self, batches: Any) -> None:
        """Apply a lane's batches until the end."""
        async for apply in batches:
            await self._applied(apply)

    async def _applied(self, action: Apply) -> None:
        reach("batch read")
        try:
            apply = partial(self.work.attempt, action.takes, action.turn, action.lane)
            result = await self.lanes[action.lane].run(apply)
        except DatabaseUnavailable as error:
            self._status.wrong("database", error.message, "away")
            result = BatchResult(CommitStatus.AWAY)
        if result.status is CommitStatus.FENCED:
            log.info("agent %s: a batch was fenced; reading the positions again", self.name)
        self._do(self.reader.done(action.turn, result, self._now(), action.lane))

    # ── start and watch ──

    async def _started(self) -> topics.Topic:
        """Wait for Kafka and PostgreSQL, make or check the agent's start, and return the log's topic."""
        while True:
            try:
                _, events = await asyncio.to_thread(topics.ensure, self.settings)
                await self.lanes[0].run(partial(self.work.start, events))
            except (KafkaUnavailable, DatabaseUnavailable) as error:
                self._status.wrong("start", error.message)
                await self._pause(1)
            else:
                self._status.well("start", "Kafka and the database are available")
                return events

    async def _watch(self, events: topics.Topic) -> None:
        """Regularly compare the topic with the contract, and check both stores even while there is nothing to fold."""
        watch = topics.Watch(self.settings, [events], self._status, topics.Admin(self.settings), self.work.topics)
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                for number, lane in enumerate(self.lanes):
                    await lane.run(partial(self.work.ping, number))
            except DatabaseUnavailable as error:
                self._status.wrong("database", error.message, "away")
            else:
                self._status.well("database", "the database is available again")
            try:
                await asyncio.to_thread(watch.check)
            except KafkaUnavailable as error:
                self._status.wrong("kafka", error.message, "away")
                continue
            self._status.well("kafka", "Kafka is available again")

    # ── helpers ──

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until something changes."""
        try:
            async with asyncio.timeout(seconds):  # `wait_for` may lose a cancellation that comes with its result
                await self._changed.wait()
        except TimeoutError:
            return
        if not self._ended.is_set():
            self._changed.clear()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def views_agent(settings: Settings, agent: str, name: str) -> Agent:
    """The agent that keeps the views which name it. Raises BadView where none does."""
    views = agent_views(agent)
    reader = Reader(code_set(views), batch=settings.batch, max_age=MAX_AGE_S, lanes=LANES)
    return Agent(settings, Worker(settings, agent, views, name, lanes=LANES), reader, name)


class _Thread:
    """One thread, which makes calls in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self, last: Callable[[], None]) -> None:
        """End after this last call, without waiting for it."""
        self._pool.submit(last)
        self._pool.shutdown(wait=False)


class _Fetcher:
    """Fetches records with librdkafka in a thread. Each partition needs a `seek` before its first `take`.

    Faust's own client could fetch them too, but a record takes four times as much of the interpreter's lock, which is an agent's
    bottleneck.
    """

    def __init__(self, settings: Settings) -> None:
        self._log = LogReader(settings, settings.events_topic, clients.agent_consumer(settings))
        """Used only in the thread."""
        self._thread = _Thread("fetch")
        self._sought: dict[int, int] = {}
        """Offsets to seek at the next take."""

    def seek(self, partition: int, offset: int) -> None:
        """Continue at this offset. Records that were fetched before are not returned any more."""
        self._sought[partition] = offset

    async def take(self, partitions: Collection[int], most: int, wait: float) -> dict[int, tuple[list[Record], int]]:
        """About `most` records by partition, with the partition's end; waits for the first one up to `wait` seconds.

        Raises the errors of `LogReader.take`.
        """
        sought, self._sought = self._sought, {}
        taken = await self._thread.run(partial(self._take, frozenset(partitions), sought, most, wait))
        # records of partitions that were sought meanwhile are outdated
        return {partition: one for partition, one in taken.items() if partition not in self._sought}

    def close(self) -> None:
        self._thread.close(self._log.close)

    def _take(
        self, partitions: frozenset[int], sought: Mapping[int, int], most: int, wait: float
    ) -> dict[int, tuple[list[Record], int]]:
        there = self._log.next
        if sought or partitions != there.keys():
            self._log.go_on({partition: sought.get(partition, there.get(partition, 0)) for partition in partitions})
        taken = self._log.take(most, wait)
        return {partition: (records, self._log.end_of(partition)) for partition, records in taken.items()}


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]
    """Passes assignments to the reader. The consumer's partitions stay paused: it fetches no records."""

    def __init__(self, agent: Agent, consumer: AIOKafkaConsumer) -> None:
        self.agent = agent
        self.consumer = consumer

    async def on_partitions_revoked(self, _revoked: Any) -> None:
        await self.on_partitions_assigned(())

    async def on_partitions_assigned(self, assigned: Any) -> None:
        # aiokafka would only log an error and continue
        await self.agent.parts.within("rebalance of the group", self._take(assigned), may_return=True)

    async def _take(self, assigned: Any) -> None:
        if self.agent.consumer is not self.consumer:
            return  # it is leaving the group
        mine = sorted(where.partition for where in assigned)
        if mine:
            log.info("agent %s: has partitions %s", self.agent.name, mine)
            self.consumer.pause(*assigned)
        self.agent._do(self.agent.reader.assigned(mine))


def what_it_knows(code: Mapping[str, int], events: Collection[str]) -> str:
    """A short hash of a set of views and the events that the code knows.

    Other code is another consumer group and has all partitions too: where one release can't continue, another may.
    """
    return hashlib.sha256(json.dumps([dict(sorted(code.items())), sorted(events)]).encode()).hexdigest()[:8]


def _in_words(code: Mapping[str, int]) -> str:
    return ", ".join(f"{name} v{version}" for name, version in sorted(code.items()))


def _consumer_settings(settings: Settings, group: str, instance: str) -> dict[str, Any]:
    password = settings.kafka_sasl_password
    tls = settings.kafka_security_protocol.endswith("SSL")
    ca = settings.kafka_ssl_ca_location
    return {
        "bootstrap_servers": settings.kafka,
        "security_protocol": settings.kafka_security_protocol,
        "ssl_context": create_ssl_context(cafile=str(ca) if ca else None) if tls else None,
        "sasl_mechanism": settings.kafka_sasl_mechanism or "PLAIN",
        "sasl_plain_username": settings.kafka_sasl_username,
        "sasl_plain_password": password.get_secret_value() if password else None,
        "group_id": group,
        "group_instance_id": instance,
        "enable_auto_commit": False,
        # it fetches nothing, and must not fail for lack of an offset
        "auto_offset_reset": "latest",
        "session_timeout_ms": settings.session_timeout_ms,
        "heartbeat_interval_ms": max(settings.session_timeout_ms // 5, 200),
        "rebalance_timeout_ms": 30_000,
        # a group leader that knows no partitions yet assigns none until its metadata is this old
        "metadata_max_age_ms": 5_000,
        "max_poll_interval_ms": 2**31 - 1,
    }


class Serving(Protocol):
    """What a process does."""

    def stop(self) -> None:
        """Let `run` return. In the event loop only."""

    async def run(self) -> None:
        """Raises the error that ended it."""


def serve(who: str, make: Callable[[Settings], Serving], log: logging.Logger) -> NoReturn:
    """Run what this makes until SIGTERM or SIGINT. Exit code 0, or 1 after an error."""
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.log_level != "DEBUG":
        # they log ordinary rebalances as errors; real errors are raised, and this process logs them
        for library in ("aiokafka", "faust", "mode", "psycopg"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    collect_seldom()

    def work() -> None:
        metrics.serve(settings)
        loop, serving = asyncio.new_event_loop(), make(settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(serving.stop))
        limit_calls(settings.decide_limit_s)
        serve_main_thread(lambda: loop.run_until_complete(serving.run()))

    # not sys.exit, which would wait for requests to an unavailable broker; an exit at any moment is safe
    os._exit(exit_code_of(work, log, who))


def main() -> NoReturn:
    """`python -m projections.engine.live.agent --agent core --name NAME`."""
    parser = argparse.ArgumentParser(prog="python -m projections.engine.live.agent")
    parser.add_argument("--agent", default="core")
    parser.add_argument("--name", default="agent")
    given = parser.parse_args()
    serve(f"agent {given.name}", lambda settings: views_agent(settings, given.agent, given.name), log)


if __name__ == "__main__":
    main()
