"""A client of the API as any could be one: it repeats a request under the same key until it is answered."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
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
    """`answered_at` is when the try that was answered last began, in monotonic seconds.

    `asking` is set while a request is under way: sent whole and not answered. `broken_off` counts those whose connection ended
    before they were answered.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.answered_at = 0.0
        self.asking = asyncio.Event()
        self._under_way = 0
        self.broken_off = 0

    async def post(self, command: Command) -> Answer:
        """The command's answer, whatever happens to the server meanwhile. Raises Unexpected."""
        pause, most = AGAIN_S
        while True:
            response = await self._try(command)
            if response is not None and response.status_code not in PASSING:
                return _answer(command, response)
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def is_served(self) -> bool:
        """Whether the API says that it is ready."""
        try:
            return (await self._client.get("/health/ready")).is_success
        except httpx.TransportError:
            return False

    async def _try(self, command: Command) -> httpx.Response | None:
        """None where nobody answers."""
        sent = _Sent(lambda: self._count(1))
        began = time.monotonic()
        try:
            response = await self._client.post(
                path_of(command),
                content=bytes(command.data),
                headers={"Content-Type": "application/json", "Idempotency-Key": _key(command.id)},
                extensions={"trace": sent},
            )
        except httpx.TransportError:
            self.broken_off += sent.whole
            return None
        finally:
            self._count(-sent.whole)
        self.answered_at = max(self.answered_at, began)
        return response

    def _count(self, more: int) -> None:
        self._under_way += more
        (self.asking.set if self._under_way else self.asking.clear)()


class _Sent:
    """Notices when the last byte of a request is out."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.whole = False
        self._tell = tell

    async def __call__(self, event: str, _info: Mapping[str, Any]) -> None:
        if event == "http11.send_request_body.complete":
            self.whole = True
            self._tell()


def front(url: str) -> httpx.AsyncClient:
    """A client for `Front`, with the connections that it may use."""
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=httpx.Timeout(ANSWER_S, pool=None), trust_env=False)


def path_of(command: Command) -> str:
    """`/accounts/42/open-account`. What a stream's id holds, a slash too, stays in its segment."""
    context, _, name = command.stream.partition("/")
    return f"/{context}/{quote(name, safe='')}/{_HUMP.sub('-', command.type).lower()}"


def can_be_sent(command: Command) -> bool:
    """Whether a header can hold its id: a string of RFC 9651 has printable ASCII only."""
    return command.id.isascii() and command.id.isprintable()


def _key(command_id: str) -> str:
    return '"' + command_id.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _answer(command: Command, response: httpx.Response) -> Answer:
    told: dict[str, Any] = response.json()
    match response.status_code:
        case 200:
            return Answer("accepted", told["version"])
        case 409:
            return Answer("rejected", told["version"], told["code"])
        case status:
            raise Unexpected(
                f"Command {command.id} of {command.stream} was answered {status} {told.get('code')}: {told.get('detail')}",
                "This is a defect of the API or of the demo.",
            )
