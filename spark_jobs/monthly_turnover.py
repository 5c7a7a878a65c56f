"""How much does each account turn over in a month?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as Spark's own pages do

from domain.accounts import MoneyDeposited, MoneyWithdrawn
from spark_jobs import Log

VERSION = 1  # raised when the columns change
PARTITIONED_BY = ("month",)


def table(log: Log) -> DataFrame:
    moved = log.events(MoneyDeposited | MoneyWithdrawn, columns=["id", "cents", "on"])
    by_month = moved.groupBy(F.trunc("on", "month").alias("month"), "id")
    return by_month.agg(F.sum("cents").alias("cents"), F.count("*").alias("movements"))
