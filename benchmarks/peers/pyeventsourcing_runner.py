"""pyeventsourcing 9.5: a ProjectionRunner that keeps one table of balances, its position in the same transaction."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from typing import Any

from eventsourcing.persistence import Tracking
from eventsourcing.postgres import PostgresDatastore, PostgresTrackingRecorder
from eventsourcing.projection import Projection, ProjectionRunner
from psycopg.sql import SQL

from benchmarks.peers.bank import Account, Bank, environment
from benchmarks.peers.job import Done, Stopwatch, read_job, tell
from benchmarks.workload import name_of

WITHIN_S = 300.0

_TABLE = SQL(
    "create table if not exists balances (id uuid primary key, version bigint not null, cents bigint not null)"
)
_UPSERT = """
insert into balances as t (id, version, cents) values (%s, %s, %s)
    on conflict (id) do update set version = excluded.version, cents = t.cents + excluded.cents
"""


class Balances(PostgresTrackingRecorder):
    """The view."""

    def __init__(self, datastore: PostgresDatastore, **names: Any) -> None:
        super().__init__(datastore, **names)
        self.sql_create_statements.append(_TABLE.format())

    def add(self, account: object, version: int, cents: int, tracking: Tracking) -> None:
        with self.datastore.transaction(commit=True) as cursor:
            self._insert_tracking(cursor, tracking)
            cursor.execute(_UPSERT, (account, version, cents), prepare=True)


class Accounts(Projection[Balances]):
    """The projection. `outcome` is there when the last event that is awaited was committed."""

    awaited = 0
    done = 0
    watch = Stopwatch()
    outcome: Done | None = None
    finished = Event()

    def process_event(self, domain_event: Any, tracking: Tracking) -> None:
        if not self.done:
            self.watch = Stopwatch()
        match domain_event:
            case Account.Deposited(cents=cents):
                change = cents
            case Account.Withdrawn(cents=cents):
                change = -cents
            case _:
                change = 0
        self.view.add(domain_event.originator_id, domain_event.originator_version, change, tracking)
        self.done += 1
        if self.done == self.awaited:
            self.outcome = self.watch.done(self.done)
            self.finished.set()


def main() -> None:
    job = read_job()
    settings = environment(job.database_url, job.options)
    with Bank(settings) as bank:
        count = bank.record_all(job.orders)
    Accounts.awaited = count
    with ProjectionRunner(
        application_class=Bank, projection_class=Accounts, view_class=Balances, env=settings
    ) as runner:
        runner.run_forever(0)
        if not Accounts.finished.wait(WITHIN_S):
            runner.run_forever(0)  # raises what stopped it
        ours = runner.projection
        assert isinstance(ours, Accounts)
        assert ours.outcome is not None, "not all events came"
        names = {Account.create_id(name): name for name in {name_of(order.account) for order in job.orders}}
        with runner.view.datastore.transaction(commit=False) as cursor:
            found = cursor.execute("select id, version, cents from balances").fetchall()
        rows = {names[row["id"]]: (row["version"], row["cents"]) for row in found}
        tell(replace(ours.outcome, rows=rows))


if __name__ == "__main__":
    main()
