"""Starting and stopping Spark for our jobs.

No secret is ever put into Spark's configuration, which its UI and its logs show: tasks take settings from the environment of
the place where they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import SamefoldError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*,4]"
"""All cores of this machine; a task whose process was killed is tried up to four times, as on a cluster."""
ROOT = Path(__file__).resolve().parent.parent


class SparkAway(SamefoldError):
    """Spark does not start, or its master does not answer."""


def submitted() -> bool:
    """Whether `spark-submit` started this process, and has said where the job runs."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def session(job: str, master: str | None = None, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A Spark session, stopped at the end, also of an interrupted one.

    Without `master`, spark-submit or spark-defaults.conf says where it runs and with how much memory. Raises SparkAway,
    JavaMissing.
    """
    # the executors' interpreter, unless somebody has said another: the `python3` of their PATH has none of our packages
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = _start(job, _conf(master) | dict(conf or {}))
    try:
        yield spark
    finally:
        # a Spark that is gone already has nothing to stop; what ended it was raised
        with suppress(Exception):
            spark.stop()


def is_local(master: str) -> bool:
    return master.startswith("local")


def _conf(master: str | None) -> dict[str, str]:
    if master is None:
        return {}
    logging = (Path(__file__).parent / "log4j2.properties").as_uri()
    # the driver only hands out tasks: it need not be compiled well, and little is garbage
    conf = {
        "spark.master": master,
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    if is_local(master):
        conf |= {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            # tasks import what this process imports, wherever it was started
            "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
    return conf


def _start(job: str, conf: Mapping[str, str]) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(f"samefold {job}")
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except (Py4JError, PySparkException, OSError) as error:
        from infra.dev.java import find_java

        find_java()
        where = conf.get("spark.master", "where spark-submit says")
        raise SparkAway(
            f"Spark does not start ({where}): {first_line(error)}",
            "Is the master there, and is its address right (--master, SAMEFOLD_SPARK_MASTER)? See docs/operating.md.",
        ) from error


def first_line(error: BaseException) -> str:
    """What Java says of an error, without its stack."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage())
    return (text.strip().splitlines() or [type(error).__name__])[0][:500]
