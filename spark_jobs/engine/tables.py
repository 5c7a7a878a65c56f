"""The log as DataFrames: `events`, `commits` and `records`, with anybody's SparkSession.

    from spark_jobs import events

    booked = events(spark, RoomBooked | BookingCancelled)
    booked.groupBy("id").count()

A DataFrame holds what the log held when it was made, however often it is evaluated. `Log` gives several that end together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, get_args

from infra.settings import Settings
from projections.engine.fold.as_of import AsOf, in_words

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_jobs.engine.source import Pin

_REGISTERED = "spark.samefold.registered"


class Log:
    """The log up to now, or to a time or positions. All its tables end there."""

    def __init__(
        self,
        spark: SparkSession,
        as_of: AsOf | str | None = None,
        settings: Settings | None = None,
        *,
        pin: Pin | None = None,
    ) -> None:
        """`pin` says instead where it begins and ends. Raises BadMoment, NotConfigured, TopicMissing, KafkaUnavailable."""
        from spark_jobs.engine.source import pinned

        self.spark = spark
        self.pin = pin or pinned(settings or Settings(), in_words(as_of) if isinstance(as_of, Mapping) else as_of)
        register(spark)

    def events(
        self,
        of: Any = None,
        *,
        columns: Sequence[str] = (),
        stream: str | None = None,
        since: datetime | str | None = None,
    ) -> DataFrame:
        """One row for each event that counts, of these classes, with their fields; without classes of all, with their `body` as
        JSON and as `variant`.

        `of` is a class, several or a union. Only `columns`, by default all, are decoded. `stream` and `since` save reading what a
        filter would leave out. Raises BadOption, BadColumn, BadMoment.
        """
        from pyspark.sql.functions import parse_json

        from spark_jobs.engine.source import name_of

        part = {name: str(value) for name, value in (("stream", stream), ("since", since)) if value is not None}
        if of is None:
            table = self.table("events", columns, **part)
            return table if columns else table.withColumn("variant", parse_json("body"))
        classes = of if isinstance(of, list | tuple) else get_args(of) or (of,)
        return self.table("events", columns, events=",".join(map(name_of, classes)), **part)

    def commits(self, *, columns: Sequence[str] = ()) -> DataFrame:
        """One row for each commit that counts: what became of each command, with the code of a rejection."""
        return self.table("commits", columns)

    def records(self, *, columns: Sequence[str] = ()) -> DataFrame:
        """One row for each record of the log: also openings and void records, with the reason why they have no effect."""
        return self.table("records", columns)

    def table(self, read: str, columns: Sequence[str] = (), **options: str) -> DataFrame:
        """As the data source gives it for these options. Raises BadOption, BadColumn."""
        from infra.processes.code_identity import CODE_DIGEST
        from spark_jobs.engine.source import Table

        options |= {"read": read, "pin": str(self.pin), "code": CODE_DIGEST}
        table = Table.of(options)  # raises here what would reach the caller as Spark's error
        context = getattr(self.spark, "sparkContext", None)  # Spark Connect has none
        if context is not None:
            options["tasks"] = str(context.defaultParallelism)
        schema = (table.only(columns) if columns else table).schema
        return self.spark.read.format("samefold").options(**options).schema(schema).load()


def register(spark: SparkSession) -> None:
    """Register the data source `samefold` with a session."""
    from spark_jobs.engine.source import Samefold

    if spark.conf.get(_REGISTERED, "") != "true":  # Spark warns of a second time
        # makes this session the active one: Spark refuses a name that another one has, while that is active
        spark.createDataFrame([], "none int")
        spark.dataSource.register(Samefold)
        spark.conf.set(_REGISTERED, "true")


def events(spark: SparkSession, of: Any = None, *, as_of: AsOf | str | None = None, **part: Any) -> DataFrame:
    """`Log(spark, as_of).events(of, columns=…, stream=…, since=…)`."""
    return Log(spark, as_of).events(of, **part)


def commits(spark: SparkSession, *, columns: Sequence[str] = (), as_of: AsOf | str | None = None) -> DataFrame:
    """`Log(spark, as_of).commits()`."""
    return Log(spark, as_of).commits(columns=columns)


def records(spark: SparkSession, *, columns: Sequence[str] = (), as_of: AsOf | str | None = None) -> DataFrame:
    """`Log(spark, as_of).records()`."""
    return Log(spark, as_of).records(columns=columns)
