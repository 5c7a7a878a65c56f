"""A guide as its reader meets it: walked from the first line to the last, in a service that `samefold new` has made.

Files are written as the page shows them, lines that begin with `$` are typed, and what is below them is what they print, `…`
standing for anything. What follows from a command is there a little later, so what only reads is typed until it shows it.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from infra.testing.waiting import until
from tests.engine.api.front import free_port
from tests.engine.pages.test_change_a_read_model import typed
from tests.engine.tools.service_trees import SAMEFOLD, Tree

READS = {"history", "outbox", "policies"}


class Author:
    """Somebody with a new service, and a second terminal in which it runs."""

    def __init__(self, service: Tree, folder: Path) -> None:
        self.service = service
        self.log = folder / "run.log"
        self.running: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        service.use(folder, self.port)

    def walk(self, language: str, block: str) -> None:
        file = re.match(r"# (\S+\.py)\n", block)
        match language:
            case "python" if file:
                (self.service.folder / file[1]).write_text(block.removeprefix(file[0]))
            case "jsonl":
                (self.service.folder / "commands.jsonl").write_text(block)
            case "csv":
                (self.service.folder / "members.csv").write_text(block)
            case "diff":
                apply = ["git", "apply", "--unidiff-zero", "-"]
                subprocess.run(apply, cwd=self.service.folder, input=block, text=True, check=True)
                self.restart()
            case "console":
                for line, expected in typed(block):
                    self.type(line.removeprefix("$ "), expected.strip())
            case _:
                pass

    def type(self, line: str, expected: str) -> None:
        words = shlex.split(line)
        if words == ["samefold", "dev", "run"]:
            self.restart()
        elif words[0] == "pytest":
            self.require(self.service.run(sys.executable, "-m", *words).stdout, expected)
        elif words[0] == "export":
            name, _, value = words[1].partition("=")
            self.service.environment[name] = value
        elif words[0] != "samefold":
            self.require(self.service.run("sh", "-ec", line).stdout, expected)
        elif words[1] in READS and "switch" not in words:
            shown: list[str] = []

            def is_shown() -> bool:
                shown.append(self.service.samefold(*words[1:]).stdout)
                return matches(shown[-1], expected)

            try:
                until(is_shown, line)
            except AssertionError:
                print(
                    shown[-1], self.service.samefold("policies").stdout, self.service.samefold("outbox", "list").stdout
                )
                print(self.log.read_text()[-5_000:])
                raise
        else:
            self.require(self.service.samefold(*words[1:]).stdout, expected)

    def require(self, shown: str, expected: str) -> None:
        assert not expected or matches(shown, expected), f"{shown}\n{expected}"

    def restart(self) -> None:
        """One Ctrl-C in the other terminal, if it runs there, and `samefold dev run` again, until it is ready."""
        self.stop()
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", SAMEFOLD, "dev", "run"]
            self.running = subprocess.Popen(
                command, cwd=self.service.folder, env=self.service.environment, stdout=log, stderr=log
            )
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60) as client:
            until(lambda: is_ready(client), "the service is ready")

    def stop(self) -> None:
        if self.running is not None:
            self.running.send_signal(signal.SIGINT)
            assert self.running.wait(60) == 0, self.log.read_text()[-5_000:]


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def files(page: str) -> Iterator[tuple[str, str]]:
    """Path and text of each file that the page shows."""
    for language, block in blocks(page):
        if language == "python" and (file := re.match(r"# (\S+\.py)\n", block)):
            yield file[1], block.removeprefix(file[0])


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").is_success
    except httpx.TransportError:
        return False


def matches(shown: str, expected: str) -> bool:
    pattern = ".*".join(map(re.escape, expected.split("…")))
    return re.fullmatch(pattern, shown.strip(), re.DOTALL) is not None


@pytest.fixture
def author(hotel: Tree, data: Path) -> Iterator[Author]:
    someone = Author(hotel, data)
    try:
        yield someone
    finally:
        try:
            someone.stop()
        finally:
            hotel.samefold("dev", "down")


def check_files(page: str, hotel: Tree) -> None:
    """They pass what `make check` runs in the service."""
    for path, text in files(page):
        (hotel.folder / path).write_text(text)
    quick = ("pytest", "-q", "-m", "not integration", "tests", "infra/testing")
    for command in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",), quick):
        hotel.run(sys.executable, "-m", *command)
