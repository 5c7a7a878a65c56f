"""What requests wait for: a place, the outcome of a command, a notification of the agents.

One connection listens for the whole process. A notification names partitions; the requests of these are due, and one query reads
their outcomes, however many they are. Notifications may be lost, so all requests are also due once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias

from psycopg import sql

from api.problems import Kind, kind
from commands.append import MaybeAppended
from commands.outcomes import Outcome, outcomes_query
from infra.database.connect import named_errors, parameters
from infra.database.deadline import Connection, Session, ended_after
from infra.errors import SamefoldError
from infra.log.partitioner import partition_of
from infra.observability import metrics
from infra.settings import Settings
from projections.engine.store.positions import channel
from projections.engine.views.binary_arrays import BinaryArray, BinaryArrayDumper, uuids
from projections.engine.views.core_views import OUTCOMES, all_views, command_key

log = logging.getLogger(__name__)

AGAIN_S = 0.25
"""Until a lost connection is replaced."""
ANSWER_S = 10.0
"""After that a query is given up, and repeated over another connection."""
PROBE_S = 30.0
"""A connection that is silent for so long is probed."""
MAX_PAYLOAD = 7_000
"""Characters; the agents cut it off there."""
POLL_S = 1.0
REPEATED_S = 0.05
"""Until a repeated command is looked up. Most new ones are answered by then, so only repeated ones cost a query of their own."""
CHUNK = 5_000
"""Outcomes in one query."""

TOO_MANY_WAIT = kind(429, "too-many-waiting", "Too many callers are waiting.", 1)


# ── a place ──


class Slots(asyncio.Semaphore):
    """A semaphore that raises a Problem where no slot gets free within `wait_s` seconds."""

    def __init__(self, most: int, refusal: Kind, wait_s: float = 0, **members: Any) -> None:
        super().__init__(most)
        self.taken = 0
        self._refusal = refusal
        self._members = members
        self._wait_s = wait_s

    async def acquire(self) -> Literal[True]:
        """Raises Problem 429."""
        if self.locked():
            try:
                async with asyncio.timeout(self._wait_s):
                    await super().acquire()
            except TimeoutError:
                raise self._refusal(**self._members) from None
        else:
            await super().acquire()  # at once
        self.taken += 1
        return True

    def release(self) -> None:
        self.taken -= 1
        super().release()


# ── notifications ──


Moved: TypeAlias = Mapping[int, int] | None
"""How far partitions are folded, {partition: next offset}; None: anything may have moved."""

Listener: TypeAlias = Callable[[str, Moved], None]
"""Called with the agent and what moved, in the event loop; the agent is "" when all may have."""


class Notifications:
    """Calls its listeners for each batch that an agent commits, each switch and replay, and after each lost connection."""

    def __init__(self, settings: Settings, name: str, agents: Collection[str]) -> None:
        self._settings = settings
        self._name = f"samefold {name} notifications"
        self._agents = {channel(agent): agent for agent in agents}
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Call it each time. It must not block nor raise."""
        self._listeners.append(listener)

    async def listen(self) -> None:
        """Listen until this is cancelled."""
        await _lasting(self._settings, self._name, self._listen)

    async def _listen(self, connection: Connection) -> None:
        with ended_after(connection, ANSWER_S):
            for name in self._agents:
                await connection.execute(sql.SQL("listen {}").format(sql.Identifier(name)))
        self._notify("", None)
        while True:
            async for notice in connection.notifies(timeout=PROBE_S):
                self._notify(self._agents.get(notice.channel, ""), _moved(notice.payload))
            with ended_after(connection, ANSWER_S):
                await connection.execute("select 1")

    def _notify(self, agent: str, moved: Moved) -> None:
        for listener in self._listeners:
            listener(agent, moved)


def _moved(payload: str) -> Moved:
    """`3:118,5:20` as numbers. A long one is cut off, and a switch or a replay names no partition: None."""
    if len(payload) >= MAX_PAYLOAD:
        return None
    moved: dict[int, int] = {}
    for part in payload.split(","):
        partition, _, offset = part.partition(":")
        try:
            moved[int(partition)] = int(offset)
        except ValueError:  # any role of the database may notify, with any text
            return None
    return moved


async def _lasting(
    settings: Settings, name: str, work: Callable[[Connection], Awaitable[None]], *, by_key: bool = False
) -> None:
    """Work over one connection until this is cancelled, and over another one where it is lost."""
    while True:
        try:
            with named_errors(settings):
                session = parameters(settings, name, by_key=by_key)
                async with await Session.connect(**session) as connection:
                    await work(connection)
        except SamefoldError as error:
            log.debug("%s: %s", name, error)
        await asyncio.sleep(AGAIN_S)


# ── the outcome of a command ──


Answer: TypeAlias = asyncio.Future[Outcome | None]
"""None: the process is stopping."""

Key: TypeAlias = tuple[str, str]
"""(stream, command id)"""


async def outcome_after(
    appended: asyncio.Future[None], outcome: Answer, within_s: float, or_append: bool
) -> Outcome | None:
    """The outcome, or None where it is not there yet and the command is in the log.

    `or_append`: return as soon as the command is in the log. Raises NotAppended, MaybeAppended.
    """
    loop, started = asyncio.get_running_loop(), time.perf_counter()
    # one future instead of `asyncio.wait`, which would wake the request for the append and again for the outcome
    enough: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not enough.done():
            enough.set_result(None)

    def look(appended: asyncio.Future[None]) -> None:
        if or_append or appended.exception():
            end()

    outcome.add_done_callback(end)
    appended.add_done_callback(look)
    timer = loop.call_later(within_s, end)
    try:
        await enough
    finally:
        timer.cancel()
    if outcome.done() and (recorded := outcome.result()) is not None:
        metrics.API_OUTCOME_SECONDS.observe(time.perf_counter() - started)
        return recorded
    if not appended.done():
        raise MaybeAppended(f"There is no acknowledgement after {time.perf_counter() - started:.1f} s.")
    appended.result()
    return None


class OutcomeWaits:
    """The waiting requests by the command that they wait for. The task `answer` answers them.

    A request is entered first, then its command is appended, so the commit of its outcome is notified. A repeated command may have
    its outcome already, so it is looked up a moment later.
    """

    def __init__(self, settings: Settings, notifications: Notifications, name: str) -> None:
        self._settings = settings
        self._name = f"samefold {name} outcomes"
        self._view = all_views()[OUTCOMES]
        self._waiting: dict[Key, list[Answer]] = {}
        self._by_partition: dict[int, set[Key]] = defaultdict(set)
        self._due: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._table: str | None = None
        self._gave_up = False
        self._poll_at = 0.0
        notifications.subscribe(self._notified)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def waiting(self, stream: str, command_id: str, partitions: int, *, may_be_there: bool) -> Iterator[Answer]:
        """A future that gets the outcome. `may_be_there`: it is looked up in a moment, notified or not.

        Enter this before the command is appended. `partitions` is the log's number of them.
        """
        loop = asyncio.get_running_loop()
        future: Answer = loop.create_future()
        if self._gave_up:  # its place was another's until now
            future.set_result(None)
        key, of_partition = (stream, command_id), self._by_partition[partition_of(stream, partitions)]
        self._waiting.setdefault(key, []).append(future)
        of_partition.add(key)
        later = loop.call_later(REPEATED_S, self._are_due, (key,)) if may_be_there else None
        try:
            yield future
        finally:
            if later is not None:
                later.cancel()
            futures = self._waiting[key]
            futures.remove(future)
            if not futures:
                del self._waiting[key]
                of_partition.discard(key)

    def give_up(self) -> None:
        """All waiting requests get None, and those to come: the process is stopping."""
        self._gave_up = True
        self._answer(self._waiting, None)

    async def answer(self) -> None:
        """Answer requests until this is cancelled."""
        await _lasting(self._settings, self._name, self._answer_over, by_key=True)

    async def _answer_over(self, connection: Connection) -> None:
        connection.adapters.register_dumper(BinaryArray, BinaryArrayDumper)
        self._table = None  # it may have been dropped, which ends the connection before too
        while True:
            await self._answer_due(connection)

    async def _answer_due(self, connection: Connection) -> None:
        """Wait until outcomes are due, and look each up once."""
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._poll_at):
                await self._wake.wait()
        if loop.time() >= self._poll_at:
            self._poll_at = loop.time() + POLL_S
            self._are_due(self._waiting)
        self._wake.clear()
        due = [key for key in self._due if key in self._waiting]
        self._due.clear()
        try:
            for start in range(0, len(due), CHUNK):
                with ended_after(connection, ANSWER_S):
                    found = await self._ask(connection, due[start : start + CHUNK])
                for key, recorded in found.items():
                    self._answer((key,), recorded)
        except BaseException:
            self._are_due(due)
            raise

    async def _ask(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Outcome]:
        digests = uuids([command_key(*key) for key in keys])
        while True:
            if (table := self._table) is None:
                cursor = await connection.execute(
                    "select table_name from live where view = %s and version = %s", (OUTCOMES, self._view.version)
                )
                if (row := await cursor.fetchone()) is None:
                    return {}  # no agent has ever run, or another version is live
                table = self._table = str(row[0])
            cursor = connection.cursor(binary=True)
            await cursor.execute(outcomes_query(table), (digests, self._settings.events_topic, OUTCOMES))
            rows = await cursor.fetchall()
            if rows and rows[0][0] == table:
                return {keys[row[1] - 1]: Outcome.of(row) for row in rows if row[1] is not None}
            self._table = None

    def _answer(self, keys: Iterable[Key], recorded: Outcome | None) -> None:
        for key in keys:
            for future in self._waiting.get(key, ()):
                if not future.done():
                    future.set_result(recorded)

    def _notified(self, agent: str, moved: Moved) -> None:
        if moved is None:
            self._are_due(self._waiting)
        elif agent == self._view.agent:
            for partition in moved:
                if keys := self._by_partition.get(partition):
                    self._are_due(keys)

    def _are_due(self, keys: Iterable[Key]) -> None:
        self._due.update(dict.fromkeys(keys))
        if self._due:
            self._wake.set()
