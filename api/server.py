"""The app under Uvicorn, with bounds that Uvicorn lacks: on heads, chunk framing, pipelines and the time that they take."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import OrderedDict, deque
from contextlib import ExitStack
from http import HTTPStatus
from typing import ClassVar

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.app import create_app
from api.problems import BAD_REQUEST, HEAD_TOO_LARGE, MEDIA_TYPE, Problem
from api.requests import TOO_SLOW, WATCHERS, Watchers
from api.safe_start import require_safe
from api.services import Services
from infra.errors import SamefoldError
from infra.observability import metrics
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
UNREAD_S = 60
"""How long a client may leave a full write buffer unread."""
MAX_HEAD = 65_536
"""Bytes of a request's line, headers and trailers."""
MAX_FRAMING = 2**21
"""Bytes that chunks may add to a body: a chunk of one byte takes five more."""
MAX_PIPELINED = 100
"""Requests sent before the answer to an earlier one. Beyond, the connection is closed; the client may retry (RFC 9112, 9.3.2)."""
MAX_UNREAD = 2**28
"""Bytes of answers that clients leave unread, in all. Beyond, those that have read nothing for longest are disconnected."""
ACCEPTED_AT_ONCE = 32
"""How many connections a round of the event loop accepts, at most a twentieth of all: libuv since 1.45 accepts one for each
socket that it watches, and under load a round is long. So the listening socket is watched so many times.
"""
OWN_FILES = 320
"""Files and connections that the process opens by itself, those to PostgreSQL apart."""

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
"""Of every answer, also of those that are written without the app."""
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

    def __init__(self, config: uvicorn.Config, services: Services, listening: socket.socket, at_once: int) -> None:
        super().__init__(config)
        self.services = services
        self.listening = listening
        self.accepted_at_once = at_once
        self.port: int = listening.getsockname()[1]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with ExitStack() as duplicates:
            more = [duplicates.enter_context(self.listening.dup()) for _ in range(1, self.accepted_at_once)]
            await super().serve(sockets or [self.listening, *more])
        if self.services.failure is not None:
            raise self.services.failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("%s: listening on port %d", self.services.name, self.port)

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
    most = _most_connections(settings)
    bounds = {"within_s": settings.api_read_timeout_s, "most": most, "waiting": OrderedDict(), "unread": OrderedDict()}
    hsts = [("Strict-Transport-Security", f"max-age={settings.api_hsts_s}")] if settings.api_hsts_s else []
    config = uvicorn.Config(
        _readable_elsewhere(app, settings),
        loop="uvloop",
        http=type("Connection", (BoundedConnection,), bounds),
        ws="none",
        lifespan="on",
        proxy_headers=False,
        access_log=False,
        log_config=None,
        server_header=False,
        headers=HEADERS + hsts,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    at_once = max(min(ACCEPTED_AT_ONCE, most // 20), 1)
    return Server(config, app.state.services, _listen(host, port), at_once)


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


def _most_connections(settings: Settings) -> int:
    """`api_max_connections`, or as many as the process may open files for; it asks for more where it may."""
    wanted, own = settings.api_max_connections, OWN_FILES + settings.api_connections
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < wanted + own:
        files = wanted + own if most == resource.RLIM_INFINITY else min(wanted + own, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return min(wanted, max(files - own, 1))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"The API can't listen on port {port} of {host}: {error.strerror or error}.",
            "Choose another port with SAMEFOLD_API_PORT or `--port`, or stop the process that uses this one.",
        ) from error


class BoundedConnection(HttpToolsProtocol):
    """Answers 431 and 408, or closes the connection during an answer. Invalid HTTP is answered with a problem too (RFC 9457).

    No connection that waits for its client keeps others out. A limit that answered 503, as uvicorn's does, would let idle
    connections lock out health checks.
    """

    _overhead = 0
    """Bytes since the request began, apart from its body."""
    _body = 0
    _ahead = 0
    """Bytes of requests that wait for an earlier one's answer, and of that one."""
    _in_head = False
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    within_s: ClassVar[float] = 10
    """The deadline for a head, and for the rest of a request that was answered before its end."""
    most: ClassVar[int]
    """Of open connections."""
    waiting: ClassVar[OrderedDict[BoundedConnection, None]]
    """Those that wait for a request or the rest of one, longest first."""
    unread: ClassVar[OrderedDict[BoundedConnection, int]]
    """Those with a full write buffer, longest first, with its bytes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting[self] = None
        if len(self.connections) > self.most:
            metrics.HTTP_EVICTED.inc()
            self.waiting.popitem(last=False)[0].transport.abort()
        self._cycles: deque[RequestResponseCycle] = deque()
        self._watchers = Watchers()
        # uvicorn starts it only after the first request
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._arrived()
        self._unset_keepalive_if_required()
        self.resume_writing()
        for cycle in self._cycles:  # uvicorn only ends the last one, and an earlier one would go on without a client
            cycle.disconnected = True
            cycle.message_event.set()
        self._watchers.disconnected()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)
        self.unread[self] = self.transport.get_write_buffer_size()
        while sum(self.unread.values()) > MAX_UNREAD:
            self.unread.popitem(last=False)[0].transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.pop(self, None)
        if self._unread is not None:
            self._unread.cancel()

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        self._ahead += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._overhead > MAX_HEAD + min(8 * self._body, MAX_FRAMING):
            self._end(HEAD_TOO_LARGE())
        elif self._deadline is None and not self._is_answering():
            self._deadline = self.loop.call_later(self.within_s, self._is_late)

    def on_message_begin(self) -> None:
        self._overhead = self._body = 0  # bytes that arrived together with its beginning are not counted
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._arrived()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        elif len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            self._end(HEAD_TOO_LARGE())
        if not self.transport.is_closing():
            super().on_headers_complete()
            self.scope[WATCHERS] = self._watchers  # type: ignore[literal-required]
            # uvicorn does not read on behind a pipelined request, and would not see that the client has gone
            if self._ahead <= MAX_HEAD:
                self.flow.resume_reading()
            while self._cycles and self._cycles[0].response_complete:
                self._cycles.popleft()
            self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body)
        self._body += len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()
            if self._is_answering():
                self.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self._ahead = 0
        if not self.transport.is_closing() and (not self._is_answering() or self.cycle.more_body):
            self.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        self._end(BAD_REQUEST(msg))

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        if self._in_head:
            self._end(TOO_SLOW(f"The head took longer than {self.within_s:g} s."))
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _end(self, problem: Problem) -> None:
        if not self._is_answering():
            body = bytes(problem.response().body)
            others = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)
            line = f"HTTP/1.1 {problem.kind.status} {HTTPStatus(problem.kind.status).phrase}\r\n"
            own = f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(line.encode() + others + own.encode() + body)
        self.transport.close()
