"""A proxy that knows where requests and answers begin and end, and holds or cuts at a chosen one.

A `Wire` (one for each connection) cuts the bytes into frames and names those that a rule may choose. A rule that holds lets
everything before its frame pass, and nothing after it in that direction: as a network does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from proofs.chaos.wires import Frame, Wire

Action = Literal["hold", "cut"]
Address = tuple[str, int] | Path
"""Host and port, or a Unix socket."""
CHUNK = 1 << 16


@dataclass(eq=False)
class Connection:
    """One client's way through. `port` is the client's own, 0 on a Unix socket."""

    wire: Wire
    port: int
    ends: list[asyncio.StreamWriter] = field(default_factory=list)

    def cut(self) -> None:
        for end in self.ends:
            end.transport.abort()


@dataclass(eq=False)
class Rule:
    """Acts once, on the nth frame of its kind on connections that `wanted` accepts; `where` is the one on which it did."""

    kind: str
    action: Action
    wanted: Callable[[Connection], bool]
    nth: int
    loop: asyncio.AbstractEventLoop
    struck: threading.Event = field(default_factory=threading.Event)
    where: Connection | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let go of what it holds; where it has not acted, it won't."""
        self.loop.call_soon_threadsafe(self.released.set)


class Proxy:
    """Listens at `front`, connects to `back`; in a thread of its own, from the beginning to the end of a `with`."""

    def __init__(self, front: Address, back: Address, wire: Callable[[], Wire]) -> None:
        self.front, self.back, self.wire = front, back, wire
        self._rules: list[Rule] = []
        self._loop: asyncio.AbstractEventLoop
        self._ready, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name=f"proxy to {back}")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), f"nothing listens at {self.front}"
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    def rule(
        self, kind: str, action: Action, wanted: Callable[[Connection], bool] = lambda _connection: True, nth: int = 1
    ) -> Rule:
        """From now on. `wanted` is asked in the proxy's thread."""
        rule = Rule(kind, action, wanted, nth, self._loop)
        self._loop.call_soon_threadsafe(self._rules.append, rule)
        return rule

    # ── in the proxy's own thread ──

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if isinstance(self.front, Path):
            server = await asyncio.start_unix_server(self._accepted, self.front)
        else:
            server = await asyncio.start_server(self._accepted, *self.front)
        self._ready.set()
        await self._ended.wait()
        server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        port = peer[1] if isinstance(peer, tuple) else 0
        connection = Connection(self.wire(), port, [writer])
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

    def _due(self, kind: str, connection: Connection) -> Rule | None:
        for rule in list(self._rules):
            if rule.released.is_set():
                self._rules.remove(rule)
            elif rule.kind == kind and rule.wanted(connection):
                rule.nth -= 1
                if rule.nth <= 0:
                    self._rules.remove(rule)
                    return rule
        return None
