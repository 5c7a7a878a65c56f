"""The API on a real port, for tests: `serving(world)` in a thread, with a handler and an agent in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from api.server import Server, server_of
from api.services import Services
from infra.access import Access, Caller
from infra.settings import Settings
from projections.engine.live.agent import Agent, views_agent
from tests.engine.spine import DEADLINE_S, beside, handler, set_up, until


class Api:
    """A running API. `client` is for one test thread; `services` may be read, from other threads with care."""

    def __init__(self, server: Server, url: str) -> None:
        self.server = server
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S)

    @property
    def services(self) -> Services:
        return self.server.services

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that serves."""
        loop = self.services.appender._loop
        assert loop is not None
        return loop


class Producer:
    """One that raises this error, or never says what became of anything."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def produce(self, *_: Any, **__: Any) -> None:
        if self.error:
            raise self.error

    def poll(self, _: float) -> int:
        return 0

    def flush(self, _: float) -> int:
        return 0

    def purge(self) -> None:
        pass


class Named:
    """Middleware in place of the one that reads tokens: the header `Caller: ada teller` is a subject and its roles."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if named := dict(scope.get("headers", ())).get(b"caller"):
            subject, *roles = named.decode().split()
            scope["samefold.caller"] = Caller(subject, frozenset(roles))
        await self._app(scope, receive, send)


@contextmanager
def serving(world: Settings, name: str = "api", access: Access | None = None) -> Iterator[Api]:
    """An API process in a thread of this one. With `access`, requests may name their callers (`Named`)."""
    server = server_of(world, name, "127.0.0.1", 0)
    if access is not None:
        server.services.access = access
        server.config.app = Named(cast(ASGIApp, server.config.app))

    def stop() -> None:
        server.should_exit = True

    with beside(server.run, stop, name) as errors:
        until(lambda: server.started or bool(errors), "the API listens")
        if not errors:
            api = Api(server, f"http://127.0.0.1:{server.port}")
            try:
                yield api
            finally:
                api.client.close()


@contextmanager
def unfolded(world: Settings, access: Access | None = None) -> Iterator[Api]:
    """A ready API and a handler; what is folded, and when, is each test's affair."""
    set_up(world)
    with handler(world), serving(world, access=access) as api:
        ready(api)
        yield api


@contextmanager
def agent(world: Settings, name: str = "a1", agent: str = "core") -> Iterator[Agent]:
    """An agent in a thread; an error that ended it is raised at the end."""
    loop = asyncio.new_event_loop()
    made: list[Agent] = []

    async def serve() -> None:
        made.append(views_agent(world, agent, name))
        await made[0].run()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve())
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def stop() -> None:
        with suppress(RuntimeError):  # it has ended by itself, and closed its loop
            if made:
                loop.call_soon_threadsafe(made[0].stop)

    with beside(run, stop, name) as errors:
        until(lambda: bool(made or errors), "the agent starts")
        if made:
            yield made[0]


@contextmanager
def everything(world: Settings, **options: Any) -> Iterator[Api]:
    """Set up, with a handler and an agent that serve, and an API that says it is ready."""
    set_up(world)
    with ExitStack() as stack:
        stack.enter_context(handler(world))
        stack.enter_context(agent(world))
        api = stack.enter_context(serving(world, **options))
        ready(api)
        yield api


def ready(api: Api) -> None:
    """Wait until the API has checked both stores and finds nothing wrong."""
    until(lambda: api.services.stores.seen is not None and not api.services.stores.failures, "the API finds all well")
