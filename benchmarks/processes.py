"""The processes under test: started for one measurement, ended with it, whatever happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, Self

import psutil

from demo.background_thread import BackgroundThread
from infra.errors import SamefoldError
from infra.settings import Settings

GRACE_S = 20.0
STALL_S = 120.0
MEMORY_EVERY_S = 0.1


class BenchmarkStalled(SamefoldError):
    """A process under test ended, or nothing went on."""


class Process:
    """`with Process(settings, folder, "h1", "commands.handler", "--name", "h1") as handler:` runs a module.

    Its output goes to `<folder>/<name>.log`, replaced at each start. It ends with this block, and with this process.
    """

    def __init__(self, settings: Settings, folder: Path, name: str, module: str, *arguments: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [sys.executable, "-m", "infra.processes.supervised", module, *arguments]
        self._environment = os.environ | settings.environment()
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0

    def __enter__(self) -> Self:
        with self.log.open("wb") as output:
            self.started_at = time.time()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the benchmark only, which then ends this in order
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """In order, where it still runs."""
        process = self._running()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdin is not None
        process.stdin.close()

    @property
    def pid(self) -> int:
        return self._running().pid

    def check(self) -> None:
        """Raises BenchmarkStalled when the process has ended."""
        if self._running().poll() is not None:
            self.fail(f"{self.name} ended with exit code {self._running().returncode}.")

    def wait(self, seconds: float) -> int:
        """The exit code, after its own end. Raises BenchmarkStalled."""
        try:
            return self._running().wait(seconds)
        except subprocess.TimeoutExpired:
            self.fail(f"{self.name} did not end within {seconds:.0f} s.")

    def wait_for_log(self, text: str, seconds: float = STALL_S) -> None:
        """Until a line with `text` stands in its log. Raises BenchmarkStalled."""
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text(errors="replace"):
            self.check()
            if time.monotonic() > deadline:
                self.fail(f"{self.name} did not say '{text}' within {seconds:.0f} s.")
            time.sleep(0.02)

    def fail(self, what: str) -> NoReturn:
        """Raises BenchmarkStalled."""
        raise BenchmarkStalled(what, self.tail())

    def tail(self) -> str:
        """The end of its log."""
        return "Its log ends with: " + " | ".join(self.log.read_text(errors="replace").splitlines()[-6:])

    def last_line(self) -> str:
        """Of its log."""
        return self.log.read_text().splitlines()[-1]

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not entered"
        return self._process


def wait_until(
    done: Callable[[], int], total: int, processes: tuple[Process, ...], advance: Callable[[int], None], *, every: float
) -> None:
    """Look `every` so many seconds until `done` counts up to `total`.

    Raises BenchmarkStalled when a process ends before, or two minutes pass without a step.
    """
    was, deadline = 0, time.monotonic() + STALL_S
    while (now := done()) < total:
        for process in processes:
            process.check()
        if now > was:
            advance(now - was)
            was, deadline = now, time.monotonic() + STALL_S
        elif time.monotonic() > deadline:
            tails = " ".join(process.tail() for process in processes)
            raise BenchmarkStalled(f"Stopped at {now:,} of {total:,} for {STALL_S:.0f} s.", tails)
        time.sleep(every)
    advance(now - was)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Cpu:
    """Seconds of processor time, user and system, that named groups of processes spend from now on.

    A group is main processes with all their children, those that have come and gone too.
    """

    def __init__(self, groups: Mapping[str, list[int]], at_end: Callable[[], None] = lambda: None) -> None:
        self._at_end = at_end
        self._groups = {name: [psutil.Process(pid) for pid in pids] for name, pids in groups.items()}
        self._was = self._now()

    def spent(self) -> dict[str, float]:
        now = self._now()
        self._at_end()
        return {name: round(now[name] - was, 2) for name, was in self._was.items()}

    def _now(self) -> dict[str, float]:
        return {name: sum(map(_seconds, processes)) for name, processes in self._groups.items()}


def _seconds(main: psutil.Process) -> float:
    total = 0.0
    try:
        for process in [main, *main.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # counted by its parent from now on
            total += times.user + times.system + times.children_user + times.children_system
    except psutil.NoSuchProcess:
        pass
    return total


class PeakMemory(BackgroundThread):
    """`with PeakMemory(pid) as peak: …`, then `peak.bytes`: resident, ten looks a second; shared pages count for each."""

    def __init__(self, pid: int) -> None:
        super().__init__("peak-memory")
        self._main = psutil.Process(pid)
        self.bytes = 0

    def _work(self) -> None:
        while not self._ended.wait(MEMORY_EVERY_S):
            try:
                family = [self._main, *self._main.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            total = 0
            for process in family:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.bytes = max(self.bytes, total)
