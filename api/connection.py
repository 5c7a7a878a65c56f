"""HTTP connections that bound what comes beside a body: Uvicorn keeps heads and trailers in memory however long, until they end."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.client import SCOPE, Client
from api.limits import TOO_SLOW
from api.problems import BAD_REQUEST, MEDIA_TYPE, Problem, kind

MAX_HEAD = 65_536
"""Bytes of a request's line, headers and trailers."""
MAX_FRAMING = 2**21
"""Bytes that chunks may add to a body: a chunk of one byte takes five more."""
MAX_PIPELINED = 100
"""Requests sent before the answer to an earlier one. Who sends more is cut off, and may ask again (RFC 9112, section 9.3.2)."""

HEAD_TOO_LARGE = kind(
    431, "head-too-large", "The head of the request is too large.", f"Line and headers may have {MAX_HEAD} bytes."
)


class BoundedConnection(HttpToolsProtocol):
    """Answers 431, or closes where an answer is under way already. What is no HTTP is a problem as well (RFC 9457)."""

    _beside = 0
    """Bytes since the request began that were not of its body."""
    _body = 0
    _in_head = False
    _late: asyncio.TimerHandle | None = None

    within_s: ClassVar[float] = 10
    """How long a head may take to arrive; and, once a request was answered before its end, how long its rest may."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._client = Client()
        # before its first request it is as idle as after one
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._client.lost()

    def data_received(self, data: bytes) -> None:
        self._beside += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._beside > MAX_HEAD + min(8 * self._body, MAX_FRAMING):
            self._end(HEAD_TOO_LARGE())
        elif self._late is None and not self._is_answering():
            self._late = self.loop.call_later(self.within_s, self._is_late)

    def on_message_begin(self) -> None:
        self._beside = self._body = 0  # of what was received together with its beginning nothing is counted
        self._in_head = True
        super().on_message_begin()
        self.scope[SCOPE] = self._client  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_time()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        elif len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            self._end(HEAD_TOO_LARGE())
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside -= len(body)
        self._body += len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._end(BAD_REQUEST(msg))

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

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
                f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n"
                f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
