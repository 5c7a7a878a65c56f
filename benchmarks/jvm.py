"""The same work on the JVM: fold a log's events, one row per event into PostgreSQL, beside Flink and Kafka Streams.

Ours with the one view that they have, then with the states and outcomes that the write side needs, and as a rebuild.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks.check import require
from benchmarks.fill import fill_log
from benchmarks.peers.job import Job
from benchmarks.peers.jvm import jar_of
from benchmarks.peers.simple_tables import balances_of
from benchmarks.peers.turn import turn
from benchmarks.project import fold
from benchmarks.rebuild import Log, Rows, after_start, rebuilds
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, history
from projections.engine.views.view import CORE

CASES = {"wide": 200_000, "hot": 1_000}
"""Accounts."""
EVENTS = 800_000
AGENT = "bench"
"""Of the one view: an agent of its own, so without states and outcomes."""
ONE = "samefold, one view, 1 process"
TWO = "samefold, one view, 2 processes"
WITH_CORE = "samefold, states, outcomes and one view, 1 process"
REBUILD = "samefold rebuild, local engine"
FLINK = "Flink 2.0.1, JDBC sink"
STREAMS = "Kafka Streams 4.3.1, no database"
PEERS = {FLINK: "flink", STREAMS: "streams"}


class _Case(NamedTuple):
    world: World
    orders: Sequence[Order]
    rows: Rows
    commits: Sequence[int]
    """Of each partition."""


def run(bench: Bench) -> Result:
    count = bench.options.scaled(EVENTS)
    accounts = {case: bench.options.scaled(size) for case, size in CASES.items()}
    built = [peer for peer in PEERS if jar_of(PEERS[peer]).is_file()]
    samples: list[Sample] = []
    with ExitStack() as worlds:
        cases = {
            case: _loaded(bench, worlds.enter_context(bench.world()), case, size, count)
            for case, size in accounts.items()
        }
        for number in range(1, bench.options.rounds + 1):
            for case, (world, orders, rows, commits) in cases.items():
                for contender, processes, agent in ((ONE, 1, AGENT), (TWO, 2, AGENT), (WITH_CORE, 1, CORE)):
                    samples.append(fold(bench, world, orders, contender, case, number, processes, agent))
                samples += [_peer(bench, cases[case], peer, case, number) for peer in built]
                if case == "wide":
                    samples.append(_rebuild(bench, Log(world, case, count, commits, rows), number))
    size = {"events": count, "accounts": accounts}
    return Result(
        "jvm", "Events folded, per second", "events/s", samples, _aims(samples, built), size, {}, not_built(built)
    )


def not_built(built: Collection[str]) -> list[str]:
    """What the report says of the other peers."""
    missing = [peer for peer in PEERS if peer not in built]
    return [f"{' and '.join(missing)}: build them with `make bench-jvm`, which needs Maven"] if missing else []


def _aims(samples: Sequence[Sample], built: Sequence[str]) -> list[Aim]:
    def beside(ours: str, other: str, case: str, wanted: float) -> Aim:
        found = middle(samples, ours, case) / middle(samples, other, case)
        return Aim(f"{ours}, beside {other}, {case}", wanted, found, unit="x")

    aims = [beside(WITH_CORE, ONE, "wide", 0.6)]
    if FLINK in built:
        aims += [beside(TWO, FLINK, "wide", 1.6), beside(TWO, FLINK, "hot", 2.2), beside(REBUILD, FLINK, "wide", 5)]
    if STREAMS in built:
        aims += [beside(TWO, STREAMS, "wide", 1.4), beside(TWO, STREAMS, "hot", 1.2)]
    return aims


def _loaded(bench: Bench, world: World, case: str, accounts: int, count: int) -> _Case:
    bench.progress.begin(f"jvm {case}: load events", count)
    orders = list(history(accounts, count, bench.chance("jvm", case)))
    ledger = Ledger(accounts)
    ledger.enter_all(orders)
    commits, _ = fill_log(world.settings, world.commands.id, orders, bench.progress.advance)
    return _Case(world, orders, ledger.rows(), commits)


def _peer(bench: Bench, on: _Case, contender: str, case: str, number: int) -> Sample:
    """From the first event that it reads to the last that it has folded and, of Flink, given to the database."""
    count = len(on.orders)
    job = Job(topic=on.world.events.name, count=count, options={"peer": PEERS[contender]})
    with turn(bench, on.world.settings, "jvm", job, contender, case, number) as (done, sample, url):
        require(done.count == count, f"{contender} did {done.count} events, not {count}")
        if contender == FLINK:
            require(balances_of(url) == on.rows, f"{contender}: its rows are not the ledger's")
        else:
            wanted = {account: (0, cents) for account, (_, cents) in on.rows.items()}
            require(done.rows == wanted, f"{contender}: its balances are not the ledger's")
    return sample


def _rebuild(bench: Bench, log: Log, number: int) -> Sample:
    [told], _, cpu, _ = rebuilds(bench, log, number, "local", 1)
    rate, seconds = after_start(log, told, "catch up")
    return Sample(REBUILD, log.case, number, rate, log.count, seconds, {"rebuild": told["cpu_s"]} | cpu)
