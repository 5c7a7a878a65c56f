"""Questions to a log in Spark, with a watch out: `python -m benchmarks.scanning --of samefold --times 2`.

On `local[2]`, in a session of PySpark's defaults, for both: that of `samefold rebuild` leaves out the JVM's second compiler, which
the connector needs. `samefold` asks through the source, `connector` through Spark's own connector to Kafka, as its users do:
`from_json` with a schema of no more than the question needs. It applies no reading rule, which is in its favour.

Prints one JSON object for each question and turn: seconds, processor seconds of this process and all its children, and the answer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # its name everywhere

from benchmarks.child import flags, tell
from benchmarks.processes import Cpu
from domain.accounts import MoneyDeposited
from infra.settings import Settings
from tools.dev.jars import FOLDER, KAFKA, JarsMissing, fetch, locked

COUNTED, SUMMED = "select type, count(*)", "sum of one type"
JARS = Path(sys.prefix, "spark-kafka-bench")
LOCK = Path(__file__).with_name("connector-jars.sha256")
CONNECTOR = (  # not what they depend on: PySpark has the rest, and the broker's jars the Kafka client
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0", "false"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0", "false"),
    ("org.apache.commons", "commons-pool2", "2.13.1", "false"),
)
RECORD = "events array<struct<type: string, data: struct<cents: long>>>"
TYPES = "events array<struct<type: string>>"


def connector() -> list[Path]:
    """The connector's jars, fetched where they are missing. Raises JarsMissing."""
    wanted = locked(LOCK)
    if not all((JARS / name).is_file() for name in wanted) and fetch("scan", JARS, CONNECTOR) != wanted:
        raise JarsMissing(f"{JARS} does not match {LOCK.name}.", "Remove that folder, and try again.")
    return [*(JARS / name for name in wanted), FOLDER / f"kafka-clients-{KAFKA}.jar"]


def main() -> None:
    given = flags("times", of=("samefold", "connector"))
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    builder = SparkSession.builder.appName("scan").master("local[2]")
    conf = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.memory": "2g"}
    conf |= {"spark.sql.shuffle.partitions": "8"}
    if given.of == "connector":
        conf["spark.driver.extraClassPath"] = os.pathsep.join(map(str, connector()))
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        questions = {"samefold": _of_source, "connector": _of_connector}[given.of](spark, Settings())
        for what, table in questions.items():
            for _ in range(given.times):
                cpu, began = Cpu({"scan": [os.getpid()]}), time.perf_counter()
                rows = table().collect()
                seconds = time.perf_counter() - began
                answer = sorted(map(list, rows))
                tell({"what": what, "seconds": seconds, "cpu_s": cpu.spent()["scan"], "answer": answer})
    finally:
        spark.stop()


Questions = Mapping[str, Callable[[], DataFrame]]


def _of_source(spark: SparkSession, settings: Settings) -> Questions:
    from spark_jobs import Log

    log = Log(spark, settings=settings)
    return {
        COUNTED: lambda: log.events(columns=["type"]).groupBy("type").count(),
        SUMMED: lambda: log.events(MoneyDeposited, columns=["cents"]).agg(F.sum("cents")),
    }


def _of_connector(spark: SparkSession, settings: Settings) -> Questions:
    options: dict[str, Any] = {"kafka.bootstrap.servers": settings.kafka, "subscribe": settings.events_topic}

    def events(record: str, *columns: str) -> DataFrame:
        log = spark.read.format("kafka").options(**options, startingOffsets="earliest").load()
        parsed = log.select(F.from_json(F.col("value").cast("string"), record).alias("record"))
        return parsed.select(F.explode("record.events").alias("event")).select(*columns)

    return {
        COUNTED: lambda: events(TYPES, "event.type").groupBy("type").count(),
        SUMMED: lambda: (
            events(RECORD, "event.type", "event.data.cents").where("type = 'MoneyDeposited'").agg(F.sum("cents"))
        ),
    }


if __name__ == "__main__":
    main()
