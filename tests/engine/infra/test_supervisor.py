"""make test: an http.server starts at once.

Processes are started again when they end, less and less often when they keep ending, and never outlive their supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from infra.processes import supervisor
from infra.processes.supervisor import Child, Supervisor, place
from tests.engine.spine import beside
from tools.testing.waiting import until

SERVES = ("http.server", ("--bind", "127.0.0.1", "0"))
ENDS = ("this", ())


@contextmanager
def supervised(folder: Path, *children: Child) -> Iterator[Supervisor]:
    running = Supervisor(children, log_dir=folder)
    with beside(running.run, running.stop):
        yield running


def test_a_killed_process_is_started_again_and_all_end_with_the_supervisor(tmp_path: Path) -> None:
    one, other = Child("one", *SERVES), Child("other", *SERVES)
    with supervised(tmp_path, one, other):
        until(lambda: bool(one.pid and other.pid), "both run")
        first, untouched = one.pid, other.pid
        assert first
        psutil.Process(first).kill()
        until(lambda: one.starts == 2 and one.pid is not None, "it is started again")
        pids = [one.pid, other.pid]
        assert other.pid == untouched
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)


def test_children_that_are_forked_are_started_again_and_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    program = (
        "from infra.processes.supervisor import Child, Supervisor\n"
        f"if __name__ == '__main__': Supervisor([Child('one', *{SERVES!r})], is_warm=True).run()\n"
    )

    def children() -> list[psutil.Process]:
        """The process that they are forked from, one that tidies up, and the child."""
        return psutil.Process(parent.pid).children(recursive=True)

    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(tmp_path)}) as parent:
        try:
            until(lambda: len(children()) == 3, "the child runs")
            [child] = [one for one in children() if one.ppid() != parent.pid]
            child.kill()
            until(lambda: len(children()) == 3 and child not in children(), "it is started again")
            left = children()
        finally:
            parent.kill()
    until(lambda: not any(map(runs, left)), "all have ended")


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_other_work_beside_a_supervisor_ends_children_and_holds_them(tmp_path: Path) -> None:
    child = Child("one", *SERVES)
    running = Supervisor([child], log_dir=tmp_path)
    seen = list[bool]()

    def work() -> Iterator[None]:
        while child.pid is None:
            yield
        child.is_held = True
        running.end([child])
        for _ in range(3):
            seen.append(child.pid is None)
            yield
        child.is_held = False
        while child.pid is None:
            yield
        running.stop()
        yield

    running.run(work())
    assert seen == [True] * 3
    assert child.starts == 2


def test_a_process_that_keeps_ending_is_started_less_and_less_often(tmp_path: Path) -> None:
    child = Child("zen", *ENDS)
    pauses = []
    with supervised(tmp_path, child):
        for failures in (1, 2, 3):
            until(lambda n=failures: child.failures == n, "it ends")  # type: ignore[misc]
            pauses.append(child.due_at - child.started_at)
    assert pauses[0] < pauses[1] < pauses[2]
    assert "The Zen of Python" in (tmp_path / "zen.log").read_text()


def test_a_process_that_was_healthy_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "HEALTHY_S", 0.0)
    child = Child("zen", *ENDS)
    with supervised(tmp_path, child):
        until(lambda: child.starts == 4, "it is started again and again")
        assert child.failures == 0
    assert "starting it again in 0.0 s" in caplog.text


def test_a_process_that_cannot_be_started_is_tried_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Child("one", *SERVES), Child("other", *SERVES)
    with supervised(tmp_path, one, other):
        until(lambda: bool(one.pid and other.pid), "both run")
        untouched = other.pid
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "nothing"))
            psutil.Process(one.pid).kill()
            until(lambda: one.failures >= 2, "it can't be started")
        until(lambda: one.pid is not None, "it is started again")
        assert other.pid == untouched


def test_a_process_that_does_not_end_when_asked_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.5)
    child = Child("one", *SERVES)
    with supervised(tmp_path, child):
        until(lambda: child.pid is not None, "it runs")
        pid = child.pid
        assert pid
        child.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
    assert not psutil.pid_exists(pid)


def test_processes_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    """Nobody is left to tell them; the pipe that was their standard input tells them."""
    program = (
        "from pathlib import Path\n"
        "from infra.processes.supervisor import Child, Supervisor\n"
        f"Supervisor([Child('one', *{SERVES!r})], log_dir=Path({str(tmp_path)!r})).run()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: bool(psutil.Process(parent.pid).children()), "the child runs")
        [child] = psutil.Process(parent.pid).children()
        until(lambda: "infra.processes.supervised" in child.cmdline(), "it has begun")
    finally:
        parent.kill()
        parent.wait(10)
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child has ended")


def test_each_supervisor_of_a_machine_has_a_place_of_its_own_and_the_next_one_takes_it_over() -> None:
    groups = f"test-{uuid4()}"
    with place(groups) as first, place(groups) as second:
        assert first != second
    with place(groups) as again:
        assert again == first
