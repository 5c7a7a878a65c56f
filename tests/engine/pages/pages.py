"""A guide as its reader meets it: walked from the first line to the last, in a service that `samefold new` has made.

Files are written as the page shows them, lines that begin with `$` are typed, and what is below them is what they print, `…`
standing for anything. What follows from a command is there a little later, so what only reads is typed until it shows it. So is a
request with an Idempotency-Key: it may be repeated.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest

from tests.engine.api.front import free_port
from tests.engine.tools.service_trees import SAMEFOLD, Tree
from tools.testing.waiting import DEADLINE_S, until

READS = {"history", "outbox", "policies"}


class Author:
    """Somebody with a new service, a second terminal in which it runs, and others for what a line with `&` starts."""

    restarts = True
    """What a page changes in the code runs at once."""
    watches = False
    """What runs follows saved files, as with `make run`."""

    def __init__(self, service: Tree, folder: Path) -> None:
        self.service = service
        self.log = folder / "run.log"
        self.running: subprocess.Popen[bytes] | None = None
        self.beside: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        service.use(folder, self.port)

    def walk(self, language: str, block: str) -> None:
        file = re.match(r"# (\S+\.py)\n", block)
        match language:
            case "python" if file:
                (self.service.folder / file[1]).write_text(block.removeprefix(file[0]))
            case "jsonl" | "csv":
                name = {"jsonl": "commands.jsonl", "csv": "members.csv"}[language]
                (self.service.folder / name).write_text(block)
            case "diff":
                apply = ["git", "apply", "--unidiff-zero", "-"]
                subprocess.run(apply, cwd=self.service.folder, input=block, text=True, check=True)
                if self.restarts:
                    self.restart()
            case "console":
                for line, expected in typed(block):
                    self.type(line.removeprefix("$ "), expected)
            case _:
                pass

    def type(self, line: str, expected: str) -> None:
        words = shlex.split(line)
        if words == ["samefold", "dev", "run"]:
            self.restart()
        elif words == ["make", "check"]:
            self.service.check("-m", "not integration")
        elif words[0] == "source":
            pass  # the commands are on the path here
        elif words[-1] == "&":
            log = self.log.with_name("beside.log")
            self.beside.append(self._begin(words[1:-1], log, "wb"))
            until(lambda: matches(log.read_text(), expected), expected)
        elif words[1:3] == ["events", "check"]:
            self.require(self.service.samefold(*words[1:], code=1 if "→" in expected else 0).stdout, expected)
        elif words[0] == "pytest":
            self.require(self.service.run(sys.executable, "-m", *words).stdout, expected)
        elif words[0] == "export":
            name, _, value = words[1].partition("=")
            self.service.environment[name] = value
        elif words[0] != "samefold" and "Idempotency-Key" not in line:
            self.require(self.service.run("sh", "-ec", line).stdout, expected)
        elif words[0] == "curl" or (words[1] in READS and "switch" not in words):
            shown: list[str] = []

            def is_shown() -> bool:
                done = self.service.run("sh", "-ec", line) if words[0] == "curl" else self.service.samefold(*words[1:])
                shown.append(done.stdout)
                return matches(shown[-1], expected)

            try:
                until(is_shown, line)
            except AssertionError:
                print(shown[-1], *(self.service.samefold(*told).stdout for told in (("policies",), ("outbox", "list"))))
                print(self.log.read_text()[-5_000:])
                raise
        else:
            self.require(self.service.samefold(*words[1:]).stdout, expected)

    def require(self, shown: str, expected: str) -> None:
        assert not expected or matches(shown, expected), f"{shown}\n{expected}"

    def restart(self) -> None:
        """One Ctrl-C in the other terminal, if it runs there, and `samefold dev run` again, until it is ready."""
        self.stop()
        self.running = self._begin(["dev", "run", *(["--watch"] if self.watches else [])], self.log, "ab")
        until(lambda: is_fine(f"http://127.0.0.1:{self.port}/health/ready"), "the service is ready")

    def stop(self) -> None:
        if self.running is not None:
            self.running.send_signal(signal.SIGINT)
            assert self.running.wait(60) == 0, self.log.read_text()[-5_000:]

    def end(self) -> None:
        self.stop()
        for process in self.beside:
            process.send_signal(signal.SIGINT)
        assert [process.wait(60) for process in self.beside] == [0] * len(self.beside)

    def _begin(self, words: list[str], log: Path, mode: Literal["ab", "wb"]) -> subprocess.Popen[bytes]:
        with log.open(mode) as file:
            command = [sys.executable, "-c", SAMEFOLD, *words]
            return subprocess.Popen(
                command, cwd=self.service.folder, env=self.service.environment, stdout=file, stderr=file
            )


def is_fine(url: str) -> bool:
    try:
        return httpx.get(url, timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        return False


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def typed(block: str) -> Iterator[tuple[str, str]]:
    """Each line that is typed, after `$` or a place's own prompt such as `old$`, and what it must print."""
    for part in re.split(r"^(?=\w*\$ )", block, flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        yield line, expected.strip()


def files(page: str) -> Iterator[tuple[str, str]]:
    """Path and text of each file that the page shows."""
    for language, block in blocks(page):
        if language == "python" and (file := re.match(r"# (\S+\.py)\n", block)):
            yield file[1], block.removeprefix(file[0])


def matches(shown: str, expected: str) -> bool:
    pattern = ".*".join(map(re.escape, expected.split("…")))
    return re.fullmatch(pattern, shown.strip(), re.DOTALL) is not None


@contextmanager
def at_work(service: Tree, folder: Path) -> Iterator[Author]:
    """The author of a service, whose development stack has this folder."""
    someone = Author(service, folder)
    try:
        yield someone
    finally:
        try:
            someone.end()
        finally:
            service.samefold("dev", "down")


@pytest.fixture
def author(hotel: Tree, data: Path) -> Iterator[Author]:
    with at_work(hotel, data) as someone:
        yield someone
