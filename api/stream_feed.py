"""Commits of streams that somebody follows: one reader of the log's end for all of them, never ahead of the read model.

A follower has a buffer of bounded size. One who is too slow for it loses what it holds, and reads the log itself from where he
stands, as he did for what had happened before he came; so a slow client costs no memory, and misses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool

from api.due import Due
from api.event_stream import Signal
from api.pulse import Pulse
from infra.database.connect import DatabaseAway, named
from infra.errors import SamefoldError
from infra.log.clients import KafkaAway
from infra.log.rule import Counted, Reading
from infra.settings import Settings
from projections.engine.live.tail import Tail
from projections.engine.store.commit import Batch
from projections.engine.views.core_views import OUTCOMES, all_views

log = logging.getLogger(__name__)

BUFFER_BYTES = 262_144
"""Of what a follower has not been sent yet; one commit may be larger."""
COMMIT_BYTES = 1_000
"""What a commit takes beside its events."""
MOST_RECORDS = 5_000
"""Read at once: what else waits for this process's one interpreter gets its turn."""
KAFKA_S = 5.0
AGAIN_S = 1.0
START_S = 5.0


class FeedNotRunning(SamefoldError):
    """The reader of the log's end has not started yet."""

    is_public = True


class Follower:
    """One client's place in one stream. Of what it is given, nothing is lost unless `is_lost` says so."""

    def __init__(self, stream: str, partition: int) -> None:
        self.stream = stream
        self.partition = partition
        self.signal = Signal()
        self.is_lost = False
        self.is_ended = False
        self._waiting: deque[Counted] = deque()
        self._size = 0

    def give(self, one: Counted) -> None:
        if self.is_lost:
            return
        self._size += _size(one)
        if self._waiting and self._size > BUFFER_BYTES:
            self.is_lost = True
            self._clear()
        else:
            self._waiting.append(one)
        self.signal.set()

    def take(self) -> Counted | None:
        """The next one, or None when nothing is left."""
        if not self._waiting:
            return None
        one = self._waiting.popleft()
        self._size -= _size(one)
        return one

    def start_anew(self) -> None:
        """From now on, all that comes is kept again."""
        self.is_lost = False
        self._clear()

    def end(self) -> None:
        self.is_ended = True
        self.signal.set()

    def _clear(self) -> None:
        self._waiting.clear()
        self._size = 0


class StreamFeed:
    """All followers of one process. Its task and its consumer are there while somebody follows."""

    def __init__(self, settings: Settings, pool: AsyncConnectionPool[Any], pulse: Pulse) -> None:
        self._settings = settings
        self._pool = pool
        self._agent = all_views()[OUTCOMES].agent
        self._due = Due(pulse, self._agent)
        self._followers: dict[str, set[Follower]] = {}
        self._task: asyncio.Task[None] | None = None
        self._at: asyncio.Future[dict[int, Reading]] | None = None
        """Where the reader stands, by partition, once it has started."""

    async def follow(self, stream: str, partition: int) -> Follower:
        """From now on, what is read of the stream is given to the follower. Raises FeedNotRunning, DatabaseAway, KafkaAway."""
        if self._task is None:
            self._at = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._at))
        assert self._at is not None, "there is a task"
        follower = Follower(stream, partition)
        self._followers.setdefault(stream, set()).add(follower)
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._at)
        except TimeoutError:
            self.leave(follower)
            raise FeedNotRunning("The log's end can't be read yet.", "Come back in a moment.") from None
        except BaseException:
            self.leave(follower)
            raise
        return follower

    def stands_at(self, follower: Follower) -> Reading:
        """Up to where the follower's partition has been read: what comes from there on is given to him."""
        assert self._at is not None, "somebody follows"
        return self._at.result()[follower.partition]

    def leave(self, follower: Follower) -> None:
        followers = self._followers[follower.stream]
        followers.discard(follower)
        if not followers:
            del self._followers[follower.stream]

    async def close(self) -> None:
        self._end_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, started: asyncio.Future[dict[int, Reading]]) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="tail")
        run = partial(asyncio.get_running_loop().run_in_executor, thread)
        tail: Tail | None = None
        try:
            at = await self._positions()
            tail = await run(partial(Tail, self._settings, self._settings.events_topic, dict(at)))
            started.set_result(at)
            while self._followers:
                await self._due.wait()
                try:
                    await self._round(tail, at, run)
                except (DatabaseAway, KafkaAway) as error:  # followers stay
                    log.debug("following: %s", error)
                    await asyncio.sleep(AGAIN_S)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, SamefoldError):
                log.warning("following the log stops: %s", error)
            else:
                log.exception("following the log stops")
            if not started.done():
                started.set_exception(error)
        finally:
            self._task = None
            if not started.done():
                started.set_exception(FeedNotRunning("The process is about to end.", "Come back to another one."))
            started.exception()  # whoever waits has it, or has gone
            self._end_all()
            if tail is not None:
                thread.submit(tail.close)
            thread.shutdown(wait=False)

    async def _round(self, tail: Tail, at: dict[int, Reading], run: Callable[..., Any]) -> None:
        """Give out what the read model has got since the last one."""
        to = await self._positions()
        while self._followers and any(
            at[partition].next_offset < reading.next_offset for partition, reading in to.items()
        ):
            for batch in await run(partial(tail.towards, dict(at), to, MOST_RECORDS, KAFKA_S)):
                self._give(batch)
                at[batch.partition] = batch.next

    def _give(self, batch: Batch) -> None:
        for one in batch.counted:
            if one.commit.events:
                for follower in self._followers.get(one.commit.stream, ()):
                    follower.give(one)

    async def _positions(self) -> dict[int, Reading]:
        """Where the read model stands. Raises DatabaseAway."""
        try:
            async with self._pool.connection() as connection:
                cursor = await connection.execute(_POSITIONS, (self._agent, self._settings.events_topic))
                return {partition: Reading(*reading) for partition, *reading in await cursor.fetchall()}
        except psycopg.Error as error:
            raise named(error, self._settings) from error

    def _end_all(self) -> None:
        for followers in self._followers.values():
            for follower in followers:
                follower.end()


_POSITIONS = """
select partition, next_offset, epoch, seq, command_offset from positions where agent = %s and topic = %s
"""


def _size(one: Counted) -> int:
    return COMMIT_BYTES + sum(len(event.data) for event in one.commit.events)
