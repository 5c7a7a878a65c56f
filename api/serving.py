"""The app under uvicorn, in this process."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from api.app import create_app
from api.connection import BoundedConnection
from api.world import World
from infra.errors import SamefoldError
from infra.settings import Settings

log = logging.getLogger(__name__)

SHUTDOWN_S = 5
STILL_WAIT_S = 1.0
"""At the end, until those who wait for an outcome are told to ask again."""
BACKLOG = 4_096
KEEP_ALIVE_S = 65
"""Longer than load balancers keep an idle connection, which would otherwise send a request into one that just closed."""


class CannotListen(SamefoldError):
    """The address is taken, or not this machine's."""


class ApiServer(uvicorn.Server):
    """One API process. `run` returns after `should_exit` was set; it raises what ended a part of the world that must not end."""

    def __init__(self, config: uvicorn.Config, world: World, listening: socket.socket) -> None:
        super().__init__(config)
        self.world = world
        self.listening = listening
        self.port: int = listening.getsockname()[1]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets or [self.listening])
        if self.world.failure is not None:
            raise self.world.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("%s: listening on port %d", self.world.name, self.port)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.world.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # those who answer without end are told to stop before they are waited for
        self.world.stopping.set()
        asyncio.get_running_loop().call_later(STILL_WAIT_S, self.world.waits.give_up)
        await super().shutdown(sockets)


def server_of(settings: Settings, name: str, host: str, port: int) -> ApiServer:
    """A server that holds its port (0: a free one) and serves once it is run. Raises CannotListen, NotConfigured, BadContext."""
    app = create_app(settings, name)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=type("Connection", (BoundedConnection,), {"within_s": settings.api_read_timeout_s}),
        ws="none",
        lifespan="on",
        proxy_headers=False,
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return ApiServer(config, app.state.world, _listen(host, port))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"Nobody can listen on port {port} of {host}: {error.strerror or error}.",
            "Give another one with SAMEFOLD_API_PORT or `--port`, or end what listens there.",
        ) from error
