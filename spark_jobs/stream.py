"""A Spark task's share of a micro-batch: the records of one Kafka partition, applied as the Faust agent applies a batch.

A task keeps nothing from one micro-batch to the next. It reads the agent's positions, passes over what lies before its own,
and applies the rest through the engine's `Worker`, in batches of the usual size. So it does not matter whether it runs again after
its COMMIT, twice at once, or late, as an orphan of a query that is long over: the compare-and-set lets one of them through, and
whoever is fenced reads the position again and finds the work done.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from infra.database.connect import DatabaseAway
from infra.errors import SamefoldError
from infra.log.clients import KafkaAway
from infra.log.records import Record
from infra.log.rule import Reading
from infra.observability import logs
from infra.processes.code_identity import require_code
from infra.processes.faultpoints import reach
from infra.processes.garbage_collector import collect_seldom
from infra.processes.services import Services
from projections.engine.live.reader import without_hole
from projections.engine.live.startup import set_difference
from projections.engine.live.worker import Worker
from projections.engine.store.commit import Fate
from projections.engine.views.core_views import agent_views, code_set
from spark_jobs.task import own_settings

COLUMNS = ("partition", "offset", "unix_millis(timestamp) as time_ms", "value")
"""What a task needs of the connector's columns. Nothing that folds looks at a record's key."""
TOLD = "told binary"
FENCES = 10
"""So many times in one micro-batch a task may find that another one was quicker; then the query begins anew."""


class Verdict(StrEnum):
    """What became of a share."""

    FOLDED = "folded"
    """All of it lies before the position now, whoever brought it there."""
    HOLE = "hole"
    """The agent stands before what was delivered: the query reads from the wrong place."""
    OTHER_SET = "other set"
    """Another set of views is live than this code's."""
    FENCED = "fenced"
    AWAY = "away"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Told:
    """A task's answer. `hole` is where the agent stands and what came instead; `error` is why it went no further."""

    partition: int
    verdict: Verdict
    folded: int = 0
    """Records that this task committed."""
    hole: tuple[int, int] | None = None
    error: SamefoldError | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """What a task is told. No settings: those come from its own environment, so that no secret travels with the query.

    `run` is one per agent process. `holes` are those of `Told` that were met twice: the log's own.
    """

    code: Mapping[str, str]
    sender: Services
    run: str
    agent: str
    name: str
    holes: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def fold(share: Share, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: apply a partition's records in offset order; yields one pickled Told, or nothing if there were none."""
    task: _Task | None = None
    told: Told | None = None
    for batch in batches:
        records = records_of(batch)
        if not records:
            continue
        task = task or _Task(share, records[0].partition)
        if (told := task.apply(records)).verdict is not Verdict.FOLDED:
            break
    if told is not None:
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(told)], pa.binary())], ["told"])


def records_of(batch: pa.RecordBatch) -> list[Record]:
    """The records in a batch of COLUMNS."""
    partitions, offsets, times, values = (column.to_pylist() for column in batch.columns)
    new = tuple.__new__  # what Record() comes to, in half the time
    return [new(Record, (p, o, t, None, v)) for p, o, t, v in zip(partitions, offsets, times, values, strict=True)]


class _Task:
    """One partition's records, from where the database says that the agent stands."""

    def __init__(self, share: Share, partition: int) -> None:
        self.share = share
        self.partition = partition
        self.turn = 0
        self.reading: Reading | None = None
        self.fenced = 0
        self.folded = 0

    def apply(self, records: Sequence[Record]) -> Told:
        try:
            return self._apply(_work(self.share), records)
        except (DatabaseAway, KafkaAway) as error:
            return self._told(Verdict.AWAY, error=error)
        except SamefoldError as error:
            return self._told(Verdict.STOPPED, error=error)

    def _apply(self, work: Worker, records: Sequence[Record]) -> Told:
        while True:
            reading = self.reading or self._position(work)
            if reading is None:
                return self._told(Verdict.OTHER_SET)
            at = reading.next_offset
            if records[0].offset < at:
                records = [record for record in records if record.offset >= at]
            if not records:
                return self._told(Verdict.FOLDED)
            known, to = self.share.holes.get(self.partition, (at, at))
            whole = without_hole(records, (at, to) if known == at else (at,))
            if not whole:
                return self._told(Verdict.HOLE, hole=(at, records[0].offset))
            taken = whole[: work.settings.agent_batch]
            reach("batch read")
            done = work.apply({self.partition: (reading, taken)}, self.turn)
            if done.fate is Fate.APPLIED:
                self.reading = done.readings.get(self.partition, reading)
                self.folded += self.reading.next_offset - at
                if done.stop is not None:
                    return self._told(Verdict.STOPPED, error=done.stop)
                continue
            self.reading = None
            self.fenced += 1
            if self.fenced == FENCES:
                return self._told(Verdict.FENCED)

    def _position(self, work: Worker) -> Reading | None:
        """Where the agent stands, and what it writes; None where that is not for this code's views."""
        self.turn += 1
        positions = work.positions(self.turn)
        reach("positions read")
        if positions is None or set_difference(positions.live_set, code_set(dict(work.views))) is not None:
            return None
        return positions.readings[self.partition]

    def _told(
        self, verdict: Verdict, *, hole: tuple[int, int] | None = None, error: SamefoldError | None = None
    ) -> Told:
        return Told(self.partition, verdict, self.folded, hole, error)


_works: dict[tuple[str, Services], Worker] = {}
"""This Python worker's own, by run and sender. Connection and plan outlive a task; what was read from the database does not."""


def _work(share: Share) -> Worker:
    """Raises WrongCode, ExecutorNotConfigured, WrongKafka, WrongDatabase, KafkaAway, DatabaseAway."""
    work = _works.get((share.run, share.sender))
    if work is None:
        require_code(share.code)
        settings = own_settings()
        # the connector came here with the driver's address
        for kafka in sorted({settings.kafka, share.sender.kafka}):
            share.sender.require(settings.model_copy(update={"kafka_bootstrap": kafka}))
        logs.configure(settings.log_level, settings.log_format)
        work = Worker(settings, share.agent, agent_views(share.agent), share.name)
        while _works:
            _works.popitem()[1].close()
        _works[share.run, share.sender] = work
        collect_seldom()
    return work
