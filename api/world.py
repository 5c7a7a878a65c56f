"""What the requests of one API process share: stores, topics, and those who wait."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Annotated, Self

from fastapi import Depends, Request

from api.answering import Waits
from api.appending import Appender
from api.look import Look
from api.problems import problem_of
from api.pulse import Pulse
from infra.database.connect import parameters
from infra.database.deadline import Pool
from infra.errors import SamefoldError
from infra.log.topics import Topic
from infra.processes.process_end import Parts
from infra.settings import Settings
from projections.engine.views.core_views import all_views

POOL_WAIT_S = 2.0
"""For a connection of the pool."""
LONGEST_QUERY_MS = 8_000
"""After which the database ends it."""
QUERY_S = 10.0
"""After which the connection is given up: the database hangs."""
POOL_AGAIN_S = 2.0
"""After that, trying to connect is given up until somebody wants a connection: which the look does twice a second."""


class World:
    """Entered once, in the event loop that serves. Kafka and PostgreSQL may be away then: they are found when they come back."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.stopping = asyncio.Event()
        """Set when the process is to end: whoever answers without end (server-sent events) ends then."""
        views = all_views()
        self.agents = frozenset(view.agent for view in views.values())
        longest = min(settings.statement_timeout_ms, LONGEST_QUERY_MS)
        session = parameters(settings, f"samefold {name}", statement_timeout_ms=longest)
        self.pool = Pool(
            session.pop("conninfo"),
            kwargs=session,
            open=False,
            min_size=2,
            max_size=settings.api_connections,
            timeout=POOL_WAIT_S,
            reconnect_timeout=POOL_AGAIN_S,
            name=name,
            seconds=QUERY_S,
        )
        self.pulse = Pulse(settings, name, self.agents)
        self.look = Look(settings, self.pool, name, views)
        self.appender = Appender(settings, name)
        self.waits = Waits(settings, self.pulse, name)
        self.look.tell(self._kafka_answered)
        self.failure: SamefoldError | None = None
        """What ended a part of this that must not end, after which the process can only end too."""
        self.parts = Parts(name, self._failed)

    @property
    def commands(self) -> Topic:
        """The topic of commands as it is now. Raises Problem 503 where it can't be used."""
        return self._topics()[0]

    @property
    def events(self) -> Topic:
        """The log. Raises Problem 503 where it can't be used."""
        return self._topics()[1]

    def _topics(self) -> tuple[Topic, Topic]:
        try:
            return self.look.topics()
        except SamefoldError as error:
            raise problem_of(error) from None

    def _kafka_answered(self) -> None:
        """The appender, which appends nothing while all brokers are away, hears from us that they are back."""
        if self.look.kafka_answered:
            self.appender.back()

    async def __aenter__(self) -> Self:
        await self.pool.open()
        self.parts.callbacks()
        self.appender.open(self.parts)
        self.parts.task("pulse", self.pulse.listen())
        self.parts.task("look", self.look.keep_looking())
        self.parts.task("answers", self.waits.answer())
        return self

    def _failed(self, error: SamefoldError) -> None:
        self.failure = error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        await self.parts.cancel()
        await self.appender.close()
        await self.pool.close(1)


def world_of(request: Request) -> World:
    """The world of the app that serves a request."""
    world: World = request.app.state.world
    return world


WorldHere = Annotated[World, Depends(world_of)]
"""As a parameter of a route."""
