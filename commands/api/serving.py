"""The app under uvicorn, in this process."""

from __future__ import annotations

import socket

import uvicorn

from commands.api.app import create_app
from infra.settings import Settings

SHUTDOWN_S = 5
KEEP_ALIVE_S = 65
"""Longer than load balancers keep an idle connection, which would otherwise send a request into one that just closed."""


class ApiServer(uvicorn.Server):
    """Tells those who answer without end to stop, before it waits for them."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.loaded_app.state.world.stopping.set()
        await super().shutdown(sockets)


def server_of(settings: Settings, name: str, host: str, port: int) -> ApiServer:
    """A server that listens once it is run; port 0 takes a free one."""
    config = uvicorn.Config(
        create_app(settings, name),
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=4_096,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return ApiServer(config)
