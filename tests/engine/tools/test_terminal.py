"""make test: needs no store. What people see while they wait."""

from __future__ import annotations

import io

import click
import pytest
from rich.console import Console

from infra.errors import SamefoldError
from tools import terminal
from tools.cli import print_error
from tools.terminal import Stages


def test_stages_tell_how_much_how_fast_and_how_long_still(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "stderr", Console(file=shown, force_terminal=True, width=120))
    now = 0.0
    with Stages() as stages:
        monkeypatch.setattr(stages._bar, "get_time", lambda: now)
        stages.begin("load", 10_000)
        for _ in range(5):
            now += 1
            stages.advance(1_000)
        [load] = stages._bar.tasks
        assert load.fields["done"] == "5,000 of 10,000, 1,000/s"
        assert load.fields["left"] == "0:00:05 left"
        stages.begin("switch")
        assert load.fields["left"] == ""
        stages.advance(0)
    assert all(task.finished for task in stages._bar.tasks)
    assert "switch" in shown.getvalue()


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rname\u202e [red]"


def test_a_value_makes_a_terminal_do_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "stdout", Console(file=shown, force_terminal=True, width=400, color_system=None))
    table = terminal.table(("name", "same"), [(HOSTILE, terminal.Text(HOSTILE, "red"))])
    terminal.show({}, lambda _: [HOSTILE, terminal.Text(HOSTILE, "red"), table, "one\ntwo"], as_json=False)
    print_error(SamefoldError(HOSTILE, HOSTILE))
    text = shown.getvalue() + click.unstyle(capsys.readouterr().err)
    assert all(line.isprintable() for line in text.split("\n")), repr(text)
    assert text.count("\\x1b[2J\\x9b31m\\rname\\u202e [red]") == 6
    assert "one\ntwo" in text
