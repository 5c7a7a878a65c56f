"""A client of the API as any could be one: it repeats a request under the same key until it is answered."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

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
    """Asks the API at a port, over some connections.

    `asking` is set while a request is under way. `broken_off` has the moments, in monotonic seconds, at which those requests began
    whose connection ended before they were answered; `answered_at` that of the youngest one that was answered.
    """

    def __init__(self, host: str, port: int) -> None:
        self.answered_at = 0.0
        self.broken_off: list[float] = []
        self.asking = threading.Event()
        self._client = httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=ANSWER_S, trust_env=False)
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._under_way = 0

    async def post(self, command: Command) -> Answer:
        """The command's answer, whatever happens to the server meanwhile. Raises Unexpected."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": _key(command.id)}
        pause, most = AGAIN_S
        while True:
            answer = await self._ask("POST", path_of(command), content=bytes(command.data), headers=headers)
            if answer is not None and answer.status_code not in PASSING:
                return _answer(command, answer)
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def is_served(self) -> bool:
        """Whether the API says that it is ready."""
        answer = await self._ask("GET", "/health/ready")
        return answer is not None and answer.status_code == httpx.codes.OK

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, method: str, path: str, **request: Any) -> httpx.Response | None:
        """None where nobody answers."""
        async with self._connections:
            began = time.monotonic()
            self._count(1)
            try:
                answer = await self._client.request(method, path, **request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                return None
            except httpx.TransportError:
                self.broken_off.append(began)
                return None
            finally:
                self._count(-1)
            self.answered_at = max(self.answered_at, began)
            return answer

    def _count(self, more: int) -> None:
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


def _answer(command: Command, answer: httpx.Response) -> Answer:
    told: dict[str, Any] = answer.json()
    match answer.status_code:
        case 200:
            return Answer("accepted", told["version"])
        case 409:
            return Answer("rejected", told["version"], told["code"])
        case status:
            raise Unexpected(
                f"Command {command.id} of {command.stream} was answered {status} {told.get('code')}: {told.get('detail')}",
                "This is a defect of the API or of the demo.",
            )
