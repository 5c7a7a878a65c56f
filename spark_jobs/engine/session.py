"""Start and stop Spark for our jobs.

Spark's UI and logs show its configuration, so it never holds a secret: tasks take settings from their own environment.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from infra.errors import SamefoldError
from spark_jobs.engine.jvm import Output, SparkUnavailable, jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*,4]"
"""All cores of this machine; four attempts at a task whose process is killed, as on a cluster."""
ROOT = Path(__file__).resolve().parents[2]
REACH_S = 5.0
STOP_S = 10.0
HELP = "See docs/operating.md."


class SparkUnfit(SamefoldError):
    """Our jobs can't use Spark as it is configured."""

    exit_code = 2


def submitted() -> bool:
    """Whether `spark-submit` started this process and sets the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def session(job: str, master: str | None = None, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A Spark session that is stopped at the end, also after an interrupt.

    Without `master`, spark-submit or spark-defaults.conf sets master and memory. Raises SparkUnavailable,
    SparkUnfit, JavaMissing.
    """
    # the executors' interpreter unless the user set another: the `python3` of their PATH has none of our packages
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _require_fit(master)
    for library in ("py4j", "pyspark", "DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        # errors are raised, too; the rest are tracebacks of a requested end
        logging.getLogger(library).setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_of_py4j)
    warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM", RuntimeWarning)
    every = {"spark.app.name": f"samefold {job}"} | _conf(master) | dict(conf or {})
    with nullcontext() if submitted() else jvm(every) as output:
        spark = _started(every, output)
        if output is not None:
            output.started = True
        try:
            yield spark
        finally:
            # in a thread of its own: an interrupt may have broken this thread's connection to the JVM
            thread = threading.Thread(target=_stop, args=(spark,), daemon=True)
            thread.start()
            thread.join(STOP_S)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """Drops Py4J's records in the root logger: it logs there when the JVM ends before `_stop` returns."""
    return Path(record.pathname).parent.name != "py4j"


def _stop(spark: SparkSession) -> None:
    # fails when Spark has ended already, whose reason was raised
    with suppress(Exception):
        spark.stop()


def _require_fit(master: str | None) -> None:
    """Check what Spark would report unclearly, late or not at all. Raises SparkUnfit, SparkUnavailable."""
    if find_spec("pyspark") is None:
        raise SparkUnfit("PySpark is not installed here.", f"Take requirements/spark.txt, or --engine local. {HELP}")
    if connect := [name for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED") if os.environ.get(name)]:
        raise SparkUnfit(
            f"{connect[0]} is set, but our tasks can't run through Spark Connect.",
            f"Unset it, and name the cluster's own master: --master spark://…. {HELP}",
        )
    if master is None:
        return
    if not re.fullmatch(r"local|local\[(\*|\d+)(, *\d+)?\]|spark://.+|k8s://.+|yarn", master):
        raise SparkUnfit(f"'{master}' is not a supported master.", f"Take spark://…, k8s://…, yarn or local[N]. {HELP}")
    python = os.environ["PYSPARK_PYTHON"]
    if is_local(master) and shutil.which(python) is None:
        raise SparkUnfit(
            f"PYSPARK_PYTHON is {python}, which can't be run.", "Unset it: then it is the Python that runs this."
        )
    if master.startswith("spark://"):
        _require_reach(master)


def _require_reach(master: str) -> None:
    """Spark itself would retry for a minute, and then report a later failure. Raises SparkUnavailable."""
    errors = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except (OSError, ValueError) as error:
            errors.append(f"{address}: {error}")
        else:
            return
    raise SparkUnavailable(
        f"No Spark master is reachable at {'; '.join(errors)}.", f"Start it, or correct its address. {HELP}"
    )


def is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _conf(master: str | None) -> dict[str, str]:
    if master is None:
        return {}
    logging = (Path(__file__).parent / "log4j2.properties").as_uri()
    # the driver only distributes tasks: little code to compile, little garbage
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
            # tasks import the same code, wherever this process was started
            "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
    return conf


def _started(conf: Mapping[str, str], output: Output | None) -> SparkSession:
    """Start in a thread, so that Ctrl-C does not interrupt a call of the JVM, and Spark does not handle it."""
    came: list[SparkSession | BaseException] = []

    def start() -> None:
        try:
            came.append(_start(conf, output))
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join()
    [spark] = came
    if isinstance(spark, BaseException):
        raise spark
    return spark


def _start(conf: Mapping[str, str], output: Output | None) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except (Py4JError, PySparkException, OSError) as error:
        where = conf.get("spark.master", "where spark-submit says")
        # without an error of Java's, the JVM has ended, and its output says why
        why = first_line(error) if output is None or hasattr(error, "java_exception") else output.cause()
        raise SparkUnavailable(
            f"Spark does not start ({where}): {why}",
            f"Is its master right (--master), and is there room for its files? {HELP}",
        ) from error


def named_error(error: BaseException) -> SamefoldError | None:
    """The error that ended a task of a DataFrame, if it has a name: Spark tells the driver its class and text only."""
    found = None
    for line in str(error).splitlines():
        kind, _, text = line.partition(": ")
        if re.fullmatch(r"\w+(\.\w+)+", kind):
            with suppress(ImportError, AttributeError, ValueError):
                raised = resolve_name(kind)
                if isinstance(raised, type) and issubclass(raised, SamefoldError):
                    found = raised.__new__(raised, text)
                    SamefoldError.__init__(found, text)
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error, Java's where it is one of Java's."""
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None else str(java.getMessage())
    return (text.strip().splitlines() or [type(error).__name__])[0][:500]
