"""make test-all + prove: each starts a JVM, or fails to; more moments to interrupt it find no more.

Spark's start and end: whatever is wrong with it is said in a sentence, and no JVM outlives who started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.processes.java import utf8
from infra.settings import Settings
from spark_jobs.engine import spark as engine
from spark_jobs.engine.jvm import SparkUnavailable
from spark_jobs.engine.session import SparkUnfit, session
from tests.engine.bookkeeper import Bookkeeper
from tests.engine.spark.spark_cluster import plain_environment, runs
from tests.engine.spine import scalar, set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow

CHAOS = pytest.mark.prove(part="chaos")

STARTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tools.cli import print_error
from infra.errors import SamefoldError
from spark_jobs.engine import session as sessions
sessions.STOP_S = float(os.environ.get("STOP_S", sessions.STOP_S))
try:
    with sessions.session("test", "local[1]"):
        print("up", flush=True)
        sys.stdin.read()
except SamefoldError as error:
    print_error(error)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def starting(folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts Spark and waits until its input ends, and a caller that reads what it says."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS],
        env=plain_environment() | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def children(process: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
    try:
        return [one for one in psutil.Process(process.pid).children(recursive=True) if one.name().startswith(name)]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    ("environment", "master", "why", "hint"),
    [
        (
            {},
            "spark://127.0.0.1:9",
            r"No Spark master is reachable at 127\.0\.0\.1:9: .*refused",
            "correct its address",
        ),
        ({}, "spark://nowhere", "No Spark master is reachable at nowhere", "correct its address"),
        ({}, "local-cluster[2,1,1024]", "is not a supported master", "Take spark://"),
        ({}, "loca[2]", "is not a supported master", "Take spark://"),
        ({"SPARK_REMOTE": "sc://localhost"}, "local[2]", "SPARK_REMOTE is set", "Unset it"),
        ({"PYSPARK_PYTHON": "/nowhere/python"}, "local[2]", "PYSPARK_PYTHON is /nowhere/python", "Unset it"),
        ({"SPARK_HOME": "/nowhere"}, "local[2]", "can't be started: .*/nowhere/bin/spark-submit", "SPARK_HOME"),
    ],
)
def test_what_can_be_known_before_is_said_before(
    environment: dict[str, str], master: str, why: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((SparkUnavailable, SparkUnfit), match=why) as refused, session("test", master):
        pass
    assert hint in refused.value.hint


def test_why_a_jvm_did_not_start_is_told(tmp_path: Path) -> None:
    with starting(tmp_path, PYSPARK_SUBMIT_ARGS="--nonsense pyspark-shell") as process:
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert said.decode().startswith(
        "spark-unavailable: Spark's JVM ended with exit code 1: Error: Unrecognized option: --nonsense"
    )
    assert len(said.splitlines()) == 2, said.decode()


def test_a_locale_of_ones_own_is_left_alone() -> None:
    assert utf8({"LANG": "de_DE.UTF-8"}) == {"LANG": "de_DE.UTF-8"}
    assert utf8({"LC_ALL": "C", "LANG": "de_DE.UTF-8"})["LC_ALL"] == utf8({})["LC_ALL"] == "C.UTF-8"


@pytest.mark.parametrize(
    "when",
    [
        "the JVM runs",
        *(
            pytest.param(one, marks=CHAOS)
            for one in ("the script runs", "the JVM listens", "it is up", "it stops slowly")
        ),
    ],
)
def test_ctrl_c_while_spark_starts_leaves_no_process_and_no_traceback(tmp_path: Path, when: str) -> None:
    patience = {"STOP_S": "0.001"} if when == "it stops slowly" else {}
    with starting(tmp_path, SPARK_LOCAL_DIRS=str(tmp_path), TMPDIR=str(tmp_path), **patience) as process:
        assert process.stdout is not None
        match when:
            case "the script runs":
                until(lambda: bool(children(process, "")), when)
            case "the JVM runs":
                until(lambda: bool(children(process, "java")), when)
            case "the JVM listens":
                until(lambda: any(one.net_connections("tcp") for one in children(process, "java")), when)
            case _:
                assert process.stdout.readline() == b"up\n"
        below = children(process, "")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        said, _ = process.communicate(timeout=DEADLINE_S)  # ends when nobody holds the pipe any more
        assert (process.returncode, said) == (130, b"")
    until(lambda: not any(map(runs, below)), "all have ended")


def test_an_executor_without_its_python_is_told_as_that() -> None:
    for told in (
        'Job aborted: Lost task 0.3: java.io.IOException: Cannot run program "/nope": Exec failed, error: 2 (No such file)',
        "Job aborted: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11",
    ):
        error = engine._gave_up(RuntimeError(told))
        assert isinstance(error, SparkUnfit)
        assert "PYSPARK_PYTHON" in error.hint
        assert told.partition(": ")[2][-30:] in error.message


def test_a_killed_agent_on_spark_leaves_neither_jvm_nor_files_whatever_its_folder_and_locale(
    world: Settings, tmp_path: Path
) -> None:
    set_up(world)
    Bookkeeper(world).life(["1", "2"], 3)
    (folder := tmp_path / "Prüfung").mkdir()
    places = {"TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder), "LC_ALL": "C"}
    agent = subprocess.Popen(
        [sys.executable, "-m", "spark_jobs.engine.agent", "--master", "local[2]"],
        env=plain_environment() | world.environment() | places | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
    )
    try:
        until(lambda: bool(scalar(world, "select sum(next_offset) > 0 from positions")), "it folds")
        assert list(folder.rglob("checkpoint-*"))
        [jvm] = children(agent, "java")
    finally:
        agent.kill()
        agent.wait()
    until(lambda: not runs(jvm), "the JVM has ended")
    assert list(folder.glob("spark-*")) == []
    assert list(folder.rglob("checkpoint-*")) == []
