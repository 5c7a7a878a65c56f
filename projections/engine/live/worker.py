"""The agent's work on the database: the first start, its positions, its batches. Synchronous; one thread per lane at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import psycopg

from infra.archive.manifest import ends_of
from infra.database.connect import Connection, DatabaseAway, connect, named
from infra.database.revisions import DatabaseAhead, require_schema
from infra.errors import SamefoldError
from infra.log.records import Record, UnreadableRecord
from infra.log.rule import Counted, Reading, Void, read
from infra.log.source import LogTrimmed
from infra.log.topics import Topic, describe
from infra.observability import tracing
from infra.settings import Settings
from projections.engine.fold.errors import EngineStop
from projections.engine.fold.plan import Plan
from projections.engine.live.measures import Measures
from projections.engine.live.startup import Contract, ensure_started
from projections.engine.store.commit import Batch, BatchResult, Committer, Fate, prepare
from projections.engine.store.positions import Positions, read_positions
from projections.engine.views.core_views import code_set
from projections.engine.views.view import View

log = logging.getLogger(__name__)


class Worker:
    """One agent's connections, one for each lane, and its committer.

    Batches of different partitions may be applied at once, each in another lane: they share the committer, which holds rows
    by partition, and so find what any lane left before. `plan` is that of `views`, where these are not of `domain/`'s contexts.
    """

    def __init__(
        self,
        settings: Settings,
        agent: str,
        views: Mapping[str, View],
        name: str,
        plan: Plan | None = None,
        *,
        lanes: int = 1,
    ) -> None:
        self.settings = settings
        self.agent = agent
        self.views = views
        self.plan = plan or Plan(views)
        self.name = name
        self._measures = Measures(agent)
        self._connections: list[Connection | None] = [None] * lanes
        self._turn = 0
        self._committer: Committer | None = None

    def start(self, events: Topic) -> None:
        """Make or check the agent's start on that topic.

        Raises ContractBroken, ShapeChanged, LogTrimmed, DatabaseBehind, DatabaseAhead; DatabaseAway where it may pass.
        """
        contract = Contract.of(events)
        with self._naming():
            connection = self._connected()
            try:
                require_schema(connection)
            except DatabaseAhead:
                # where this code's own set is live still, all that it needs is there, whatever migrations came since
                positions = read_positions(connection, self.agent, events.name)
                if positions is None or positions.live_set != code_set(dict(self.views)):
                    raise
            positions = ensure_started(connection, self.agent, self.views, contract)
        if positions is not None:
            # described after the positions were read: others go on meanwhile, and the log's end with them
            now = describe(self.settings, events.name)
            with self._naming():
                _check_reach(now, positions, ends_of(self._connected(), events.name))

    def ping(self, lane: int = 0) -> None:
        """Ask the database for nothing. Raises DatabaseAway."""
        with self._naming(lane):
            self._connected(lane).execute("select")

    def positions(self, turn: int = 0) -> Positions | None:
        """Where the agent stands; batches of this turn are folded from there. Raises DatabaseAway."""
        with self._naming():
            positions = read_positions(self._connected(), self.agent, self.settings.events_topic)
        # in this order, and asked in the other: a batch of the turn before, in another lane, must not get the new committer
        self._turn = turn
        self._committer = Committer(self.plan, positions) if positions else None
        return positions

    def apply(self, takes: Mapping[int, tuple[Reading, Sequence[Record]]], turn: int = 0, lane: int = 0) -> BatchResult:
        """Apply records of several partitions in one transaction.

        A batch of an earlier turn is fenced: the positions read since may be those of another set of views, whose tables these
        views must not write. Where the log can't be folded beyond a place, everything before it is applied, and `stop` says why.
        Raises DatabaseAway, and whatever named error the database's answer is.
        """
        if not tracing.recording():
            return self._measured(takes, turn, lane)
        records = [record for _, records in takes.values() for record in records]
        known = {"samefold.agent": self.agent, "samefold.partitions": ",".join(map(str, takes))}
        with tracing.of_batch("fold", records, known | {"samefold.records": len(records)}) as span:
            result = self._measured(takes, turn, lane)
            span.set_attribute("samefold.fate", result.fate)
            return result

    def _measured(self, takes: Mapping[int, tuple[Reading, Sequence[Record]]], turn: int, lane: int) -> BatchResult:
        try:
            result = self._apply(takes, turn, lane)
        except DatabaseAway:
            self._measures.fate(Fate.AWAY)
            raise
        self._measures.fate(result.fate)
        return result

    def _apply(self, takes: Mapping[int, tuple[Reading, Sequence[Record]]], turn: int, lane: int) -> BatchResult:
        committer = self._committer
        if committer is None or turn != self._turn:
            return BatchResult(Fate.FENCED)
        started = time.perf_counter()
        result = BatchResult(Fate.APPLIED)
        stop: SamefoldError | None = None
        batches = []
        voids = []
        for partition, (was, records) in takes.items():
            after, counted, void, unreadable = _read(was, records)
            stop = stop or unreadable
            batches.append(Batch(partition, was, after, counted))
            voids.append(void)
            _warn(self.settings.events_topic, partition, void)
        with self._naming(lane):
            while batches := [batch for batch in batches if batch.next != batch.was]:
                try:
                    result = committer.apply(self._connected(lane), batches)
                except EngineStop as error:
                    stop = error
                    batches = [b.until(error.offset) if b.partition == error.partition else b for b in batches]
                    continue
                if result.fate is not Fate.APPLIED:
                    return result
                commits = sum(len(batch.counted) for batch in batches)
                self._measures.applied(result, commits, time.perf_counter() - started)
                self._measures.void(voids)
                break
        return replace(result, readings={batch.partition: batch.next for batch in batches}, stop=stop)

    def close(self, lane: int = 0) -> None:
        connection, self._connections[lane] = self._connections[lane], None
        if connection is not None:
            connection.close()

    def _connected(self, lane: int = 0) -> Connection:
        connection = self._connections[lane]
        if connection is None or connection.closed:
            connection = connect(self.settings, f"samefold {self.name}", short_transactions=True, by_key=True)
            self._connections[lane] = connection
            prepare(connection)
        return connection

    @contextmanager
    def _naming(self, lane: int = 0) -> Iterator[None]:
        """Turns psycopg's errors into named ones, and gives up a connection on which one happened."""
        try:
            yield
        except psycopg.Error as error:
            self.close(lane)
            raise named(error, self.settings) from error
        except DatabaseAway:
            self.close(lane)
            raise


def _read(
    was: Reading, records: Sequence[Record]
) -> tuple[Reading, list[Counted], list[Void], UnreadableRecord | None]:
    """The reading rule; where a record can't be read, everything before it and the error."""
    try:
        return *read(was, records), None
    except UnreadableRecord as error:
        stop = error
    counted: list[Counted] = []
    void: list[Void] = []
    for record in records:
        try:
            was, more, empty = read(was, [record])
        except UnreadableRecord:
            break
        counted += more
        void += empty
    return was, counted, void, stop


def _warn(topic: str, partition: int, void: Sequence[Void]) -> None:
    garbage = [one.offset for one in void if one.reason == "garbage"]
    if garbage:
        log.warning(
            "%s[%d]: %d records that are none of ours, the first at offset %d: void",
            topic,
            partition,
            len(garbage),
            garbage[0],
        )


def _check_reach(events: Topic, positions: Positions, archived: Mapping[int, int]) -> None:
    """Raises LogTrimmed where neither the log nor the archive, up to these ends, holds what comes next for some partition."""
    for partition, reading in positions.readings.items():
        if not events.first[partition] <= reading.next_offset <= events.end[partition]:
            if reading.next_offset < events.first[partition] <= archived.get(partition, 0):
                continue
            raise LogTrimmed(
                f"{events.name}[{partition}] holds offsets {events.first[partition]} to {events.end[partition]}, but "
                f"agent '{positions.agent}' goes on at {reading.next_offset}, and no archive has that.",
                "The log was trimmed without `samefold archive`, or lost its end: restore it, or start with an empty database.",
            )
