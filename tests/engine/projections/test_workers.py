"""make test + test-all: two processes start in a second; those that die take longer.

Worker processes: results in order, errors as they were raised, and no process that outlives its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.processes import memory
from infra.processes.memory import MemoryShort
from infra.processes.workers import FEW_RECORDS, WorkerDied, processes_for, run
from projections.engine.fold.errors import PoisonEvent
from tests.engine.projections.worker_tasks import ask_for_too_much, die, double, fail_on_three
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_arguments_and_progress_adds_up(processes: int) -> None:
    told: list[int] = []
    assert run(double, [5, 1, 4, 2], processes, told.append) == [10, 2, 8, 4]
    assert sum(told) == 12


def test_an_error_arrives_whole_and_stops_the_others() -> None:
    with pytest.raises(PoisonEvent) as raised:
        run(fail_on_three, [1, 3], 2)
    assert (raised.value.stream, raised.value.version, raised.value.offset) == ("accounts/3", 7, 9)
    assert raised.value.hint


@pytest.mark.slow
def test_a_worker_that_dies_is_a_named_error() -> None:
    with pytest.raises(WorkerDied, match="--processes"):
        run(die, [1, 2], 2)


def test_a_task_is_refused_when_hardly_anything_is_free_and_it_is_what_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_and_total", lambda: (4, 100))
    monkeypatch.setattr(memory, "SMALL", 1 << 50)  # whatever other tests have left in this process
    assert run(double, [1], 1) == [2], "it holds next to nothing"
    monkeypatch.setattr(memory, "SMALL", 1)
    with pytest.raises(MemoryShort, match=r"free\..*--processes"):
        run(double, [1], 1)
    monkeypatch.setattr(memory, "free_and_total", lambda: (6, 100))
    assert run(double, [1], 1) == [2]


def test_memory_that_the_system_refuses_is_named() -> None:
    with pytest.raises(MemoryShort, match="no more memory"):
        run(ask_for_too_much, [1], 1)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = memory.free_and_total()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 250\n")
    assert memory.free_and_total() == (350, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_and_total()[1] == machine[1]


def test_as_many_processes_as_the_size_is_worth() -> None:
    assert processes_for(FEW_RECORDS) == 1
    assert processes_for(FEW_RECORDS + 1) == os.cpu_count()
    assert processes_for(10, wanted=3) == 3


PARENT = """
import signal, sys
from infra.processes.workers import run
from tests.engine.projections.worker_tasks import report_and_wait
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background may have it ignored
    run(report_and_wait, [sys.argv[1], sys.argv[1]], 2)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.slow
def test_workers_end_with_their_parent_however_it_ends(tmp_path: Path, how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "worker")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until(lambda: len(_workers(tmp_path)) == 2, "both workers work")
    if how is signal.SIGINT:
        os.killpg(parent.pid, how)  # as a terminal does it
    else:
        parent.kill()
    assert parent.wait(DEADLINE_S) != 0
    until(lambda: not any(map(_lives, _workers(tmp_path))), "the workers end too")


def _workers(folder: Path) -> list[int]:
    return [int(path.suffix[1:]) for path in folder.glob("worker.*")]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
