"""How many events the local engine folds into a new table in a second, and whether its memory stays the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psycopg import sql

from benchmarks.check import check_rows, require
from benchmarks.fill import fill_log
from benchmarks.memory import PeakMemory
from benchmarks.processes import Process
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, history
from infra.database.connect import connect
from projections.engine.live.startup import Contract, ensure_started
from projections.engine.views.core_views import agent_views

STREAMS = 200_000
SIZES = {"1 million": 1_000_000, "2 million": 2_000_000, "5 million": 5_000_000}
MEASURED = "2 million"
"""The others are run once, for their memory."""
AFTER_START = "samefold rebuild, start-up apart"
IN_ALL = "samefold rebuild, in all"
VIEW = "balances"
WITHIN_S = 300.0
FLAT = 1.15
"""Memory may grow by so much from the smallest log to the largest."""

BALANCES = sql.SQL("select account, transactions + 1, cents from {}")

Pin = Sequence[int]
"""Commits of each partition."""
Rows = Mapping[str, tuple[int, int]]


def run(bench: Bench) -> Result:
    sizes = {case: bench.options.scaled(size) for case, size in SIZES.items()}
    streams = bench.options.scaled(STREAMS)
    samples: list[Sample] = []
    with bench.world() as log:
        bench.progress.begin("rebuild: load events", max(sizes.values()))
        marks: dict[int, Rows] = {}
        orders = entered(history(streams, max(sizes.values()), bench.chance("rebuild")), streams, sizes, marks)
        _, pins = fill_log(log.settings, log.commands.id, orders, bench.progress.advance, marks=sizes.values())
        for case, number in _turns(sizes, bench.options.rounds):
            count = sizes[case]
            bench.progress.begin(f"rebuild {case}, round {number}", None)
            samples += _ours(bench, log, pins[count], marks[count], case, count, number)
    smallest, *_, largest = sizes
    memory = _memory(samples, largest) / _memory(samples, smallest)
    aims = [
        Aim(
            f"{MEASURED}, start-up apart",
            400_000,
            middle(samples, AFTER_START, MEASURED),
            unit="events/s",
            case=MEASURED,
        ),
        Aim(f"peak memory, {largest} beside {smallest}", FLAT, memory, at_most=True, unit="x"),
    ]
    title = "Events folded into a new table, per second"
    return Result("rebuild", title, "events/s", samples, aims, {"events": sizes, "streams": streams})


def _turns(sizes: Mapping[str, int], rounds: int) -> Iterator[tuple[str, int]]:
    for number in range(1, rounds + 1):
        for case in sizes:
            if case == MEASURED or number == 1:
                yield case, number


def entered(orders: Iterator[Order], streams: int, sizes: Mapping[str, int], marks: dict[int, Rows]) -> Iterator[Order]:
    """Enters the orders into a ledger on their way, and keeps its rows at each of the sizes."""
    ledger = Ledger(streams)
    wanted = set(sizes.values())
    for number, order in enumerate(orders, start=1):
        ledger.enter(order)
        if number in wanted:
            marks[number] = ledger.rows()
        yield order


def _ours(bench: Bench, log: World, pin: Pin, rows: Rows, case: str, count: int, number: int) -> list[Sample]:
    """Rebuild in a process of its own, on a database whose agent stands at the pin.

    The rate with start-up apart is that of everything behind the first step that is told, until the keys are made.
    """
    with bench.beside(log) as world:
        stand_at(world, pin)
        with (
            Process(world.settings, bench.folder, f"rebuild-{case}-{number}", "benchmarks.rebuilding", VIEW) as process,
            PeakMemory(process.pid) as peak,
        ):
            meter = bench.cpu()
            code = process.wait(WITHIN_S)
            cpu = meter.spent()
        if code:
            process.fail(f"The rebuild ended with exit code {code}.")
        told: dict[str, Any] = json.loads(process.log.read_text().splitlines()[-1])
        cpu = {"rebuild": told["cpu_s"]} | cpu
        require(told["commits"] == count, f"{told['commits']} commits were folded, not {count}")
        table = told["tables"][VIEW]
        check_rows(world.settings, BALANCES.format(sql.Identifier(table)), rows, table)
    started = process.started_at
    ready = told["began"]["catch up"]
    after_start = (count - told["first_step"]) / (ready - told["first_step_at"])
    more = {
        "start_up_s": told["first_step_at"] - started,
        "load_s": told["load_s"],
        "index_s": told["index_s"],
        "switch_s": told["ended"] - ready,
        "peak_memory_mb": peak.bytes / 2**20,
    }
    whole = told["ended"] - started
    return [
        Sample(AFTER_START, case, number, after_start, count, ready - told["first_step_at"], cpu, more),
        Sample(IN_ALL, case, number, count / whole, count, whole, cpu),
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
