"""What a start costs, how soon a process that was killed is back at work, and what all processes cost while nobody asks.

Processor time of a start, from nothing until it serves, is compared with that of an interpreter that imports the two client
libraries; both have their bytecode, as in an image (Dockerfile). The time after a kill is compared with the session time-out, after
which Kafka would give the partitions to another process.
"""

from __future__ import annotations

import compileall
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from statistics import median

import httpx
import psutil

from benchmarks.check import OUTCOMES, check_count, require
from benchmarks.http import Server, wait_for
from benchmarks.http_client import HOST
from benchmarks.processes import Process, free_port, wait_until
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from infra.settings import SERVICE

IMPORTS = "import psycopg, confluent_kafka"
START, BACK, IDLE = "processor time until it serves", "back at work after kill -9", "processor time per second, idle"
SERVES = {
    "agent": ("projections.engine.live.agent", "has partitions"),
    "handler": ("commands.handler", "serving from command"),
    "api": ("api", ""),
    "policies": ("policies.engine.process", "has partitions"),
    "publisher": ("policies.engine.publisher", "has partitions"),
}
"""Each process's module, and what its log says once it serves; the API's readiness is asked for."""
ALL = "run all"
NOBODY, BROKER = "broker without clients", "broker"
KILLED = ("handler", "agent", "api")
"""Each once in a round, when it has run for longer than the supervisor's HEALTHY_S."""
IDLE_S, SETTLE_S = 30, 15
BACK_WITHIN_S = 60.0
AGAIN_S = 0.01
TIMES = 2.5
BEYOND_MS = 1_500
IDLE_MS = 40
_names = count(1)


def run(bench: Bench) -> Result:
    samples: list[Sample] = []
    compileall.compile_dir(SERVICE.parent, rx=re.compile(r"/\.venv/|/tests/"), quiet=1)
    with bench.world() as world:
        session_ms = world.settings.session_timeout_ms
        for number in range(1, bench.options.rounds + 1):
            samples += _starts(bench, world, number)
            samples += _running(bench, world, number)
            samples += _idle(bench, {NOBODY: _broker(bench)}, number)
        check_count(world.settings, OUTCOMES, bench.options.rounds * (1 + len(KILLED)), "outcomes")
    imports = middle(samples, IMPORTS, START)
    aims = [
        Aim(
            f"start of {name} beside the imports", TIMES, middle(samples, name, START) / imports, at_most=True, unit="x"
        )
        for name in (*SERVES, ALL)
    ]
    aims += [
        Aim(
            f"{name}: back after a kill, beyond the session time-out",
            BEYOND_MS,
            max(middle(samples, name, BACK) - session_ms, 0),
            at_most=True,
            unit="ms",
        )
        for name in KILLED
    ]
    ours = sum(middle(samples, name, IDLE) for name in (*SERVES, ALL))
    beside = middle(samples, BROKER, IDLE) / middle(samples, NOBODY, IDLE)
    aims += [
        Aim("idle: all our processes", IDLE_MS, ours, at_most=True, unit="ms/s"),
        Aim("idle: the broker beside itself without clients", 2, beside, at_most=True, unit="x"),
    ]
    size = {"session_timeout_ms": session_ms, "idle_s": bench.options.scaled(IDLE_S, least=1)}
    title = "Starts, restarts and idle processes"
    return Result("starts", title, "ms; idle: ms/s", samples, aims, size)


# ── starts ──


def _starts(bench: Bench, world: World, number: int) -> Iterator[Sample]:
    bench.progress.begin(f"starts, round {number}", None)
    yield Sample(IMPORTS, START, number, _imports_ms(), 1, 0.0)
    with ExitStack() as open_:
        for name, (module, served) in SERVES.items():
            port, member = free_port(), f"{world.settings.group_prefix}-{name}"
            flags = {"name": member} | ({"host": HOST, "port": port} if name == "api" else {})
            process = open_.enter_context(bench.process(world, f"{member}-{number}", module, **flags))
            if name == "api":
                wait_for(Server(port, {name: process}), "/health/ready", 200)
            else:
                process.wait_for_log(served)
            yield Sample(name, START, number, 1000 * _seconds(process.pid), 1, time.time() - process.started_at)
    with _all(bench, world) as server:
        main = server.processes[ALL]
        wait_until(lambda: bool(_children(main)), 1, (main,), lambda _: None, every=0.005)
        yield Sample(ALL, START, number, 1000 * _seconds(main.pid), 1, time.time() - main.started_at)


def _imports_ms() -> float:
    """The median of some."""
    found = []
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", IMPORTS])
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        require(process.returncode == 0, "the imports failed")
        found.append(1000 * (used.ru_utime + used.ru_stime))
    return median(found)


def _seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


# ── all processes, as they are run ──


@contextmanager
def _all(bench: Bench, world: World) -> Iterator[Server]:
    port = free_port()
    name = f"{world.settings.group_prefix}-all-{next(_names)}"
    with bench.process(
        world, name, "benchmarks.run_all", host=HOST, port=port, name=world.settings.group_prefix
    ) as main:
        yield Server(port, {ALL: main})


def _children(main: Process) -> dict[str, psutil.Process]:
    """The supervised processes, by the names of `SERVES`."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(main.pid).children():
        command = child.cmdline()
        found |= {name: child for name, (module, _) in SERVES.items() if module in command}
    return found


def _running(bench: Bench, world: World, number: int) -> Iterator[Sample]:
    with (
        _all(bench, world) as server,
        httpx.Client(base_url=f"http://{HOST}:{server.port}", timeout=BACK_WITHIN_S) as client,
    ):
        wait_for(server, "/health/ready", 200)
        main = server.processes[ALL]
        _until_answered(client)
        ours = {name: child.pid for name, child in _children(main).items()}
        yield from _idle(bench, {ALL: main.pid, **ours, BROKER: _broker(bench)}, number)
        for name in KILLED:
            bench.progress.begin(f"kill of {name}, round {number}", None)
            killed = _children(main)[name]
            began = time.monotonic()
            killed.kill()
            _until_answered(client)
            seconds = time.monotonic() - began
            yield Sample(name, BACK, number, 1000 * seconds, 1, seconds)


def _until_answered(client: httpx.Client) -> None:
    """Until a new command is answered with its outcome; sent again where it is not."""
    name = f"starts-{next(_names)}"
    deadline = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < deadline:
        try:
            answer = client.post(
                f"/accounts/{name}/open-account",
                json={"overdraft_limit": 0, "on": "2026-01-01"},
                headers={"Idempotency-Key": f'"{name}"'},
            )
        except httpx.TransportError:
            time.sleep(AGAIN_S)
            continue
        if answer.status_code == 200:
            return
        require(answer.status_code in (202, 503), f"a command was answered {answer.status_code}: {answer.text}")
        time.sleep(AGAIN_S)
    require(False, "no command is answered any more")


def _idle(bench: Bench, pids: Mapping[str, int], number: int) -> Iterator[Sample]:
    seconds = bench.options.scaled(IDLE_S, least=1)
    bench.progress.begin(f"idle, round {number}", None)
    time.sleep(bench.options.scaled(SETTLE_S, least=1))
    was, began = {name: _seconds(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)
    lasted = time.monotonic() - began
    for name, pid in pids.items():
        yield Sample(name, IDLE, number, 1000 * (_seconds(pid) - was[name]) / lasted, 1, lasted)


def _broker(bench: Bench) -> int:
    broker = bench.stack.kafka.process()
    assert broker is not None, "it has ended"
    return broker.pid
