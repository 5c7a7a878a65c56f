"""Waits for outcomes, for all requests at once: one query per notification of the agent, however many wait.

A request is entered first, then its command is appended, so the commit of its outcome is notified. A repeated command may have its
outcome already, so it is looked up a moment later. In case a notification is lost, all are looked up every second.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple

from api.problems import kind
from api.waits import Moved, Notifications, lasting
from commands.outcomes import outcomes_query
from infra.database.deadline import Connection, ended_after
from infra.log.partitioner import partition_of
from infra.settings import Settings
from projections.engine.views.binary_arrays import BinaryArray, BinaryArrayDumper, uuids
from projections.engine.views.core_views import OUTCOMES, all_views, command_key
from projections.engine.views.token import Token

POLL_S = 1.0
REPEATED_S = 0.05
"""Until a repeated command is looked up. Most new ones are answered by then, so only repeated ones cost a query of their own."""
ANSWER_S = 10.0
"""After that a query is given up, and repeated over another connection."""
CHUNK = 5_000
"""Outcomes in one query."""

Key = tuple[str, str]
"""(stream, command id)"""

TOO_MANY_WAIT = kind(429, "too-many-waiting", "Too many callers are waiting.", 1)


class Recorded(NamedTuple):
    """An outcome as it is recorded. `position` is that of its partition, read in the same snapshot."""

    outcome: str
    code: str | None
    message: str | None
    version: int
    fingerprint: str
    at: datetime
    position: Token
    by: str | None = None
    """Not read for the command's sender."""


Outcome = asyncio.Future[Recorded | None]
"""None: the process is stopping."""


class OutcomeWaits:
    """The waiting requests by the command that they wait for. The task `answer` answers them."""

    def __init__(self, settings: Settings, notifications: Notifications, name: str) -> None:
        self._settings = settings
        self._name = f"samefold {name} outcomes"
        view = all_views()[OUTCOMES]
        self._agent, self._version = view.agent, view.version
        self._waiting: dict[Key, list[Outcome]] = {}
        self._by_partition: dict[int, set[Key]] = defaultdict(set)
        self._due: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._table: str | None = None
        self._count = 0
        self._gave_up = False
        self._poll_at = 0.0
        notifications.subscribe(self._notified)

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def waiting(self, stream: str, command_id: str, partitions: int, *, may_be_there: bool) -> Iterator[Outcome]:
        """A future that gets the outcome. `may_be_there`: it is looked up in a moment, notified or not.

        Enter this before the command is appended. `partitions` is the log's number of them.
        """
        loop = asyncio.get_running_loop()
        future: Outcome = loop.create_future()
        if self._gave_up:  # its place was another's until now
            future.set_result(None)
        key, of_partition = (stream, command_id), self._by_partition[partition_of(stream, partitions)]
        self._waiting.setdefault(key, []).append(future)
        of_partition.add(key)
        self._count += 1
        later = loop.call_later(REPEATED_S, self._are_due, (key,)) if may_be_there else None
        try:
            yield future
        finally:
            if later is not None:
                later.cancel()
            self._count -= 1
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
        await lasting(self._settings, self._name, self._answer_over, by_key=True)

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

    async def _ask(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Recorded]:
        while True:
            table = self._table
            if table is None:
                cursor = await connection.execute(
                    "select table_name from live where view = %s and version = %s", (OUTCOMES, self._version)
                )
                row = await cursor.fetchone()
                if row is None:
                    return {}  # no agent has ever run, or another version is live
                table = self._table = str(row[0])
            cursor = connection.cursor(binary=True)
            digests = uuids([command_key(*key) for key in keys])
            await cursor.execute(outcomes_query(table), (digests, self._settings.events_topic, OUTCOMES))
            rows = await cursor.fetchall()
            if rows and rows[0][0] == table:
                return {keys[row[1] - 1]: _recorded(row) for row in rows if row[1] is not None}
            self._table = None

    def _answer(self, keys: Iterable[Key], recorded: Recorded | None) -> None:
        for key in keys:
            for future in self._waiting.get(key, ()):
                if not future.done():
                    future.set_result(recorded)

    def _notified(self, agent: str, moved: Moved) -> None:
        if moved is None:
            self._are_due(self._waiting)
        elif agent == self._agent:
            for partition in moved:
                if keys := self._by_partition.get(partition):
                    self._are_due(keys)

    def _are_due(self, keys: Iterable[Key]) -> None:
        self._due.update(dict.fromkeys(keys))
        if self._due:
            self._wake.set()


def _recorded(row: Sequence[Any]) -> Recorded:
    _, _, outcome, code, message, version, fingerprint, at, topic_id, partition, next_offset = row
    position = Token.of(topic_id, {partition: next_offset})
    return Recorded(outcome, code, message, version, fingerprint, at, position)
