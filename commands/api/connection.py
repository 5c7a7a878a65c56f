"""HTTP connections that bound what comes beside a body: Uvicorn keeps heads and trailers in memory however long, until they end."""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from commands.api.problems import BAD_REQUEST, MEDIA_TYPE, Problem, kind

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

    def data_received(self, data: bytes) -> None:
        self._beside += len(data)
        super().data_received(data)
        if self._beside > MAX_HEAD + min(8 * self._body, MAX_FRAMING) and not self.transport.is_closing():
            self._end(HEAD_TOO_LARGE())

    def on_message_begin(self) -> None:
        self._beside = self._body = 0  # of what was received together with its beginning nothing is counted
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
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

    def _end(self, problem: Problem) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            body = bytes(problem.response().body)
            head = (
                f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n"
                f"Content-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
