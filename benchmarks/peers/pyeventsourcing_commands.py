"""pyeventsourcing 9.5: one application, one command after the other, get + save, on its own PostgreSQL recorder."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers.bank import Bank, environment
from benchmarks.peers.job import Stopwatch, read_job, tell
from benchmarks.workload import OPEN, Order, name_of


def main() -> None:
    job = read_job()
    with Bank(environment(job.database_url, job.options)) as bank:
        accounts = sorted({order.account for order in job.orders})
        bank.record_all(Order(account, OPEN, "") for account in accounts)
        watch = Stopwatch()
        for order in job.orders:
            bank.obey(order)
        done = watch.done(len(job.orders))
        tell(replace(done, rows=bank.rows(map(name_of, accounts))))


if __name__ == "__main__":
    main()
