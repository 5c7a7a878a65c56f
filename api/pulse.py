"""When read models move: one connection listens to what all agents say after each batch, for everybody who waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import psycopg
from psycopg import sql

from infra.database.connect import DatabaseRefused, named, parameters
from infra.database.deadline import ended_after
from infra.settings import Settings
from projections.engine.store.positions import channel

log = logging.getLogger(__name__)

AGAIN_S = 0.5
LOOK_S = 30.0
"""A connection that says nothing for so long is asked whether it is still there."""
ANSWER_S = 10.0
"""And is given up when it does not answer by then."""

Moved: TypeAlias = Mapping[int, int] | None
"""How far partitions are folded, {partition: next offset}; None: anything may have moved."""

Listener: TypeAlias = Callable[[str, Moved], None]
"""Called with the agent and what moved, in the event loop; the agent is "" when all may have."""


class Pulse:
    """`count` rises with each batch that some agent commits, with each switch and replay, and when the connection was made anew."""

    def __init__(self, settings: Settings, name: str, agents: Collection[str]) -> None:
        self.count = 0
        self._settings = settings
        self._name = f"samefold {name} pulse"
        self._agents = {channel(agent): agent for agent in agents}
        self._next = asyncio.Event()
        self._listeners: list[Listener] = []

    def tell(self, listener: Listener) -> None:
        """Have it called at each beat. It must not block nor raise."""
        self._listeners.append(listener)

    async def after(self, seen: int, timeout_s: float) -> int:
        """The count as soon as it is beyond `seen`, or as it is when the time, in seconds, has passed."""
        if self.count <= seen:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._next.wait()
            except TimeoutError:
                pass
        return self.count

    async def listen(self) -> None:
        """Until it is cancelled. A lost connection is made anew; what may have been missed meanwhile counts as a beat."""
        while True:
            try:
                await self._listen()
            except (psycopg.Error, DatabaseRefused) as error:
                said = error if isinstance(error, DatabaseRefused) else named(error, self._settings)
                log.debug("pulse: %s", said)
            await asyncio.sleep(AGAIN_S)

    async def _listen(self) -> None:
        connection = await psycopg.AsyncConnection.connect(**parameters(self._settings, self._name))
        async with connection:
            with ended_after(connection, ANSWER_S):
                for name in self._agents:
                    await connection.execute(sql.SQL("listen {}").format(sql.Identifier(name)))
            self._beat("", None)
            while True:
                async for notice in connection.notifies(timeout=LOOK_S):
                    self._beat(self._agents.get(notice.channel, ""), _moved(notice.payload))
                with ended_after(connection, ANSWER_S):
                    await connection.execute("select 1")

    def _beat(self, agent: str, moved: Moved) -> None:
        self.count += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()
        for listener in self._listeners:
            listener(agent, moved)


def _moved(payload: str) -> Moved:
    """`3:118,5:20` as numbers. A long one is cut off, and a switch or a replay names no partition: None."""
    if len(payload) >= MAX_PAYLOAD:
        return None
    moved: dict[int, int] = {}
    for part in payload.split(","):
        partition, _, offset = part.partition(":")
        if not (partition.isdecimal() and offset.isdecimal()):
            return None
        moved[int(partition)] = int(offset)
    return moved


MAX_PAYLOAD = 7_000
"""Characters, at which the agents cut it off."""
