"""Notifications of read models: one connection listens to what all agents notify after each batch, for all requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeAlias

from psycopg import sql

from infra.database.connect import named_errors, parameters
from infra.database.deadline import Connection, Session, ended_after
from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.store.positions import channel

log = logging.getLogger(__name__)

AGAIN_S = 0.25
"""Until a lost connection is replaced."""
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
        """Listen until this is cancelled."""
        await lasting(self._settings, self._name, self._listen)

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
        except ValueError:  # of somebody else's, too: every role may notify
            return None
    return moved


async def lasting(
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
