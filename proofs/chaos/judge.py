"""About once a second, one snapshot of all rows and positions is compared with the ledger's fold of the log to exactly there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psycopg
from psycopg import sql

from demo.background_thread import BackgroundThread
from infra.database.connect import Connection, DatabaseUnavailable, connect
from infra.settings import Settings
from proofs.bank_oracle import Place, places_in
from proofs.chaos.ledger import COLUMNS, Key, Ledger, Sent
from proofs.chaos.policy_judge import PolicyJudge, Snapshot
from proofs.chaos.tail import Tail

EVERY_S = 1.0
LOG_S = 60.0
SHOWN = 5


@dataclass(slots=True)
class Seen:
    """What the judge has done."""

    snapshots: int = 0
    rows: int = 0
    missed: int = 0
    """Times at which the database was unavailable."""


class Judge(BackgroundThread):
    """Compares the rows of `views` in a thread, and what policies have; what it finds wrong is in `violations`.

    Without `sent` decisions are not judged.
    """

    def __init__(
        self, settings: Settings, tail: Tail, sent: Mapping[Key, Sent] | None, views: Iterable[str] = COLUMNS
    ) -> None:
        super().__init__("judge")
        self.settings, self.tail, self.views = settings, tail, tuple(views)
        self.policies = PolicyJudge(settings, tail)
        self.ledger = Ledger(settings.partitions, sent)
        self.ledger.wished = self.policies.made
        self.seen = Seen()
        self._found: list[str] = []
        self._one = threading.Lock()

    def _end(self, join_s: float = LOG_S + 30) -> None:
        super()._end(join_s)

    @property
    def violations(self) -> list[str]:
        return [*self.ledger.violations, *self._found, *self.policies.violations]

    def look(self, *, at_rest: bool = False) -> None:
        """One snapshot, compared. Raises psycopg.Error, DatabaseUnavailable."""
        with self._one, connect(self.settings, "chaos judge", statement_timeout_ms=0) as connection:
            snapshot = self._snapshot(connection)
            if snapshot is None:
                return
            places, tables, rows, policies = snapshot
            if not all(map(self._is_there, (places, *policies.places.values()))):
                return
            # first, so that what a policy wished is known when its command is judged
            self.policies.compare(policies)
            self._fold_to(places)
            for partition, (expected, found) in enumerate(zip(self.ledger.places, places, strict=True)):
                if expected != found:
                    self._found.append(f"C: the position of partition {partition} is {found}; the log says {expected}")
            for view, lines in rows.items():
                self._compare(view, tables[view], lines)
            self.policies.once(self.ledger)
            if at_rest:
                self.policies.at_rest(policies, self.ledger)
            self.seen.snapshots += 1

    def _work(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                self.look()
            except (psycopg.Error, DatabaseUnavailable):
                self.seen.missed += 1
            except BaseException as error:
                self._found.append(f"the judge itself failed: {error!r}")
                return
            self._ended.wait(max(EVERY_S - (time.monotonic() - began), 0.1))

    def _snapshot(
        self, connection: Connection
    ) -> tuple[list[Place], dict[str, str], dict[str, list[str]], Snapshot] | None:
        """Positions by partition, of each view the live table and its rows, and the policies: all of one moment. None before the
        start."""
        with connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            connection.execute("set local idle_in_transaction_session_timeout = 0")  # a busy machine is no fault
            places = places_in(connection)
            live: dict[str, str] = dict(connection.execute("select view, table_name from live").fetchall())
            if not places:
                return None
            rows = {view: _lines(connection, COLUMNS[view], live[view]) for view in self.views if view in live}
            policies = self.policies.snapshot(connection)
        return places, live, rows, policies

    def _is_there(self, places: list[Place]) -> bool:
        """Whether the log reaches these positions; False where it does not for a minute, which is a violation."""
        for partition, place in enumerate(places):
            deadline = time.monotonic() + LOG_S
            while len(self.tail.records[partition]) < place.next_offset:
                if time.monotonic() > deadline:
                    self._found.append(f"C: partition {partition} stands at {place}, which the log does not reach")
                    return False
                time.sleep(0.01)  # the tail comes after, by milliseconds, or by as long as the broker is unavailable
        return True

    def _fold_to(self, places: list[Place]) -> None:
        for partition, place in enumerate(places):
            for offset in range(self.ledger.places[partition].next_offset, place.next_offset):
                self.ledger.take(partition, offset, *self.tail.records[partition][offset])

    def _compare(self, view: str, table: str, found: list[str]) -> None:
        expected = self.ledger.lines[view].values()
        self.seen.rows += len(found)
        if len(found) == len(expected) and set(found) == set(expected):
            return
        missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        at = [place.next_offset for place in self.ledger.places]
        self._found.append(
            f"C: {table} at {at} has {len(found)} rows, the fold {len(expected)}; "
            f"missing {missing[:SHOWN]}, extra {extra[:SHOWN]}"
        )


def _lines(connection: Connection, columns: str, table: str) -> list[str]:
    query = sql.SQL("copy (select {} from {}) to stdout").format(sql.SQL(columns), sql.Identifier(table))
    with connection.cursor().copy(query) as copy:
        return b"".join(map(bytes, copy)).decode().splitlines()
