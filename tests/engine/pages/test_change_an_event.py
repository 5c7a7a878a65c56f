"""make test-all: a service of its own for minutes.

`docs/change-an-event.md` is walked from the first line to the last, two releases and a rollout in the wrong order included."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.testing.fixtures import ROOT
from infra.testing.waiting import until
from tests.engine.pages.pages import Author, blocks, matches
from tests.engine.tools.service_trees import SAMEFOLD, Tree

PAGE = (ROOT / "docs" / "change-an-event.md").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("services")]


class Releaser(Author):
    """An author who changes the code while the release before runs, and starts single processes beside it with `&`."""

    def __init__(self, service: Tree, folder: Path) -> None:
        super().__init__(service, folder)
        self.beside: list[subprocess.Popen[bytes]] = []

    def walk(self, language: str, block: str) -> None:
        if language == "diff":
            apply = ["git", "apply", "--unidiff-zero", "-"]
            subprocess.run(apply, cwd=self.service.folder, input=block, text=True, check=True)
        else:
            super().walk(language, block)

    def type(self, line: str, expected: str) -> None:
        words = shlex.split(line)
        if words[-1] == "&":
            self.start(words[1:-1], expected)
        elif words[1:3] == ["events", "check"]:
            done = self.service.samefold("events", "check", code=None)
            self.require(done.stdout, expected)
            assert (done.returncode == 1) == ("→" in expected)
        else:
            super().type(line, expected)

    def start(self, words: list[str], expected: str) -> None:
        log = self.log.with_name("beside.log")
        with log.open("wb") as file:
            command = [sys.executable, "-c", SAMEFOLD, *words]
            process = subprocess.Popen(
                command, cwd=self.service.folder, env=self.service.environment, stdout=file, stderr=file
            )
        self.beside.append(process)
        until(lambda: matches(log.read_text(), expected), expected)

    def end(self) -> None:
        self.stop()
        for process in self.beside:
            process.send_signal(signal.SIGINT)
        for process in self.beside:
            assert process.wait(60) == 0


@pytest.fixture
def releaser(hotel: Tree, data: Path) -> Iterator[Releaser]:
    someone = Releaser(hotel, data)
    try:
        yield someone
    finally:
        try:
            someone.end()
        finally:
            hotel.samefold("dev", "down")


def test_the_page_from_the_first_line_to_the_last(releaser: Releaser) -> None:
    for language, block in blocks(PAGE):
        releaser.walk(language, block)
