"""The service as it runs in production, for tests: all its processes, on the run's Kafka and PostgreSQL."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec
import pytest

from domain.engine.contexts import has_personal_fields
from domain.engine.personal.masters import new_line
from domain.language import kebab
from infra.log import topics
from infra.settings import PREFIX, Settings
from policies.engine.activations import start_all
from tools.dev.process import free_ports
from tools.dev.stack import Stack
from tools.migrations.migrate import upgrade
from tools.testing.fixtures import ROOT, command, world_of

START_S = 60.0


class Service:
    """A running service. Each answer to a command comes when its rows can be read."""

    def __init__(self, settings: Settings, client: httpx.Client) -> None:
        self.settings = settings
        self.client = client

    def send(self, stream: str, command: object, key: str | None = None) -> dict[str, Any]:
        """Send a command to `<context>/<id>`; the outcome, or the refusal with its `code`, as JSON. `key` is the command's id."""
        context, _, name = stream.partition("/")
        kind = kebab(type(command).__name__)
        answer = self.client.post(
            f"/{context}/{quote(name, safe='')}/{kind}",
            content=msgspec.json.encode(command),
            headers={"Content-Type": "application/json", "Idempotency-Key": f'"{key or uuid4()}"'},
        )
        outcome: dict[str, Any] = answer.json()
        return outcome

    def row(self, view: str, *key: object) -> dict[str, Any] | None:
        """The row of a view with this key; None if there is none."""
        answer = self.client.get("/".join(["/views", view, *(quote(str(value), safe="") for value in key)]))
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        row: dict[str, Any] = answer.raise_for_status().json()["row"]
        return row

    def rows(self, view: str, **columns: object) -> list[dict[str, Any]]:
        """All rows of a view in the order of their keys, or those whose columns have these values."""
        found: list[dict[str, Any]] = []
        answer = self.client.get(f"/views/{view}", params={name: str(value) for name, value in columns.items()})
        while True:
            page = answer.raise_for_status().json()
            found += page["items"]
            if page["next"] is None:
                return found
            answer = self.client.get(page["next"])

    def samefold(self, *arguments: str) -> str:
        """Run `samefold` with these arguments; what it printed. Fails the test unless it ends with exit code 0."""
        done = subprocess.run(
            command(*arguments), env=_environment(self.settings), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"samefold {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def service(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """This service, running for the whole run: tests share it, so each uses streams of its own."""
    with world_of(stack) as settings, running(settings, tmp_path_factory.mktemp("service")) as found:
        yield found


@contextmanager
def running(settings: Settings, folder: Path) -> Iterator[Service]:
    """A service with these settings, on an empty database; its processes write their logs into the folder."""
    if has_personal_fields() and settings.master_key_file is None:
        (file := folder / "master-key").touch(0o600)
        file.write_text(new_line("tests"))
        settings = settings.model_copy(update={"master_key_file": file})
    upgrade(settings)
    topics.ensure(settings)
    start_all(settings)
    [port], log = free_ports(1), folder / "service.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command("run", "all", "--port", str(port)),
            env=_environment(settings),
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:
            _wait_until_ready(client, process, log)
            yield Service(settings, client)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(START_S)


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"The service did not get ready: {log.read_text()[-4_000:]}")


def _environment(settings: Settings) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return others | settings.environment() | {"PYTHONPATH": str(ROOT)}
