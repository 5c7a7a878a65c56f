"""A client of the API as any could be one: it repeats a request under the same key until it is answered."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple
from urllib.parse import quote

from infra.errors import SamefoldError
from infra.log.records import Command

CONNECTIONS = 24
ANSWER_S = 40.0
"""Longer than the API lets anybody wait."""
AGAIN_S = (0.05, 0.5)
"""Between two tries: at first, and at most."""
PASSING = frozenset({202, 429, 503})
"""Try again: not decided yet, too far behind, away."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Unexpected(SamefoldError):
    """The API gave an answer that the demo's commands should not get."""


class Answer(NamedTuple):
    """What a command was answered over HTTP. `code` is of a refusal; `version` is the stream's."""

    outcome: str
    version: int
    code: str | None = None


class Front:
    """Asks the API at a port from threads, each request over a connection of its own while it is under way.

    `asking` is set while one is: sent whole and not answered. `broken_off` has the moments, in monotonic seconds, at which those
    requests began whose connection ended before they were answered; `answered_at` that of the youngest one that was answered.
    """

    def __init__(self, host: str, port: int) -> None:
        self.answered_at = 0.0
        self.broken_off: list[float] = []
        self.asking = threading.Event()
        self._address = host, port
        self._threads = ThreadPoolExecutor(CONNECTIONS, "front")
        self._lock = threading.Lock()
        self._under_way = 0
        self._idle: list[HTTPConnection] = []
        self._used: set[HTTPConnection] = set()

    async def post(self, command: Command) -> Answer:
        """The command's answer, whatever happens to the server meanwhile. Raises Unexpected."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": _key(command.id)}
        pause, most = AGAIN_S
        while True:
            found = await self._ask("POST", path_of(command), bytes(command.data), headers)
            if found is not None and found[0] not in PASSING:
                return _answer(command, *found)
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def is_served(self) -> bool:
        """Whether the API says that it is ready."""
        found = await self._ask("GET", "/health/ready")
        return found is not None and found[0] == 200

    def close(self) -> None:
        """Ends what is under way."""
        with self._lock:
            for connection in self._used:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(cancel_futures=True)
        for connection in self._idle:
            connection.close()

    async def _ask(self, *request: Any) -> tuple[int, bytes] | None:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._try, *request)

    def _try(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes] | None:
        """Status and body; None where nobody answers."""
        with self._lock:
            connection = self._idle.pop() if self._idle else HTTPConnection(*self._address, timeout=ANSWER_S)
            self._used.add(connection)
        began = time.monotonic()
        whole = False
        try:
            connection.request(method, path, body, headers or {})
            whole = True
            self._count(1)
            response = connection.getresponse()
            found = response.status, response.read()
        except (OSError, HTTPException):
            connection.close()
            with self._lock:
                self._used.discard(connection)
                if whole:
                    self.broken_off.append(began)
            return None
        finally:
            self._count(-whole)
        with self._lock:
            self._used.discard(connection)
            self._idle.append(connection)
            self.answered_at = max(self.answered_at, began)
        return found

    def _count(self, more: int) -> None:
        with self._lock:
            self._under_way += more
            (self.asking.set if self._under_way else self.asking.clear)()


def path_of(command: Command) -> str:
    """`/accounts/42/open-account`. What a stream's id holds, a slash too, stays in its segment."""
    context, _, name = command.stream.partition("/")
    return f"/{context}/{quote(name, safe='')}/{_HUMP.sub('-', command.type).lower()}"


def can_be_sent(command: Command) -> bool:
    """Whether a header can hold its id: a string of RFC 9651 has printable ASCII only."""
    return command.id.isascii() and command.id.isprintable()


def _key(command_id: str) -> str:
    return '"' + command_id.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _answer(command: Command, status: int, body: bytes) -> Answer:
    told: dict[str, Any] = json.loads(body)
    match status:
        case 200:
            return Answer("accepted", told["version"])
        case 409:
            return Answer("rejected", told["version"], told["code"])
        case _:
            raise Unexpected(
                f"Command {command.id} of {command.stream} was answered {status} {told.get('code')}: {told.get('detail')}",
                "This is a defect of the API or of the demo.",
            )
