"""The app under Uvicorn, by Uvicorn's own options. Clients reach it through a proxy, which bounds what a client may do to a server:
docs/behind-a-proxy.md. Why: docs/adr/0021-the-http-server-is-not-ours.md.
"""

from __future__ import annotations

import logging
import resource
import socket

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from api.app import create_app
from api.safe_start import require_safe
from api.services import Services
from infra.errors import SamefoldError
from infra.observability.logs import Sparing
from infra.settings import Settings

log = logging.getLogger(__name__)
logging.getLogger("uvicorn.error").addFilter(Sparing(10))

SHUTDOWN_S = 5
STILL_WAIT_S = 1.0
"""At the end, until requests that wait are answered without what they wait for."""
BACKLOG = 4_096
KEEP_ALIVE_S = 65
"""Longer than load balancers keep an idle connection, which would otherwise send a request into one that just closed."""
MAX_CONNECTIONS = 15_000
"""While more are open, or as many as the process may open files for, Uvicorn answers requests with 503."""
OWN_FILES = 320
"""Kept for the process's other files and connections."""

HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    # no-store rather than no-cache: a browser's cache is a copy of a bank's rows on a disk, too. An ETag is still of use to
    # programs, which send If-None-Match with what they hold themselves.
    ("Cache-Control", "no-store"),
    # as the page /docs needs it, which has a script in it
    (
        "Content-Security-Policy",
        "default-src 'self' 'unsafe-inline' data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    ),
]
"""Of every answer, also of those that Uvicorn writes itself."""
CORS_SENT = (
    "Authorization Correlation-Id Idempotency-Key If-Match If-None-Match Last-Event-ID Prefer traceparent tracestate"
)
CORS_READ = (
    "Correlation-Id ETag Idempotency-Key Link Location Preference-Applied Retry-After Samefold-Position Samefold-Stopped "
    "WWW-Authenticate"
)


class CannotListen(SamefoldError):
    """The address is in use, or not this machine's."""


class Server(uvicorn.Server):
    """One API process. `run` returns after `should_exit` was set; it raises the error that ended a part of the process."""

    def __init__(self, config: uvicorn.Config, services: Services, listening: socket.socket) -> None:
        super().__init__(config)
        self.services = services
        self.listening = listening
        self.port: int = listening.getsockname()[1]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("%s: listening on port %d", self.services.name, self.port)
        await super().serve(sockets or [self.listening])
        if self.services.failure is not None:
            raise self.services.failure

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.services.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.services.stop(STILL_WAIT_S)  # uvicorn waits for all requests, and live updates never end by themselves
        await super().shutdown(sockets)


def server_of(settings: Settings, name: str, host: str, port: int) -> Server:
    """A server that holds its port (0: a free one) and serves once it is run.

    Raises ListensToAll, BadAccess, CannotListen, NotConfigured, BadContext.
    """
    require_safe(settings, host)
    app = create_app(settings, name)
    config = uvicorn.Config(
        _readable_elsewhere(app, settings),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        proxy_headers=False,
        access_log=False,
        log_config=None,
        server_header=False,
        headers=HEADERS,
        backlog=BACKLOG,
        limit_concurrency=_connections(),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return Server(config, app.state.services, _listen(host, port))


def _connections() -> int:
    """How many may be open, once the process may open as many files as it is let."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OWN_FILES
    if files < wanted:
        files = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    if files < wanted:
        log.warning("this process may open %d files: set ulimit -n to %d or more", files, wanted)
    return min(MAX_CONNECTIONS, max(files - OWN_FILES, 1))


def _readable_elsewhere(app: ASGIApp, settings: Settings) -> ASGIApp:
    """The app with CORS, where that is configured. Around all of it: a preflight has no token, and errors are for scripts too."""
    if settings.api_cors_origins is None:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.api_cors_origins.split(","),
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=CORS_SENT.split(),
        expose_headers=CORS_READ.split(),
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"The API can't listen on port {port} of {host}: {error.strerror or error}.",
            "Choose another port with SAMEFOLD_API_PORT or `--port`, or stop the process that uses this one.",
        ) from error
