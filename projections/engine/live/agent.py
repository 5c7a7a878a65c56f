"""The agent's process, `python -m projections.engine.live.agent --agent core`: Faust around the reader and the worker.

The membership says which partitions are the agent's, the fetcher brings their records, the reader decides what to do next, and the
worker applies batches in the database, which has the positions. Faust runs a service that fetches, agents that fold, and channels
between them, with one message per batch. Its own consumer is off, because it acknowledges failed messages, and so are its
producer, tables and web server.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import faust
from faust.app import BootStrategy
from faust.serializers import codecs

from infra.database.connect import DatabaseUnavailable
from infra.log import names, topics
from infra.log.clients import KafkaUnavailable
from infra.observability import logs
from infra.processes.faultpoints import reach
from infra.processes.process_end import Parts, Thread
from infra.processes.serving import serve
from infra.settings import Settings
from projections.engine.live.log_reader import Fetcher
from projections.engine.live.membership import Membership, what_it_knows
from projections.engine.live.reader import Action, Apply, Reader, ReadPositions, Seek, Stop, Wait, WaitForNewerCode
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
IDLE_S, BUSY_S = 0.25, 0.02
"""How long to wait for records while none are applied, and while some are: what gathers may be due when these are done."""
FAUST_S = 1.0
"""How often to check whether Faust still runs."""
LEAVE_S = 4.0
"""At the end, how long to wait for Faust."""
LANES = 2
"""Batches of different partitions at once: while PostgreSQL writes one, another is folded."""


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

    def __init__(self, settings: Settings, work: Worker, reader: Reader, name: str, *, gather_ms: int = 0) -> None:
        self.settings = settings
        self.name = name
        self.code = reader.code
        self.work = work
        self.lanes = [Thread("database") for _ in range(reader.lanes)]
        self.reader = reader
        self.error: BaseException | None = None
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self.parts = Parts(f"agent {name}", self.stop)
        self._status = logs.StatusLog(log, f"agent {name}")
        self._app: Any = None
        self._channels: list[Any] = []
        self._fetcher = Fetcher(settings, gather_ms)
        group = names.agents(settings.group_prefix, work.agent) + what_it_knows(self.code, own_event_types())
        self._member = Membership(settings, group, name, self.parts, self._status, self._assigned)

    async def run(self) -> None:
        """Fold until `stop`. Raises SamefoldError."""
        log.info("agent %s: starting in the group %s", self.name, self._member.group)
        self.parts.callbacks()
        self.parts.task("start and watch", self._serve())
        await self._ended.wait()
        await self.parts.cancel()
        await self._member.leave()
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
        self.parts.task("group", self._member.stay())
        await self._watch(events)

    # ── Faust ──

    def _make_app(self) -> Any:
        """The Faust app: a service that fetches and, for each lane, an agent that applies batches."""
        # a broker's address is required, but the app does not connect to it
        app = _App(self._member.group, broker="kafka://", web_enabled=False, topic_disable_leader=True)
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
            async def _fetch(self) -> None:
                await outer.parts.within("fetch", outer._fetching())

        return app

    async def _faust(self) -> None:
        """Wait until Faust stops by itself."""
        while not self._app.should_stop:  # noqa: ASYNC110  # Faust has no event for it
            await asyncio.sleep(FAUST_S)

    # ── fetching ──

    async def _fetching(self) -> None:
        """Pass fetched records to the reader until the end."""
        while not self._ended.is_set():
            try:
                await self._fetch_once()
            except (KafkaUnavailable, DatabaseUnavailable) as error:  # the database has the archive's manifest
                self._unavailable(error)
                await self._pause(0.1)

    async def _fetch_once(self) -> None:
        wanted = self.reader.fetching
        if not wanted:
            self._changed.clear()
            await self._pause(0.05)
            self._do(self.reader.tick(self._now()))
            return
        wait = BUSY_S if self.reader.under_way else IDLE_S
        if self.reader.due is not None:
            wait = max(self.reader.due - self._now(), 0.0)
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

    def _assigned(self, partitions: Sequence[int]) -> None:
        self._do(self.reader.assigned(partitions))

    async def _read_positions(self, action: ReadPositions) -> None:
        if action.after:
            await asyncio.sleep(action.after)
            if action.turn != self.reader.turn:
                return
        try:
            positions = await self.lanes[0].run(partial(self.work.positions, action.turn))
            reach("positions read")
        except (DatabaseUnavailable, KafkaUnavailable) as error:
            self._unavailable(error)
            self._do(self.reader.away(action.turn))
            return
        self._status.well("database", "the database is available again")
        actions = self.reader.positions(action.turn, positions)
        if actions and not any(isinstance(one, Wait) for one in actions):  # none of an earlier turn
            versions = ", ".join(f"{name} v{version}" for name, version in sorted(self.code.items()))
            self._status.well("set", f"folding: the live set is this code's, {versions}")
        self._do(actions)

    async def _folding(self, batches: Any) -> None:
        """Apply a lane's batches until the end."""
        async for action in batches:
            reach("batch read")
            try:
                apply = partial(self.work.attempt, action.takes, action.turn, action.lane)
                result = await self.lanes[action.lane].run(apply)
            except DatabaseUnavailable as error:
                self._unavailable(error)
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
                self._unavailable(error)
            else:
                self._status.well("database", "the database is available again")
            try:
                await asyncio.to_thread(watch.check)
            except KafkaUnavailable as error:
                self._unavailable(error)
            else:
                self._status.well("kafka", "Kafka is available again")

    # ── helpers ──

    def _unavailable(self, error: KafkaUnavailable | DatabaseUnavailable) -> None:
        self._status.wrong("kafka" if isinstance(error, KafkaUnavailable) else "database", error.message, "away")

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
    reader = Reader(code_set(views), batch=settings.batch, lanes=LANES)
    return Agent(settings, Worker(settings, agent, views, name, lanes=LANES), reader, name)


def main() -> NoReturn:
    """`python -m projections.engine.live.agent --agent core --name NAME`."""
    parser = argparse.ArgumentParser(prog="python -m projections.engine.live.agent")
    parser.add_argument("--agent", default="core")
    parser.add_argument("--name", default="agent")
    given = parser.parse_args()
    serve(f"agent {given.name}", lambda settings: views_agent(settings, given.agent, given.name), log)


if __name__ == "__main__":
    main()
