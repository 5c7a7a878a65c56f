"""HTTP as somebody writes it who does not mean well: bytes into a socket, whatever comes back out of it."""

from __future__ import annotations

import http.client
import json
import re
import select
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

from tools.testing.waiting import DEADLINE_S

HELD_UP_S = 2.0
HOST = "127.0.0.1"

INTERNALS = re.compile(
    r"psycopg|libpq|rdkafka|Traceback|SQLSTATE|FATAL|127\.0\.0\.1|localhost|db\.intern|operator in|/var/lib|/dev/shm|PGSQL|"
    r"relation \"|role \"|\b[A-Z]\w*(?:Error|Exception)\b|\bselect\b.*\bfrom\b|\.py\b|site-packages|\bFile \"|<\w+ object|"
    r"uvicorn|starlette|fastapi|pydantic|msgspec|uvloop|httptools|aiokafka|[Ff]aust|\b[Pp]ython|WSGI"
)
"""Addresses, paths, and the words of other programs: no answer has one."""
SECRET = "at db.intern:5433 as operator in /var/lib/samefold"
"""As an error may say it."""

Header = tuple[str, str | bytes]


class Reply(NamedTuple):
    """An answer; names of headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_problem(self) -> bool:
        """Whether it is a problem as RFC 9457 has it, with its own status, and tells nothing of what the API runs on."""
        return (
            self.headers.get("content-type", "").startswith("application/problem+json")
            and self.json["status"] == self.status
            and {"type", "title", "code"} <= self.json.keys()
            and not INTERNALS.search(
                f"{self.headers} {self.body!r}".replace(self.headers.get("correlation-id", " "), " ")
            )
        )


@contextmanager
def connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), timeout=DEADLINE_S) as opened:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield opened


def head(method: str, target: str, headers: Sequence[Header] = ()) -> bytes:
    """A request's head; nothing is escaped or made right."""
    lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: test"]
    lines += [
        name.encode() + b": " + (value if isinstance(value, bytes) else value.encode()) for name, value in headers
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(target: str, body: bytes, *headers: Header, content_type: str = "application/json") -> bytes:
    """A POST with its length."""
    return head("POST", target, [("Content-Type", content_type), ("Content-Length", str(len(body))), *headers]) + body


def ask(port: int, request: bytes) -> Reply:
    """Send a request and read the answer. Raises ConnectionError where none comes."""
    with connection(port) as opened:
        opened.sendall(request)
        return answer(opened)


def answer(opened: socket.socket) -> Reply:
    """Raises ConnectionError, and TimeoutError after the deadline."""
    with closing(http.client.HTTPResponse(opened)) as response:
        try:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, response.read())
        except http.client.HTTPException as error:
            raise ConnectionError(f"no answer: {error!r}") from error


def pour(opened: socket.socket, pieces: Iterable[bytes]) -> Reply | None:
    """Send until all is sent, or the other side ends it or takes no more, then read the answer, if there is one."""
    opened.settimeout(HELD_UP_S)
    with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
        for piece in pieces:
            opened.sendall(piece)
    with suppress(ConnectionError, TimeoutError):
        return answer(opened)
    return None


def has_answer(opened: socket.socket) -> bool:
    """Whether something can be read at once: an answer, or the end."""
    return bool(select.select([opened], [], [], 0)[0])
