"""A peer's turn: its process is given a job, does it, and says how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.peers.job import Done, Job, told, write_job
from benchmarks.processes import Process
from benchmarks.results import Sample
from benchmarks.stage import Bench
from infra.settings import Settings

WITHIN_S = 400.0


@contextmanager
def turn(
    bench: Bench, settings: Settings, module: str, job: Job, contender: str, case: str, number: int
) -> Iterator[tuple[Done, Sample, str]]:
    """What a peer did, as a sample, and its database, which is there as long as the block. Raises BenchmarkStalled."""
    name = f"{module}-{case}-{number}"
    bench.progress.begin(f"{case}, round {number}: {contender}", None)
    with bench.database() as url:
        file = bench.folder / f"{name}.job"
        group = url.rpartition("/")[2].partition("?")[0]
        write_job(replace(job, database_url=url, kafka=settings.kafka, group=group), file)
        with Process(settings, bench.folder, name, f"benchmarks.peers.{module}", str(file)) as process:
            meter = bench.cpu()
            if code := process.wait(WITHIN_S):
                process.fail(f"{contender} ended with exit code {code}.")
            cpu = meter.spent()
        done = told(process.log.read_text())
        cpu = {"peer": round(done.cpu_s, 2)} | cpu
        rate = done.count / done.seconds
        yield done, Sample(contender, case, number, rate, done.count, done.seconds, cpu, done.more), url
