"""The jobs behind `samefold lake`: bring datasets up to the log's end, compare them with the log, remove them.

One process at a time changes the lake, by a lock in PostgreSQL.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as Spark's own pages do
from pyspark.sql.types import StructType

from infra.database.connect import Connection, session
from infra.errors import NotConfigured, SamefoldError
from infra.log.contract import require_contract
from infra.log.rule import START, Reading
from infra.log.topics import Topic, TopicChanged
from infra.processes.code_identity import CODE
from infra.processes.engines import SILENT, Progress
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.rebuild.claims import CLAIM_S, by_whom, session_name, try_claim
from spark_jobs.engine.datasets import (
    SILVER,
    Classes,
    Dataset,
    UnknownDataset,
    datasets,
    failed,
    rows,
    text_of,
)
from spark_jobs.engine.lake_files import File, Lake, Manifest
from spark_jobs.engine.session import LOCAL, is_local, submitted
from spark_jobs.engine.session import session as spark_session
from spark_jobs.engine.source import Pin, pinned
from spark_jobs.engine.tables import Log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CODE_DIGEST = blake2b(repr(sorted(CODE.items())).encode(), digest_size=8).hexdigest()
MANY = 8
"""So many small files of one folder become one."""
SMALL = 32_000_000
"""Bytes of a file that is small."""
_LOCK = "the lake"
_CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # every reader knows it
}


class LakeBusy(SamefoldError):
    """Another process changes the lake."""


class DatasetChanged(SamefoldError):
    """A dataset has other columns than its files, under the same VERSION."""


@dataclass(frozen=True, slots=True)
class Updated:
    """`rows` are those that the run wrote; `what` is made, added or unchanged."""

    name: str
    what: str
    rows: int
    files: int
    size: int


@dataclass(frozen=True, slots=True)
class Verified:
    name: str
    rows: int
    expected: int
    differs: bool


@contextmanager
def lake_session(settings: Settings, master: str | None) -> Iterator[SparkSession]:
    """Spark for the jobs of the lake. Raises NotConfigured, and what `session` raises."""
    where = master or (None if submitted() else LOCAL)
    if settings.lake_url is None and (where is None or not is_local(where)):
        raise NotConfigured(
            "SAMEFOLD_LAKE_URL is not set, and executors of a cluster can't write to a folder of this machine.",
            "Set it to an object store, or to a folder that all machines have mounted: docs/analytics.md.",
        )
    with spark_session("lake", where) as spark:
        yield spark


@contextmanager
def alone(settings: Settings, command: str) -> Iterator[Connection]:
    """The one session that may change the lake. Raises LakeBusy, ContractBroken, DatabaseUnavailable."""
    with session(settings, session_name(f"lake {command}")) as connection:
        deadline = time.monotonic() + CLAIM_S  # a process that was killed keeps its lock until PostgreSQL notices
        while not try_claim(connection, _LOCK):
            if time.monotonic() > deadline:
                raise LakeBusy(
                    f"Another process changes the lake{by_whom(connection, _LOCK)}.", "Wait until it has ended."
                )
            time.sleep(0.1)
        yield connection


def chosen(names: Sequence[str]) -> dict[str, Dataset]:
    """The datasets of these names, by default all; `events` names those of all event classes. Raises UnknownDataset."""
    known = datasets()
    for name in names:
        if name not in known and name != SILVER:
            raise UnknownDataset(f"There is no dataset '{name}'.", f"There are: {', '.join(known)}.")
    return {
        name: one
        for name, one in known.items()
        if not names or name in names or (SILVER in names and one.event is not None)
    }


def update(
    settings: Settings, spark: SparkSession, names: Sequence[str] = (), *, progress: Progress = SILENT
) -> list[Updated]:
    """Bring datasets up to the log's end now.

    Raises LakeBusy, LakeUnavailable, BadDataset, DatasetFailed, DatasetChanged, TopicChanged and what reading the log raises.
    """
    asked = chosen(names)
    with alone(settings, "update") as connection:
        topic = require_contract(settings, connection)
        lake, pin = Lake(settings), pinned(settings)
        found = {name: lake.manifest(name) for name in asked}
        _require_topic(found, topic)
        was = {name: one for name, one in found.items() if one and one.version == asked[name].version}
        run = _Run(lake, _prepared(spark), pin, connection, asked, was)
        progress.begin("update", len(asked))
        done = []
        for dataset in asked.values():
            lake.sweep(dataset.name)
            done.append(run.update(dataset))
            progress.advance(1)
        run.classes.close()
        return done


class _Run:
    """Brings datasets up to one end of the log. `was` are those that go on from where they are."""

    def __init__(
        self,
        lake: Lake,
        spark: SparkSession,
        pin: Pin,
        connection: Connection,
        asked: Mapping[str, Dataset],
        was: Mapping[str, Manifest],
    ) -> None:
        self.lake, self.spark, self.pin, self.connection, self.was = lake, spark, pin, connection, was
        self.ends = self._ends([one.positions for one in was.values()])
        self.classes = Classes(spark, {one.event: self._pin(one) for one in asked.values() if one.event})

    def _ends(self, known: list[Mapping[int, Reading]]) -> dict[int, Reading]:
        """The reading states at the log's end, read from the latest that datasets know."""
        begins = {
            partition: max((one.get(partition, START) for one in known), default=START) for partition in self.pin.ends
        }
        found = Log(self.spark, pin=self.pin._replace(begins=begins)).table("ends").collect()
        return begins | {partition: Reading(*reading) for partition, *reading in found}

    def _pin(self, dataset: Dataset) -> Pin:
        was = self.was.get(dataset.name)
        return self.pin._replace(begins=was.positions if was and dataset.incremental else {})

    def update(self, dataset: Dataset) -> Updated:
        was = self.was.get(dataset.name)
        if was and was.positions == self.ends and (dataset.incremental or was.code == CODE_DIGEST):
            return Updated(dataset.name, "unchanged", 0, len(was.files), sum(one.size for one in was.files))
        try:
            if dataset.event is None:
                return self._write(dataset, rows(dataset, Log(self.spark, pin=self._pin(dataset))), was)
            made, count = self.classes.rows(dataset.event)
            return self._write(dataset, made, was, is_empty=not count)
        except PySparkException as error:
            raise failed(dataset.name, error) from error

    def _write(self, dataset: Dataset, made: DataFrame, was: Manifest | None, *, is_empty: bool = False) -> Updated:
        name, columns = dataset.name, text_of(made.schema)
        if was and (was.columns, was.partitioned_by) != (columns, dataset.partitioned_by):
            raise DatasetChanged(
                f"Dataset '{name}' has other columns than its files, in the same version: {columns}, partitioned by "
                f"{dataset.partitioned_by}; not {was.columns}, by {was.partitioned_by}.",
                "Raise its VERSION, or make the columns as they were.",
            )
        kept = was.files if was and dataset.incremental else ()
        run, url = self.lake.new_run(name)
        if not is_empty:
            writer = made.hint("rebalance", *dataset.partitioned_by).write.partitionBy(*dataset.partitioned_by)
            writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(url)
        new = [] if is_empty else self.lake.written(name, run)
        reach("dataset written")
        files = self._compacted(name, run, [*kept, *new])
        self.connection.execute("select")  # the lock is held: nobody else has changed the dataset
        topic_id, by = self.pin.topic_id, dataset.partitioned_by
        manifest = Manifest(dataset.version, CODE_DIGEST, topic_id, self.ends, columns, by, tuple(files), run)
        self.lake.commit(name, manifest)
        reach("dataset committed")
        what = "added" if kept else "made"
        return Updated(name, what, sum(one.rows for one in new), len(files), sum(one.size for one in files))

    def _compacted(self, name: str, run: str, files: list[File]) -> list[File]:
        """These files, with one in place of many small ones in one folder."""
        small = sorted((one for one in files if one.size < SMALL), key=lambda one: one.folder)
        for folder, group in groupby(small, key=lambda one: one.folder):
            many = list(group)
            if len(many) < MANY:
                continue
            before = self.lake.written(name, run, folder)
            read = self.spark.read.parquet(*(self.lake.where(name, one, hidden=one.run == run) for one in many))
            read.coalesce(1).write.mode("append").parquet(self.lake.run_url(name, run, folder))
            files = [one for one in files if one not in many]
            files += [one for one in self.lake.written(name, run, folder) if one not in before]
            for one in many:
                if one.run == run:
                    self.lake.remove(name, one)
        return files


def _prepared(spark: SparkSession) -> SparkSession:
    """A session of its own, so that datasets do not depend on the machine's time zone."""
    own = spark.newSession()
    for name, value in _CONF.items():
        own.conf.set(name, value)
    return own


def _require_topic(found: Mapping[str, Manifest | None], topic: Topic) -> None:
    for name, one in found.items():
        if one and (one.topic_id != topic.id or any(at.next_offset > topic.end[p] for p, at in one.positions.items())):
            raise TopicChanged(
                f"Dataset '{name}' was made of another '{topic.name}': the topic was recreated.",
                f"Make it anew: `samefold lake drop {name}`, then `samefold lake update`.",
            )


def status(settings: Settings) -> Iterator[dict[str, Any]]:
    """Each dataset: what is there, and how many records the log has beyond it. `state` is ready, missing, outdated or gone.

    `outdated` is of another version, `gone` has no code any more. Raises LakeUnavailable, BadDataset, ContractBroken.
    """
    with session(settings, "samefold lake status") as connection:
        topic = require_contract(settings, connection)
    lake, known = Lake(settings), datasets()
    for name in [*known, *(one for one in lake.names() if one not in known)]:
        found = lake.manifest(name)
        if found is None:
            yield {"name": name, "state": "missing", "question": known[name].question}
            continue
        state = "gone" if name not in known else "ready" if known[name].version == found.version else "outdated"
        yield {
            "name": name,
            "state": state,
            "question": known[name].question if name in known else "",
            "version": found.version,
            "at": found.at.isoformat(timespec="seconds"),
            "rows": sum(one.rows for one in found.files),
            "bytes": sum(one.size for one in found.files),
            "behind": sum(end - found.positions.get(p, START).next_offset for p, end in topic.end.items()),
            "positions": {partition: at.next_offset for partition, at in found.positions.items()},
            "files": [lake.where(name, one) for one in found.files],
        }


def verify(
    settings: Settings, spark: SparkSession, names: Sequence[str] = (), *, progress: Progress = SILENT
) -> list[Verified]:
    """Compare the rows of datasets that are there with those that the log has up to the same positions.

    Raises LakeUnavailable, BadDataset, DatasetFailed, TopicChanged and what reading the log raises.
    """
    asked, lake, own = chosen(names), Lake(settings), _prepared(spark)
    with session(settings, "samefold lake verify") as connection:
        topic = require_contract(settings, connection)
    found = {name: lake.manifest(name) for name in asked}
    _require_topic(found, topic)
    there = {name: one for name, one in found.items() if one and one.version == asked[name].version}
    pins = {
        name: Pin(settings.kafka, topic.id, {partition: Cut(at.next_offset) for partition, at in one.positions.items()})
        for name, one in there.items()
    }
    classes = Classes(own, {event: pins[name] for name in there if (event := asked[name].event)})
    progress.begin("verify", len(there))
    done = []
    for name, manifest in there.items():
        event = asked[name].event
        try:
            expected = classes.rows(event)[0] if event else rows(asked[name], Log(own, pin=pins[name]))
            wanted, real = _digest(expected), _digest(_stored(lake, own, name, manifest, expected.schema))
        except PySparkException as error:
            raise failed(name, error) from error
        done.append(Verified(name, real[0], wanted[0], real != wanted))
        progress.advance(1)
    classes.close()
    return done


def _stored(lake: Lake, spark: SparkSession, name: str, manifest: Manifest, schema: StructType) -> DataFrame:
    """A dataset's files. Raises DatasetFailed."""
    parts = []
    for run in sorted({one.run for one in manifest.files}):
        files = [one for one in manifest.files if one.run == run]
        base = lake.url_of(name) if lake.has_links else lake.run_url(name, run)
        read = spark.read.schema(schema).option("basePath", base)
        parts.append(read.parquet(*(lake.where(name, one) for one in files)).select(*schema.fieldNames()))
    return reduce(DataFrame.union, parts) if parts else spark.createDataFrame([], schema)


def _digest(table: DataFrame) -> tuple[int, int]:
    """The number of rows and a sum of their hashes: equal for the same rows in any order."""
    columns = [
        F.to_json(F.struct(field.name)) if "map<" in field.dataType.simpleString() else F.col(f"`{field.name}`")
        for field in table.schema
    ]
    row = table.select(F.xxhash64(*columns).cast("decimal(38)").alias("hash")).agg(F.count("*"), F.sum("hash")).head()
    assert row is not None, "an aggregate has a row"
    return int(row[0]), int(row[1] or 0)


def drop(settings: Settings, names: Sequence[str]) -> None:
    """Remove datasets, also those that the code has no more. Raises UnknownDataset, LakeBusy, LakeUnavailable."""
    lake = Lake(settings)
    with alone(settings, "drop"):
        there = lake.names()
        for name in names:
            if name not in there:
                raise UnknownDataset(f"The lake has no dataset '{name}'.", f"It has: {', '.join(there) or 'none'}.")
        for name in names:
            lake.drop(name)
