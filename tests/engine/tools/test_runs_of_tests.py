"""make test: no store. What failed runs once more, alone; what a test leaves behind fails that test, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools.testing.again import MOST, UNSTABLE
from tools.testing.fixtures import ROOT
from tools.testing.rings import FAILURES
from tools.testing.waiting import DEADLINE_S

FAILS_FIRST = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("number", range({count}))
def test_chance(number):
    seen = Path(__file__).with_name(f"seen-{{number}}")
    is_first = not seen.exists()
    seen.touch()
    assert not is_first, "by chance"
"""


CRASHES = """
import os

def test_crash():
    os._exit(1)

def test_after():
    pass
"""


LEAVES = """
import os, pathlib, pytest, socket, subprocess, tempfile

KEPT = []

def test_process():
    KEPT.append(subprocess.Popen(['sleep', '1000']))

def test_port():
    KEPT.append(socket.create_server(('127.0.0.1', 0)))

def test_file_where_it_runs():
    pathlib.Path('notes').touch()

def test_temporary_file():
    tempfile.mkdtemp()

def test_beside_them():
    assert not list(pathlib.Path().iterdir())
"""


class Checkout:
    """A folder with tests and the plugins that this service's tests have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plugins = [f'"-p", "tools.testing.{name}"' for name in ("fixtures", "rings", "leftovers")]
        (folder / "pyproject.toml").write_text(
            f'[tool.pytest.ini_options]\naddopts = [{", ".join(plugins)}]\nmarkers = ["slow", "prove", "integration"]\n'
        )

    def python(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        others = {name: value for name, value in os.environ.items() if name != "TEST_RUN"}
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.folder,
            env=others | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def both(self, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run these tests, and then what failed again, as `.ci/run` does; how the second run ended."""
        (self.folder / "test_it.py").write_text(tests)
        assert self.python("pytest", "-q", *options).returncode == 1
        return self.python("tools.testing.again")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_what_fails_once_is_listed_and_fails_no_run_and_what_fails_twice_does(checkout: Checkout) -> None:
    done = checkout.both(FAILS_FIRST.format(count=2), "-n", "1", "--dist", "loadgroup")
    assert done.returncode == 0, done.stdout
    assert done.stdout.partition("UNSTABLE:")[2].count("test_it.py::test_chance[") == 2
    assert "AssertionError: by chance" in (checkout.folder / UNSTABLE).read_text()
    done = checkout.both(FAILS_FIRST.format(count=3) + "\n\ndef test_never():\n    assert False\n")
    assert done.returncode == 1
    assert "FAILED twice: test_it.py::test_never" in done.stdout
    assert "test_it.py::test_chance[2]" in done.stdout.partition("UNSTABLE:")[2]


def test_more_than_a_few_fail_the_run_at_once(checkout: Checkout) -> None:
    done = checkout.both(FAILS_FIRST.format(count=MOST + 1))
    assert done.returncode == 1
    assert "UNSTABLE" not in done.stdout


def test_a_run_that_ended_for_another_reason_is_not_repeated(checkout: Checkout) -> None:
    assert checkout.python("tools.testing.again").returncode == 1
    (checkout.folder / "test_it.py").write_text("import nothing_of_that_name\n")
    assert checkout.python("pytest", "-q").returncode == 2
    assert (checkout.folder / FAILURES).exists()
    assert checkout.python("tools.testing.again").returncode == 1


def test_a_worker_that_crashes_ends_the_run_which_is_not_repeated(checkout: Checkout) -> None:
    """With one worker, pytest-xdist would wait for ever for the one in its place."""
    (checkout.folder / "test_it.py").write_text(CRASHES)
    done = checkout.python("pytest", "-q", "-n", "1", "--dist", "loadgroup")
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "crashed while running 'test_it.py::test_crash'" in done.stdout
    assert checkout.python("tools.testing.again").returncode == 1


def test_what_a_test_leaves_behind_fails_it_and_not_its_neighbour(checkout: Checkout) -> None:
    (checkout.folder / "test_it.py").write_text(LEAVES)
    done = checkout.python("pytest", "-q", TEST_SLOWNESS="0.01")
    for test, named in {"process": "process", "port": "a port", "file_where": "file", "temporary": "file"}.items():
        assert re.search(
            rf"ERROR test_it.py::test_{test}\w* - AssertionError: the test left behind {named}", done.stdout
        )
    assert "5 passed, 4 errors" in done.stdout


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("infra.testing.facts", "tools.testing.facts"),
        ("infra.testing.service", "tools.testing.service"),
        ("infra.domain_model.contexts", "domain.engine.contexts"),
        ("infra.cli", "tools.cli"),
        ("infra.terminal", "tools.terminal"),
    ],
)
def test_tests_of_a_service_of_before_find_what_moved(former: str, now: str) -> None:
    found, moved = vars(import_module(former)), vars(import_module(now))
    assert {name for name in moved if not name.startswith("__")} <= found.keys()
    assert [name for name in moved if not name.startswith("__") and found[name] is not moved[name]] == []


def test_what_moved_is_found_where_compiled_files_of_before_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update removes infra/cli/*.py; the folder stays, with what Python compiled, and would be an empty package."""
    (tmp_path / "cli" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr("infra.__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "infra.cli", raising=False)
    assert import_module("infra.cli").Json is import_module("tools.cli").Json
