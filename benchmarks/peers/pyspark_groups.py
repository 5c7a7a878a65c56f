"""Plain PySpark as its users write it: the log as JSON lines, parsed by Spark, a fold in Python for each group, rows by COPY.

The files hold the records of the log as they are, so neither Kafka nor its connector is in the figure, and COPY is faster than
`write.jdbc`: both in its favour. It applies no reading rule. A group's events are sorted in the fold: Spark promises no order.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pandas as pd
import psycopg
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # its name everywhere

from benchmarks.peers.job import Done, Job, read_job, tell
from benchmarks.processes import Cpu

RECORD = "stream string, version long, outcome string, events array<struct<type: string, data: struct<cents: long>>>"
BALANCE = "account string, version long, cents long"
TABLE = 'create table balances (account text collate "C" primary key, version bigint not null, cents bigint not null)'
SIGNS = {"MoneyDeposited": 1, "MoneyWithdrawn": -1}
COPY = "copy balances (account, version, cents) from stdin (format binary)"


def main() -> None:
    job = read_job()
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    spark = (
        SparkSession.builder.appName("peer")
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    try:
        first, _ = _apply(job, spark)
        cpu = Cpu({"peer": [os.getpid()]})
        seconds, count = _apply(job, spark)
        tell(Done(count, seconds, cpu.spent()["peer"], first_s=first))
    finally:
        spark.stop()


def _apply(job: Job, spark: SparkSession) -> tuple[float, int]:
    """How long it took, and how many events the rows stand for."""
    with psycopg.connect(job.database_url, autocommit=True) as connection:
        connection.execute("drop table if exists balances")
        connection.execute(TABLE)
        began = time.perf_counter()
        events = (
            spark.read.schema(RECORD)
            .json(job.options["files"])
            .where("outcome = 'accepted'")
            .select("stream", "version", F.explode("events").alias("event"))
            .select("stream", "version", "event.type", F.coalesce("event.data.cents", F.lit(0)).alias("cents"))
        )
        groups = getattr(events.groupBy("stream"), job.options["call"])
        balances: DataFrame = groups(FOLDS[job.options["call"]], BALANCE)
        balances.foreachPartition(partial(_copy, job.database_url))
        seconds = time.perf_counter() - began
        row = connection.execute("select coalesce(sum(version), 0)::bigint from balances").fetchone()
    return seconds, row[0] if row else 0


def with_pandas(group: pd.DataFrame) -> pd.DataFrame:
    group = group.sort_values("version")
    balance = _balance(zip(group["type"], group["cents"], strict=True))
    account = group["stream"].iloc[0].removeprefix("accounts/")
    return pd.DataFrame({"account": [account], "version": [len(group)], "cents": [balance]})


def with_arrow(group: pa.Table) -> pa.Table:
    group = group.sort_by("version")
    balance = _balance(zip(group["type"].to_pylist(), group["cents"].to_pylist(), strict=True))
    account = group["stream"][0].as_py().removeprefix("accounts/")
    return pa.table({"account": [account], "version": [group.num_rows], "cents": [balance]})


FOLDS: dict[str, Callable[[Any], Any]] = {"applyInPandas": with_pandas, "applyInArrow": with_arrow}


def _balance(events: Iterable[tuple[str, int]]) -> int:
    return int(sum(SIGNS.get(kind, 0) * cents for kind, cents in events))


def _copy(url: str, rows: Iterable[Row]) -> None:
    """A partition's rows, in a transaction."""
    with psycopg.connect(url) as connection, connection.cursor().copy(COPY) as copy:
        copy.set_types(["text", "int8", "int8"])
        for row in rows:
            copy.write_row(row)


if __name__ == "__main__":
    main()
