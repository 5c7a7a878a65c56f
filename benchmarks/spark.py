"""How many events Spark folds into a new table in a second, compared with the local engine and with other ways to write it.

Ours rebuild `balances` from the whole log; the peers get smaller logs with as many events for each account.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.check import require
from benchmarks.fill import fill_log
from benchmarks.peers.job import Job
from benchmarks.peers.simple_tables import applied_orders, balances_of
from benchmarks.peers.turn import turn
from benchmarks.rebuild import Log, Rows, after_start, logs_of, rebuilds
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, history
from infra.archive.whole_log import read_range

STREAMS = 200_000
SIZES = {"1 million": 1_000_000, "5 million": 5_000_000}
MEASURED = "5 million"
"""The other is run once, for its memory."""
PEER_COMMITS = 200_000
PEER_STREAMS = 8_000
"""25 events for each, as in the large log."""
SIMPLE_EVENTS = 50_000

LOCAL = "samefold, local engine"
FIRST = "samefold on Spark, first job"
WARM = "samefold on Spark, warm"
SIMPLE = "one event, one transaction"
CALLS = ("applyInPandas", "applyInArrow")
"""What a PySpark user would give a group's events to. The first is the one that the aim names."""

LOCAL_TIMES = 250
SPARK_TIMES = 150
PYSPARK_TIMES = 20
WARM_SHARE = 0.6
FLAT = 1.15
FIRST_EVENT_S = 8.0


def run(bench: Bench) -> Result:
    sizes = {case: bench.options.scaled(size) for case, size in SIZES.items()}
    samples: list[Sample] = []
    with bench.world() as world, bench.world() as small:
        logs = logs_of(bench, world, "spark", bench.options.scaled(STREAMS), sizes)
        orders = _small(bench, small)
        files = _dump(small, bench.folder / "log")
        for number in range(1, bench.options.rounds + 1):
            samples += _local(bench, logs[MEASURED], number)
            for case, log in logs.items():
                if case == MEASURED or number == 1:
                    samples += _spark(bench, log, number)
            samples.append(_simple(bench, small, orders, number))
            for call in CALLS:
                samples += _pyspark(bench, small, orders, files, call, number)
    size = {"commits": sizes, "streams": bench.options.scaled(STREAMS)}
    size |= {"commits_of_pyspark": len(orders), "streams_of_peers": bench.options.scaled(PEER_STREAMS)}
    title = "Events folded into a new table with Spark, per second"
    return Result("spark", title, "events/s", samples, _aims(samples, sizes), size)


def first_job(call: str) -> str:
    return f"PySpark groupBy().{call}(), first job"


def warm(call: str) -> str:
    return f"PySpark groupBy().{call}(), warm"


def _aims(samples: Sequence[Sample], sizes: Mapping[str, int]) -> list[Aim]:
    of = {contender: middle(samples, contender, MEASURED) for contender in (LOCAL, FIRST, WARM)}
    simple, grouped = (
        median(one.value for one in samples if one.contender == peer) for peer in (SIMPLE, first_job(CALLS[0]))
    )
    first_event = median(_more(samples, FIRST, MEASURED, "first_event_s"))
    cases = list(sizes)
    low, high = (max(_more(samples, FIRST, case, "peak_memory_mb")) for case in (cases[0], cases[-1]))
    return [
        Aim(f"local engine beside {SIMPLE}", LOCAL_TIMES, of[LOCAL] / simple, unit="x"),
        Aim(f"Spark's first job beside {SIMPLE}", SPARK_TIMES, of[FIRST] / simple, unit="x"),
        Aim(f"Spark's first job beside {first_job(CALLS[0])}", PYSPARK_TIMES, of[FIRST] / grouped, unit="x"),
        Aim("Spark, warm, beside the local engine", WARM_SHARE, of[WARM] / of[LOCAL], unit="x"),
        Aim("Spark, from the process's start to the first event", FIRST_EVENT_S, first_event, at_most=True, unit="s"),
        Aim(f"Spark, peak memory, {cases[-1]} beside {cases[0]}", FLAT, high / low, at_most=True, unit="x"),
    ]


def _more(samples: Sequence[Sample], contender: str, case: str, what: str) -> list[float]:
    return [one.more[what] for one in samples if (one.contender, one.case) == (contender, case)]


def _small(bench: Bench, world: World) -> list[Order]:
    count, streams = bench.options.scaled(PEER_COMMITS), bench.options.scaled(PEER_STREAMS)
    bench.progress.begin("spark: load the peers' events", count)
    orders = list(history(streams, count, bench.chance("spark", "peers")))
    fill_log(world.settings, world.commands.id, orders, bench.progress.advance)
    return orders


def _dump(world: World, folder: Path) -> Path:
    """The values of the log's records as they are, a line each, a file for each partition."""
    folder.mkdir()
    for partition, end in world.ends().items():
        with (folder / f"{partition}.json").open("wb") as file:
            for records in read_range(world.settings, world.events.name, partition, 0, end):
                file.writelines((record.value or b"") + b"\n" for record in records)
    return folder


def _local(bench: Bench, log: Log, number: int) -> list[Sample]:
    """Start-up apart: everything behind the first step that is told, until the keys are made."""
    [told], process, _, memory = rebuilds(bench, log, number, "local", 1)
    rate, seconds = after_start(log, told, "switch")
    more = _told(told) | {"first_event_s": told["first_step_at"] - process.started_at, "peak_memory_mb": memory}
    return [Sample(LOCAL, log.case, number, rate, log.count, seconds, {"rebuild": told["cpu_s"]}, more)]


def _spark(bench: Bench, log: Log, number: int) -> list[Sample]:
    """Two jobs in one session: each from its beginning until the keys are made, with its workers' start."""
    jobs, process, _, memory = rebuilds(bench, log, number, "spark", 2)
    started = process.started_at
    samples = []
    for contender, told in zip((FIRST, WARM), jobs, strict=True):
        seconds = told["began"]["switch"] - told["began"]["load"]
        more = _told(told)
        if contender == FIRST:
            more |= {
                "session_s": told["began"]["rebuild"] - started,
                "first_event_s": told["first_step_at"] - started,
                "peak_memory_mb": memory,
            }
        cpu = {"rebuild": told["cpu_s"]}
        samples.append(Sample(contender, log.case, number, log.count / seconds, log.count, seconds, cpu, more))
    return samples


def _told(told: Mapping[str, Any]) -> dict[str, float]:
    return {name: told[name] for name in ("load_s", "index_s", "switch_s")} | {
        "in_all_s": told["ended"] - told["began"]["rebuild"]
    }


def _simple(bench: Bench, log: World, orders: Sequence[Order], number: int) -> Sample:
    count = min(bench.options.scaled(SIMPLE_EVENTS), len(orders))
    partitions = log.settings.partitions
    job = Job(topic=log.events.name, partitions=partitions, count=count)
    with turn(bench, log.settings, "one_by_one", job, SIMPLE, f"{count:,} events", number) as (done, sample, url):
        require(done.count == count, f"{SIMPLE} did {done.count} events, not {count}")
        seen = applied_orders(orders, partitions, url)
        require(len(seen) == count, f"{SIMPLE}: its offsets stand for {len(seen)} events, not {count}")
        require(balances_of(url) == _sums(seen), f"{SIMPLE}: its rows are not the ledger's")
    return sample


def _pyspark(
    bench: Bench, log: World, orders: Sequence[Order], files: Path, call: str, number: int
) -> Iterator[Sample]:
    """The same job twice in one session."""
    case = f"{len(orders):,} commits"
    job = Job(count=len(orders), options={"files": str(files), "call": call})
    with turn(bench, log.settings, "pyspark_groups", job, warm(call), case, number) as (done, sample, url):
        require(done.count == len(orders), f"{call} did {done.count} events, not {len(orders)}")
        require(balances_of(url) == _sums(orders), f"{call}: its rows are not the ledger's")
    yield Sample(first_job(call), case, number, done.count / done.first_s, done.count, done.first_s)
    yield sample


def _sums(orders: Sequence[Order]) -> Rows:
    ledger = Ledger(1 + max(order.account for order in orders))
    ledger.enter_all(orders)
    return ledger.rows()
