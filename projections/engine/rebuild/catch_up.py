"""Catching up: fold builds towards their agent's positions, one transaction at a time, while the agent goes on.

A transaction locks the builds' rows and checks that state and positions are as this process knows them, or it is fenced. Only
then it reads skips, parked streams and rows. It never goes beyond the agent's positions in that same transaction: no switch
could take a table that is ahead of its agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

from psycopg import errors

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log.rule import Reading
from infra.processes.faultpoints import reach
from projections.engine.fold.fold import Blocked, RowCache, decode
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.builds import Build, BuildState, lock_builds, read_skips
from projections.engine.rebuild.claims import BuildAbandoned
from projections.engine.rebuild.tail import Tail
from projections.engine.store.commit import Batch
from projections.engine.store.parking import insert_parked
from projections.engine.store.positions import read_positions, write_build_positions
from projections.engine.store.writing import ask_for_missing, fold_and_write, hold
from projections.engine.views.view import View

MOST_RECORDS = 20_000
"""In one transaction."""
TRIES = 20
RETRIED = (errors.LockNotAvailable, errors.DeadlockDetected, errors.SerializationFailure)


class MovedElsewhere(SamefoldError):
    """Another process has moved a build on."""


class Ahead(SamefoldError):
    """A table has been folded further than its agent."""


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
        self, connection: Connection, tail: Tail, to: Mapping[int, Reading], between: Callable[[], None] = lambda: None
    ) -> int:
        """Fold on to exactly these positions; returns the number of commits. `between` is called between transactions.

        Raises MovedElsewhere, BuildAbandoned, Ahead and what folding raises.
        """
        commits = 0
        while batches := tail.towards(self.at, to, MOST_RECORDS):
            self._transaction(connection, tail.topic, batches)
            commits += sum(len(batch.counted) for batch in batches)
            between()
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

    def fold(self, connection: Connection, topic: str, batches: Sequence[Batch]) -> None:
        """Fold batches into the tables and the builds' positions, in a transaction that has locked and checked them."""
        blocked = self._blocked(connection)
        decoded = [decode(self.plan, batch.partition, batch.counted) for batch in batches]
        held = {one.partition: RowCache(self.plan) for one in decoded}
        tables = {name: build.table for name, build in self.builds.items()}
        hold(self.plan, ask_for_missing(connection, self.plan, tables, decoded, held))
        _, parked = fold_and_write(connection, self.plan, tables, decoded, held=held, blocked=blocked)
        for name, table in tables.items():
            insert_parked(connection, table, [stream for stream in parked if stream.view == name])
        at = {**self.at, **{batch.partition: batch.next for batch in batches}}
        for build in self.ids:
            write_build_positions(connection, build, topic, at)

    def moved(self, batches: Sequence[Batch]) -> None:
        """The transaction that folded these batches has committed."""
        for batch in batches:
            self.at[batch.partition] = batch.next

    def _blocked(self, connection: Connection) -> Blocked:
        tables = [build.table for build in self.builds.values()]
        parked = connection.execute(
            "select view, stream, since_version from parked where table_name = any(%s)", (tables,)
        ).fetchall()
        skips = read_skips(connection, self.builds).skips
        return Blocked({(view, stream): since for view, stream, since in parked}, skips)


def groups_at(leader: str, views: Mapping[str, View], builds: Sequence[Build]) -> list[Group]:
    """An agent's builds in groups at the same positions, the lowest positions first."""
    at: dict[tuple[tuple[int, Reading], ...], list[Build]] = {}
    for build in builds:
        at.setdefault(tuple(sorted(build.positions.items())), []).append(build)
    groups = [Group(leader, views, together) for together in at.values()]
    return sorted(groups, key=lambda group: sum(reading.next_offset for reading in group.at.values()))
