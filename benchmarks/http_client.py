"""Deposits of one cent over HTTP: `python -m benchmarks.http_client --port 8000 --connections 64 --count 1000 …`.

Each as soon as a connection is free (`--rate 0`), or so many per second. It prints one JSON object at its end: `exchanges`, for
each of its orders when it was due, sent and answered (seconds of the system's monotonic clock, which all processes share), the
status and the stream's version, and `cpu_s`, this process's own processor time meanwhile.

HTTP as cheap as it gets in Python: requests made beforehand, one at a time on a connection, answers kept as bytes. A client
library's own work would be a large part of what is measured; this one's is told with each figure.
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

from benchmarks.child import flags, tell
from benchmarks.fill import DAY_TEXT
from benchmarks.workload import Order, deposits, name_of

HOST = "127.0.0.1"
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_VERSION = re.compile(rb'"version": ?([0-9]+)')
_STATUS = slice(9, 12)
"""Of `HTTP/1.1 200 OK`."""


class Exchange(NamedTuple):
    """One request, by its place in the order of sending, and its answer. Times are monotonic seconds.

    It was due at `since`: earlier than `sent` where no connection was free then. `version` is the stream's, 0 where none was told.
    """

    number: int
    since: float
    sent: float
    answered: float
    status: int
    version: int


def deposit(order: Order) -> bytes:
    """The request of an order."""
    return _DEPOSIT % (name_of(order.account).encode(), order.id.encode(), len(_BODY), _BODY)


_BODY = b'{"cents":1,"on":"' + DAY_TEXT + b'"}'
_DEPOSIT = (
    b"POST /accounts/%s/deposit HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b'idempotency-key: "%s"\r\ncontent-length: %d\r\n\r\n%s'
)


class Connection(asyncio.Protocol):
    """One connection, which asks again only when it was answered. `answered` gets itself, the status and the body."""

    def __init__(self, answered: Callable[[Connection, int, bytes], None], lost: Callable[[], None]) -> None:
        self._answered = answered
        self._lost = lost
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def ask(self, request: bytes) -> None:
        assert self._transport is not None, "not connected"
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data
        head = received.find(b"\r\n\r\n")
        length = _LENGTH.search(received, 0, head + 2) if head >= 0 else None
        if length is not None and len(received) >= head + 4 + int(length[1]):
            self._received = b""
            self._answered(self, int(received[_STATUS]), received[head + 4 :])

    def connection_lost(self, _error: Exception | None) -> None:
        self._lost()


class Asking:
    """Sends requests over so many connections: each as soon as one is free or, with a `rate` per second, when it is due."""

    def __init__(self, requests: Sequence[bytes], connections: int, rate: float) -> None:
        self.exchanges: list[Exchange] = []
        self._requests = requests
        self._connections = connections
        self._rate = rate
        self._next = 0
        self._free: deque[Connection] = deque()
        self._under_way: dict[Connection, tuple[int, float, float]] = {}
        self._late: list[int] = []
        self._done: asyncio.Future[None]

    async def run(self, port: int) -> list[Exchange]:
        """All exchanges, in the order of their answers. Raises ConnectionError where the server hangs up."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        made = [
            (await loop.create_connection(lambda: Connection(self._answered, self._lost), HOST, port))[1]
            for _ in range(self._connections)
        ]
        self._free = deque(made)
        self._began = time.monotonic()
        try:
            if self._rate:
                self._tick()
            else:
                for _ in range(min(self._connections, len(self._requests))):
                    self._ask(self._free.popleft(), time.monotonic())
            await self._done
        finally:
            for connection in made:
                connection.close()
            await asyncio.sleep(0)  # closed they are in the loop's next turn
        return self.exchanges

    def _ask(self, connection: Connection, since: float) -> None:
        number = self._next
        self._next += 1
        self._under_way[connection] = (number, since, time.monotonic())
        connection.ask(self._requests[number])

    def _tick(self) -> None:
        """Send what is due, as far as connections are free; the rest has waited since then when one is."""
        now = time.monotonic()
        while self._free and self._next < len(self._requests) and self._due(self._next) <= now:
            # in turn: the server closes an idle one after some seconds
            self._ask(self._free.popleft(), now)
        if self._next < len(self._requests):
            asyncio.get_running_loop().call_later(max(self._due(self._next) - now, 0.0002), self._tick)

    def _due(self, number: int) -> float:
        return self._began + number / self._rate

    def _answered(self, connection: Connection, status: int, body: bytes) -> None:
        now = time.monotonic()
        number, since, sent = self._under_way.pop(connection)
        version = _VERSION.search(body)
        self.exchanges.append(Exchange(number, since, sent, now, status, int(version[1]) if version else 0))
        if len(self.exchanges) == len(self._requests):
            self._done.set_result(None)
        elif self._next == len(self._requests):
            return
        elif not self._rate:
            self._ask(connection, now)
        elif (due := self._due(self._next)) <= now:
            self._ask(connection, due)
        else:
            self._free.append(connection)

    def _lost(self) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the server hung up"))


def ask_all(requests: Iterable[bytes], connections: int, rate: float, port: int) -> list[Exchange]:
    """All exchanges of these requests. Raises ConnectionError."""
    import uvloop

    return uvloop.run(Asking(list(requests), connections, rate).run(port))


def main() -> None:
    given = flags("port", "connections", "count", "first", "accounts", "seed", "rate")
    requests = [deposit(order) for order in deposits(given.first, given.accounts, given.count, given.seed)]
    gc.freeze()
    gc.disable()
    began = time.process_time()
    exchanges = ask_all(requests, given.connections, given.rate, given.port)
    cpu_s = time.process_time() - began
    tell({"exchanges": exchanges, "cpu_s": cpu_s})


if __name__ == "__main__":
    main()
