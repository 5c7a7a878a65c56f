"""The jobs behind `samefold lake`: bring datasets up to the log's end, compare them with the log, remove them.

One process at a time changes the lake, by a lock in PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import groupby
from posixpath import dirname
from typing import Any
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as Spark's own pages do

from infra.database.connect import Connection, session
from infra.errors import NotConfigured, SamefoldError
from infra.log.contract import require_contract
from infra.log.topics import Topic, TopicChanged
from infra.processes.code_identity import CODE_DIGEST
from infra.processes.engines import SILENT, Progress
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.rebuild.claims import by_whom, release, session_name, try_claim
from spark_jobs.engine import session as of_spark
from spark_jobs.engine.datasets import SPARK_ERRORS, BadDataset, Dataset, DatasetFailed, Rows, datasets, failed
from spark_jobs.engine.lake_files import File, Lake, Manifest
from spark_jobs.engine.source import Pin, pinned

MANY, SMALL = 8, 32_000_000
"""So many files of one folder that have less than so many bytes become one."""
_LOCK = "the lake"


class LakeBusy(SamefoldError):
    """Another process changes the lake, or compares it with the log."""


class DatasetChanged(SamefoldError):
    """A dataset has other columns than its files, under the same VERSION, or a lower one."""


@contextmanager
def lake_session(settings: Settings, master: str | None) -> Iterator[SparkSession]:
    """Spark for the jobs of the lake. Raises NotConfigured, and what starting Spark raises."""
    where = master or (None if of_spark.submitted() else of_spark.LOCAL)
    if settings.lake_url is None and (where is None or not of_spark.is_local(where)):
        raise NotConfigured(
            "SAMEFOLD_LAKE_URL is not set, and executors of a cluster can't write to a folder of this machine.",
            "Set it to an object store, or to a folder that all machines have mounted: docs/analytics.md.",
        )
    with of_spark.session("lake", where) as spark:
        yield spark


@contextmanager
def opened(settings: Settings, command: str) -> Iterator[tuple[Lake, Topic, Connection]]:
    """The lake, for the one session that may work on it. Raises LakeBusy, LakeUnavailable, ContractBroken."""
    with session(settings, session_name(f"lake {command}")) as connection:
        if not try_claim(connection, _LOCK):
            by = by_whom(connection, _LOCK)
            raise LakeBusy(f"Another process works on the lake{by}.", "Wait until it has ended.")
        try:
            yield Lake(settings), require_contract(settings, connection), connection
        finally:
            release(connection, _LOCK)  # a session ends some time after its connection is closed


def chosen(names: Sequence[str], known: Collection[str]) -> list[str]:
    """Those of these names, by default all; `events` names all event classes. Raises BadDataset."""
    if unknown := {*names} - ({*known, *map(dirname, known)} - {""}):
        raise BadDataset(f"There is no dataset '{min(unknown)}'.", f"There are: {', '.join(known) or 'none'}.")
    return [name for name in known if not names or {name, dirname(name)} & {*names}]


def update(
    settings: Settings, spark: SparkSession, names: Sequence[str] = (), *, progress: Progress = SILENT
) -> list[dict[str, Any]]:
    """Bring datasets up to the log's end now; what became of each: `made`, `added` or `unchanged`, with how many rows.

    Raises LakeBusy, LakeUnavailable, BadDataset, DatasetFailed, DatasetChanged, TopicChanged and what reading the log raises.
    """
    known, spark = datasets(), _with_conf(spark)
    asked = {name: known[name] for name in chosen(names, known)}
    with opened(settings, "update") as (lake, topic, connection):
        was = _there(lake, asked, topic)
        end = pinned(settings)
        ends = {partition: cut.next_offset for partition, cut in end.ends.items()}
        begins = {name: one.ends for name, one in was.items() if asked[name].incremental}
        rows = Rows(spark, asked, {name: end._replace(begins=begins.get(name, {})) for name in asked})
        progress.begin("update", len(asked))
        done, errors = [], dict[str, SamefoldError]()
        for name, dataset in asked.items():
            progress.advance(1)
            before = was.get(name)
            connection.execute("select")  # the lock is held: no other run's files are taken for leftovers
            lake.sweep(name)
            if before and before.ends == ends and (dataset.incremental or before.code == CODE_DIGEST):
                done.append({"name": name, "what": "unchanged", "rows": 0})
                continue
            kept = before.files if before and dataset.incremental else ()
            try:
                if (found := lake.manifest(name)) and _state(found, dataset) == "newer":
                    raise DatasetChanged(
                        f"Dataset '{name}' was made in VERSION {found.version}, and this code has {dataset.version}.",
                        f"Run newer code, or `samefold lake drop {name}` first.",
                    )
                made, count = rows.of(dataset)
                columns = ", ".join(f"{column} {kind}" for column, kind in made.dtypes)
                shape = columns, dataset.partitioned_by, dataset.incremental
                if before and (before.columns, before.partitioned_by, before.incremental) != shape:
                    raise _changed(name, columns, before)
                run = uuid4().hex
                new = _written(lake, dataset, run, made) if count != 0 else []
                files = _compacted(lake, spark, name, run, [*kept, *new])
            except (*SPARK_ERRORS, DatasetFailed, DatasetChanged) as error:
                errors[name] = error if isinstance(error, SamefoldError) else failed(name, error)
                continue
            connection.execute("select")  # the lock is held still
            lake.commit(name, Manifest(dataset.version, CODE_DIGEST, topic.id, ends, *shape, tuple(files), end.at))
            reach("dataset committed")
            what = "added" if before and dataset.incremental else "made"
            done.append({"name": name, "what": what, "rows": sum(one.rows for one in new)})
        rows.close()
        _raise(errors)
        return done


def _raise(errors: Mapping[str, SamefoldError]) -> None:
    """The first error, which names the other datasets that failed, too, if there is one: all others are done."""
    if errors:
        first, *others = errors
        errors[first].message += f" These failed, too: {', '.join(others)}." if others else ""
        raise errors[first]


def _there(lake: Lake, asked: dict[str, Dataset], topic: Topic) -> dict[str, Manifest]:
    """The manifests of datasets that are there in the code's version. Raises TopicChanged."""
    found = {name: one for name in asked if (one := lake.manifest(name))}
    if other := [name for name, one in found.items() if _is_of_another(one, topic)]:
        raise TopicChanged(
            f"The lake is of another '{topic.name}': the topic was recreated, or lost records.",
            f"Drop what was made of it, `samefold lake drop {' '.join(other)}`, then run `samefold lake update`.",
        )
    return {name: one for name, one in found.items() if one.version == asked[name].version}


def _is_of_another(found: Manifest, topic: Topic) -> bool:
    return found.topic_id != topic.id or any(end > topic.end[p] for p, end in found.ends.items())


def _state(found: Manifest | None, dataset: Dataset | None) -> str:
    """The versions of event classes have no order: a table of another one is outdated."""
    if found is None:
        return "missing"
    if dataset is None:
        return "gone"
    if found.version == dataset.version:
        return "ready"
    return "newer" if not isinstance(dataset.source, type) and int(found.version) > int(dataset.version) else "outdated"


def _changed(name: str, columns: str, before: Manifest) -> DatasetChanged:
    return DatasetChanged(
        f"Dataset '{name}' has other columns, or is partitioned by others, or another INCREMENTAL, than its files in the same "
        f"version: {columns}; its files have {before.columns}, partitioned by {', '.join(before.partitioned_by) or 'none'}.",
        "Raise its VERSION, or make them as they were.",
    )


def _written(lake: Lake, dataset: Dataset, run: str, made: DataFrame) -> list[File]:
    """Write rows where no reader looks, and no other run. A file per folder, unless it would be large."""
    by, name = dataset.partitioned_by, dataset.name
    writer = made.hint("rebalance", *map(_column, by)).write.mode("append").partitionBy(*by)
    writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(lake.url_of(name, run))
    reach("dataset written")
    return lake.files(name, run)


def _compacted(lake: Lake, spark: SparkSession, name: str, run: str, files: list[File]) -> list[File]:
    """These files, with one in place of many small ones in one folder."""
    large = f"{run}-large"
    small = sorted((one for one in files if one.size < SMALL), key=lambda one: dirname(one.place))
    for folder, group in groupby(small, key=lambda one: dirname(one.place)):
        if len(many := list(group)) >= MANY:
            read = spark.read.parquet(*(lake.url_of(name, one.path) for one in many))
            read.coalesce(1).write.mode("append").parquet(lake.url_of(name, f"{large}/{folder}"))
            files = [one for one in files if one not in many]
    return files + lake.files(name, large)


def _with_conf(spark: SparkSession) -> SparkSession:
    """The session: datasets do not depend on the machine's time zone now, and every reader of Parquet knows the form of times."""
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    return spark


def status(settings: Settings) -> Iterator[dict[str, Any]]:
    """Each dataset that the code or the lake has. `behind` is how many records of the log it lacks.

    Raises LakeUnavailable, BadDataset.
    """
    with session(settings, "samefold lake status") as connection:
        topic = require_contract(settings, connection)
    lake, known = Lake(settings), datasets()
    for name in dict.fromkeys([*known, *lake.datasets()]):
        found, dataset = lake.manifest(name), known.get(name)
        files = found.files if found else ()
        positions = {p: found.ends.get(p, 0) if found else 0 for p in topic.end}
        yield {
            "name": name,
            "state": "of another topic"
            if found and dataset and _is_of_another(found, topic)
            else _state(found, dataset),
            "question": dataset.question if dataset else None,
            "at": found.at.isoformat(timespec="seconds") if found else None,
            "rows": sum(one.rows for one in files),
            "bytes": sum(one.size for one in files),
            "behind": sum(end - positions[partition] for partition, end in topic.end.items()),
            "positions": positions,
            "folder": lake.folder(name) if found else None,
            "files": [lake.url_of(name, one.path) for one in files],
        }


def verify(
    settings: Settings, spark: SparkSession, names: Sequence[str] = (), *, progress: Progress = SILENT
) -> list[dict[str, Any]]:
    """Compare the rows of datasets that are there with those that the log gives up to the same positions.

    Raises LakeUnavailable, BadDataset, DatasetFailed, TopicChanged and what reading the log raises.
    """
    known, spark = datasets(), _with_conf(spark)
    asked = {name: known[name] for name in chosen(names, known)}
    with opened(settings, "verify") as (lake, topic, _):  # no update moves the files meanwhile
        there = _there(lake, asked, topic)
        if lacking := [name for name in names if name in asked and name not in there]:
            hint = f"Run `samefold lake update {lacking[0]}` first."
            raise BadDataset(f"The lake has no '{lacking[0]}' in this code's version.", hint)
        ends = {name: {p: Cut(end) for p, end in one.ends.items()} for name, one in there.items()}
        pins = {name: Pin(settings.kafka, topic.id, ends[name], one.at) for name, one in there.items()}
        rows = Rows(spark, {name: asked[name] for name in there}, pins)
        done, errors = [], dict[str, SamefoldError]()
        progress.begin("verify", len(there))
        for name, manifest in there.items():
            progress.advance(1)
            try:
                wanted, _ = rows.of(asked[name])
                expected, found = _digest(wanted), _digest(_seen(lake, spark, name, manifest, wanted))
            except (*SPARK_ERRORS, DatasetFailed) as error:
                errors[name] = error if isinstance(error, SamefoldError) else failed(name, error)
                continue
            done.append({"name": name, "rows": found[0], "expected": expected[0], "differs": found != expected})
        rows.close()
        _raise(errors)
        return done


def _seen(lake: Lake, spark: SparkSession, name: str, manifest: Manifest, like: DataFrame) -> DataFrame:
    """The dataset's files, as readers find them."""
    below: dict[str, list[str]] = {}
    for file in manifest.files:
        url, base = lake.seen(name, file)
        below.setdefault(base, []).append(url)
    reads = (spark.read.schema(like.schema).option("basePath", base).parquet(*urls) for base, urls in below.items())
    return reduce(DataFrame.union, (read.select(*map(_column, like.columns)) for read in reads), like.limit(0))


def _column(name: str) -> Column:
    """Of exactly this name: Spark takes a bare one for an expression, or for a field's path."""
    return F.col(f"`{name.replace('`', '``')}`")


def _digest(table: DataFrame) -> tuple[int, int]:
    """The number of rows and the sum of their hashes: the same for the same rows in any order."""
    hashable = [
        F.to_json(F.struct(_column(name))) if "map<" in kind or kind == "variant" else _column(name)
        for name, kind in table.dtypes
    ]
    hashes = table.select(F.xxhash64(*hashable).cast("decimal(38)").alias("hash"))
    [(count, total)] = hashes.agg(F.count("*"), F.sum("hash")).collect()
    return int(count), int(total or 0)


def drop(settings: Settings, names: Sequence[str]) -> None:
    """Remove datasets. Raises LakeBusy, LakeUnavailable."""
    with opened(settings, "drop") as (lake, _, _):
        for name in names:
            lake.drop(name)
