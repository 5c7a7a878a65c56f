"""The endpoints of a month: they take posts, are slow, hang up or answer with any status, as the weather says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WELL, GONE = "200", "410"
SECRET = "whsec_" + "c2FtZWZvbGQ" * 4
NAMES = ("archive", "tracking")
KINDS = ("away", "slow", "stuck", "302", "400", "429", "500", GONE)
TIMEOUT_S = 2.0
WAITS_S = {"slow": 1.0, "stuck": 3.0}


@dataclass
class Endpoints:
    """`answers` are a kind by name; `taken` are the ids of the posts that were taken, in order."""

    answers: dict[str, str] = field(default_factory=lambda: dict.fromkeys(NAMES, WELL))
    taken: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in NAMES})
    """By endpoint and id, the body."""
    requests: int = 0
    since: str = ""
    """Posts of older events are not made any more."""
    too_old: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of those that came nevertheless."""
    ended: threading.Event = field(default_factory=threading.Event)

    def configured(self, port: int, names: Iterable[str] = NAMES) -> dict[str, str]:
        """Settings that name these."""
        urls = {name: f"http://127.0.0.1:{port}/{name}" for name in names}
        settings = {name: {"url": url, "secret": SECRET, "timeout_s": TIMEOUT_S} for name, url in urls.items()}
        return {"SAMEFOLD_WEBHOOKS": json.dumps(settings)}


@contextmanager
def served(endpoints: Endpoints) -> Iterator[int]:
    """The port at which they listen while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            if len(raw := self.rfile.read(length)) < length:  # its client has ended
                return
            body = json.loads(raw)
            name = self.path.removeprefix("/")
            answer = endpoints.answers[name]
            endpoints.requests += 1
            if body["time"] < endpoints.since:
                endpoints.too_old.append(body)
            endpoints.ended.wait(WAITS_S.get(answer, 0))
            if answer in ("away", "stuck"):
                self.close_connection = True
                return
            if answer in (WELL, "slow"):
                answer = WELL
                endpoints.taken[name].setdefault(self.headers["webhook-id"], body)
            self.send_response(int(answer))
            self.send_header("content-length", "0")
            if answer == "429":
                self.send_header("retry-after", "3600")
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
