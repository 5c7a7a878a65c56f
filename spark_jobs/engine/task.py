"""A task on an executor. Its settings come from its own environment; errors are returned as values."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from infra.database.connect import Connection, DatabaseUnavailable, connect
from infra.errors import BadSettings, NotConfigured, SamefoldError
from infra.log.clients import KafkaUnavailable
from infra.processes.code_identity import require_code
from infra.processes.engines import Argument
from infra.processes.memory import folding
from infra.processes.workers import Advance
from infra.settings import Settings
from spark_jobs.engine.services import Services

REPORT_S = 1.0
PASSING = (KafkaUnavailable, DatabaseUnavailable)
PAUSE_S = 1.0
"""How long a task waits before it fails for a reason that may pass, and Spark retries it."""


class ExecutorNotConfigured(SamefoldError):
    """An executor's environment does not say where Kafka and PostgreSQL are."""


class CodeMissing(SamefoldError):
    """An executor can't import this code, or what it needs."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a task gets: the driver's services, the function and the argument without settings, pickled."""

    slot: int
    work: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a task, as a value that the driver can raise."""

    pickled: bytes | None
    trace: str

    def error(self) -> BaseException:
        error = pickle.loads(self.pickled) if self.pickled else RuntimeError("A task failed.")  # noqa: S301  # our own task's
        assert isinstance(error, BaseException), "an exception was pickled"
        error.__cause__ = _Trace(f"\n{self.trace}")
        return error


class _Trace(Exception):
    """The traceback of another process."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A task's value, and how many records it reported. A failure goes through `Task.failed`."""

    folded: int
    value: Any = None


def pack(sender: Services, slot: int, function: Callable[[Any, Advance], Any], argument: Argument) -> Sent:
    return Sent(slot, pickle.dumps((sender, function, replace(argument, settings=None))))


@dataclass(frozen=True, slots=True)
class Task:
    """What Spark calls with each `Sent`. It is pickled and must be readable by other code: it holds names and numbers only."""

    code: Mapping[str, str]
    channel: str
    attempts: int
    """How many attempts Spark makes at a task."""
    failed: Any = field(compare=False)
    """A Spark accumulator: the driver sees a failure as soon as its task has ended, not when all have."""

    def __call__(self, sent: Sent) -> Returned:
        from pyspark import TaskContext

        attempt = TaskContext.get().attemptNumber()
        reported = 0
        try:
            require_code(self.code)
            settings = own_settings()
            sender, function, argument = _unpack(sent)
            sender.require(settings)
            with folding() as check_memory, _Reporter(settings, self.channel, sent.slot) as reporter:
                try:

                    def advance(count: int) -> None:
                        reporter.advance(count)
                        check_memory()

                    value = function(replace(argument, settings=settings), advance)
                finally:
                    reported = reporter.folded
        except PASSING as error:
            if attempt + 1 < self.attempts:
                time.sleep(PAUSE_S)
                raise
            return self._failed(reported, error)
        except Exception as error:
            return self._failed(reported, error)
        return Returned(reported, value)

    def _failed(self, reported: int, error: Exception) -> Returned:
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # noqa: S301  # some exceptions can be pickled but not unpickled
        except Exception:
            pickled = None
        self.failed.add((Failure(pickled, "".join(traceback.format_exception(error))),))
        return Returned(reported)


def own_settings() -> Settings:
    """The settings of this executor. Raises ExecutorNotConfigured."""
    try:
        settings = Settings()
        _ = settings.kafka, settings.database
    except NotConfigured as error:
        raise ExecutorNotConfigured(
            f"On an executor: {error.message}",
            "Set SAMEFOLD_KAFKA_BOOTSTRAP, SAMEFOLD_DATABASE_URL and other settings without defaults in the environment of "
            "the executors, not in Spark's configuration: docs/operating.md.",
        ) from error
    except BadSettings as error:
        raise ExecutorNotConfigured(f"On an executor: {error.message}", error.hint) from error
    return settings


def _unpack(sent: Sent) -> tuple[Services, Callable[[Any, Advance], Any], Any]:
    """Raises CodeMissing."""
    try:
        sender, function, argument = pickle.loads(sent.work)  # noqa: S301  # the driver's
    except (ImportError, AttributeError) as error:
        raise CodeMissing(
            f"On an executor: {error}.", "Ship the very same code and packages to the executors: docs/operating.md."
        ) from error
    return sender, function, argument


class _Reporter:
    """Notifies the driver through PostgreSQL once a second how many records a task has folded; ignores errors."""

    def __init__(self, settings: Settings, channel: str, slot: int) -> None:
        self.folded = 0
        self._settings = settings
        self._channel = channel
        self._slot = slot
        self._next = 0.0  # the first time at once
        self._connection: Connection | None = None

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def advance(self, count: int) -> None:
        self.folded += count
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_S
            with suppress(psycopg.Error, SamefoldError):
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._settings, "samefold progress")
                self._connection.execute("select pg_notify(%s, %s)", (self._channel, f"{self._slot} {self.folded}"))
