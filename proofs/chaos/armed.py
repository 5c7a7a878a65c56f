"""Runs one of the product's modules with its points armed: `python -m proofs.chaos.armed MODULE --name NAME [ARGUMENT…]`.

The process says hello on the socket that the environment names and waits for a first line before it begins, so that the points of
its start can be armed too. Lines, both ways, are JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import threading
from typing import IO, Any

from infra.processes import faultpoints
from infra.processes.faultpoints import Point

SOCKET = "CHAOS_SOCKET"
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


class Armed:
    """Which points act: at each, the number of times it is still passed, and what happens then."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._arms: dict[str, list[dict[str, Any]]] = {}

    def arm(self, order: dict[str, Any]) -> None:
        """`order` has `strike` (its number), `point`, `nth`, `action`; or `disarm`, the number of one that is to go."""
        with self._lock:
            if "disarm" in order:
                for arms in self._arms.values():
                    arms[:] = [arm for arm in arms if arm["strike"] != order["disarm"]]
            else:
                self._arms.setdefault(order["point"], []).append(order)

    def reach(self, point: Point) -> None:
        if not self._arms.get(point):
            return
        with self._lock:
            arms = self._arms[point]
            for arm in arms:
                arm["nth"] -= 1
            due = [arm for arm in arms if arm["nth"] <= 0]
            arms[:] = [arm for arm in arms if arm["nth"] > 0]
        for arm in due:
            self._control.sendall(json.dumps({"struck": arm["strike"]}).encode() + b"\n")
            if arm["action"] in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[arm["action"]])

    def listen(self, lines: IO[bytes]) -> None:
        for line in lines:
            self.arm(json.loads(line))


def main() -> None:
    module, *rest = sys.argv[1:]
    control = socket.socket(socket.AF_UNIX)
    control.connect(os.environ[SOCKET])
    hello = {"name": rest[rest.index("--name") + 1], "pid": os.getpid()}
    control.sendall(json.dumps(hello).encode() + b"\n")
    lines = control.makefile("rb")
    armed = Armed(control)
    for order in json.loads(lines.readline()):
        armed.arm(order)
    threading.Thread(target=armed.listen, args=[lines], daemon=True, name="armed").start()
    faultpoints.hook = armed.reach
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
