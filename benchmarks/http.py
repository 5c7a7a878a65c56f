"""How long a command takes over HTTP until its outcome is answered, where that time goes, and how many a second are answered.

All processes that `make run` starts are running. It is compared with the same framework under the same server answering each
command with a constant and, one at a time, with the same command sent to the topic itself.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.check import BALANCES, OUTCOMES, check_count, check_public, check_rows, require
from benchmarks.http_client import HOST, Exchange
from benchmarks.http_parts import MIDDLE, TAIL, means, parts_of
from benchmarks.latency import CLIENT_ACCOUNTS, client_of, repeat
from benchmarks.processes import Process, free_port, wait_until
from benchmarks.reading import progress_of
from benchmarks.results import Aim, Result, Sample, curve, latency_sample, middle, percentile
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, deposits, opening_orders
from infra.processes import supervisor
from infra.processes.supervisor import Child
from policies.engine.activations import start_all
from policies.engine.policy import agent_of, discover
from projections.engine.views.core_views import all_views

OURS = "samefold, request to answer"
WITHOUT = "the same command without HTTP"
CONSTANT = "FastAPI and uvicorn, a constant"
IDLE, STEADY, FULL = "idle", "500/s", "64 connections"
RATE = 500
CONNECTIONS = {IDLE: 1, STEADY: 64, FULL: 64}
REQUESTS = {IDLE: 2_000, STEADY: 10_000, FULL: 20_000}
"""Of a turn."""
BLOCKS = 4
"""Of an idle turn: each contender's in turn."""
WARM_UP = 5_000
"""Requests over 64 connections that do not count: the broker compiles what it does often."""
WARM_UP_WITHOUT = 200
ACCOUNTS = 1_000
TURN_S = 180.0
READY_S = 60.0
REACTING = ("policies", "publisher")
"""Groups of processes that follow the log and answer nobody."""


def run(bench: Bench) -> Result:
    with bench.world() as world:
        turns = _Turns(bench, world)
        with (
            served(bench, world) as ours,
            _constant(bench, world) as constant,
            client_of(world, bench.chance("http"), turns.ledger.enter, ACCOUNTS) as client,
        ):
            turns.open_accounts(ours)
            turns.warm_up(ours, constant)
            repeat(client.step, WARM_UP_WITHOUT)
            for number in range(1, bench.options.rounds + 1):
                for case in REQUESTS:
                    bench.progress.begin(f"http {case}, round {number}", None)
                    turns.take(case, number, {CONSTANT: constant, OURS: ours}, client.step)
            running = [*ours.processes]
        parts = _divided(bench, world, turns)
        turns.check()
    samples = turns.samples
    p99 = median(one.more["p99_ms"] for one in samples if (one.contender, one.case) == (OURS, IDLE))
    steady = median(one.more["p99_ms"] for one in samples if (one.contender, one.case) == (OURS, STEADY))
    idle = middle(samples, OURS, IDLE)
    aims = [
        Aim("p50 idle", 5.0, idle, at_most=True, unit="ms"),
        Aim("p99 idle", 15.0, p99, at_most=True, unit="ms"),
        Aim(f"p50 idle beside {WITHOUT}", 1.3, idle / middle(samples, WITHOUT, IDLE), at_most=True, unit="x"),
        Aim(f"p99 at {STEADY} beside p99 idle", 3.0, steady / p99, at_most=True, unit="x"),
    ]
    beside = {case: middle(samples, OURS, case) / middle(samples, CONSTANT, case) for case in REQUESTS}
    curves = {f"{who}, {case}": curve(times) for (who, case), times in turns.times.items() if case != FULL}
    plots = {"curves": curves, "parts": parts, "beside_constant": {case: round(x, 3) for case, x in beside.items()}}
    size = {"requests": {case: turns.size(case) for case in REQUESTS}, "accounts": ACCOUNTS, "running": running}
    title = "From sending a command over HTTP until its outcome is answered"
    return Result("http", title, f"ms, p50; {FULL}: answers/s", samples, aims, size, plots)


@dataclass(frozen=True, slots=True)
class Server:
    """Who answers at a port, with all processes behind it by group."""

    port: int
    processes: Mapping[str, Process]

    def check(self) -> None:
        for process in self.processes.values():
            process.check()


def children_of(place: str, port: int) -> dict[str, Child]:
    """What `samefold run all` runs, and so `make run`: one process of each group."""
    agents = sorted({view.agent for view in all_views().values()})
    children = [
        *supervisor.handlers(1, place),
        *(child for agent in agents for child in supervisor.agents(1, place, agent)),
        *supervisor.policies(1, place),
        supervisor.publisher(place),
        supervisor.api(place, HOST, port),
    ]
    return {child.name.removesuffix("-1"): child for child in children}


@contextmanager
def served(bench: Bench, world: World, marks: Path | None = None, *, reacting: bool = True) -> Iterator[Server]:
    """All that `make run` starts, and the API answers; with `reacting=False` no policies and no publisher.

    In a folder `marks` those on a request's way leave what they noted, each in a file of its group's name.
    """
    start_all(world.settings)  # as `make run` does, before the service is asked anything
    port = free_port()
    with ExitStack() as open_:
        processes = {}
        for group, child in children_of(world.settings.group_prefix, port).items():
            if group not in REACTING:
                noting = ("benchmarks.http_marks", str(marks / group)) if marks else ()
                processes[group] = open_.enter_context(_child(bench, world, child, *noting))
        server = Server(port, processes)
        wait_for(server, "/health/ready", 200)
        yield open_.enter_context(reacted_to(bench, world, server)) if reacting else server


@contextmanager
def reacted_to(bench: Bench, world: World, server: Server) -> Iterator[Server]:
    """The same with policies and publisher, which have read all that there is. Raises RunVoid where they missed something."""
    with ExitStack() as open_:
        processes = {
            group: open_.enter_context(_child(bench, world, child))
            for group, child in children_of(world.settings.group_prefix, server.port).items()
            if group in REACTING
        }
        both = Server(server.port, {**server.processes, **processes})
        settle(world, both)
        yield both
        settle(world, both)
        check_public(world.settings)


def _child(bench: Bench, world: World, child: Child, *noting: str) -> Process:
    name = f"{world.settings.group_prefix}-{child.name}"
    return bench.process(world, name, *noting, child.module, *child.arguments)


def settle(world: World, server: Server) -> dict[str, float]:
    """Wait until each command has its outcome, and policies and publisher, if they run, have read the log to its end.

    Each command must come to one commit. Returns the seconds until each of the three was done. Raises BenchmarkStalled.
    """
    began = time.monotonic()
    behind = {}
    with progress_of(world) as progress:
        wait = partial(wait_until, processes=tuple(server.processes.values()), advance=lambda _: None, every=0.02)
        wait(progress.answered, progress.asked())
        behind["outcomes_behind_s"] = time.monotonic() - began
        end = progress.appended()
        following: dict[str, list[Callable[[], int]]] = {
            "policies": [partial(progress.folded, agent_of(policy)) for policy in discover()],
            "publisher": [progress.published],
        }
        for group, readers in following.items():
            if group in server.processes:
                for read in readers:
                    wait(read, end)
                behind[f"{group}_behind_s"] = time.monotonic() - began
    return behind


@contextmanager
def _constant(bench: Bench, world: World) -> Iterator[Server]:
    port = free_port()
    with bench.process(world, "constant", "benchmarks.peers.constant", port=port) as process:
        server = Server(port, {"constant": process})
        wait_for(server, "/", 404)
        yield server


def wait_for(server: Server, path: str, status: int) -> None:
    def answers() -> int:
        with suppress(httpx.TransportError):
            return int(httpx.get(f"http://{HOST}:{server.port}{path}", timeout=READY_S).status_code == status)
        return 0

    wait_until(answers, 1, tuple(server.processes.values()), lambda _: None, every=0.05)


@dataclass(slots=True)
class _Turns:
    """Turns of both contenders, and the ledger of all that ours was asked for."""

    bench: Bench
    world: World
    ledger: Ledger = field(default_factory=lambda: Ledger(ACCOUNTS + CLIENT_ACCOUNTS))
    samples: list[Sample] = field(default_factory=list)
    times: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Milliseconds by contender and case, of all rounds."""
    versions: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Those that were answered, by account."""
    _seeds: Iterator[int] = field(default_factory=lambda: count(1))

    def size(self, case: str) -> int:
        return self.bench.options.scaled(REQUESTS[case], least=50)

    def open_accounts(self, server: Server) -> None:
        orders = opening_orders(ACCOUNTS + CLIENT_ACCOUNTS, self.bench.chance("open"))
        self.ledger.enter_all(orders)
        with progress_of(self.world) as progress:
            progress.carry_out(self.bench, orders, "http: open accounts", *server.processes.values())

    def warm_up(self, *servers: Server) -> None:
        for server in servers:
            self.ask(server, FULL, self.bench.options.scaled(WARM_UP))

    def take(self, case: str, number: int, servers: Mapping[str, Server], without: Callable[[], None]) -> None:
        """One turn of each; the idle one in blocks, and without HTTP, too. Raises RunVoid for any answer but the right one."""
        measured = {contender: _Turn() for contender in servers}
        blocks, times = BLOCKS if case == IDLE else 1, list[float]()
        for _ in range(blocks):
            for contender, server in servers.items():
                turn = measured[contender]
                meter = self.bench.cpu(**{group: [process] for group, process in server.processes.items()})
                exchanges, client_s = self.ask(server, case, self.size(case) // blocks)
                turn.enter(exchanges, meter.spent() | {"client": client_s})
            if case == IDLE:
                times += repeat(without, self.size(case) // blocks)
        for contender, turn in measured.items():
            self.times[contender, case] += turn.times
            sample = latency_sample(contender, case, number, turn.times)
            cpu = {group: round(seconds, 2) for group, seconds in turn.cpu.items()}
            sample = replace(sample, seconds=turn.seconds, cpu=cpu)
            rate = len(turn.times) / turn.seconds
            if case == FULL:
                sample = replace(sample, value=rate, more={"p50_ms": sample.value} | sample.more)
            elif case == STEADY:
                sample.more["answers_per_s"] = rate
            self.samples.append(sample)
        if times:
            self.times[WITHOUT, case] += times
            self.samples.append(latency_sample(WITHOUT, case, number, times))

    def ask(self, server: Server, case: str, size: int) -> tuple[list[Exchange], float]:
        """The exchanges in the order of answers, and the client's processor time. Raises RunVoid, BenchmarkStalled."""
        seed = next(self._seeds)
        given: dict[str, Any] = {"port": server.port, "connections": CONNECTIONS[case], "count": size}
        given |= {"first": 0, "accounts": ACCOUNTS, "seed": seed, "rate": RATE if case == STEADY else 0}
        with self.bench.process(self.world, "load", "benchmarks.http_client", **given) as load:
            if load.wait(TURN_S):
                load.fail("The client of the benchmark failed.")
        server.check()
        told = json.loads(load.last_line())
        exchanges = [Exchange(*one) for one in told["exchanges"]]
        require(len(exchanges) == size, f"{len(exchanges)} of {size} requests were answered")
        if "constant" not in server.processes:
            self._enter(exchanges, seed, size)
        return exchanges, told["cpu_s"]

    def _enter(self, exchanges: Sequence[Exchange], seed: int, size: int) -> None:
        orders = list(deposits(0, ACCOUNTS, size, seed))
        self.ledger.enter_all(orders)
        for one in exchanges:
            require(one.status == 200, f"order {orders[one.number].id} was answered {one.status}")
            self.versions[orders[one.number].account].append(one.version)

    def check(self) -> None:
        """Each deposit is in the rows once, and was answered with a version of its own. Raises RunVoid."""
        check_rows(self.world.settings, BALANCES, self.ledger.rows(), "balances")
        check_count(self.world.settings, OUTCOMES, sum(self.ledger.version), "outcomes")
        check_versions(self.versions, self.ledger.version[:ACCOUNTS])


@dataclass(slots=True)
class _Turn:
    """What a contender's blocks came to: milliseconds of each request, and seconds."""

    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def enter(self, exchanges: Sequence[Exchange], cpu: Mapping[str, float]) -> None:
        self.times += [1000 * (one.answered - one.since) for one in exchanges]
        self.seconds += max(one.answered for one in exchanges) - min(one.sent for one in exchanges)
        for group, seconds in cpu.items():
            self.cpu[group] += seconds


def check_versions(answered: Mapping[int, Sequence[int]], versions: Sequence[int]) -> None:
    """Every deposit on an account, which was opened as its version 1, was answered a version of its own. Raises RunVoid."""
    for account, version in enumerate(versions):
        found = sorted(answered.get(account, ()))
        require(found == list(range(2, version + 1)), f"account {account} was answered the versions {found}")


def _divided(bench: Bench, world: World, turns: _Turns) -> dict[str, Any]:
    """Where the time goes: of the fifth in the middle, and of the slowest hundredth, of requests one at a time."""
    folder = bench.folder / "marks"
    folder.mkdir()
    with served(bench, world, folder) as server:
        turns.warm_up(server)
        bench.progress.begin("http idle, divided", None)
        exchanges, _ = turns.ask(server, IDLE, turns.size(IDLE))
    marks: dict[str, list[float]] = defaultdict(list)
    for file in folder.iterdir():
        for point, at in json.loads(file.read_text()):
            marks[point].append(at)
    divided = parts_of(exchanges, {point: sorted(times) for point, times in marks.items()})
    times = [1000 * (one.answered - one.sent) for one in exchanges]
    return {
        "p50_ms": round(median(times), 3),
        "p99_ms": round(percentile(times, 99), 3),
        "middle": {name: round(ms, 3) for name, ms in means(divided, MIDDLE).items()},
        "slowest": {name: round(ms, 3) for name, ms in means(divided, TAIL).items()},
    }
