"""The app under Uvicorn, with bounds that Uvicorn lacks: on heads, chunk framing, pipelines and the time that they take."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from http import HTTPStatus
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.app import create_app
from api.problems import BAD_REQUEST, HEAD_TOO_LARGE, MEDIA_TYPE, Problem
from api.requests import TOO_SLOW
from api.safe_start import require_safe
from api.services import Services
from infra.errors import SamefoldError
from infra.settings import Settings

log = logging.getLogger(__name__)

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
        await super().serve(sockets or [self.listening])
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
    return Server(config, app.state.services, _listen(host, port))


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
    """Answers 431 and 408, or closes the connection during an answer. Invalid HTTP is answered with a problem too (RFC 9457)."""

    _overhead = 0
    """Bytes since the request began, apart from its body."""
    _body = 0
    _in_head = False
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    within_s: ClassVar[float] = 10
    """The deadline for a head, and for the rest of a request that was answered before its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycles: deque[RequestResponseCycle] = deque()
        # uvicorn starts it only after the first request
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._unset_keepalive_if_required()
        self.resume_writing()
        for cycle in self._cycles:  # uvicorn only ends the last one, and an earlier one would go on without a client
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
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
            head = (
                f"HTTP/1.1 {problem.kind.status} {HTTPStatus(problem.kind.status).phrase}\r\n"
                f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
