"""make prove: a service of its own for minutes.

`docs/change-a-read-model.md` is walked from the first line to the last, under load, with a reader who must never see less.

Lines that begin with `$` or `old$` are typed, in the next release's checkout or where the old one is installed; what is below
them is what they must print, `…` standing for anything. `&` is another terminal, known by its last word or as `rebuild`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import pytest

from commands.client import wait_for
from demo.proof import counted_in
from demo.traffic import Traffic
from infra.database.connect import connect
from infra.settings import Settings
from tests.engine.pages.pages import blocks, matches, typed
from tests.engine.pages.test_journey import table
from tests.engine.spine import beside, scalar
from tests.engine.tools.service_trees import SAMEFOLD, copy_of_this_tree
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

PAGE = (ROOT / "docs" / "change-a-read-model.md").read_text()
PROMPT = re.compile(r"(?:old)?\$ ")


class Reader:
    """Reads people's view `balances` over and over; what was there once must stay there."""

    def __init__(self, world: Settings) -> None:
        self.world = world
        self.asked = 0
        self.fell: list[tuple[Counter[str], Counter[str]]] = []
        self.ended = threading.Event()

    def read(self) -> None:
        before = Counter[str]()
        with connect(self.world, "reader") as db:
            while not self.ended.wait(0.002):
                now = Counter[str](dict(db.execute("select account, transactions from balances").fetchall()))
                if before - now:
                    self.fell.append((before, now))
                before = now
                self.asked += 1


class Operator:
    """Somebody who has the page before them, two releases' folders, and as many terminals as it takes."""

    def __init__(self, world: Settings, folder: Path) -> None:
        self.world = world
        self.log = folder / "terminals.log"
        self.folders = {"$ ": folder / "new", "old$ ": folder / "old"}
        self.folders["old$ "].mkdir()
        copy_of_this_tree(self.folders["$ "])
        self.code = {"$ ": self.folders["$ "], "old$ ": ROOT}
        self.terminals: dict[str, subprocess.Popen[bytes]] = {}
        self.lines: list[str] = []
        self.around = ExitStack()
        self.traffic = Traffic(world, ["ada", "bob"], date(2026, 11, 21))
        self.reader = Reader(world)

    def walk(self, language: str, block: str) -> None:
        match language:
            case "console":
                for line, expected in typed(block):
                    self.lines.append(line)
                    prompt = PROMPT.match(line)
                    assert prompt
                    self.type(prompt[0], shlex.split(line.removeprefix(prompt[0])), expected)
            case "jsonl":
                (self.folders["old$ "] / "commands.jsonl").write_text(block)
            case "diff":
                apply = ["git", "apply", "--unidiff-zero", "-"]
                subprocess.run(apply, cwd=self.folders["$ "], input=block, text=True, check=True)
            case _:
                self.ask(block)

    def type(self, prompt: str, words: list[str], expected: str) -> None:
        match words:
            case ["kill", how, name]:
                self.end(name.removeprefix("%"), {"-9": signal.SIGKILL, "-INT": signal.SIGINT}[how])
            case [*command, "&"] if "rebuild" in command:
                self.begin("rebuild", prompt, command)
            case [*command, "&"]:
                self.begin(command[-1], prompt, command)
            case _:
                self.run(prompt, words, expected)

    def run(self, prompt: str, words: list[str], expected: str) -> None:
        """A command that ends, and what it must print."""
        done = subprocess.run(
            _command(words),
            cwd=self.folders[prompt],
            env=self._environment(prompt),
            timeout=DEADLINE_S,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{self.lines[-1]}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, said + self.log.read_text()[-3_000:]
        assert not expected or matches(done.stdout, expected), said
        if "send" in words:
            self.around.enter_context(self.traffic)
            self.around.enter_context(beside(self.reader.read, self.reader.ended.set, "reader"))
        if "switch" in words or "rebuild" in words:
            before = self._answers()
            self.until(lambda: self._answers() > before, "the agents of the code that is live go on")

    def begin(self, name: str, prompt: str, words: list[str]) -> None:
        """In a terminal of its own. A rebuild comes as far as the midst of its load, and stays there until it is ended."""
        if name == "rebuild":
            self.slowly = connect(self.world, "test")
            self.slowly.execute("set idle_in_transaction_session_timeout = 0")
            self.slowly.execute("begin")
            self.slowly.execute("lock table build_parts in share mode")
        with self.log.open("ab") as log:
            self.terminals[name] = subprocess.Popen(
                _command(words),
                cwd=self.folders[prompt],
                env=self._environment(prompt),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if name == "rebuild":
            self.until(self._is_loading, "the rebuild loads")
        else:
            self.until(lambda: self._has_joined(name), f"'{name}' is at work, or waits for its turn")

    def end(self, name: str, how: signal.Signals) -> None:
        process = self.terminals.pop(name)
        process.send_signal(how)
        assert process.wait(60) == (-how if how == signal.SIGKILL else 0)
        if name == "rebuild":
            self.slowly.close()

    def ask(self, block: str) -> None:
        query, _, shown = block.removeprefix("=> ").partition("\n")
        with connect(self.world, "test") as db:
            cursor = db.execute(query.encode())
            columns = [column.name for column in cursor.description or ()]
            assert table(shown) == [columns, *([str(value) for value in row] for row in cursor)]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            until(holds, what)
        except AssertionError:
            print(self.log.read_text()[-5_000:])
            raise

    def stop(self) -> None:
        self.around.close()
        for process in self.terminals.values():
            process.send_signal(signal.SIGINT)
        for process in self.terminals.values():
            process.wait(60)

    def _answers(self) -> int:
        return int(scalar(self.world, "select count(*) from command_outcomes"))

    def _is_loading(self) -> bool:
        waiting = "application_name like 'samefold build %%' and wait_event_type = 'Lock'"
        return bool(scalar(self.world, f"select count(*) from pg_stat_activity where {waiting}"))

    def _has_joined(self, name: str) -> bool:
        named = "select count(*) from pg_stat_activity where application_name like %s"
        return bool(scalar(self.world, named, f"samefold %{name}%"))

    def _environment(self, prompt: str) -> dict[str, str]:
        return (
            os.environ
            | self.world.environment()
            | {
                "PYTHONPATH": str(self.code[prompt]),
                "SAMEFOLD_API_PORT": "0",  # both releases have an API on this machine
            }
        )


def _command(words: list[str]) -> list[str]:
    known = {"samefold": ["-c", SAMEFOLD], "pytest": ["-m", "pytest"]}
    return [sys.executable, *known[words[0]], *words[1:]]


@pytest.fixture
def operator(world: Settings, tmp_path: Path) -> Iterator[Operator]:
    someone = Operator(world, tmp_path)
    try:
        yield someone
    finally:
        someone.stop()


@pytest.mark.prove(part="new-services")
def test_the_page_from_the_first_line_to_the_last(operator: Operator) -> None:
    world, traffic, reader = operator.world, operator.traffic, operator.reader
    for language, block in blocks(PAGE):
        operator.walk(language, block)
    traffic.stop()
    answered = wait_for(world, traffic.commands, lambda _: None, timeout_s=DEADLINE_S)
    assert (answered.accepted, answered.rejected) == (len(traffic.commands), 0)
    counted = counted_in(world)
    assert {counted[command.stream, command.id] for command in traffic.commands} == {1}
    assert reader.fell == []
    assert reader.asked > 100
    assert scalar(world, "select sum(cents) from balances") == traffic.deposited - traffic.withdrawn - 450
    assert len(operator.lines) == len(re.findall(r"^(?:old)?\$ ", PAGE, re.MULTILINE)) > 20
