"""make test: one walk. What README and the page on the first event tell a newcomer to type works, in that order."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.engine.api.front import free_port
from tests.engine.pages.curl import curl
from tests.engine.pages.pages import matches, typed
from tools.cli import build
from tools.testing.waiting import DEADLINE_S, until

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
FIRST_EVENT = (ROOT / "docs" / "first-event.md").read_text()
BIN = Path(sys.executable).parent


def section(title: str, page: str = FIRST_EVENT) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section '{title}'"
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    return [line.removeprefix("$ ") for block in blocks(text, "console") for line in block.splitlines()]


class Newcomer:
    """Somebody with an empty folder, an empty environment and the project's commands on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.environment = {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "LC_ALL": "C.UTF-8",
            "SAMEFOLD_API_PORT": str(self.port),  # another one may be in use
        }

    def types(self, line: str) -> str:
        if line.startswith("curl "):
            return self._asks(line)
        done = subprocess.run(
            line.split(),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"`{line}` ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _asks(self, line: str) -> str:
        """What the API answers, once it is up."""
        answers: list[httpx.Response] = []

        def is_answered() -> bool:
            try:
                answers.append(curl(line, f"http://127.0.0.1:{self.port}"))
            except httpx.TransportError:
                return False
            return answers[-1].status_code != 503

        until(is_answered, f"an answer to {line}")
        assert answers[-1].status_code == 200, answers[-1].text
        return answers[-1].text

    @contextmanager
    def meanwhile(self, line: str) -> Iterator[None]:
        """A command in another terminal, ended with Ctrl-C; it must then end cleanly."""
        with (self.folder / "terminal.log").open("ab") as log:
            running = subprocess.Popen(
                line.split(), cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield
            except BaseException:
                print((self.folder / "terminal.log").read_text()[-5_000:])
                raise
            finally:
                running.send_signal(signal.SIGINT)
                code = running.wait(60)
        assert code == 0


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="sf-"))  # short: sockets live below it
    someone = Newcomer(folder)
    try:
        yield someone
    finally:
        subprocess.run(
            ["samefold", "dev", "down"], cwd=folder, env=someone.environment, check=False, timeout=DEADLINE_S
        )
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.integration
def test_the_page_from_the_first_command_to_the_last(newcomer: Newcomer) -> None:
    play = section("Play with it")
    types = [line for block in blocks(play, "console") for line in typed(block)]
    [lines] = blocks(play, "json")
    (newcomer.folder / "commands.jsonl").write_text(lines)
    with ExitStack() as stack:
        for line, expected in types:
            if line == "$ samefold run all":
                stack.enter_context(newcomer.meanwhile(line.removeprefix("$ ")))
            else:
                printed = newcomer.types(line.removeprefix("$ "))
                assert not expected or matches(printed, expected), (line, printed)
    assert len(types) == 14


def test_every_command_that_the_documents_name_exists() -> None:
    documents = [README, *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))]
    named = {match for text in documents for match in re.findall(r"samefold ([a-z]+)(?: ([a-z]+))?", text)}
    for first, second in sorted(named):
        if first not in {"is", "and", "on"}:
            words = [first, second] if second else [first]
            done = CliRunner().invoke(build(), [*words, "--help"])
            assert done.exit_code == 0, f"the documents name `samefold {' '.join(words)}`: {done.output}"


def test_the_readme_tells_commands_that_exist() -> None:
    told = commands(section("The commands", README))
    assert told == ["make demo", "make run", "make test"]
    for line in [*told, "make test-all", "make prove", "make check"]:
        subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, check=True)
