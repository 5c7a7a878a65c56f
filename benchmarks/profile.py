"""`--profile`: what our processes do, sampled by py-spy, and which statements take PostgreSQL's time."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.processes import Process
from infra.errors import SamefoldError
from tools.dev.postgres import binaries
from tools.dev.stack import Stack
from tools.terminal import stderr

RATE = 100
"""Samples a second."""
TOP = 20
ATTACHED_S = 10.0
WRITTEN_S = 60.0
LIBRARY = Path("lib", "postgresql", "pg_stat_statements.so")
OTHERS = Path(sys.prefix, "postgres-tls", "bin")
"""Where the tests of TLS keep a build of PostgreSQL that has more than set-up's."""

_TOP = """
select queryid, query, calls, rows, total_exec_time + total_plan_time, shared_blks_read, wal_bytes::bigint
  from pg_stat_statements order by 5 desc limit 200
"""


class NotProfiled(SamefoldError):
    """py-spy can't look into a process."""


class Profile:
    """Of one benchmark, in a folder: `<name>-<process>.speedscope.json` each, and `<name>-statements.json`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.programs = _programs()
        self.settings: Mapping[str, str] = {}
        if self.programs is None:
            stderr.print(
                "[yellow]No statements: PostgreSQL's binaries of set-up have no pg_stat_statements, and there are none in "
                f"{OTHERS}, where `pytest tests/engine/infra/test_on_the_wire.py` puts some.[/yellow]"
            )
        else:
            self.settings = {
                "shared_preload_libraries": "pg_stat_statements",
                "pg_stat_statements.track_planning": "on",
            }
        self._folder = folder
        self._name = name
        self._spies: dict[str, subprocess.Popen[bytes]] = {}
        self._database: psycopg.Connection[Any] | None = None
        self._statements: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(int))

    @contextmanager
    def of(self, stack: Stack) -> Iterator[None]:
        """While the benchmark runs."""
        if self.programs is not None:
            self._database = psycopg.connect(stack.postgres.url(), autocommit=True)
            self._database.execute("create extension if not exists pg_stat_statements")
        try:
            yield
        finally:
            for spy in self._spies.values():
                self._end(spy)
            if self._database is not None:
                self._database.close()
                top = sorted(self._statements.values(), key=lambda one: -one["ms"])[:TOP]
                top = [{**one, "ms": round(one["ms"], 1)} for one in top]
                (self._folder / f"{self._name}-statements.json").write_text(json.dumps(top, indent=1) + "\n")

    def begin(self, processes: Sequence[Process]) -> None:
        """A turn begins: each process is sampled from its first one on until it ends. Raises NotProfiled."""
        for process in processes:
            if process.name not in self._spies:
                self._spies[process.name] = self._attach(process)
        if self._database is not None:
            self._database.execute("select pg_stat_statements_reset()")

    def end(self) -> None:
        """A turn has ended: its statements are added."""
        if self._database is None:
            return
        for key, query, calls, rows, ms, blocks_read, wal_bytes in self._database.execute(_TOP):
            one = self._statements[key]
            one["query"] = " ".join(query.split())
            for name, more in (("calls", calls), ("rows", rows), ("ms", ms)):
                one[name] += more
            one["blocks_read"] += blocks_read
            one["wal_bytes"] += wal_bytes

    def _attach(self, process: Process) -> subprocess.Popen[bytes]:
        found = shutil.which("py-spy", path=str(Path(sys.executable).parent))
        if found is None:
            raise NotProfiled("py-spy is not installed.", "Run `make setup`.")
        file = self._folder / f"{self._name}-{process.name}.speedscope.json"
        told = file.with_suffix(".log")
        command = [found, "record", "--pid", str(process.pid), "--output", str(file), "--format", "speedscope"]
        command += ["--rate", str(RATE), "--subprocesses"]
        with told.open("wb") as output:
            spy = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + ATTACHED_S
        while b"Sampling" not in told.read_bytes():
            if spy.poll() is not None or time.monotonic() > deadline:
                why = " ".join(told.read_text(errors="replace").split()) or "it says nothing"
                raise NotProfiled(
                    f"py-spy can't look into {process.name} (process {process.pid}): {why}",
                    "It needs the right to trace: be root, or set /proc/sys/kernel/yama/ptrace_scope to 0; in a container "
                    "add the capability SYS_PTRACE.",
                )
            time.sleep(0.02)
        told.unlink()
        return spy

    def _end(self, spy: subprocess.Popen[bytes]) -> None:
        """It writes its file when it is interrupted, or when its process has ended."""
        spy.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            spy.wait(WRITTEN_S)
            return
        spy.kill()
        spy.wait()


def _programs() -> Path | None:
    """The folder of PostgreSQL's programs that have pg_stat_statements."""
    return next((folder for folder in (binaries(), OTHERS) if (folder.parent / LIBRARY).is_file()), None)
