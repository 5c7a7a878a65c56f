"""The API on a real port, for tests: `serving(world)` in a thread, with a handler and an agent in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, TypeVar, cast

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from api.requests import LONGEST_WAIT_S, path_of
from api.server import Server, server_of
from api.services import Services
from infra.access import Access, Caller
from infra.log import topics
from infra.processes.serving import Serving
from infra.settings import Settings
from projections.engine.live import agent as agent_engine
from projections.engine.live import membership
from projections.engine.live.agent import Agent, views_agent
from tests.engine.api.raw_http import INTERNALS
from tests.engine.spine import beside, handler, set_up
from tools.testing.waiting import DEADLINE_S, until

DAY = "2026-01-02"
S = TypeVar("S", bound=Serving)
_names = count(1)
agent_engine.LEAVE_S = membership.LEAVE_S = 30.0
"""On a busy machine it takes longer than in production, whose processes end then: here, connections would stay open."""


class Api:
    """A running API. `services` may be read, from other threads with care."""

    def __init__(self, server: Server, url: str) -> None:
        self.server = server
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=named(headers))

    def post(
        self, name: str, command: str, headers: Mapping[str, str] | None = None, key: str = "", **body: Any
    ) -> httpx.Response:
        """A command to an account."""
        given = dict(headers or {}) | ({"Idempotency-Key": f'"{key}"'} if key else {})
        return self.client.post(path_of("accounts", name, command), json={"on": DAY} | body, headers=given)

    def open(self, name: str, limit: int = 0) -> httpx.Response:
        """Its name is the key, too."""
        return self.post(name, "open-account", key=name, overdraft_limit=limit)

    def opened(self, limit: int = 0) -> str:
        answer = self.open(name := fresh(), limit)
        assert answer.status_code == 200, answer.text
        return name

    @property
    def services(self) -> Services:
        return self.server.services

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that serves."""
        loop = self.services.appender._loop
        assert loop is not None
        return loop


def named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def fresh() -> str:
    """An account that no other test uses."""
    return f"n{next(_names)}"


def appended(world: Settings) -> int:
    """How many commands there have ever been."""
    return sum(topics.describe(world, world.commands_topic).end.values())


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The answer is that problem, and tells nothing of what the API runs on."""
    found: dict[str, Any] = answer.json()
    assert (answer.status_code, found["code"], found["status"]) == (status, code, status), found
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert found["title"]
    assert not INTERNALS.search(answer.text.replace(found.get("correlation_id", " "), " ")), answer.text
    return found


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
def serving(world: Settings, name: str = "api", access: Access | None = None, port: int = 0) -> Iterator[Api]:
    """An API process in a thread of this one. With `access`, requests may name their callers (`Named`)."""
    server = server_of(world, name, "127.0.0.1", port)
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
def served(world: Settings, name: str = "api", access: Access | None = None) -> Iterator[Api]:
    """One that says it is ready."""
    with serving(world, name, access) as api:
        ready(api)
        yield api


@contextmanager
def unfolded(world: Settings, access: Access | None = None) -> Iterator[Api]:
    """A ready API and a handler; what is folded, and when, is each test's affair."""
    set_up(world)
    with handler(world), served(world, access=access) as api:
        yield api


@contextmanager
def agent(world: Settings, name: str = "a1", agent: str = "core") -> Iterator[Agent]:
    """An agent in a thread; an error that ended it is raised at the end."""
    with in_a_loop(lambda: views_agent(world, agent, name), name) as running:
        yield running


@contextmanager
def in_a_loop(make: Callable[[], S], name: str) -> Iterator[S]:
    """What runs until it is told to stop, in a loop and a thread of its own; an error that ended it is raised at the end."""
    loop = asyncio.new_event_loop()
    made: list[S] = []

    async def serve() -> None:
        made.append(make())
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
        until(lambda: bool(made or errors), f"{name} starts")
        if made:
            yield made[0]


@contextmanager
def everything(world: Settings, **options: Any) -> Iterator[Api]:
    """Set up, with a handler and an agent that serve, and an API that says it is ready."""
    set_up(world)
    patient = world.model_copy(update={"api_wait_s": LONGEST_WAIT_S})  # on a slow day answers take longer
    with handler(world), agent(world), served(patient, **options) as api:
        yield api


def ready(api: Api) -> None:
    until(lambda: api.services.stores.seen is not None and not api.services.stores.failures, "the API finds all well")
