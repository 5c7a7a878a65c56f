"""Sends the demo's commands to the log, every 20th through the API; each account's stay in order.

It is an ordinary client of the API: it repeats a request with the same key until it gets an answer.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote

import httpx

from commands.client import Sender
from infra.errors import SamefoldError
from infra.log.records import Command
from infra.settings import Settings

EVERY = 20
ASKING_WITHIN_S = 1.0
ANSWERED_WITHIN_S = 60.0
CONNECTIONS = 24
ANSWER_S = 40.0
"""Longer than the API lets a client wait."""
AGAIN_S = (0.05, 0.5)
"""Between two tries: at first, and at most."""
PASSING = frozenset({202, 429, 503})
"""Try again: not decided yet, too far behind, unavailable."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

T = TypeVar("T")
Key = tuple[str, str]
"""Stream and command id."""


class Unanswered(SamefoldError):
    """The API did not answer all commands in time."""


class Sending:
    """`with Sending(settings, host, port) as sending:` sends through a thread with an event loop of its own.

    `answers` holds what was answered over HTTP by stream and command id, None while it is under way. Behind such a command those of
    the same stream wait for its answer; all others go on. `held` counts both, until they are answered or in the log.
    """

    def __init__(self, settings: Settings, host: str, port: int, every: int = EVERY) -> None:
        self.answers: dict[Key, Answer | None] = {}
        self.held = 0
        self._every = every
        self._sender = Sender(settings)
        self._front = Front(host, port)
        self._taken = 0
        self._lanes: dict[str, deque[tuple[Command, bool]]] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._one_by_one = ThreadPoolExecutor(1, "append")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sending", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._do(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._one_by_one.shutdown()

    def send(self, commands: Sequence[Command]) -> None:
        """Returns when all are in the log, but those that go through the API and what waits behind them, which are on their way.

        Raises NotSent, and what `check` raises.
        """
        self._do(self._take(commands))
        self.check()

    def check(self) -> None:
        """Raises what ended a request or an append in the background: Unexpected, NotSent."""
        if self._error is not None:
            raise self._error

    @property
    def answered_at(self) -> float:
        """When the try that was answered last began, in monotonic seconds: who lived then has answered it."""
        return self._front.answered_at

    @property
    def broken_off(self) -> list[float]:
        """Of each request that was sent whole and lost its connection before it was answered, when it began."""
        return self._front.broken_off

    def is_served(self) -> bool:
        """Whether the API says that it is ready."""
        return self._do(self._front.is_served())

    def is_asking(self) -> bool:
        """Whether a request is under way, sent whole and not answered; waits a second for one."""
        return self.held > 0 and self._front.asking.wait(ASKING_WITHIN_S)

    def finish(self) -> None:
        """Returns when everything is answered. Raises Unanswered after a minute, and what `check` raises."""
        self._do(self._finish())
        self.check()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _cancel(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._front.close()

    async def _take(self, commands: Sequence[Command]) -> None:
        at_once, begun = [], []
        for command in commands:
            self._taken += 1
            through_api = self._taken % self._every == 0 and can_be_sent(command)
            if through_api:
                self.answers[command.stream, command.id] = None
            if (lane := self._lanes.get(command.stream)) is not None:
                self.held += 1
                lane.append((command, through_api))
            elif through_api:
                self.held += 1
                self._lanes[command.stream] = deque([(command, through_api)])
                begun.append(command.stream)
            else:
                at_once.append(command)
        await self._append(at_once)
        for stream in begun:  # behind what was appended of it just now
            task = asyncio.create_task(self._follow(stream))
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    async def _follow(self, stream: str) -> None:
        """Send what waits in a stream's lane, one after the other, until nothing does."""
        lane = self._lanes[stream]
        try:
            while lane:
                command, through_api = lane.popleft()
                if through_api:
                    self.answers[stream, command.id] = await self._front.post(command)
                    self.held -= 1
                    continue
                together = [command]
                while lane and not lane[0][1]:
                    together.append(lane.popleft()[0])
                await self._append(together)
                self.held -= len(together)
        except Exception as error:
            self._error = self._error or error
        finally:
            del self._lanes[stream]

    async def _append(self, commands: Sequence[Command]) -> None:
        await self._loop.run_in_executor(self._one_by_one, self._sender.send, commands, lambda _count: None)

    async def _finish(self) -> None:
        if self._following:
            _, left = await asyncio.wait(self._following, timeout=ANSWERED_WITHIN_S)
            if left:
                raise Unanswered(
                    f"{len(left)} commands sent over HTTP have no answer after {ANSWERED_WITHIN_S:.0f} s.",
                    "Look into the API's log.",
                )


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
        """The answer; None if there is none."""
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
    return f"/{context}/{quote(name, safe='')}/{_HUMP.sub('-', command.type.partition('/')[0]).lower()}"


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
