"""The demo's end must be able to fail: whatever is lost, doubled or different when the next release takes over shows."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from demo import release, tree
from demo.release import Bodies, CommandFailed, CommandLine, Released, Sums, judge
from infra.log.records import Command
from infra.testing.fixtures import ROOT
from tests.engine.spine import until

pytestmark = pytest.mark.slow

COMMANDS = [Command(f"meanwhile-{n}", "accounts/1", "Deposit", msgspec.Raw(b"{}")) for n in range(3)]
KEYS = [("accounts/1", command.id) for command in COMMANDS]


def test_each_command_has_one_commit_and_one_outcome() -> None:
    others = [("accounts/1", "before")]
    assert judge(COMMANDS, Counter([*KEYS, *others]), dict.fromkeys([*KEYS, *others])) == (0, 0)


def test_a_command_without_a_commit_or_an_outcome_is_lost_and_a_second_commit_is_doubled() -> None:
    assert judge(COMMANDS, Counter(KEYS[1:]), dict.fromkeys(KEYS)) == (1, 0)
    assert judge(COMMANDS, Counter(KEYS), dict.fromkeys(KEYS[1:])) == (1, 0)
    assert judge(COMMANDS, Counter([*KEYS, KEYS[0]]), dict.fromkeys(KEYS)) == (0, 1)


RELEASED = Released(
    as_of=datetime(2026, 11, 21, tzinfo=UTC),
    sent=3,
    lost=0,
    doubled=0,
    rebuilt={},
    rows=10,
    differences=0,
    bodies=Bodies(
        {"type": "MoneyDeposited", "data": {"cents": 5}},
        {"type": "MoneyDeposited/2", "data": {"cents": 5, "currency": "CZK"}},
        {"type": "MoneyDeposited/2", "data": {"cents": 6, "currency": "CZK"}},
    ),
    look_back="samefold rebuild",
    table_then="balances_v3_asof_1",
    then=Sums(5, 1),
    now=Sums(6, 2),
    expected_then=Sums(5, 1),
    expected_now=Sums(6, 2),
)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"lost": 1}, {"doubled": 1}, {"differences": 1}, {"then": Sums(5, 2)}, {"now": Sums(5, 2)}),
        {"bodies": RELEASED.bodies._replace(read=RELEASED.bodies.stored)},
        {"bodies": RELEASED.bodies._replace(new=RELEASED.bodies.stored)},
        {
            "bodies": RELEASED.bodies._replace(
                read={"type": "MoneyDeposited/2", "data": {"cents": 6, "currency": "CZK"}}
            )
        },
    ],
    ids=["lost", "doubled", "differences", "then", "now", "read as it was", "stored as before", "another amount"],
)
def test_it_holds_only_if_all_of_it_does(wrong: dict[str, Any]) -> None:
    assert RELEASED.holds
    assert not replace(RELEASED, **wrong).holds


def test_the_next_release_is_this_code_with_an_event_and_a_view_changed(tmp_path: Path) -> None:
    diff = tree.make(tmp_path / "next")
    changed = [line for line in diff.splitlines() if line[0] in "+-" and not line.startswith(("+++", "---"))]
    views = changed.index("-VERSION = 2")
    assert changed[views + 1] == "+VERSION = 3"
    assert "+    deposited: int" in changed[views:]
    assert "+    currency: Text" in changed[:views]
    program = (
        "from projections import balances as b; from domain.accounts import MoneyDeposited as event; "
        "print(b.VERSION, b.Balance._fields[-1], event.VERSION, b.__file__)"
    )
    [version, column, of_event, file] = subprocess.check_output(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | tree.environment(tmp_path / "next"), text=True
    ).split()
    assert (version, column, of_event) == ("3", "deposited", "2")
    assert Path(file).is_relative_to(tmp_path), "and not the tree from which it was started"


@pytest.mark.parametrize("name", tree.EDITS)
def test_a_file_that_is_not_the_samples_is_left_alone(name: str) -> None:
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
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "__init__.py").touch()
    (tmp_path / "infra" / "cli.py").write_text(
        "import subprocess, sys\n"
        "def main(): subprocess.run([sys.executable, '-c', CHILD])\n"
        "CHILD = 'import os, pathlib, time; pathlib.Path(\"child\").write_text(str(os.getpid())); time.sleep(600)'\n"
    )
    monkeypatch.setattr(release, "COMMAND_S", 2.0)
    with pytest.raises(CommandFailed, match="did not end"):
        CommandLine(tmp_path, tree.environment(tmp_path)).run()
    child = int((tmp_path / "child").read_text())
    until(lambda: not psutil.pid_exists(child), "its child is gone")
