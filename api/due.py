"""When it is time for another round: after a beat of the pulse, when somebody new has come, and each second besides."""

from __future__ import annotations

import asyncio

from api.pulse import Moved, Pulse

POLL_S = 1.0
"""The connection that is listened on may be lost."""
PAUSE_S = 0.02
"""Between two rounds: beats that come faster are one."""


class Due:
    """Told by the pulse of one agent, and by whoever calls `now`."""

    def __init__(self, pulse: Pulse, agent: str) -> None:
        self._agent = agent
        self._event = asyncio.Event()
        pulse.tell(self._heard)

    def now(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Until another round is due."""
        await asyncio.sleep(PAUSE_S)
        try:
            async with asyncio.timeout(POLL_S):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()

    def _heard(self, agent: str, _moved: Moved) -> None:
        if agent in ("", self._agent):
            self._event.set()
