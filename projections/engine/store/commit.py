"""A batch is one transaction: first the compare-and-set of the positions, then the rows.

The compare-and-set is the fence. Every other process that changes rows or the live tables moves the positions or sets a new
generation, under the positions' locks. So a batch either finds everything as it was read, or writes nothing.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import psycopg
from psycopg import errors

from infra.archive import marks
from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log.rule import Counted, Reading
from infra.processes.faultpoints import reach
from projections.engine.fold.errors import EngineStop, TooSlowFold
from projections.engine.fold.fold import Changes, Decoded, Parked, RowCache, changed_rows, decode, fold, keys_to_load
from projections.engine.fold.plan import Plan
from projections.engine.store.parking import insert_parked
from projections.engine.store.positions import Positions, channel
from projections.engine.store.rows import Refused, Statement, ask_for_missing, writes
from projections.engine.store.writing import fold_and_write, is_refusal
from projections.engine.views import binary_arrays
from projections.engine.views.view import CORE

log = logging.getLogger(__name__)

HELD_ROWS = 75_000
"""Rows in the younger half of a partition's cache; the older half has about as many at most."""

LOCKED = {"40001", "40P01", "55P03"}
"""Serialisation failure, deadlock, lock timeout: the whole batch is retried."""
TRIES = 10
DEFER_S = 1.0
"""How long the move of a position may wait, if the batch changes no row."""


class Batch(NamedTuple):
    """Counted commits of one partition, and the positions before and after them."""

    partition: int
    was: Reading
    next: Reading
    counted: Sequence[Counted]

    def has_mark(self, moved_from: Reading) -> bool:
        """Whether its end is the first one beyond a multiple of `marks.EVERY`, and directly behind a commit that counted."""
        end = self.next.next_offset
        crosses = moved_from.next_offset // marks.EVERY != end // marks.EVERY
        return crosses and bool(self.counted) and self.counted[-1].offset == end - 1

    def until(self, offset: int) -> Batch:
        """The part of it before the commit at `offset`."""
        before = [one for one in self.counted if one.offset < offset]
        at = next(one.commit for one in self.counted if one.offset == offset)
        last = before[-1].commit.command_offset if before else self.was.command_offset
        return Batch(self.partition, self.was, Reading(offset, at.epoch, at.seq - 1, last), before)


class _Deferred(NamedTuple):
    """A move of a position that has not been written: where it is in the database, where it is here, and since when."""

    was: Reading
    next: Reading
    since: float


class CommitStatus(StrEnum):
    """What became of a batch."""

    APPLIED = "applied"
    """Committed: rows, outcomes and positions."""
    FENCED = "fenced"
    """Nothing was written: another process changed the positions or the generation. Drop buffers, read the positions, seek."""
    UNKNOWN = "unknown"
    """The connection broke during COMMIT. The positions show whether it was applied."""
    AWAY = "away"
    """The database is unavailable."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a batch. The other fields are of one that was applied; `stop` also of one after which a view was stopped."""

    status: CommitStatus
    readings: Mapping[int, Reading] = field(default_factory=dict)
    """The positions after it, by partition."""
    stop: SamefoldError | None = None
    """Why nothing beyond them can be applied."""
    parked: tuple[Parked, ...] = ()
    events: int = field(default=0, compare=False)
    """Number of events that were folded into some view."""
    rows: int = field(default=0, compare=False)
    """Number of rows written or deleted, in all views."""
    retries: tuple[str, ...] = field(default=(), compare=False)
    """Why each try before the last one failed: locked or refused."""


COMPARE_AND_SET = """
with mine as materialized (
  select p.agent, p.topic, p.partition, u.next_offset, u.epoch, u.seq, u.command_offset
    from positions p
    join unnest(%s, %s, %s, %s, %s, %s, %s, %s)
      u(partition, was, was_epoch, was_seq, next_offset, epoch, seq, command_offset) using (partition)
   where p.agent = %s and p.topic = %s and p.generation = %s
     and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)
   order by p.topic, p.partition for update of p),
moved as (
  update positions p
     set next_offset = m.next_offset, epoch = m.epoch, seq = m.seq, command_offset = m.command_offset
    from mine m where (p.agent, p.topic, p.partition) = (m.agent, m.topic, m.partition) returning 1)
select 1 / (count(*) = %s)::int, pg_notify(%s, %s) from moved
"""
# If not all positions moved, this divides by zero. So the rest of the pipeline fails with the fence, which costs no round trip.
_FENCED = errors.DivisionByZero


class Committer:
    """Applies batches for one agent, from one reading of the positions on. `held` is the row cache of that reading.

    Batches of different partitions may be applied at once, in threads of their own.

    With `defers`, for one thread, a batch that changes no row moves its position a little later: with the partition's next batch
    that does, after DEFER_S, or in `flush`.
    """

    def __init__(self, plan: Plan, positions: Positions, *, defers: bool = False) -> None:
        self.plan = plan
        self.pause: Callable[[float], None] = time.sleep
        """Before a retry."""
        self._defers = defers
        self._deferred: dict[int, _Deferred] = {}
        """By partition, the move that has not been written."""
        self.positions = positions
        self.blocked = positions.blocked
        self._parking = threading.Lock()
        self.held: dict[int, RowCache] = {partition: RowCache(plan, HELD_ROWS) for partition in positions.readings}

    def apply(self, connection: Connection, batches: Sequence[Batch]) -> BatchResult:
        """Apply one batch each of several partitions, in one transaction. `connection` is in autocommit mode and prepared.

        Raises EngineStop (PoisonEvent, UnknownEvent, …) and psycopg.Error, having written nothing.
        """
        try:
            result = self._apply(connection, batches)
        except BaseException:
            self._forget(batches)
            with suppress(psycopg.Error):  # a fold that is too slow outlasts its transaction's timeout
                connection.rollback()
            raise
        if result.status is not CommitStatus.APPLIED:
            self._forget(batches)
        return result

    def flush(self, connection: Connection) -> CommitStatus:
        """Write the deferred moves."""
        batches = [Batch(partition, one.was, one.next, ()) for partition, one in self._deferred.items()]
        self._deferred.clear()
        if not batches:
            return CommitStatus.APPLIED
        try:
            self._move(connection, batches)
        except _FENCED:
            return CommitStatus.FENCED
        return CommitStatus.APPLIED

    def _apply(self, connection: Connection, batches: Sequence[Batch]) -> BatchResult:
        decoded = [decode(self.plan, batch.partition, batch.counted) for batch in batches]
        by_statement = False
        retries: list[str] = []
        while True:
            try:
                result = (self._statement_by_statement if by_statement else self._pipelined)(
                    connection, batches, decoded
                )
                return replace(result, retries=tuple(retries)) if retries else result
            except (Refused, psycopg.Error) as error:
                refused = is_refusal(error)
                locked = isinstance(error, psycopg.Error) and error.sqlstate in LOCKED
                if connection.closed or len(retries) + 1 == TRIES or not (refused or locked):
                    raise
            connection.rollback()
            self._forget(batches)
            retries.append("refused" if refused else "locked")
            by_statement = by_statement or refused
            if locked:
                self.pause(random.uniform(0, 0.02 * 2 ** min(len(retries), 6)))

    def _forget(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.held[batch.partition].clear()

    def _pipelined(self, connection: Connection, batches: Sequence[Batch], decoded: Sequence[Decoded]) -> BatchResult:
        """One round trip if all rows are cached; else one for the fence and the rows, and one for all writes."""
        changes = None
        if not any(keys_to_load(self.plan, one, self.held[one.partition]) for one in decoded):
            try:
                changes = self._fold(decoded)  # before the positions are locked
            except TooSlowFold:
                raise
            except EngineStop:
                # perhaps the cached rows are outdated by another worker: let the fence and fresh rows decide
                self._forget(batches)
        statements = None if changes is None else self._writes(changes)
        if self._defers and changes is not None and not statements and self._defer(batches, changes):
            return self._applied(decoded, changes, ())
        committing = False
        try:
            with connection.pipeline() as pipeline:
                connection.execute("begin")
                self._move(connection, batches)
                if changes is None:
                    hold = ask_for_missing(connection, self.plan, self.positions.tables, decoded, self.held)
                    pipeline.sync()
                    hold()
                    reach("compare-and-set done")
                    changes = self._fold(decoded)
                answers = []
                for query, parameters, answer in self._writes(changes) if statements is None else statements:
                    cursor = connection.execute(query, parameters)
                    if answer is not None:
                        answers.append((answer, cursor))
                parked = [one for change in changes for one in change.parked]
                insert_parked(connection, self.positions.tables, parked)
                reach("rows sent")
                committing = True
                connection.execute("commit")
                reach("COMMIT sent")
            reach("COMMIT acknowledged")
        except psycopg.Error as error:
            if committing and connection.closed:
                return BatchResult(CommitStatus.UNKNOWN)
            if isinstance(error, _FENCED):
                connection.rollback()
                return BatchResult(CommitStatus.FENCED)
            raise
        self._moved(batches)
        for answer, cursor in answers:
            answer(cursor.fetchall())
        return self._applied(decoded, changes, parked)

    def _statement_by_statement(
        self, connection: Connection, batches: Sequence[Batch], decoded: Sequence[Decoded]
    ) -> BatchResult:
        """The same without a pipeline, under savepoints, to find the streams whose rows are refused."""
        connection.execute("begin")
        try:
            self._move(connection, batches)
        except _FENCED:
            connection.rollback()
            return BatchResult(CommitStatus.FENCED)
        tables = {name: self.positions.tables[name] for name in self.plan.views}
        changes, parked = fold_and_write(connection, self.plan, tables, decoded, held=self.held, blocked=self.blocked)
        try:
            connection.execute("commit")
        except psycopg.Error:
            if connection.closed:
                return BatchResult(CommitStatus.UNKNOWN)
            raise
        self._moved(batches)
        return self._applied(decoded, changes, parked)

    def _move(self, connection: Connection, batches: Sequence[Batch]) -> None:
        """The compare-and-set. It fails unless every position is where its batch begins, and notifies of the new ones.

        With it, the agent `core` writes the marks that are due.
        """
        at = self.positions
        was = {partition: one.was for partition, one in self._deferred.items()}
        rows = [(batch.partition, *was.get(batch.partition, batch.was)[:3], *batch.next) for batch in batches]
        moves = [binary_arrays.bigints(column) for column in zip(*rows, strict=True)]
        moved = ",".join(f"{batch.partition}:{batch.next.next_offset}" for batch in batches)
        notice = (channel(at.agent), moved[:7_000])
        connection.execute(COMPARE_AND_SET, [*moves, at.agent, at.topic, at.generation, len(batches), *notice])
        if at.agent == CORE and (marked := [one for one in batches if one.has_mark(was.get(one.partition, one.was))]):
            known = sorted((batch.partition, batch.next) for batch in marked)
            marks.write(connection, at.topic, at.topic_id, known)

    def _defer(self, batches: Sequence[Batch], changes: Sequence[Changes]) -> bool:
        """Put the moves off, if no row changes and none of them has waited for long."""
        now = time.monotonic()
        since = [one.since for batch in batches if (one := self._deferred.get(batch.partition))]
        if any(change.parked for change in changes) or now - min(since, default=now) > DEFER_S:
            return False
        for batch in batches:
            known = self._deferred.get(batch.partition) or _Deferred(batch.was, batch.next, now)
            self._deferred[batch.partition] = known._replace(next=batch.next)
        return True

    def _moved(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._deferred.pop(batch.partition, None)

    def _writes(self, changes: Sequence[Changes]) -> list[Statement]:
        tables = self.positions.tables
        return [one for name, view in self.plan.views.items() for one in writes(view, tables[name], changes)]

    def _fold(self, decoded: Sequence[Decoded]) -> list[Changes]:
        return [fold(self.plan, one, self.held[one.partition], self.blocked) for one in decoded]

    def _applied(self, decoded: Sequence[Decoded], changes: Sequence[Changes], parked: Sequence[Parked]) -> BatchResult:
        for change in changes:
            self.held[change.partition].merge(change)
        for one in parked:
            log.warning("parked %s for view %s from version %d on: %s", one.stream, one.view, one.version, one.error)
        if parked:
            with self._parking:
                self.blocked = self.blocked.and_parked(parked)
        events = sum(len(one.items) for one in decoded)
        rows = sum(changed_rows(self.plan, change) for change in changes)
        return BatchResult(CommitStatus.APPLIED, parked=tuple(parked), events=events, rows=rows)
