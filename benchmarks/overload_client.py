"""More clients than a server can serve: `python -m benchmarks.overload_client --port 8000 --connections 4000 --seconds 60 …`.

Each client has one connection and sends its next deposit of one cent when the one before was answered; one that was answered 429
or 503 it sends again, at once or, with `--patient 1`, when `Retry-After` says. `--deaf` connections more ask for the largest
document over and over, and read nothing. It prints one JSON object at its end (`Told`).
"""

from __future__ import annotations

import asyncio
import gc
import re
import resource
import time
from array import array
from collections import Counter
from itertools import repeat
from typing import cast

import msgspec

from benchmarks.child import flags, tell
from benchmarks.http_client import HOST, deposit
from benchmarks.results import percentile
from benchmarks.workload import Order, deposits

REFUSED = frozenset({b"429", b"503"})
CONNECTS = 200
"""At once."""
DRAIN_S = 90.0
"""After the end, for what is not answered yet: longer than the server may wait by its settings."""
PIPELINED = 50
DOCUMENT = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * PIPELINED
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *([0-9]+)\r\n", re.IGNORECASE)


class Told(msgspec.Struct):
    """What clients saw. Times are in milliseconds, of a try until its answer."""

    seconds: float
    """Between the first burst, a sixth of the time, and the end."""
    done: int
    """Answered 200 in these seconds; all others count in what follows."""
    statuses: dict[str, int]
    without_retry_after: int
    """Of those that were answered 429 or 503."""
    lost: int
    """Connections that the server closed."""
    unanswered: int
    """At the very end."""
    p50_ms: float
    p99_ms: float
    max_ms: float
    done_p50_ms: float
    done_p99_ms: float
    """Of deposits that were done, from their first try."""
    cpu_s: float
    accepted: list[int]
    """Deposits that were answered 200, by account."""
    unknown: list[int]
    """Others that were sent."""


class Load:
    """All clients together."""

    def __init__(self, port: int, accounts: int, seed: int, patient: bool) -> None:
        self.port = port
        self.patient = patient
        self.orders = deposits(0, accounts, None, seed)
        self.begins_at = self.ends_at = 0.0
        self.statuses: Counter[bytes] = Counter()
        self.times = array("d")
        self.done_times = array("d")
        self.accepted = [0] * accounts
        self.unknown = [0] * accounts
        self.done = self.lost = self.without_retry_after = 0

    async def run(self, connections: int, deaf: int, seconds: int) -> None:
        clients = [Client(self) for _ in range(connections)]
        for first in range(0, connections, CONNECTS):
            await asyncio.gather(*(client.connect() for client in clients[first : first + CONNECTS]))
        loop = asyncio.get_running_loop()
        silent = [(await loop.create_connection(Deaf, HOST, self.port))[0] for _ in repeat(None, deaf)]
        began = time.monotonic()
        self.begins_at, self.ends_at = began + seconds / 6, began + seconds
        for client in clients:
            client.ask_next()
        await asyncio.sleep(seconds)
        for transport in silent:
            transport.abort()
        late = self.ends_at + DRAIN_S
        while any(client.waits for client in clients) and time.monotonic() < late:  # noqa: ASYNC110  # thousands of them
            await asyncio.sleep(0.05)
        for client in clients:
            client.close()
        await asyncio.sleep(0)


class Client(asyncio.Protocol):
    """One client."""

    def __init__(self, load: Load) -> None:
        self.waits = False
        """For an answer."""
        self._load = load
        self._order: Order
        self._began = self._sent = 0.0
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._closed = False

    async def connect(self) -> None:
        """Until it succeeds: a server with all its connections taken may let it wait."""
        while not self._closed:
            try:
                await asyncio.get_running_loop().create_connection(lambda: self, HOST, self._load.port)
                return
            except OSError:
                await asyncio.sleep(0.1)

    def ask_next(self) -> None:
        load = self._load
        self._began = time.monotonic()
        if self._began >= load.ends_at:
            return
        self._order = next(load.orders)
        load.unknown[self._order.account] += 1
        self._ask()

    def close(self) -> None:
        """An answer that has not come has taken until now."""
        self._closed = True
        if self.waits:
            self._load.times.append(1000 * (time.monotonic() - self._sent))
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._received = b""
        if self.waits:
            self._ask()

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        if not self._closed:
            self._load.lost += 1
            self.waits = self.waits and time.monotonic() < self._load.ends_at
            self._connecting = asyncio.ensure_future(self.connect())

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data
        head = received.find(b"\r\n\r\n")
        length = _LENGTH.search(received, 0, head + 2) if head >= 0 else None
        if length is None or len(received) < head + 4 + int(length[1]):
            return
        self._received = b""
        self.waits = False
        load, now = self._load, time.monotonic()
        status = received[9:12]
        load.statuses[status] += 1
        load.times.append(1000 * (now - self._sent))
        if status in REFUSED:
            after = _RETRY_AFTER.search(received, 0, head + 2)
            load.without_retry_after += after is None
            if load.patient and after is not None:
                asyncio.get_running_loop().call_later(int(after[1]), self._ask_again)
            else:
                self._ask_again()
            return
        if status == b"200":
            account = self._order.account
            load.accepted[account] += 1
            load.unknown[account] -= 1
            load.done_times.append(1000 * (now - self._began))
            load.done += load.begins_at <= now < load.ends_at
        self.ask_next()

    def _ask_again(self) -> None:
        if time.monotonic() < self._load.ends_at:
            self._ask()

    def _ask(self) -> None:
        self._sent = time.monotonic()
        self.waits = True
        if self._transport is not None:
            self._transport.write(deposit(self._order))


class Deaf(asyncio.Protocol):
    """Asks for much, and reads nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        there = cast(asyncio.Transport, transport)
        there.pause_reading()
        there.write(DOCUMENT)


def main() -> None:
    import uvloop

    given = flags("port", "connections", "deaf", "seconds", "accounts", "seed", "patient")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()
    gc.disable()
    load = Load(given.port, given.accounts, given.seed, bool(given.patient))
    began = time.process_time()
    uvloop.run(load.run(given.connections, given.deaf, given.seconds))
    times, done = load.times or [0.0], load.done_times or [0.0]
    told = Told(
        seconds=load.ends_at - load.begins_at,
        done=load.done,
        statuses={status.decode(): count for status, count in sorted(load.statuses.items())},
        without_retry_after=load.without_retry_after,
        lost=load.lost,
        unanswered=sum(load.unknown),
        p50_ms=percentile(times, 50),
        p99_ms=percentile(times, 99),
        max_ms=max(times),
        done_p50_ms=percentile(done, 50),
        done_p99_ms=percentile(done, 99),
        cpu_s=time.process_time() - began,
        accepted=load.accepted,
        unknown=load.unknown,
    )
    tell(msgspec.to_builtins(told))


if __name__ == "__main__":
    main()
