"""Waits for outcomes, for everybody at once: one query per beat of the pulse, however many wait.

Whoever waits is entered first, then the command is appended: an outcome that is committed after that makes a beat. One that was
there before makes none (a repeated command), so those whose command may be a repeated one are looked for a moment later; and every
second all are, whatever beats there were.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import psycopg
from psycopg import errors, sql

from api.problems import kind
from api.pulse import Moved, Pulse
from infra.database.connect import DatabaseRefused, named, parameters
from infra.database.deadline import ended_after
from infra.log.partitioner import partition_of
from infra.settings import Settings
from projections.engine.views.binary_arrays import BinaryArray, BinaryArrayDumper, texts
from projections.engine.views.columns import PARTITION
from projections.engine.views.core_views import OUTCOMES, all_views
from projections.engine.views.token import Token

log = logging.getLogger(__name__)

POLL_S = 1.0
LOOK_AFTER_S = 0.05
"""By then most commands are answered, and only a repeated one costs a query of its own."""
AGAIN_S = 0.25
ANSWER_S = 10.0
"""Until a query that has no answer is given up, and asked over another connection."""
CHUNK = 5_000
"""Outcomes asked for at once."""

Key = tuple[str, str]
"""(stream, command id)"""

TOO_MANY_WAIT = kind(
    429,
    "too-many-waiting",
    "Too many callers are waiting.",
    "Nothing was appended. Come back after `Retry-After` seconds.",
)


class Recorded(NamedTuple):
    """An outcome as it is recorded. `position` is that of its partition, read in the same snapshot."""

    outcome: str
    code: str | None
    message: str | None
    version: int
    fingerprint: str
    at: datetime
    position: Token


class Waits:
    """Who waits for which outcome. `answer` answers them, until it is cancelled."""

    def __init__(self, settings: Settings, pulse: Pulse, name: str) -> None:
        self._settings = settings
        self._name = f"samefold {name} answers"
        view = all_views()[OUTCOMES]
        self._agent, self._version = view.agent, view.version
        self._waiting: dict[Key, list[asyncio.Future[Recorded]]] = {}
        self._by_partition: dict[int, set[Key]] = defaultdict(set)
        self._due: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._partitions = 1
        self._table: str | None = None
        self._count = 0
        self._poll_at = 0.0
        self._begun = self._ended = 0
        """Queries, which follow each other."""
        self._round = asyncio.Event()
        """Set when the one under way ends, and then another."""
        pulse.tell(self._on_beat)

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def waiting(
        self, stream: str, command_id: str, partitions: int, *, look: bool
    ) -> Iterator[asyncio.Future[Recorded]]:
        """A future that gets the outcome. `look`: it may be there already, and is looked for in a moment. Raises Problem 429.

        Enter this before the command is appended. `partitions` is the log's number of them.
        """
        if self._count >= self._settings.api_max_waiting:
            raise TOO_MANY_WAIT(f"{self._count} callers wait already.", headers={"Retry-After": "1"}, appended="no")
        if partitions != self._partitions:
            self._partitions = partitions
            self._by_partition = defaultdict(set)
            for key in self._waiting:
                self._by_partition[partition_of(key[0], partitions)].add(key)
        future: asyncio.Future[Recorded] = asyncio.get_running_loop().create_future()
        key = (stream, command_id)
        self._waiting.setdefault(key, []).append(future)
        self._by_partition[partition_of(stream, partitions)].add(key)
        self._count += 1
        later = asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._are_due, (key,)) if look else None
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
                self._by_partition[partition_of(stream, self._partitions)].discard(key)

    def give_up(self) -> None:
        """Whoever waits gets TimeoutError: the process is to end."""
        for futures in self._waiting.values():
            for future in futures:
                end_with(future, TimeoutError())

    async def looked(self, stream: str, command_id: str, within_s: float) -> bool:
        """Look for an outcome that somebody waits for, now; whether a query that began behind this call ended in time."""
        self._are_due(((stream, command_id),))
        wanted = self._begun + 1
        try:
            async with asyncio.timeout(within_s):
                while self._ended < wanted:
                    await self._round.wait()
        except TimeoutError:
            return False
        return True

    async def answer(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    **parameters(self._settings, self._name, by_key=True)
                ) as connection:
                    connection.adapters.register_dumper(BinaryArray, BinaryArrayDumper)
                    while True:
                        await self._answer_due(connection)
            except errors.UndefinedTable:
                self._table = None  # dropped after a switch, or never there
            except (psycopg.Error, DatabaseRefused) as error:
                said = error if isinstance(error, DatabaseRefused) else named(error, self._settings)
                log.debug("outcomes: %s", said)
            await asyncio.sleep(AGAIN_S)

    async def _answer_due(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Wait until there is something to ask, ask it once, and tell those whose outcome is there."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(self._poll_at):
                await self._wake.wait()
        except TimeoutError:
            pass
        if loop.time() >= self._poll_at:
            self._poll_at = loop.time() + POLL_S
            self._are_due(self._waiting)
        self._wake.clear()
        due = [key for key in self._due if key in self._waiting]
        self._due.clear()
        self._begun += 1
        try:
            for start in range(0, len(due), CHUNK):
                with ended_after(connection, ANSWER_S):
                    found = await self._ask(connection, due[start : start + CHUNK])
                for key, recorded in found.items():
                    for future in self._waiting.get(key, ()):
                        if not future.done():
                            future.set_result(recorded)
        except BaseException:
            self._are_due(due)
            self._begun = self._ended
            raise
        self._ended = self._begun
        ended, self._round = self._round, asyncio.Event()
        ended.set()

    async def _ask(self, connection: psycopg.AsyncConnection[Any], keys: Sequence[Key]) -> dict[Key, Recorded]:
        """One statement reads the pointer, the rows and the positions: after a switch it is asked once more, of the other table."""
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
            streams, ids = texts([stream for stream, _ in keys]), texts([command_id for _, command_id in keys])
            cursor = connection.cursor(binary=True)
            await cursor.execute(_query(table), (streams, ids, self._settings.events_topic, OUTCOMES))
            rows = await cursor.fetchall()
            if rows and rows[0][0] == table:
                return dict(map(_recorded, (row for row in rows if row[1] is not None)))
            self._table = None

    def _on_beat(self, agent: str, moved: Moved) -> None:
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


def end_with(future: asyncio.Future[Recorded], error: Exception) -> None:
    """Have whoever waits for the outcome get this instead, unless it is there."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # it may be that nobody looks at it any more


def _recorded(row: Sequence[Any]) -> tuple[Key, Recorded]:
    _, stream, command_id, outcome, code, message, version, fingerprint, at, topic_id, partition, next_offset = row
    position = Token.of(topic_id, {partition: next_offset})
    return (stream, command_id), Recorded(outcome, code, message, version, fingerprint, at, position)


@cache
def _query(table: str) -> bytes:
    return _QUERY.format(table=sql.Identifier(table), partition=sql.Identifier(PARTITION)).as_bytes()


_QUERY = sql.SQL("""
select l.table_name, o.stream, o.command_id, o.outcome, o.code, o.message, o.version, o.fingerprint, o.at,
       p.topic_id, p.partition, p.next_offset
  from live l
  left join (
    select o.* from unnest(%s, %s) as asked(stream, command_id)
      join {table} o on (o.stream, o.command_id) = (asked.stream collate "C", asked.command_id collate "C")
  ) o on true
  left join positions p on p.agent = l.agent and p.topic = %s and p.partition = o.{partition}
 where l.view = %s
""")
