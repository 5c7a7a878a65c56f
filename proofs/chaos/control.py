"""Arms points in running processes, and in those that are yet to start; notes when one acts."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal, Self

from infra.processes.faultpoints import Point

Action = Literal["kill", "freeze", "tell"]
"""What a process does to itself at a point; `tell` only reports that it is there."""


@dataclass(eq=False, slots=True)
class Strike:
    """One arming of a point in one process. `struck` is set by the process, just before it acts; `pid` is its."""

    name: str
    point: Point
    nth: int
    action: Action
    number: int
    struck: threading.Event = field(default_factory=threading.Event)
    pid: int = 0

    def order(self) -> dict[str, Any]:
        return {"strike": self.number, "point": self.point, "nth": self.nth, "action": self.action}


class Control:
    """The other end of `armed.py`, by the names of processes. `path` must be short: it is a Unix socket's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._strikes: dict[int, Strike] = {}
        self._at_start: dict[str, list[Strike]] = {}
        self._there: dict[str, tuple[int, socket.socket]] = {}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True, name="control").start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.close()
        self.path.unlink(missing_ok=True)

    def pid(self, name: str) -> int | None:
        """The process of that name that is there now."""
        with self._lock:
            return self._there[name][0] if name in self._there else None

    def arm(self, name: str, point: Point, nth: int, action: Action, *, at_start: bool = False) -> Strike:
        """The process of that name, or with `at_start` the next one to come, acts when it reaches `point` the nth time."""
        with self._lock:
            strike = Strike(name, point, nth, action, next(self._numbers))
            self._strikes[strike.number] = strike
            if at_start or name not in self._there:
                self._at_start.setdefault(name, []).append(strike)
            else:
                self._tell(strike, strike.order())
            return strike

    def disarm(self, strike: Strike) -> None:
        with self._lock:
            waiting = self._at_start.get(strike.name, [])
            if strike in waiting:
                waiting.remove(strike)
            elif strike.name in self._there:
                self._tell(strike, {"disarm": strike.number})

    def _tell(self, strike: Strike, order: dict[str, Any]) -> None:
        pid, connection = self._there[strike.name]
        strike.pid = pid
        try:
            connection.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            return  # just died; the wait for the strike ends by its time-out

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connection], daemon=True, name="control of one").start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            hello = _next(lines)
            if hello is None:
                return
            name, pid = hello["name"], hello["pid"]
            with self._lock:
                armed = self._at_start.pop(name, [])
                for strike in armed:
                    strike.pid = pid
                self._there[name] = (pid, connection)
                connection.sendall(json.dumps([strike.order() for strike in armed]).encode() + b"\n")
            while (said := _next(lines)) is not None:
                self._strikes[said["struck"]].struck.set()
            with self._lock:
                if self._there.get(name, (0, None))[0] == pid:
                    del self._there[name]


def _next(lines: IO[bytes]) -> dict[str, Any] | None:
    try:
        line = lines.readline()
        said: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    except OSError:
        return None
    return said
