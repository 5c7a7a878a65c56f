"""The datasets of the lake: those of the author's files in spark_jobs/, and one of each event class.

A dataset's file is a module with a docstring, VERSION and `table(log: Log) -> DataFrame`. With `PARTITIONED_BY = ("month",)` its
files are in folders by these columns. With `INCREMENTAL = True` the log that `table` gets holds only what is new, and its rows are
added to those that are there; without, the dataset is made anew whenever the log has grown.

PySpark is imported here, and an author's module, so only the commands of the lake import this.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as Spark's own pages do
from pyspark.sql.types import StructField, StructType

import spark_jobs
from domain.engine.contexts import contexts
from infra.errors import SamefoldError, in_words
from projections.engine.views.view import NAME, version_of
from spark_jobs.engine.columns import fields_of
from spark_jobs.engine.source import EVENTS, Pin, columns_of, name_of
from spark_jobs.engine.tables import Log

SILVER = "events"
"""The folder of the datasets of event classes."""
DAY = "day"
_DAY_OF_TIME = "date_from_unix_date(cast(unix_micros(time) div 86400000000 as int))"
"""In UTC, whatever the session's time zone."""


class BadDataset(SamefoldError):
    """A file of spark_jobs/ declares no dataset."""

    exit_code = 2


class DatasetFailed(SamefoldError):
    """A dataset could not be made, or its files not be written."""


class UnknownDataset(SamefoldError):
    """There is no dataset of this name."""

    exit_code = 2


@dataclass(frozen=True)
class Dataset:
    name: str
    version: str
    partitioned_by: tuple[str, ...]
    incremental: bool
    question: str
    table: Callable[[Log], Any] | None = None
    event: type | None = None
    """Whose dataset it is, instead of a file's function."""


def datasets() -> dict[str, Dataset]:
    """All by name: those of the event classes, then the author's. Raises BadDataset, BadContext, BadColumn."""
    folder = Path(spark_jobs.__file__).parent
    names = sorted(file.stem for file in folder.glob("[!._]*.py"))
    return {**silver(), **{name: _of_file(name) for name in names}}


def silver() -> dict[str, Dataset]:
    """A dataset of each event class by name, `events/rooms.RoomBooked`. Raises BadContext, BadColumn."""
    found = {}
    for context in contexts().values():
        for event in sorted(set(context.events.values()), key=name_of):
            # an earlier version of the event or another upcaster make other rows of old events
            stored = sorted(name for name, (of, _) in context.readers.items() if of is event)
            shape = repr((stored, [(column.name, column.type.spark.json()) for column in columns_of([event])]))
            name, version = f"{SILVER}/{name_of(event)}", blake2b(shape.encode(), digest_size=6).hexdigest()
            found[name] = Dataset(name, version, (DAY,), True, inspect.getdoc(event) or "", event=event)
    return found


class Classes:
    """The rows of event classes, with one reading of the log for all that are read from and to the same positions."""

    def __init__(self, spark: SparkSession, pins: Mapping[type, Pin]) -> None:
        self._spark, self._pins = spark, pins
        self._read: dict[str, tuple[DataFrame, dict[str, int]]] = {}

    def rows(self, event: type) -> tuple[DataFrame, int]:
        """As the class's dataset has them, and their number. Raises what reading the log raises."""
        name, pin = name_of(event), str(self._pins[event])
        if pin not in self._read:
            together = ",".join(name_of(one) for one, other in self._pins.items() if str(other) == pin)
            every = Log(self._spark, pin=Pin.parse(pin)).table("events", by="class", events=together).persist()
            counts = every.groupBy("context", "type").count().collect()
            self._read[pin] = every, {f"{context}.{kind}": count for context, kind, count in counts}
        every, numbers = self._read[pin]
        context, _, kind = name.partition(".")
        own = zip(fields_of(event), columns_of([event])[len(EVENTS) :], strict=True)
        fields = [F.col(f"`{name}`.`{field.name}`").alias(column.name) for field, column in own]
        mine = every.where((F.col("context") == context) & (F.col("type") == kind))
        chosen = mine.select(*(column.name for column in EVENTS), *fields)
        return chosen.withColumn(DAY, F.expr(_DAY_OF_TIME)), numbers.get(name, 0)

    def close(self) -> None:
        for every, _ in self._read.values():
            every.unpersist()


def _of_file(name: str) -> Dataset:
    file = f"spark_jobs/{name}.py"
    if not NAME.fullmatch(name) or name == SILVER:
        raise BadDataset(
            f"{file} can't be a dataset: its name is not valid.",
            f"Rename the file: at most 40 lower case letters, digits and underscores, and not '{SILVER}'.",
        )
    try:
        module = importlib.import_module(f"spark_jobs.{name}")
    except SamefoldError:
        raise
    except Exception as error:
        raise BadDataset(f"{file} can't be imported: {in_words(error)}", "Correct that file.") from error
    version, function = version_of(module, file, BadDataset), module.__dict__.get("table")
    if not inspect.isfunction(function) or len(inspect.signature(function).parameters) != 1:
        raise BadDataset(f"{file} has no function `table(log)`.", "Write `def table(log: Log) -> DataFrame:` in it.")
    partitioned_by, incremental = getattr(module, "PARTITIONED_BY", ()), getattr(module, "INCREMENTAL", False)
    if not isinstance(partitioned_by, tuple) or not all(isinstance(one, str) for one in partitioned_by):
        raise BadDataset(
            f"{file} has PARTITIONED_BY = {partitioned_by!r}.",
            'Write columns\' names as in ("month",), with the comma.',
        )
    if not isinstance(incremental, bool):
        raise BadDataset(f"{file} has INCREMENTAL = {incremental!r}.", "It is True or False.")
    return Dataset(name, str(version), partitioned_by, incremental, inspect.getdoc(module) or "", function)


def rows(dataset: Dataset, log: Log) -> DataFrame:
    """What a file's function makes of the log; Spark has not run yet. Raises DatasetFailed."""
    assert dataset.table is not None, "an event class's rows are of Classes"
    try:
        made = dataset.table(log)
    except SamefoldError:
        raise
    except Exception as error:
        raise failed(dataset.name, error) from error
    if not isinstance(made, DataFrame):
        raise DatasetFailed(
            f"`table` of dataset '{dataset.name}' returned {type(made).__name__}.", "It returns a DataFrame of Spark."
        )
    names = made.schema.fieldNames()
    if wrong := [one for one in dataset.partitioned_by if one not in names]:
        raise DatasetFailed(
            f"Dataset '{dataset.name}' is partitioned by '{wrong[0]}', which it has not.",
            f"Its columns: {', '.join(names)}.",
        )
    return made


def failed(name: str, error: Exception) -> DatasetFailed:
    """The error in a sentence, with the cause of a task's."""
    text = str(error) if isinstance(error, PySparkException) else in_words(error)
    if java := getattr(error, "java_exception", None):
        text = f"{java.toString()}\n{text}"
    if "No space left on device" in text:
        return DatasetFailed(
            f"Dataset '{name}' was not written: no space is left.", "Make room, and run the command again."
        )
    raised = [line for line in text.splitlines() if _is_raised(line)]
    return DatasetFailed(f"Dataset '{name}' could not be made: {(raised or text.splitlines() or ['?'])[-1].strip()}")


def _is_raised(line: str) -> bool:
    """Whether it is the last line of a traceback of Python."""
    head, colon, _ = line.partition(": ")
    return (
        bool(colon)
        and head.rpartition(".")[2].isidentifier()
        and head.rpartition(".")[2][0].isupper()
        and " " not in head
    )


def text_of(schema: StructType) -> str:
    """A schema without what does not matter: whether columns may be null, and comments."""
    return str(StructType([StructField(field.name, field.dataType) for field in schema]).simpleString())
