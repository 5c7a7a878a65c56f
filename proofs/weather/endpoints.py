"""The endpoints of a month: they take posts, are slow, fail, hang up or want no more, as the weather says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WELL = 200
SLOW_S = 1.0
SECRET = "whsec_" + "c2FtZWZvbGQ" * 4
NAMES = ("archive", "tracking")


@dataclass
class Endpoints:
    """`answers` are a status by name, or "away" or "slow"; `taken` are the ids of the posts that were taken, in order."""

    answers: dict[str, int | str] = field(default_factory=lambda: dict.fromkeys(NAMES, WELL))
    taken: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in NAMES})
    """By endpoint and id, the body."""
    requests: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def configured(self, port: int) -> str:
        """SAMEFOLD_WEBHOOKS."""
        return json.dumps(
            {name: {"url": f"http://127.0.0.1:{port}/{name}", "secret": SECRET, "timeout_s": 5} for name in NAMES}
        )


@contextmanager
def served(endpoints: Endpoints) -> Iterator[int]:
    """The port at which they listen while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            name = self.path.removeprefix("/")
            answer = endpoints.answers[name]
            endpoints.requests += 1
            if answer == "away":
                self.close_connection = True
                return
            if answer == "slow":
                endpoints.ended.wait(SLOW_S)
                answer = WELL
            if answer == WELL:
                endpoints.taken[name].setdefault(self.headers["webhook-id"], body)
            self.send_response(int(answer))
            self.send_header("content-length", "0")
            self.end_headers()

        def handle(self) -> None:
            with suppress(ConnectionError):  # its client has ended
                super().handle()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            endpoints.ended.set()
            server.shutdown()
            thread.join()
