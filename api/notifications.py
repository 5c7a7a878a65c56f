"""Notifications of read models: one connection listens to what all agents notify after each batch, for all requests."""

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
PROBE_S = 30.0
"""A connection that is silent for so long is probed."""
ANSWER_S = 10.0
"""The deadline for the answer to a probe."""
MAX_PAYLOAD = 7_000
"""Characters; the agents cut it off there."""

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
        """Listen until this is cancelled, over a new connection where one is lost."""
        while True:
            try:
                await self._listen()
            except (psycopg.Error, DatabaseRefused) as error:
                reason = error if isinstance(error, DatabaseRefused) else named(error, self._settings)
                log.debug("notifications: %s", reason)
            await asyncio.sleep(AGAIN_S)

    async def _listen(self) -> None:
        async with await psycopg.AsyncConnection.connect(**parameters(self._settings, self._name)) as connection:
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
        if not (partition.isdecimal() and offset.isdecimal()):
            return None
        moved[int(partition)] = int(offset)
    return moved
