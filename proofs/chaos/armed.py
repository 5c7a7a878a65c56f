"""Points in running processes, and in those that are yet to start: armed from outside, and noted when one acts.

`python -m proofs.chaos.armed MODULE --name NAME [ARGUMENT…]` runs one of the product's modules that listens to a `Control`. It says
who it is and waits for a first answer before it begins, so that the points of its start can be armed too.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Literal, NamedTuple
from unittest.mock import patch

from infra.database import connect
from infra.log import clients
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from proofs.patches import Edit, edited

SOCKET, LACKING = "CHAOS_SOCKET", "CHAOS_LACKING"
ACK_TIMEOUT_S = 3.0
SHORT = {
    (connect, "STATEMENT_TIMEOUT_MS"): 3_000,
    (connect, "LOCK_TIMEOUT_MS"): 1_000,
    (clients, "ACK_TIMEOUT_S"): ACK_TIMEOUT_S,
}
"""Short enough to outlast each in seconds, as the settings of `ground.py`."""
Action = Literal["kill", "freeze", "tell"]
"""What a process does to itself at a point; `tell` only reports that it is there."""
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
RULE, COMMIT = "infra/log/rule.py", "projections/engine/store/commit.py"
RULES: dict[str, list[Edit]] = {
    "a handler reads up to its opening": [
        Edit(
            "commands/writer.py",
            "self.phase = Phase.READING\n        return ReadLog(self.reading.next_offset, offset + 1)",
            "self.phase = Phase.SERVING\n        self.last_command = self.reading.command_offset\n"
            "        return Serve(self.last_command + 1)",
        )
    ],
    "a commit counts in its epoch and in line": [
        Edit(RULE, "entry.epoch != epoch or epoch < 0", "False"),
        Edit(RULE, "entry.seq != seq + 1", "False"),
    ],
    "a batch moves positions from where it was read": [
        Edit(COMMIT, "and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)", "")
    ],
    "a view takes every event": [
        Edit(
            "projections/daily_totals.py",
            "    yield DailyTotal(",
            "    from zlib import crc32\n\n    if crc32(f'{at.stream} {at.version}'.encode()) % 307 == 0:\n"
            "        raise ValueError('this code is wrong')\n    yield DailyTotal(",
        )
    ],
}
"""What a process may be made to lack: the judge must find it, but for a view, which stops and is resumed."""
STUMBLING = {"projections.engine.live.agent": "a view takes every event"}


class Order(NamedTuple):
    """To act at a point when it is passed the nth time. `number` alone takes the order back."""

    number: int
    point: Point | None = None
    nth: int = 0
    action: Action = "tell"


@dataclass(eq=False, slots=True)
class Strike:
    """One order to one process. `struck` is set by the process, just before it acts; `pid` is its."""

    name: str
    order: Order
    struck: threading.Event = field(default_factory=threading.Event)
    pid: int = 0


class Control:
    """Gives orders, by the names of processes. `path` must be short: it is a Unix socket's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._strikes: dict[int, Strike] = {}
        self._at_start: dict[str, list[Strike]] = defaultdict(list)
        self._there: dict[str, tuple[int, Connection]] = {}
        self._listener = Listener(str(path), backlog=64)
        threading.Thread(target=self._accept, daemon=True, name="control").start()

    def close(self) -> None:
        self._listener.close()

    def pid(self, name: str) -> int | None:
        """The process of that name that is there now."""
        with self._lock:
            return self._there[name][0] if name in self._there else None

    def arm(self, name: str, point: Point, nth: int, action: Action, *, at_start: bool = False) -> Strike:
        """The process of that name, or with `at_start` the next one to come, acts when it reaches `point` the nth time."""
        with self._lock:
            strike = Strike(name, Order(next(self._numbers), point, nth, action))
            self._strikes[strike.order.number] = strike
            if at_start or name not in self._there:
                self._at_start[name].append(strike)
            else:
                strike.pid = self._tell(name, strike.order)
            return strike

    def disarm(self, strike: Strike) -> None:
        with self._lock:
            if strike in self._at_start[strike.name]:
                self._at_start[strike.name].remove(strike)
            elif strike.name in self._there:
                self._tell(strike.name, Order(strike.order.number))

    def _tell(self, name: str, order: Order) -> int:
        pid, connection = self._there[name]
        with suppress(OSError):  # just died; the wait for the strike ends by its time-out
            connection.send(order)
        return pid

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True, name="control of one").start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError):
            name, pid = connection.recv()
            try:
                with self._lock:
                    armed = self._at_start.pop(name, [])
                    for strike in armed:
                        strike.pid = pid
                    self._there[name] = (pid, connection)
                    connection.send([strike.order for strike in armed])
                while True:
                    self._strikes[connection.recv()].struck.set()
            finally:
                with self._lock:
                    if self._there.get(name, (0, None))[0] == pid:
                        del self._there[name]


# ── in the armed process ──


class Armed:
    """Acts at points as it is ordered."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._orders: list[Order] = control.recv()

    def reach(self, point: Point) -> None:
        if not any(order.point == point for order in self._orders):
            return
        with self._lock:
            orders = [one._replace(nth=one.nth - 1) if one.point == point else one for one in self._orders]
            due = [one for one in orders if one.point == point and one.nth <= 0]
            self._orders = [one for one in orders if one not in due]
            for order in due:
                self._control.send(order.number)
        for order in due:
            if order.action in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[order.action])

    def listen(self) -> None:
        with suppress(EOFError):  # the control is gone
            while True:
                order: Order = self._control.recv()
                with self._lock:
                    others = [one for one in self._orders if one.number != order.number]
                    self._orders = [*others, order] if order.point else others


def main() -> None:
    module, *rest = sys.argv[1:]
    control = Client(os.environ[SOCKET])
    control.send((rest[rest.index("--name") + 1], os.getpid()))
    armed = Armed(control)
    threading.Thread(target=armed.listen, daemon=True, name="armed").start()
    faultpoints.hook = armed.reach
    sys.argv = [module, *rest]
    with ExitStack() as lacking:
        for (owner, name), value in SHORT.items():
            lacking.enter_context(patch.object(owner, name, value))
        if rule := json.loads(os.environ.get(LACKING, "{}")).get(module):
            lacking.enter_context(edited(*RULES[rule]))
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
