"""A Spark task's share of a micro-batch: the records of one Kafka partition, applied as the Faust agent applies a batch.

A task keeps nothing from one micro-batch to the next. It reads the agent's positions, skips records before its own, and applies the
rest through the engine's `Worker`, in batches of the usual size. So it may run again after its COMMIT, twice at once, or late, as
an orphan of a query that ended long ago: the compare-and-set lets one of them through, and a fenced one reads the position
again and finds the work done.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from infra.errors import SamefoldError
from infra.log.records import Record
from infra.log.rule import Reading
from infra.observability import logs
from infra.processes.code_identity import require_code
from infra.processes.faultpoints import reach
from infra.processes.garbage_collector import collect_seldom
from infra.processes.time_limit import limit_calls
from projections.engine.live.reader import without_hole
from projections.engine.live.startup import set_difference
from projections.engine.live.worker import Worker
from projections.engine.store.commit import CommitStatus
from projections.engine.views.core_views import agent_views, code_set
from spark_jobs.engine.services import Services
from spark_jobs.engine.task import own_settings

COLUMNS = "partition int, offset bigint, time timestamp, value binary"
"""What a task needs of a record. No fold uses its key, and the worker applies the reading rule itself."""
RESULT = "result binary"
FENCES = 10
"""How often a task may be fenced in one micro-batch before the query starts again."""


class Status(StrEnum):
    """What became of a share."""

    FOLDED = "folded"
    """All of it lies before the agent's position now, whichever process folded it."""
    HOLE = "hole"
    """The agent's position is before what was delivered: the query reads from the wrong place."""
    OTHER_SET = "other set"
    """The live views are not this code's."""
    FENCED = "fenced"
    STOPPED = "stopped"
    """By an error, which may pass: of a database or broker that is unavailable."""


@dataclass(frozen=True, slots=True)
class ShareResult:
    """A task's result. `hole` is the agent's position and the offset that came instead; `error` is why the task stopped."""

    partition: int
    status: Status
    folded: int = 0
    """Records that this task committed."""
    hole: tuple[int, int] | None = None
    error: SamefoldError | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """What a task gets. No settings: those come from its own environment, so that the query carries no secret.

    `run` identifies the agent process. `holes` are those of `ShareResult` that were met twice: they are the log's own.
    """

    code: Mapping[str, str]
    sender: Services
    run: str
    agent: str
    name: str
    holes: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def fold(share: Share, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: apply a partition's records in offset order; yields one pickled ShareResult, or nothing without records."""
    task: _Task | None = None
    result: ShareResult | None = None
    for batch in batches:
        records = records_of(batch)
        if not records:
            continue
        task = task or _Task(share, records[0].partition)
        if (result := task.apply(records)).status is not Status.FOLDED:
            break
    if result is not None:
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(result)], pa.binary())], ["result"])


def records_of(batch: pa.RecordBatch) -> list[Record]:
    """The records of a batch with COLUMNS."""
    partitions, offsets, times, values = batch.columns
    columns = partitions, offsets, times.cast(pa.int64()), values
    new = tuple.__new__  # what Record() comes to, in half the time
    of = zip(*(column.to_pylist() for column in columns), strict=True)
    return [new(Record, (p, o, t // 1_000, None, v)) for p, o, t, v in of]


@dataclass
class _Task:
    """One partition's records, applied from the agent's position on."""

    share: Share
    partition: int
    session: int = 0
    reading: Reading | None = None
    fenced: int = 0
    folded: int = 0

    def apply(self, records: Sequence[Record]) -> ShareResult:
        try:
            return self._apply(_worker(self.share), records)
        except SamefoldError as error:
            return self._result(Status.STOPPED, error=error)

    def _apply(self, worker: Worker, records: Sequence[Record]) -> ShareResult:
        while True:
            reading = self.reading or self._position(worker)
            if reading is None:
                return self._result(Status.OTHER_SET)
            at = reading.next_offset
            if records[0].offset < at:
                records = [record for record in records if record.offset >= at]
            if not records:
                return self._result(Status.FOLDED)
            known, to = self.share.holes.get(self.partition, (at, at))
            whole = without_hole(records, (at, to) if known == at else (at,))
            if not whole:
                return self._result(Status.HOLE, hole=(at, records[0].offset))
            taken = whole[: worker.settings.batch]
            reach("batch read")
            done = worker.attempt({self.partition: (reading, taken)}, self.session)
            if done.status is CommitStatus.APPLIED:
                self.reading = done.readings.get(self.partition, reading)
                self.folded += self.reading.next_offset - at
                if done.stop is not None:
                    return self._result(Status.STOPPED, error=done.stop)
                continue
            self.reading = None
            self.fenced += 1
            if self.fenced == FENCES:
                return self._result(Status.FENCED)

    def _position(self, worker: Worker) -> Reading | None:
        """The agent's position; None where the live views are not this code's."""
        self.session += 1
        positions = worker.positions(self.session)
        reach("positions read")
        if positions is None or set_difference(positions.live_set, code_set(worker.views)) is not None:
            return None
        return positions.readings[self.partition]

    def _result(
        self, status: Status, *, hole: tuple[int, int] | None = None, error: SamefoldError | None = None
    ) -> ShareResult:
        return ShareResult(self.partition, status, self.folded, hole, error)


_workers: dict[tuple[str, Services], Worker] = {}
"""This Python process's own, by run and services. Connection and plan outlive a task; what was read from the database does not."""


def _worker(share: Share) -> Worker:
    """Raises WrongCode, ExecutorNotConfigured, WrongKafka, WrongDatabase, KafkaUnavailable, DatabaseUnavailable."""
    worker = _workers.get((share.run, share.sender))
    if worker is None:
        require_code(share.code)
        settings = own_settings()
        share.sender.require(settings)
        logs.configure(settings.log_level, settings.log_format)
        worker = Worker(settings, share.agent, agent_views(share.agent), share.name)
        while _workers:
            _workers.popitem()[1].close()
        _workers[share.run, share.sender] = worker
        collect_seldom()
        limit_calls(settings.decide_limit_s)
    return worker
