"""A proxy that knows where requests and answers begin and end, and holds or cuts at a chosen one.

What goes through it is a `Frame`; a `Wire` (one for each connection) cuts the bytes into frames and names those that a rule may
choose. A rule that holds lets everything before its frame pass, and nothing after it in that direction: as a network does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

Kind = Literal["produce", "produce answer", "COMMIT", "COMMIT answer"]
Address = tuple[str, int] | Path
"""Host and port, or a Unix socket."""
CHUNK = 1 << 16


class Frame(NamedTuple):
    """One message, whole. `kind` is None where no rule may choose it."""

    data: bytes
    kind: Kind | None


class Wire(Protocol):
    """What is understood of one connection."""

    def requests(self, data: bytes) -> Iterator[Frame]:
        """The frames that these bytes from the client complete."""

    def answers(self, data: bytes) -> Iterator[Frame]:
        """The same for the server's bytes."""


@dataclass(eq=False)
class Connection:
    """One client's way through. `port` is the client's own, 0 on a Unix socket."""

    wire: Wire
    port: int
    number: int
    ends: list[asyncio.StreamWriter] = field(default_factory=list)

    def cut(self) -> None:
        for end in self.ends:
            end.transport.abort()


@dataclass(eq=False)
class Rule:
    """Acts once, on the nth frame of its kind on connections that `wanted` accepts; `where` is the one on which it did."""

    kind: Kind
    action: Literal["hold", "cut"]
    wanted: Callable[[Connection], bool]
    nth: int
    struck: threading.Event = field(default_factory=threading.Event)
    where: Connection | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Listens at `front`, connects to `back`; in a thread of its own, from the beginning to the end of a `with`."""

    def __init__(self, front: Address, back: Address, wire: Callable[[], Wire]) -> None:
        self.front, self.back, self.wire = front, back, wire
        self._rules: list[Rule] = []
        self._numbers = count(1)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"proxy to {back}")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), f"nothing listens at {self.front}"
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def rule(
        self,
        kind: Kind,
        action: Literal["hold", "cut"],
        wanted: Callable[[Connection], bool] = lambda _connection: True,
        nth: int = 1,
    ) -> Rule:
        """From now on. `wanted` is asked in the proxy's thread."""
        rule = Rule(kind, action, wanted, nth)
        self._loop.call_soon_threadsafe(self._rules.append, rule)
        return rule

    def release(self, rule: Rule) -> None:
        """Let go of what a rule holds; a rule that has not acted won't."""

        def release() -> None:
            if rule in self._rules:
                self._rules.remove(rule)
            rule.released.set()

        self._loop.call_soon_threadsafe(release)

    # ── in the proxy's own thread ──

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        if isinstance(self.front, Path):
            return await asyncio.start_unix_server(self._accepted, self.front)
        return await asyncio.start_server(self._accepted, *self.front)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = writer.get_extra_info("peername")
        port = peer[1] if isinstance(peer, tuple) else 0
        connection = Connection(self.wire(), port, next(self._numbers), [writer])
        try:
            if isinstance(self.back, Path):
                back_reader, back_writer = await asyncio.open_unix_connection(self.back)
            else:
                back_reader, back_writer = await asyncio.open_connection(*self.back)
            connection.ends.append(back_writer)
            await asyncio.gather(
                self._pump(reader, back_writer, connection.wire.requests, connection),
                self._pump(back_reader, writer, connection.wire.answers, connection),
            )
        except OSError:
            pass  # no server there any more: the client sees the end of its connection
        finally:
            self._tasks.discard(task)
            connection.cut()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: Callable[[bytes], Iterator[Frame]],
        connection: Connection,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                for frame in frames(data):
                    if frame.kind and (rule := self._due(frame.kind, connection)):
                        rule.where = connection
                        rule.struck.set()
                        if rule.action == "cut":
                            connection.cut()
                            return
                        await rule.released.wait()
                    if writer.is_closing():
                        return
                    writer.write(frame.data)
                await writer.drain()
        # what was forwarded still arrives; the other direction ends when its own end does
        writer.close()

    def _due(self, kind: Kind, connection: Connection) -> Rule | None:
        for rule in self._rules:
            if rule.kind == kind and rule.wanted(connection):
                rule.nth -= 1
                if rule.nth <= 0:
                    self._rules.remove(rule)
                    return rule
        return None
