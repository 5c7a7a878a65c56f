"""Catching up: fold builds towards their agent's positions, one transaction at a time, while the agent goes on.

A transaction locks the builds' rows and checks that state and positions are as this process knows them, or it is fenced. Only
then it reads skips, parked streams and rows. It never goes beyond the agent's positions in that same transaction: no switch
could take a table that is ahead of its agent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException
from psycopg import errors

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.records import Record
from infra.log.rule import Reading, read
from infra.log.source import NO_PROGRESS_S
from infra.processes.faultpoints import reach
from infra.processes.workers import Advance
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged
from projections.engine.fold.fold import Blocked, RowCache, decode
from projections.engine.fold.plan import Plan
from projections.engine.live.log_reader import LogReader
from projections.engine.rebuild.builds import Build, BuildState, lock_builds, read_skips
from projections.engine.rebuild.claims import BuildAbandoned
from projections.engine.store.commit import Batch
from projections.engine.store.positions import read_positions, write_build_positions
from projections.engine.store.writing import fold_and_write
from projections.engine.views.view import View

MOST_RECORDS = 20_000
"""In one transaction."""
AHEAD = 20_000
"""Most records of one partition that are read ahead, and that one read returns."""
TRIES = 20
RETRIED = (errors.LockNotAvailable, errors.DeadlockDetected, errors.SerializationFailure)


class MovedElsewhere(SamefoldError):
    """Another process has moved a build on."""


class Ahead(SamefoldError):
    """A table has been folded further than its agent."""


class NotArrived(Exception):
    """One read of the log's newest records did not reach its target. A switch tries again."""


class Group:
    """Builds of one agent at the same positions, which are folded on together, up to the positions of the `leader`.

    A journal comes with its contexts' states, whose rows are at the same positions.
    """

    def __init__(self, leader: str, views: Mapping[str, View], builds: Sequence[Build]) -> None:
        self.leader = leader
        self.plan = Plan({build.view: views[build.view] for build in builds})
        self.builds = {build.view: build for build in sorted(builds, key=lambda build: build.view)}
        self.at = dict(builds[0].positions)

    @property
    def ids(self) -> list[UUID]:
        return [build.id for build in self.builds.values()]

    def catch_up(
        self, connection: Connection, tail: Tail, to: Mapping[int, Reading], advance: Advance = lambda _count: None
    ) -> int:
        """Fold on to exactly these positions; returns the number of commits.

        Raises MovedElsewhere, BuildAbandoned, Ahead and what folding raises.
        """
        self.require_not_ahead(to)
        commits = 0
        while batches := tail.towards(self.at, to, MOST_RECORDS):
            self._transaction(connection, tail.topic, batches)
            commits += sum(len(batch.counted) for batch in batches)
            advance(sum(batch.next.next_offset - batch.was.next_offset for batch in batches))
        return commits

    def _transaction(self, connection: Connection, topic: str, batches: Sequence[Batch]) -> None:
        tries = 0
        while True:
            try:
                with connection.transaction():
                    self.check(lock_builds(connection, self.ids))
                    agent = read_positions(connection, self.leader, topic)
                    for batch in batches:
                        if agent is None or batch.next.next_offset > agent.readings[batch.partition].next_offset:
                            raise Ahead(
                                f"Agent '{self.leader}' has not reached offset {batch.next.next_offset} of partition "
                                f"{batch.partition} any more: the database was restored.",
                                "Run the command again.",
                            )
                    self.fold(connection, topic, batches)
                    reach("catch-up written")
                self.moved(batches)
                return
            except RETRIED:
                tries += 1
                if tries == TRIES:
                    raise

    def check(self, builds: Sequence[Build]) -> None:
        """Check that the builds, just locked, are as this process knows them. Raises BuildAbandoned, MovedElsewhere."""
        if {build.id for build in builds} != set(self.ids):
            raise MovedElsewhere("A build has disappeared.", "Run the command again.")
        for build in builds:
            if build.state not in (BuildState.READY, BuildState.OLD):
                raise BuildAbandoned(
                    f"Table {build.table} is {build.state}, so it can't be caught up with.", "Run the command again."
                )
            if build.positions != self.at:
                raise MovedElsewhere(f"Another process has moved table {build.table} on.", "Run the command again.")

    def require_not_ahead(self, to: Mapping[int, Reading]) -> None:
        """Raises Ahead unless the leader has reached the tables' positions."""
        for partition, reading in self.at.items():
            if reading.next_offset > to[partition].next_offset:
                raise Ahead(
                    f"{', '.join(build.table for build in self.builds.values())} is folded to offset "
                    f"{reading.next_offset} of partition {partition}, but agent '{self.leader}' is at "
                    f"{to[partition].next_offset}: the database was restored.",
                    "Rebuild the view.",
                )

    def fold(self, connection: Connection, topic: str, batches: Sequence[Batch]) -> None:
        """Fold batches into the tables and the builds' positions, in a transaction that has locked and checked them."""
        tables = {name: build.table for name, build in self.builds.items()}
        query = "select view, stream, since_version from parked where table_name = any(%s)"
        parked = connection.execute(query, (list(tables.values()),)).fetchall()
        skips = read_skips(connection, tables).skips
        blocked = Blocked({(view, stream): since for view, stream, since in parked}, skips)
        decoded = [decode(self.plan, batch.partition, batch.counted) for batch in batches]
        held = {one.partition: RowCache(self.plan) for one in decoded}
        fold_and_write(connection, self.plan, tables, decoded, held=held, blocked=blocked)
        at = {**self.at, **{batch.partition: batch.next for batch in batches}}
        for build in self.ids:
            write_build_positions(connection, build, topic, at)

    def moved(self, batches: Sequence[Batch]) -> None:
        """The transaction that folded these batches has committed."""
        for batch in batches:
            self.at[batch.partition] = batch.next


def groups_at(leader: str, views: Mapping[str, View], builds: Sequence[Build]) -> list[Group]:
    """An agent's builds in groups at the same positions, the lowest positions first."""
    at: dict[tuple[tuple[int, Reading], ...], list[Build]] = {}
    for build in builds:
        at.setdefault(tuple(sorted(build.positions.items())), []).append(build)
    groups = [Group(leader, views, together) for together in at.values()]
    return sorted(groups, key=lambda group: sum(reading.next_offset for reading in group.at.values()))


class Tail:
    """The log's newest records, from given positions on, read ahead so that a switch need not wait for them under locks."""

    def __init__(self, settings: Settings, topic: str, at: Mapping[int, Reading]) -> None:
        self.settings = settings
        self.topic = topic
        self._ahead: dict[int, deque[Record]] = {partition: deque() for partition in at}
        self._log = LogReader(settings, topic, clients.range_consumer(settings, tells_ends=False))
        self._log.go_on({partition: reading.next_offset for partition, reading in at.items()})

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def close(self) -> None:
        self._log.close()

    def exactly(
        self, at: Mapping[int, Reading], to: Mapping[int, Reading], give_up_s: float = NO_PROGRESS_S
    ) -> list[Batch]:
        """The batches from `at` exactly to `to`, in one read. Raises NotArrived and the errors of `towards`."""
        batches = self.towards(at, to, AHEAD * len(at), give_up_s)
        reached = {**at, **{batch.partition: batch.next for batch in batches}}
        if reached != dict(to):
            raise NotArrived
        return batches

    def towards(
        self, at: Mapping[int, Reading], to: Mapping[int, Reading], most: int, give_up_s: float = NO_PROGRESS_S
    ) -> list[Batch]:
        """The batches from `at` towards `to`, one for each partition that is not there yet, about `most` records in all.

        They may end before `to`; `exactly` requires that they don't. Calling it again from the same or a later position returns
        the same records, so a failed transaction can be retried. Raises LogChanged when the log does not lead to `to`,
        KafkaUnavailable, and the archive's errors.
        """
        for partition, target in to.items():
            if at[partition].next_offset == target.next_offset and at[partition] != target:
                raise LogChanged(self.topic, partition, at[partition], at[partition], target)
        for partition, ahead in self._ahead.items():
            while ahead and ahead[0].offset < at[partition].next_offset:
                ahead.popleft()
        missing = {
            partition: end.next_offset for partition, end in to.items() if at[partition].next_offset < end.next_offset
        }
        share = max(most // max(len(missing), 1), 1)
        wanted = {
            partition: min(end, at[partition].next_offset + min(share, AHEAD)) for partition, end in missing.items()
        }
        self._read_to(wanted, give_up_s)
        made = []
        for partition, end in wanted.items():
            records = list(islice(self._ahead[partition], end - at[partition].next_offset))
            reading, counted, _ = read(at[partition], [record for record in records if record.offset < end])
            if end == missing[partition] and reading != to[partition]:
                raise LogChanged(self.topic, partition, at[partition], reading, to[partition])
            made.append(Batch(partition, at[partition], reading, counted))
        return made

    def read_ahead(self) -> None:
        """Read what has arrived, without waiting."""
        self._take(0, {})

    def _read_to(self, wanted: Mapping[int, int], give_up_s: float) -> None:
        deadline = time.monotonic() + give_up_s
        while any(self._log.next[partition] < end for partition, end in wanted.items()):
            if self._take(0.1, wanted):
                deadline = time.monotonic() + give_up_s
            elif time.monotonic() > deadline:
                raise clients.away(self.settings, KafkaException(KafkaError(KafkaError._TIMED_OUT)))

    def _take(self, wait: float, wanted: Mapping[int, int]) -> bool:
        """Read what has come of partitions that are not read ahead far enough. Returns whether there was any."""
        there = self._log.next
        full = {p for p, ahead in self._ahead.items() if len(ahead) >= AHEAD and there[p] >= wanted.get(p, 0)}
        taken = self._log.take(AHEAD, wait, full)
        for partition, records in taken.items():
            self._ahead[partition].extend(records)
        return bool(taken)
