"""A log for tests of datasets: these events, without Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from domain.engine.storable import encode
from domain.engine.versions import stored_type
from infra.log.records import Commit, EventRecord
from infra.log.rule import Counted
from spark_jobs import Log
from spark_jobs.engine.source import CommitRow, Decoding, Table


class GivenLog(Log):
    """Events by stream, in order: `GivenLog(spark, [("rooms/12", RoomBooked(…)), …])`. Each is a commit of its own, at one time.

    It has no records: `records()` is empty.
    """

    def __init__(self, spark: SparkSession, events: Iterable[tuple[str, Any]], time_ms: int = 0) -> None:
        self.spark = spark
        self._counted: list[Counted] = []
        versions = Counter[str]()
        for offset, (stream, event) in enumerate(events):
            versions[stream] += 1
            record = EventRecord(stored_type(type(event)), msgspec.Raw(encode(event)))
            many = versions[stream]
            commit = Commit(stream, many, [record], f"c{offset}", offset, "", "accepted", None, 0, offset + 1)
            self._counted.append(Counted(offset, time_ms, commit))

    def table(self, read: str, columns: Sequence[str] = (), **options: str) -> DataFrame:
        table = Table.of({"read": read, **options})
        table = table.only(columns) if columns else table
        mine = [one for one in self._counted if one.time_ms >= table.since_ms]
        rows: list[Any] = []
        if read == "commits":
            rows = [CommitRow(one, 0) for one in mine if table.stream in (None, one.commit.stream)]
        elif read == "events":
            rows = Decoding(table).rows(mine, 0)
        arrays = [column.array(rows) for column in table.columns]
        names = [column.name for column in table.columns]
        return self.spark.createDataFrame(pa.table(arrays, names=names), table.schema)
