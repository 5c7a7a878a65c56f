"""A log for tests of datasets: these events, without Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from domain.engine.storable import encode
from domain.engine.versions import stored_name, stored_type
from infra.log.records import Commit, EventRecord
from infra.log.rule import Counted
from spark_jobs import Log
from spark_jobs.engine.source import CommitRow, EventRow, Table


class GivenLog(Log):
    """Events by stream, in order: `GivenLog(spark, [("rooms/12", RoomBooked(…)), …])`. Each is a commit of its own, at one time.

    It has no records: `records()` is empty.
    """

    def __init__(self, spark: SparkSession, events: Iterable[tuple[str, Any]], time_ms: int = 0) -> None:
        self.spark = spark
        self._events: list[EventRow] = []
        versions = Counter[str]()
        for offset, (stream, event) in enumerate(events):
            versions[stream] += 1
            of, version = type(event), versions[stream]
            record = EventRecord(stored_type(of), msgspec.Raw(encode(event)))
            commit = Commit(stream, version, [record], f"c{offset}", offset, "", "accepted", None, 0, offset + 1)
            self._events.append(EventRow(Counted(offset, time_ms, commit), 0, of, version, stored_name(of), event))

    def table(self, read: str, columns: Sequence[str] = (), **options: str) -> DataFrame:
        table = Table.of({"read": read, **options})
        table = table.only(columns) if columns else table
        mine = [row for row in self._events if table.stream in (None, row.counted.commit.stream)]
        rows: list[Any] = []
        if read == "commits":
            rows = [CommitRow(row.counted, row.partition) for row in mine]
        elif read == "events" and table.classes:
            rows = [row for row in mine if row.of in table.classes]
        elif read == "events":
            rows = [row._replace(event=encode(row.event)) for row in mine]
        arrays = [column.array(rows) for column in table.columns]
        names = [column.name for column in table.columns]
        return self.spark.createDataFrame(pa.table(arrays, names=names), table.schema)
