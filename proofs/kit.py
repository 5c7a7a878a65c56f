"""What the demo, chaos and the end-to-end tests share: a supervisor's processes, which can be killed one by one."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from infra.errors import SamefoldError
from infra.processes import supervisor
from infra.processes.supervisor import Child, Supervisor

DIES_WITHIN_S = 10.0
JOIN_S = 60.0


class CrewGone(SamefoldError):
    """The supervisor ended by itself."""


class Supervised:
    """`with Supervised(children, environment, folder):` runs the processes; leaving the block ends them, whatever happened in it.

    `folder` gets the logs, one file each.
    """

    def __init__(self, children: Sequence[Child], environment: Mapping[str, str], folder: Path) -> None:
        self.children = children
        self.folder = folder
        self._supervisor = Supervisor(children, dict(environment), folder)
        self._thread = threading.Thread(target=self._supervisor.run, name="supervisor", daemon=True)
        self._log: logging.Handler | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = logging.FileHandler(self.folder / "supervisor.log")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        supervisor.log.addHandler(self._log)
        supervisor.log.propagate = False
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes, in order."""
        self._supervisor.stop()
        self._thread.join(JOIN_S)
        if self._log:
            supervisor.log.removeHandler(self._log)
            supervisor.log.propagate = not supervisor.log.handlers
            self._log.close()
            self._log = None

    @property
    def is_watched(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Raises CrewGone if the supervisor has ended."""
        if not self.is_watched:
            raise CrewGone("The supervisor of the processes ended.", f"Their logs are in {self.folder}.")

    def kill(self, child: Child) -> int | None:
        """`kill -9`. Returns the pid of the killed process; None if there was none or it ended otherwise.

        Uses the process's handle, not its pid, so that its successor can't be killed instead.
        """
        process = child.process
        if process is None or process.poll() is not None:
            return None
        process.kill()
        try:
            code = process.wait(DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            return None
        return process.pid if code == -signal.SIGKILL else None


def name_of(child: Child) -> str:
    """The name that a supervised process was given: it is known by it to Kafka and PostgreSQL."""
    return child.arguments[child.arguments.index("--name") + 1]


@contextmanager
def posts_answered(answer: Callable[[str, str], tuple[int, Mapping[str, str], bytes] | None]) -> Iterator[int]:
    """An HTTP server of a test's own, while the block runs; its port. Each POST, by its path and idempotency key, is answered with
    a status, headers and a body; where that is None, it hangs up."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in two packets would wait for an acknowledgement between them

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answered = answer(self.path, self.headers["Idempotency-Key"].strip('"'))
            if answered is None:
                self.close_connection = True
                return
            status, headers, body = answered
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
