"""A receiver of webhooks in a process of its own: `webhook_receiver.py PORT JOURNAL SECRET [CERTIFICATE]`.

The path says how it answers. It writes what it has processed to the journal, a JSON line each, before it answers.
"""

from __future__ import annotations

import json
import os
import random
import socket
import ssl
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import unquote

from standardwebhooks.webhooks import Webhook

LONG_S = 120.0
MOODS = ("status/500", "ok", "status/503", "crash", "reset", "ok", "never", "trickle")
"""Of a moody endpoint, one after the other."""
ONE_BY_ONE = Lock()


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    journal: Path
    secret: str

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        mood = self.path.partition("?")[0].removeprefix("/")
        name, _, mood = mood.partition("/")
        with ONE_BY_ONE:  # or two at once would have the same mood, and the next one nobody
            if mood == "moody":
                known = self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0
                mood = MOODS[known % len(MOODS)]
            if mood == "hasty" and random.random() < 0.3:
                mood = "status/500"
            self._process(name, mood, body)
        getattr(self, f"_{mood.partition('/')[0]}", self._ok)(mood.partition("/")[2])

    def do_GET(self) -> None:
        """What a followed redirect would ask for."""
        self._process("followed", "ok", b"{}")
        self._ok("")

    def _process(self, name: str, mood: str, body: bytes) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        try:
            Webhook(self.secret).verify(body, headers)
            verified = True
        except Exception:
            verified = False
        taken = mood.partition("/")[0] not in ("status", "reset", "moved")
        line = {"name": name, "mood": mood, "verified": verified, "taken": taken, "headers": headers}
        text = json.dumps(line | {"body": json.loads(body), "at": time.time()}) + "\n"
        descriptor = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, text.encode())
        os.close(descriptor)

    def _ok(self, _: str) -> None:
        self._answer(200)

    def _status(self, number: str) -> None:
        self._answer(int(number))

    def _answer(self, number: int, **headers: str) -> None:
        self.send_response(number)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("content-length", "2")
        self.end_headers()
        if number != 304:  # which has no body: the next request on the connection would take it for its answer
            self.wfile.write(b"{}")

    def _moved(self, target: str) -> None:
        self._answer(301, location=f"http://localhost:{self.server.server_port}/elsewhere/{target}")  # type: ignore[attr-defined]

    def _later(self, until: str) -> None:
        """The first request is one too many."""
        first = self.journal.with_suffix(".later")
        if first.exists():
            return self._answer(200)
        first.touch()
        return self._answer(429, retry_after=unquote(until))

    def _cookie(self, _: str) -> None:
        self._answer(200, set_cookie="session=1; path=/")

    def _never(self, _: str) -> None:
        time.sleep(LONG_S)

    def _reset(self, _: str) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _crash(self, _: str) -> None:
        os._exit(9)

    def _garbage(self, _: str) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
        self.close_connection = True

    def _headers(self, _: str) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for _number in range(200):
            self.wfile.write(b"x-filler: " + b"x" * 10_000 + b"\r\n")

    def _huge(self, _: str) -> None:
        self._long(b"x" * 1_000_000, 0.0)

    def _trickle(self, _: str) -> None:
        self._long(b"x", 0.1)

    def _long(self, part: bytes, pause_s: float) -> None:
        self.send_response(200)
        self.send_header("content-length", str(10**10))
        self.end_headers()
        for _ in range(10**10 // len(part)):
            self.wfile.write(part)
            time.sleep(pause_s)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):  # the client has closed the connection, or this process has
            self.close_connection = True

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    Receiver.journal, Receiver.secret = Path(sys.argv[2]), sys.argv[3]
    server = Server(("127.0.0.1", int(sys.argv[1])), Receiver)
    if certificate := sys.argv[4:]:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate[0])
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
