"""How many events the local engine folds into a new table in a second, and whether its memory stays the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from benchmarks.check import BALANCES_IN, check_rows, require
from benchmarks.fill import fill_log
from benchmarks.other_code import VIEW
from benchmarks.processes import PeakMemory, Process
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, history
from infra.database.connect import connect
from infra.log.contract import Contract
from projections.engine.live.startup import ensure_started
from projections.engine.views.core_views import agent_views

STREAMS = 200_000
SIZES = {"1 million": 1_000_000, "2 million": 2_000_000, "5 million": 5_000_000}
MEASURED = "2 million"
"""The others are run once, for their memory."""
AFTER_START = "samefold rebuild, start-up apart"
IN_ALL = "samefold rebuild, in all"
WITHIN_S = 300.0
FLAT = 1.15
"""Memory may grow by so much from the smallest log to the largest."""

Pin = Sequence[int]
"""Commits of each partition."""
Rows = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Log:
    """A log to rebuild from, at one of its sizes: the commits of each partition, and the rows that they come to."""

    world: World
    case: str
    count: int
    pin: Pin
    rows: Rows


def run(bench: Bench) -> Result:
    sizes = {case: bench.options.scaled(size) for case, size in SIZES.items()}
    streams = bench.options.scaled(STREAMS)
    samples: list[Sample] = []
    with bench.world() as world:
        logs = logs_of(bench, world, "rebuild", streams, sizes)
        for case, number in turns(sizes, MEASURED, bench.options.rounds):
            samples += _ours(bench, logs[case], number)
    smallest, *_, largest = sizes
    memory = _memory(samples, largest) / _memory(samples, smallest)
    rate = middle(samples, AFTER_START, MEASURED)
    aims = [
        Aim(f"{MEASURED}, start-up apart", 400_000, rate, unit="events/s", case=MEASURED),
        Aim(f"peak memory, {largest} beside {smallest}", FLAT, memory, at_most=True, unit="x"),
    ]
    title = "Events folded into a new table, per second"
    return Result("rebuild", title, "events/s", samples, aims, {"events": sizes, "streams": streams})


def turns(sizes: Iterable[str], measured: str, rounds: int) -> Iterator[tuple[str, int]]:
    """(case, round): the measured one in each round, the others in the first."""
    for number in range(1, rounds + 1):
        for case in sizes:
            if case == measured or number == 1:
                yield case, number


def logs_of(bench: Bench, world: World, name: str, streams: int, sizes: Mapping[str, int]) -> dict[str, Log]:
    """One log; each size is a piece from its beginning."""
    bench.progress.begin(f"{name}: load events", max(sizes.values()))
    rows: dict[int, Rows] = {}
    wanted = set(sizes.values())

    def entered() -> Iterator[Order]:
        """The orders, entered into a ledger on their way, whose rows at each of the sizes are kept."""
        ledger = Ledger(streams)
        for number, order in enumerate(history(streams, max(wanted), bench.chance(name)), start=1):
            ledger.enter(order)
            if number in wanted:
                rows[number] = ledger.rows()
            yield order

    _, pins = fill_log(world.settings, world.commands.id, entered(), bench.progress.advance, marks=wanted)
    return {case: Log(world, case, count, pins[count], rows[count]) for case, count in sizes.items()}


def rebuilds(
    bench: Bench, log: Log, number: int, engine: str, times: int
) -> tuple[list[dict[str, Any]], Process, dict[str, float], float]:
    """Rebuild so often in a process of its own, on a database whose agent stands at the log's pin.

    What the process told of each, the process, what Kafka and PostgreSQL spent, and its highest memory in MB with all its children.
    """
    bench.progress.begin(f"{log.case}, round {number}: {engine} engine", None)
    with bench.world(beside=log.world) as world:
        stand_at(world, log.pin)
        flags = {"engine": engine, "times": times}
        with (
            bench.process(world, f"{engine}-{log.case}-{number}", "benchmarks.rebuilding", **flags) as process,
            PeakMemory(process.pid) as peak,
        ):
            meter = bench.cpu()
            if bench.profile:
                bench.profile.begin([process])
            code = process.wait(WITHIN_S)
            cpu = meter.spent()
        if code:
            process.fail(f"The rebuild ended with exit code {code}.")
        jobs = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
        require(len(jobs) == times, f"{len(jobs)} rebuilds were told, not {times}")
        for told in jobs:
            require(told["commits"] == log.count, f"{told['commits']} commits were folded, not {log.count}")
            table = told["tables"][VIEW]
            check_rows(world.settings, BALANCES_IN.format(sql.Identifier(table)), log.rows, f"{table} ({engine})")
    return jobs, process, cpu, peak.bytes / 2**20


def after_start(log: Log, told: Mapping[str, Any], end: str) -> tuple[float, float]:
    """Events per second with start-up apart: behind the first step that is told, until a stage begins. And those seconds."""
    seconds = told["began"][end] - told["first_step_at"]
    return (log.count - told["first_step"]) / seconds, seconds


def _ours(bench: Bench, log: Log, number: int) -> list[Sample]:
    [told], process, cpu, memory = rebuilds(bench, log, number, "local", 1)
    rate, seconds = after_start(log, told, "catch up")
    cpu = {"rebuild": told["cpu_s"]} | cpu
    more = {
        "start_up_s": told["first_step_at"] - process.started_at,
        "load_s": told["load_s"],
        "index_s": told["index_s"],
        "switch_s": told["ended"] - told["began"]["catch up"],
        "peak_memory_mb": memory,
    }
    whole = told["ended"] - process.started_at
    return [
        Sample(AFTER_START, log.case, number, rate, log.count, seconds, cpu, more),
        Sample(IN_ALL, log.case, number, log.count / whole, log.count, whole, cpu),
    ]


def stand_at(world: World, pin: Pin) -> None:
    """Record that the agent has folded so many commits of each partition: all that a rebuild asks of what is live."""
    with connect(world.settings, "samefold bench") as connection:
        ensure_started(connection, "core", agent_views("core"), Contract.of(world.events))
        for partition, commits in enumerate(pin):
            connection.execute(
                "update positions set next_offset = %s, epoch = 0, seq = %s, command_offset = %s where partition = %s",
                [commits + 1, commits, commits - 1, partition],
            )


def _memory(samples: Sequence[Sample], case: str) -> float:
    return max(one.more["peak_memory_mb"] for one in samples if one.case == case and "peak_memory_mb" in one.more)
