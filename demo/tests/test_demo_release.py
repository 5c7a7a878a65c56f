"""make test: without the bank. The demo's end must be able to fail: what is lost, doubled or different at the takeover shows."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from demo import release, tree
from demo.proof import Key
from demo.question import Year
from demo.release import Bodies, CommandFailed, CommandLine, Released, Sums, judge
from infra.log.records import Command
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

COMMANDS = [Command(f"meanwhile-{n}", "accounts/1", "Deposit", msgspec.Raw(b"{}")) for n in range(3)]
KEYS = [("accounts/1", command.id) for command in COMMANDS]
OTHER = ("accounts/1", "before")


@pytest.mark.parametrize(
    ("log", "outcomes", "found"),
    [
        ([*KEYS, OTHER], [*KEYS, OTHER], (0, 0)),
        (KEYS[1:], KEYS, (1, 0)),
        (KEYS, KEYS[1:], (1, 0)),
        ([*KEYS, KEYS[0]], KEYS, (0, 1)),
    ],
    ids=["one of each", "no commit", "no outcome", "a second commit"],
)
def test_what_is_lost_or_doubled_is_counted(
    log: Sequence[Key], outcomes: Sequence[Key], found: tuple[int, int]
) -> None:
    assert judge(COMMANDS, Counter(log), dict.fromkeys(outcomes)) == found


BODIES = Bodies(
    {"type": "MoneyDeposited", "data": {"cents": 5}},
    {"type": "MoneyDeposited/2", "data": {"cents": 5, "currency": "CZK"}},
    {"type": "MoneyDeposited/2", "data": {"cents": 6, "currency": "CZK"}},
)
RELEASED = Released(
    as_of=datetime(2026, 11, 21, tzinfo=UTC),
    sent=3,
    lost=0,
    doubled=0,
    rebuilt={},
    rows=10,
    differences=0,
    bodies=BODIES,
    look_back="samefold rebuild",
    table_then="balances_v3_asof_1",
    then=Sums(5, 1),
    now=Sums(6, 2),
    expected_then=Sums(5, 1),
    expected_now=Sums(6, 2),
    years=[Year(1993, "CZK", 1, 5)],
    expected_years=[Year(1993, "CZK", 1, 5)],
)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"lost": 1}, {"doubled": 1}, {"differences": 1}, {"then": Sums(5, 2)}, {"now": Sums(5, 2)}),
        {"bodies": BODIES._replace(read=BODIES.stored)},
        {"bodies": BODIES._replace(new=BODIES.stored)},
        {"years": [Year(1993, "CZK", 1, 6)]},
        {"bodies": BODIES._replace(read=BODIES.new)},
    ],
    ids=[
        "lost",
        "doubled",
        "differences",
        "then",
        "now",
        "read as it was",
        "stored as before",
        "a year",
        "another amount",
    ],
)
def test_it_holds_only_if_all_of_it_does(wrong: dict[str, Any]) -> None:
    assert RELEASED.holds
    assert not replace(RELEASED, **wrong).holds


def test_the_next_release_is_this_code_with_an_event_and_a_view_changed(tmp_path: Path) -> None:
    diff = tree.make(tmp_path / "next")
    assert all(f"+{line}" in diff for line in ("VERSION = 3", "    deposited: int", "    currency: Text"))
    program = (
        "from projections import balances as b; from domain.accounts import MoneyDeposited as event; "
        "print(b.VERSION, b.Balance._fields[-1], event.VERSION, b.__file__)"
    )
    *found, file = subprocess.check_output(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | tree.environment(tmp_path / "next"), text=True
    ).split()
    assert found == ["3", "deposited", "2"]
    assert Path(file).is_relative_to(tmp_path), "and not the tree from which it was started"
    for name in tree.EDITS:
        with pytest.raises(tree.NotTheSample, match=f"^{name}"):
            tree.changed(name, "VERSION = 3\n")


def test_a_command_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="`samefold nonsense` ended with exit code 2") as raised:
        CommandLine(tmp_path, tree.environment(ROOT)).run("nonsense")
    assert "No such command" in raised.value.hint


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree whose command line starts another process, as a Spark driver does, and waits for it."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "tools" / "cli.py").write_text(
        "import subprocess, sys\n"
        "def main(): subprocess.run([sys.executable, '-c', CHILD])\n"
        "CHILD = 'import os, pathlib, time; pathlib.Path(\"child\").write_text(str(os.getpid())); time.sleep(600)'\n"
    )
    child = tmp_path / "child"

    class Late(subprocess.Popen[str]):
        def communicate(self, *_: Any, **__: Any) -> tuple[str, str]:
            until(lambda: child.exists() and child.read_text(), "its child runs")
            raise subprocess.TimeoutExpired("samefold", 0)

    monkeypatch.setattr(release.subprocess, "Popen", Late)  # type: ignore[attr-defined]
    with pytest.raises(CommandFailed, match="did not end"):
        CommandLine(tmp_path, tree.environment(tmp_path)).run()
    until(lambda: not psutil.pid_exists(int(child.read_text())), "its child is gone")
