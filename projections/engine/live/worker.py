"""The agent's access to the database: its start, its positions and its batches. Synchronous; each lane has one thread."""

from __future__ import annotations

import hashlib
import importlib
import logging
import pkgutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import psycopg
from psycopg import errors
from psycopg.types.json import Json

from domain.engine.versions import UpcastFailed
from infra.archive.manifest import ends_of
from infra.database.connect import Connection, DatabaseUnavailable, connect, named_error
from infra.database.revisions import DatabaseAhead, require_schema
from infra.errors import SamefoldError
from infra.log.contract import Contract
from infra.log.records import Record, Traced, decode_value
from infra.log.rule import Reading, Void, read_readable
from infra.log.source import LogTrimmed
from infra.log.topics import Topic, describe
from infra.observability import metrics, tracing
from infra.settings import Settings
from projections.engine.fold.errors import EndedTheAgent, EngineStop, PoisonEvent, UnreadableEvent
from projections.engine.fold.fold import RowCache, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.live.startup import ensure_started
from projections.engine.live.stopping import stop_view
from projections.engine.store.commit import Batch, BatchResult, CommitStatus, Committer
from projections.engine.store.event_types import record_event_types
from projections.engine.store.positions import Attempt, Positions, read_positions
from projections.engine.store.rows import ask_for_missing
from projections.engine.views.core_views import code_set
from projections.engine.views.view import CORE, View

log = logging.getLogger(__name__)

Takes: TypeAlias = Mapping[int, tuple[Reading, Sequence[Record]]]

ATTEMPTS = 3
READING = "(reading)"
"""In place of a view's name, while a record is read."""
ONE_AT_A_TIME = threading.Lock()
"""For the attempts of all workers of this process: where one ends it, no other is under way and suspected.

A later batch of another partition may end the process during an attempt. But the next process begins with that batch, as an attempt
of its own. So a view that is folded alone meanwhile is not suspected three times at one event.
"""


class Worker:
    """One agent's connections, one per lane, and its committer.

    Batches of different partitions may be applied at once, each in its lane. The lanes share the committer and its row cache,
    which is kept by partition. `plan` is that of `views`, for views of other contexts than those of `domain/`. `defers` is the
    committer's, for one lane.
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
        defers: bool = False,
    ) -> None:
        self.settings = settings
        self.agent = agent
        self.views = views
        self.plan = plan or Plan(views)
        self.name = name
        self.topics: Sequence[str] = ()
        """Those that it has beside the log."""
        self._batches = {status: metrics.AGENT_BATCHES.labels(agent, status) for status in CommitStatus}
        for metric in (metrics.AGENT_COMMITS, metrics.AGENT_EVENTS, metrics.AGENT_ROWS):
            metric.labels(agent)  # shown from the start
        metrics.AGENT_VOID.labels(agent, "garbage")
        self._connections: list[Connection | None] = [None] * lanes
        self._defers = defers
        self._turn = 0
        self._committer: Committer | None = None
        self._attempts: dict[int, Attempt] = {}
        """By partition, the last one of the processes before."""
        self._most = 0
        """So many records may be in a batch; 0: all."""
        self._begun: set[int] = set()
        """Partitions whose next records are no attempt."""

    def start(self, events: Topic) -> None:
        """Make the agent's first start on that topic, or check a later one.

        Raises ContractBroken, ShapeChanged, LogTrimmed, DatabaseBehind, DatabaseAhead, and DatabaseUnavailable, which may pass.
        """
        contract = Contract.of(events)
        with self._connected() as connection:
            try:
                require_schema(connection)
            except DatabaseAhead:
                # while this code's set of views is live, the database has all that they need, whatever newer migrations did
                positions = read_positions(connection, self.agent, events.name)
                if positions is None or positions.live_set != code_set(self.views):
                    raise
            positions = self.begin(connection, contract)
        if positions is not None:
            # after the positions were read, because other agents and the log's end move on
            now = describe(self.settings, events.name)
            check_reach(now, positions, self.archived(events.name))

    def begin(self, connection: Connection, contract: Contract) -> Positions | None:
        """Make the first start or check a later one; the positions, or None if the agent has none yet."""
        return ensure_started(connection, self.agent, self.views, contract)

    def archived(self, topic: str) -> Mapping[int, int]:
        """The archive's ends by partition. Raises DatabaseUnavailable."""
        with self._connected() as connection:
            return ends_of(connection, topic)

    def read(self, connection: Connection) -> Positions | None:
        """The agent's positions."""
        return read_positions(connection, self.agent, self.settings.events_topic)

    def positions(self, turn: int = 0) -> Positions | None:
        """The agent's positions, from which batches of this turn are folded. Raises DatabaseUnavailable."""
        with self._connected() as connection:
            positions = self.read(connection)
            if self.agent == CORE:
                self.record_event_types(connection, positions)
        # written in this order and read in the other: another lane's batch of the last turn must not get the new committer
        self._turn = turn
        self._committer = Committer(self._plan_of(positions), positions, defers=self._defers) if positions else None
        return positions

    def _plan_of(self, positions: Positions) -> Plan:
        """The plan of this code's views without those that are stopped."""
        running = self.plan.views.keys() - positions.stopped.keys()
        return self.plan if running == self.plan.views.keys() else self.plan.only(*running)

    def record_event_types(self, connection: Connection, positions: Positions | None = None) -> None:
        """Let handlers append this code's events, if its views are live."""
        positions = positions or self.read(connection)
        lives = positions is not None and positions.live_set == code_set(self.views)
        if lives and (new := record_event_types(connection)):
            log.info("agent %s: handlers may append these events now: %s", self.name, ", ".join(sorted(new)))

    def ping(self, lane: int = 0) -> None:
        """Check the connection, write the moves that were deferred, and record event types. Raises DatabaseUnavailable.

        A restored database may lack the types. Handlers wait for them, so no record would come that has the positions read.
        """
        with self._connected(lane) as connection:
            connection.execute("select")
            if self._committer is not None and self._committer.flush(connection) is CommitStatus.FENCED:
                self._committer = None
            if lane == 0 and self.agent == CORE:
                self.record_event_types(connection)

    # ── batches ──

    def apply(self, takes: Takes, turn: int = 0, lane: int = 0) -> BatchResult:
        """Apply records of several partitions in one transaction.

        A batch of an earlier turn is fenced: the positions read since may be of another set of views, whose tables must not be
        written. If the log can't be folded beyond a record, everything before it is applied, and `stop` is the error. Where only
        a view can't go on, it is stopped, and the result is FENCED: the next turn is without it. Raises DatabaseUnavailable and
        the database's other named errors.
        """
        if not tracing.recording():
            return self._measured(takes, turn, lane)
        records = [record for _, records in takes.values() for record in records]
        known = {"samefold.agent": self.agent, "samefold.partitions": ",".join(map(str, takes))}
        headers = [record.headers for record in records if isinstance(record, Traced)]
        with tracing.of_batch("fold", headers, known | {"samefold.records": len(records)}) as span:
            result = self._measured(takes, turn, lane)
            span.set_attribute("samefold.status", result.status)
            return result

    def _measured(self, takes: Takes, turn: int, lane: int) -> BatchResult:
        try:
            result = self._apply(takes, turn, lane)
        except DatabaseUnavailable:
            self._batches[CommitStatus.AWAY].inc()
            self._most = max(sum(len(records) for _, records in takes.values()) // 2, 1)
            raise
        self._batches[result.status].inc()
        return result

    def _apply(self, takes: Takes, turn: int, lane: int, ended: EngineStop | None = None) -> BatchResult:
        committer = self._committer
        if committer is None or turn != self._turn:
            return BatchResult(CommitStatus.FENCED)
        started = time.perf_counter()
        result = BatchResult(CommitStatus.APPLIED)
        stop: SamefoldError | None = ended
        batches = []
        voids = []
        for partition, (was, records) in takes.items():
            mine, foreign = self.own(partition, was, records)
            after, counted, void, unreadable = read_readable(
                was, mine, decode_value if ended else committer.plan.decode
            )
            batch = Batch(partition, was, after, counted)
            batches.append(batch.until(ended.offset) if ended else batch)
            stop = stop or unreadable or foreign
            voids.append(void)
            _warn(self.settings.events_topic, partition, void)
        while batches := [batch for batch in batches if batch.next != batch.was]:
            try:
                with self._connected(lane) as connection:
                    result = committer.apply(connection, batches)
            except EngineStop as error:
                stop = error
                batches = [b.until(error.offset) if b.partition == error.partition else b for b in batches]
                continue
            if result.status is not CommitStatus.APPLIED:
                return result
            commits = sum(len(batch.counted) for batch in batches)
            _count(self.agent, result, commits, time.perf_counter() - started, voids)
            break
        if stop is not None:
            with self._connected(lane) as connection:
                # other code goes on from exactly there
                if committer.flush(connection) is CommitStatus.FENCED:
                    return BatchResult(CommitStatus.FENCED)
                if isinstance(stop, PoisonEvent) and self.plan.views[stop.view].stops_alone:
                    with suppress(errors.LockNotAvailable, errors.DeadlockDetected):  # the next batch meets it again
                        stop_view(connection, committer.positions, stop)
                    return BatchResult(CommitStatus.FENCED, stop=stop)
        return replace(result, readings={batch.partition: batch.next for batch in batches}, stop=stop)

    def own(
        self,
        partition: int,  # noqa: ARG002
        was: Reading,  # noqa: ARG002
        records: Sequence[Record],
    ) -> tuple[Sequence[Record], EngineStop | None]:
        """The records that this code folds, and the error that names the first one that it must not fold."""
        return records, None

    # ── attempts ──

    def attempt(self, takes: Takes, turn: int = 0, lane: int = 0) -> BatchResult:
        """Apply records as `apply` does. A partition's first ones are an attempt, so that an event that ends agents is found.

        After a batch that the database did not finish, the next one is half as large: a view may be slow, and outlast a timeout.
        """
        committer = self._committer
        if committer is None or turn != self._turn or (self._begun.issuperset(takes) and not self._most):
            return self.apply(takes, turn, lane)
        readings: dict[int, Reading] = {}
        with ONE_AT_A_TIME:
            for partition, (was, records) in takes.items():
                before = self._attempts.setdefault(partition, committer.positions.attempts.get(partition, Attempt()))
                rest, reading = records, was
                while rest:
                    is_suspect = partition not in self._begun and rest[0].offset <= before.last
                    size = 1 if is_suspect else self._most or len(rest)
                    part, rest = rest[:size], rest[size:]
                    take = {partition: (reading, part)}
                    is_known = partition in self._begun
                    result = self.apply(take, turn, lane) if is_known else self._attempt(committer, take, turn, lane)
                    if result.status is not CommitStatus.APPLIED or result.stop is not None:
                        return result
                    readings |= result.readings
                    reading = readings.get(partition, reading)
                    self._most = self._most * 2 if self._most < self.settings.batch else 0
                    if not is_suspect:
                        self._begun.add(partition)
        return BatchResult(CommitStatus.APPLIED, readings)

    def _attempt(self, committer: Committer, take: Takes, turn: int, lane: int) -> BatchResult:
        [(partition, (_, records))] = take.items()
        attempt = Attempt(records[0].offset, records[-1].offset)
        ended_one = len(records) == 1 and attempt[:2] == self._attempts[partition][:2]
        stop = self._fold_alone(committer, take, lane) if ended_one else None
        self._keep(partition, attempt, lane)
        result = self._apply(take, turn, lane, stop) if stop else self.apply(take, turn, lane)
        if result.status is not CommitStatus.APPLIED or result.stop is not None:
            # this process lives; and where it gave up, the next one tries again: what ended agents may be outside the code
            self._keep(partition, self._attempts[partition]._replace(number=0) if stop else Attempt(), lane)
        return result

    def _fold_alone(self, committer: Committer, take: Takes, lane: int) -> EngineStop | None:
        """Read a record and fold it for one view after the other, keeping only which. The error of what ended agents before."""
        [(partition, (was, records))] = take.items()
        plan, before = committer.plan, self._attempts[partition]
        mine, code = self.own(partition, was, records)[0], code_of_authors()
        _, counted, _, _ = read_readable(was, mine)
        if not counted:
            return None
        again = before.code == code and before.view in (READING, *plan.views)
        number = before.number + 1 if again else 1
        if number > ATTEMPTS:
            [(offset, _, commit)] = counted
            why = f"ended-the-agent: it ended {ATTEMPTS} agents; their logs or exit codes say how"
            where = {"partition": partition, "offset": offset}
            if before.view == READING:
                kinds = ", ".join(sorted({event.type for event in commit.events}))
                return UnreadableEvent(commit.stream, kinds, UpcastFailed(why), **where)
            return EndedTheAgent(before.view, commit.stream, commit.version, cause=why, **where)
        # states before the others: journals fold them, too
        views = [READING, *sorted(plan.views, key=lambda name: name not in plan.states)]
        for view in [before.view] if again else views:
            self._keep(partition, before._replace(view=view, number=number, code=code), lane)
            alone = plan if view == READING else plan.only(view)
            with suppress(EngineStop), self._connected(lane) as connection:  # raised again where the record is applied
                batch, held = decode(alone, partition, read_readable(was, mine, plan.decode)[1]), RowCache(alone)
                if alone is not plan:
                    tables = committer.positions.tables
                    hold = ask_for_missing(connection, plan, tables, [batch], {partition: held})
                    hold()
                    fold(alone, batch, held, committer.blocked)
        return None

    def _keep(self, partition: int, attempt: Attempt, lane: int) -> None:
        query = "update positions set attempt = %s where agent = %s and topic = %s and partition = %s"
        with self._connected(lane) as connection:
            connection.execute(query, (Json(attempt), self.agent, self.settings.events_topic, partition))

    # ── connections ──

    @contextmanager
    def _connected(self, lane: int = 0) -> Iterator[Connection]:
        """The lane's connection. psycopg's errors become named ones, and it is closed after one."""
        try:
            connection = self._connections[lane]
            if connection is None or connection.closed:
                connection = connect(self.settings, f"samefold {self.name}", short_transactions=True, by_key=True)
                self._connections[lane] = connection
            yield connection
        except psycopg.Error as error:
            self.close(lane)
            raise named_error(error, self.settings) from error
        except DatabaseUnavailable:
            self.close(lane)
            raise

    def close(self, lane: int = 0) -> None:
        connection, self._connections[lane] = self._connections[lane], None
        if connection is not None:
            connection.close()


def code_of_authors() -> str:
    """A short hash of their modules: what ended agents may have been corrected since."""
    found = hashlib.sha256()
    for package in ("domain", "projections", "policies"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            spec = find_spec(f"{package}.{module.name}")
            if spec and spec.origin and not module.ispkg:
                found.update(Path(spec.origin).read_bytes())
    return found.hexdigest()[:8]


def _warn(topic: str, partition: int, void: Sequence[Void]) -> None:
    garbage = [one.offset for one in void if one.reason == "garbage"]
    if garbage:
        log.warning(
            "%s[%d]: ignored %d foreign records, the first at offset %d", topic, partition, len(garbage), garbage[0]
        )


def check_reach(events: Topic, positions: Positions, archived: Mapping[int, int]) -> None:
    """Raises LogTrimmed if some partition's next record is neither in the log nor in the archive, which has these ends."""
    for partition, reading in positions.readings.items():
        if not events.first[partition] <= reading.next_offset <= events.end[partition]:
            if reading.next_offset < events.first[partition] <= archived.get(partition, 0):
                continue
            what = (
                f"{events.name}[{partition}] holds offsets {events.first[partition]} to {events.end[partition]}, but "
                f"agent '{positions.agent}' continues at {reading.next_offset}"
            )
            raise LogTrimmed(
                f"{what}, which is not in the archive either.",
                "The log was trimmed without `samefold archive`, or lost its end. Restore it, or start with an empty database.",
            )


def _count(agent: str, result: BatchResult, commits: int, seconds: float, voids: Iterable[Sequence[Void]]) -> None:
    """A batch's transaction was committed; `voids` are void records that the position has passed."""
    metrics.AGENT_BATCH_COMMITS.labels(agent).observe(commits)
    metrics.AGENT_BATCH_SECONDS.labels(agent).observe(seconds)
    metrics.AGENT_COMMITS.labels(agent).inc(commits)
    metrics.AGENT_EVENTS.labels(agent).inc(result.events)
    metrics.AGENT_ROWS.labels(agent).inc(result.rows)
    for why in result.retries:
        metrics.AGENT_RETRIES.labels(agent, why).inc()
    for parked in result.parked:
        metrics.AGENT_PARKED.labels(agent, parked.view).inc()
    for why, count in Counter(one.reason for void in voids for one in void).items():
        metrics.AGENT_VOID.labels(agent, why).inc(count)
