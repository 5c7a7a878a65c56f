"""The datasets of the lake: those of the author's files in spark_jobs/, and one of each event class.

A dataset's file has a docstring, VERSION and `table(log: Log) -> DataFrame`. With `PARTITIONED_BY = ("month",)` its files are in
folders by these columns. With `INCREMENTAL = True` the log that `table` gets holds only what is new, and its rows are added to the
ones before; without, the dataset is made again when the log has grown.

Only the commands of the lake import this: it imports PySpark, and the author's modules.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as Spark's own pages do

import spark_jobs
from domain.engine.contexts import contexts
from domain.engine.versions import stored_name
from infra.errors import SamefoldError, in_words
from projections.engine.fold.errors import UnreadableEvent
from projections.engine.views.view import NAME, version_of
from spark_jobs.engine.lake_files import SILVER
from spark_jobs.engine.session import named_error
from spark_jobs.engine.source import EVENTS, Pin, UnfitValue, columns_of, name_of
from spark_jobs.engine.tables import Log

SPARK_ERRORS = (PySparkException, Py4JError)
_DAY = "date_from_unix_date(cast(unix_micros(time) div 86400000000 as int)) as day"
"""Of the broker's time in UTC, whatever the session's time zone."""
_NO_TABLE = "Write `def table(log: Log) -> DataFrame:` in it, or begin its name with _ if it is no dataset."
_RAISED = re.compile(r"^(?:\w+\.)*[A-Z]\w*: .+", re.MULTILINE)
"""The last line of a traceback of Python."""
_REST = re.compile(r" SQLSTATE: .*| at [\w$]+\.[\w$.]+\(.*")
"""What follows the sentence of an error of Spark's: its plan, or the JVM's stack."""


class BadDataset(SamefoldError):
    """A file of spark_jobs/ declares no dataset, or there is none of that name."""

    exit_code = 2


class DatasetFailed(SamefoldError):
    """A dataset could not be made, or not be written."""


@dataclass(frozen=True)
class Dataset:
    name: str
    version: str
    question: str
    partitioned_by: tuple[str, ...]
    incremental: bool
    source: Callable[[Log], Any] | type
    """A file's function, or an event class."""


def datasets() -> dict[str, Dataset]:
    """All by name: those of the event classes, then the author's. Raises BadDataset, BadContext, BadColumn."""
    events = (event for context in contexts().values() for event in context.events.values())
    names = sorted(file.stem for folder in spark_jobs.__path__ for file in Path(folder).glob("[!._]*.py"))
    found = [*map(_of_event, sorted(set(events), key=name_of)), *map(_of_file, names)]
    return {one.name: one for one in found}


def _of_event(event: type) -> Dataset:
    name = name_of(event)
    # of an event with another version, old ones have other rows too
    readers = contexts()[name.partition(".")[0]].readers
    stored = sorted(known for known, (of, _) in readers.items() if of is event)
    shape = repr((stored, [(column.name, column.type.spark.json()) for column in columns_of([event])]))
    version = blake2b(shape.encode(), digest_size=6).hexdigest()
    return Dataset(f"{SILVER}/{name}", version, inspect.getdoc(event) or "", ("day",), True, event)


def _of_file(name: str) -> Dataset:
    file = f"spark_jobs/{name}.py"
    if not NAME.fullmatch(name) or name == SILVER:
        hint = f"Rename the file: at most 40 lower case letters, digits and underscores, and not '{SILVER}'."
        raise BadDataset(f"{file} can't be a dataset: its name is not valid.", hint)
    try:
        module = importlib.import_module(f"spark_jobs.{name}")
    except SamefoldError:
        raise
    except Exception as error:
        raise BadDataset(f"{file} can't be imported: {in_words(error)}", "Correct that file.") from error
    function = module.__dict__.get("table")
    if not inspect.isfunction(function) or len(inspect.signature(function).parameters) != 1:
        raise BadDataset(f"{file} has no function `table(log)`.", _NO_TABLE)
    partitioned_by, incremental = getattr(module, "PARTITIONED_BY", ()), getattr(module, "INCREMENTAL", False)
    is_by = isinstance(partitioned_by, tuple) and not any(str(one).startswith(("_", ".")) for one in partitioned_by)
    if not is_by or not isinstance(incremental, bool):  # readers of Parquet pass over folders with such names
        hint = 'PARTITIONED_BY is a tuple as ("month",), of names that do not begin with _ or a dot; INCREMENTAL is True or False.'
        raise BadDataset(f"{file} has PARTITIONED_BY = {partitioned_by!r}, INCREMENTAL = {incremental!r}.", hint)
    version = str(version_of(module, file, BadDataset))
    return Dataset(name, version, inspect.getdoc(module) or "", partitioned_by, incremental, function)


class Rows:
    """The rows of datasets, each of what its pin says of the log; event classes of one pin in one reading of it."""

    def __init__(self, spark: SparkSession, asked: Mapping[str, Dataset], pins: Mapping[str, Pin]) -> None:
        self._spark = spark
        self._pins = pins
        self._events = {name: one.source for name, one in asked.items() if isinstance(one.source, type)}
        self._read: dict[tuple[str, str], tuple[DataFrame, dict[str, int]] | Exception] = {}
        self._apart = False

    def of(self, dataset: Dataset) -> tuple[DataFrame, int | None]:
        """And their number, where that is known. Raises DatasetFailed, and what reading the log raises."""
        pin = self._pins[dataset.name]
        if isinstance(dataset.source, type):
            return self._of_event(dataset.source, pin)
        try:
            made = dataset.source(Log(self._spark, pin=pin))
        except Exception as error:
            raise failed(dataset.name, error) from error
        missing = {*dataset.partitioned_by} - {*(made.columns if isinstance(made, DataFrame) else ())}
        if missing or not isinstance(made, DataFrame):
            what = f"a DataFrame without '{min(missing)}'" if isinstance(made, DataFrame) else type(made).__name__
            hint = "It returns a DataFrame of Spark, with the columns of PARTITIONED_BY."
            raise DatasetFailed(f"`table` of dataset '{dataset.name}' returned {what}.", hint)
        return made, None

    def _of_event(self, event: type, pin: Pin) -> tuple[DataFrame, int]:
        name = name_of(event)
        together = (name_of(one) for dataset, one in self._events.items() if self._pins[dataset] == pin)
        key = str(pin), name if self._apart else ",".join(together)
        if key not in self._read:
            every = Log(self._spark, pin=pin).table("events", by="class", events=key[1]).persist()
            try:
                counts = every.groupBy("context", "type").count().collect()
            except SPARK_ERRORS as error:
                every.unpersist()
                if not self._apart and isinstance(named_error(error), UnfitValue | UnreadableEvent):
                    self._apart = True  # an event that can't be a row keeps back its own class's table alone
                    return self._of_event(event, pin)
                self._read[key] = error
            else:
                self._read[key] = every, {f"{context}.{kind}": count for context, kind, count in counts}
        if isinstance(read := self._read[key], Exception):
            raise read
        every, numbers = read
        kind = f"{name.partition('.')[0]}.{stored_name(event)}"
        mine = every.where(F.concat_ws(".", "context", "type") == kind)
        return mine.select(*(column.name for column in EVENTS), f"`{name}`.*", F.expr(_DAY)), numbers.get(kind, 0)

    def close(self) -> None:
        for read in self._read.values():
            if not isinstance(read, Exception):
                read[0].unpersist()


def failed(name: str, error: Exception) -> SamefoldError:
    """The named error that ended a task; else the error in a sentence, of a task what its Python raised."""
    text, what = str(error) if isinstance(error, SPARK_ERRORS) else "", f"Dataset '{name}' could not be made:"
    if isinstance(error, SamefoldError):
        return DatasetFailed(f"{what} {error.message}", error.hint)
    if "No space left on device" in text:
        return DatasetFailed(f"Dataset '{name}' was not written: no space is left.", "Make room, and run it again.")
    if known := named_error(error):
        known.message = f"{what} {known.message}"
        return known
    raised = _RAISED.findall(text.partition("Traceback")[2]) or [_REST.sub("", in_words(error))]
    if "TASK_WRITE_FAILED" in text and "Traceback" not in text:  # no Python of the author's ran in that task
        hint = "May Spark write below SAMEFOLD_LAKE_URL? Are a partition's values short enough to name a folder?"
        return DatasetFailed(f"Dataset '{name}' was not written: {raised[-1]}", hint)
    where = "" if name.startswith(SILVER) else f" in spark_jobs/{name}.py"
    return DatasetFailed(f"{what} {raised[-1]}", f"Mend the cause{where}, then run `samefold lake update {name}`.")
