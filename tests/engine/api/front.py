"""The API as a process of a test's own, with handler and agent, and a record of all its answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psutil

from infra.log.partitioner import partition_of
from infra.settings import PREFIX, Settings
from tests.engine.api.api import agent
from tests.engine.api.evidence import Told, contradictions, told, witnesses
from tests.engine.api.raw_http import Header, Reply, ask, head, post
from tests.engine.spine import handler, set_up
from tools.dev.process import Service, free_ports
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

OPENED_ON = "2026-01-01"
_names = count(1)


class Front:
    """Asks over raw sockets and keeps every answer; `assert_true` holds all of them against the log and the rows."""

    def __init__(self, settings: Settings, port: int, pid: int) -> None:
        self.settings = settings
        self.port = port
        self.pid = pid
        self.told: list[Told] = []

    def send(self, target: str, body: bytes, *headers: Header, stream: str, key: str) -> Reply:
        """Send one command as it is, and record the answer for this stream and key."""
        reply = None
        try:
            reply = ask(self.port, post(target, body, *headers, ("Idempotency-Key", f'"{key}"')))
        finally:
            self.hear(stream, key, reply)
        return reply

    def hear(self, stream: str, key: str, reply: Reply | None) -> None:
        """`None`: there was no answer, so that the command may be in the log or not."""
        self.told.append(told(stream, key, reply.status, reply.json) if reply else Told(stream, key, None))

    def command(
        self, stream: str, command: str, data: Mapping[str, Any] | bytes, *headers: Header, key: str = ""
    ) -> Reply:
        """A command to a stream whose name may be anything."""
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        return self.send(f"{path_of(stream)}/{command}", body, *headers, stream=stream, key=key or new_name("key"))

    def open(self, stream: str = "") -> str:
        """A new account, which may not be overdrawn; its stream."""
        stream = stream or new_name("accounts/")
        reply = self.command(stream, "open-account", {"overdraft_limit": 0, "on": OPENED_ON})
        assert reply.status == 200, reply
        return stream

    def get(self, target: str, *headers: Header) -> Reply:
        return ask(self.port, head("GET", target, headers))

    def assert_true(self, stream: str = "") -> None:
        """Hold all answers, or those about a stream, against log and rows. Raises AssertionError with each contradiction."""
        self._settle(
            {partition_of(stream, self.settings.partitions)} if stream else set(range(self.settings.partitions))
        )
        about = [one for one in self.told if stream in ("", one.stream)]
        found = contradictions(about, witnesses(self.settings, stream))
        assert not found, "\n".join(found)

    def _settle(self, missing: set[int]) -> None:
        """Whatever was appended has its outcome: in each of these partitions a command after all others has one."""
        while missing:
            stream = new_name("accounts/last-")
            partition = partition_of(stream, self.settings.partitions)
            if partition in missing:
                self.open(stream)
                missing.remove(partition)


@contextmanager
def front_of(world: Settings, folder: Path) -> Iterator[Front]:
    """The API as a process, whose log, in `folder`, must show no defect in the end; handler and agent in threads of this one."""
    set_up(world)
    log = folder / "api.log"
    with handler(world), agent(world), api_process(world, log) as process:
        front = Front(world, listening_port(process), process.pid)
        until(lambda: ask(front.port, head("GET", "/health/ready")).status == 200, "the API is ready")
        yield front
    assert "Traceback" not in log.read_text()


@contextmanager
def api_process(
    world: Settings, log: Path, port: int = 0, *, files: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`files`: the most that it may have open."""
    limited = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"] if files else []
    others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*limited, sys.executable, "-m", "api", "--name", "front", "--port", str(port)],
            env=others | {"PYTHONPATH": str(ROOT)} | world.environment(),
            cwd=log.parent,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()


def listening_port(process: subprocess.Popen[bytes]) -> int:
    """The port it listens on, as soon as it does."""

    def listening() -> list[int]:
        assert process.poll() is None, f"it ended with {process.returncode}"
        connections = psutil.Process(process.pid).net_connections("tcp")
        return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]

    until(lambda: bool(listening()), "the process listens")
    return listening()[0]


@contextmanager
def frozen(service: Service) -> Iterator[None]:
    """Kafka or PostgreSQL hangs: its processes are there, its connections stand, and nothing is answered."""
    server = service.process()
    assert server is not None
    processes = [server, *server.children(recursive=True)]
    try:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def path_of(stream: str) -> str:
    context, _, stream_id = stream.partition("/")
    return f"/{context}/{quote(stream_id, safe='')}"


def new_name(prefix: str) -> str:
    return f"{prefix}{next(_names)}"


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """A port on which no process listens: the API must come back on the same."""
    return free_ports(1)[0]
