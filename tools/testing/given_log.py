"""A log for tests of datasets: these events, without Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, get_args

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from infra.log.records import Commit
from infra.log.rule import Counted
from spark_jobs import Log
from spark_jobs.engine.source import EventRow, Table, name_of


class GivenLog(Log):
    """Events by stream, in order: `GivenLog(spark, [("rooms/12", RoomBooked(…)), …])`. Each is a commit of its own."""

    def __init__(self, spark: SparkSession, events: Iterable[tuple[str, Any]], time_ms: int = 0) -> None:
        self.spark = spark
        self._rows, versions = [], Counter[str]()
        for offset, (stream, event) in enumerate(events):
            versions[stream] += 1
            kind = name_of(type(event)).partition(".")[2]
            commit = Commit(stream, versions[stream], [], f"c{offset}", offset, "", "accepted", None, 0, offset + 1)
            self._rows.append(EventRow(Counted(offset, time_ms, commit), 0, type(event), commit.version, kind, event))

    def events(
        self, of: Any = None, *, columns: Sequence[str] = (), stream: str = "", since: datetime | str = ""
    ) -> DataFrame:
        """`since` is not looked at: all events have one time."""
        classes = of if isinstance(of, list | tuple) else get_args(of) or (of,)
        table = Table.of({"events": ",".join(map(name_of, classes))})
        table = table.only(columns) if columns else table
        mine = [row for row in self._rows if row.of in classes and stream in ("", row.counted.commit.stream)]
        arrays = [column.array(mine) for column in table.columns]
        return self.spark.createDataFrame(
            pa.table(arrays, names=[column.name for column in table.columns]), table.schema
        )
