"""make test: commands in this process.

The command line as a whole: how it ends, what it prints when something is wrong, how fast it starts."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import typer

from infra.errors import SamefoldError
from tools import cli
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import until

HEAVY = {"aiokafka", "alembic", "confluent_kafka", "faust", "psycopg", "pydantic", "pyspark", "rich", "sqlalchemy"}


class WaterLeaks(SamefoldError):
    """An error that only this test knows."""


def test_how_a_command_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fine() -> None: ...

    @app.command()
    def named() -> None:
        raise WaterLeaks("The tap drips.", "Close it.")

    @app.command()
    def defect() -> None:
        raise RuntimeError("a defect")

    app.command("run")(defect)

    def ends(command: str) -> object:
        monkeypatch.setattr(sys, "argv", ["samefold", command])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    monkeypatch.setattr(cli, "build", lambda: app)
    assert ends("named") == 1
    assert capsys.readouterr() == ("", "water-leaks: The tap drips.\n  → Close it.\n")
    assert ends("fine") == 0
    assert ends("nonsense") == 2
    capsys.readouterr()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ends("defect") == 1
    [kept] = tmp_path.iterdir()
    assert capsys.readouterr() == (
        "",
        "unexpected-error: RuntimeError: a defect\n"
        f"  → Samefold or this service has a defect: its traceback is in {kept}.\n",
    )
    assert kept.stat().st_mode & 0o077 == 0, "only its owner reads it"
    assert kept.read_text().startswith("Traceback (most recent call last):\n")
    with pytest.raises(RuntimeError, match="a defect"):  # a process's goes where its log goes
        ends("run")


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    """Waiting for a lock that this test holds, the process gets a Ctrl-C."""
    import fcntl

    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = "from tools.cli import main; main()"
        waiting = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-c", script, "dev", "up"],
            env=os.environ | {"PYTHONPATH": str(ROOT), "SAMEFOLD_DATA_DIR": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert waiting.stderr is not None
        with waiting.stderr as said:
            assert any("tools.dev.stack" in line for line in said)  # its last import before the lock
            waiting.send_signal(signal.SIGINT)
            rest = said.read()
        assert waiting.wait(20) == 130
        assert "Traceback" not in rest


def test_wrong_settings_are_2(samefold: Samefold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEFOLD_PARTITON", "3")
    done = samefold("dev", "status")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 2


def test_the_list_of_commands_imports_nothing_heavy() -> None:
    script = "import atexit, sys; from tools.cli import main; "
    script += "atexit.register(lambda: print(*{name.split('.')[0] for name in sys.modules})); sys.argv[1:] = ['--help']; main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "typer" in done.stdout.split()
    assert HEAVY & set(done.stdout.split()) == set()


def test_each_module_of_the_command_line_is_listed_with_the_first_sentence_of_its_help(samefold: Samefold) -> None:
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*.py")} - {"__init__"}
    listed = dict(re.findall(r"^  (\w+) +(\S[^.]*)", samefold("--help").stdout, re.MULTILINE))
    assert modules <= listed.keys()
    for module in modules:
        told = samefold(module, "--help").stdout
        assert " ".join(listed[module].split()) in " ".join(told.split())


def test_an_agent_that_no_view_names_is_refused_before_anything_starts(samefold: Samefold) -> None:
    done = samefold("run", "agent", "--agent", "nosuch")
    assert done.returncode == 2
    assert "no view names agent 'nosuch': give one of core" in done.stderr


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[psutil.Process]:
    """`samefold run …` where `folder` is `policies/`; one Ctrl-C ends it."""
    script = f"import policies.engine; policies.__path__ = [{str(folder)!r}]; from tools.cli import main; main()"
    nowhere = {"SAMEFOLD_KAFKA_BOOTSTRAP": "127.0.0.1:1", "SAMEFOLD_DATABASE_URL": "host=127.0.0.1 port=1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", script, "run", *arguments],
            env=os.environ | nowhere | {"PYTHONPATH": str(ROOT), "SAMEFOLD_GROUP_PREFIX": folder.name},
            stderr=log,
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        ended = process.wait(30)
    assert ended in (0, 130), (folder / "log").read_text()


def test_policies_and_publisher_run_where_there_are_any(tmp_path: Path) -> None:
    event = "from domain.language import fact\nfrom domain.engine.contexts import contexts\n"
    event += "Event = next(iter(next(iter(contexts().values())).events.values()))\nVERSION = 1\n"
    (tmp_path / "reminders.py").write_text(f"{event}def react(event: Event, at): return []\n")
    (tmp_path / "public.py").write_text("")
    with running(tmp_path, "all", "--handlers", "0", "--agents", "0", "--no-api") as process:

        def modules() -> set[str]:
            return {word for child in process.children() for word in child.cmdline() if word.startswith("policies.")}

        until(lambda: modules() == {"policies.engine.process", "policies.engine.publisher"}, "both are started")


@pytest.mark.parametrize(("command", "told"), [("policies", "holds no policy"), ("publisher", "no policies/public.py")])
def test_without_policies_their_processes_are_idle(tmp_path: Path, command: str, told: str) -> None:
    with running(tmp_path, command) as process:
        until(lambda: told in (tmp_path / "log").read_text(), "it says so")
        assert process.is_running()
        assert process.children() == []


def test_an_unknown_view_is_named_before_a_question(samefold: Samefold) -> None:
    for command in (("parked", "drop", "nosuch", "accounts/1"), ("verify", "nosuch")):
        done = samefold(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("unknown-view: There is no view 'nosuch'."), command
