"""Appends commands to their topic, reports exactly what is known when that fails, and waits for their outcomes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message
from opentelemetry.trace import Span, SpanKind

from infra.log import clients
from infra.log.partitioner import partition_of
from infra.log.records import Command, Headers
from infra.log.topics import Topic
from infra.observability import logs, metrics, tracing
from infra.processes.process_end import Parts
from infra.settings import Settings

if TYPE_CHECKING:
    from api.outcome_waits import Recorded

log = logging.getLogger(__name__)

POLL_S = 0.5
CLOSE_S = 2.0
GATHER_S = 0.02
"""How long an append waits at most for those before it to be acknowledged, so that load makes batches. When idle, none waits."""


class NotAppended(Exception):
    """The command is not in the log and never will be, by this try."""


class MaybeAppended(Exception):
    """The command may be in the log, or get there yet: only its outcome shows."""


async def outcome_after(
    appended: asyncio.Future[int], outcome: asyncio.Future[Recorded | None], within_s: float, or_append: bool
) -> Recorded | None:
    """The outcome, or None where it is not there yet and the command is in the log.

    `or_append`: return as soon as the command is in the log. Raises NotAppended, MaybeAppended.
    """
    loop, started = asyncio.get_running_loop(), time.perf_counter()
    # one future instead of `asyncio.wait`, which would wake the request for the append and again for the outcome
    enough: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not enough.done():
            enough.set_result(None)

    def look(appended: asyncio.Future[int]) -> None:
        if or_append or appended.exception():
            end()

    outcome.add_done_callback(end)
    appended.add_done_callback(look)
    timer = loop.call_later(within_s, end)
    try:
        await enough
    finally:
        timer.cancel()
    if outcome.done() and (recorded := outcome.result()) is not None:
        metrics.API_OUTCOME_SECONDS.observe(time.perf_counter() - started)
        return recorded
    if not appended.done():
        raise MaybeAppended(f"There is no acknowledgement after {time.perf_counter() - started:.1f} s.")
    appended.result()
    return None


class _Append(NamedTuple):
    """A command that waits to be produced, or was."""

    future: asyncio.Future[int]
    started: float
    span: Span | None
    command: Command
    value: bytes
    topic: Topic
    headers: Headers
    """Of the request's own trace, which is the current one only while the request runs."""

    def end(self, error: NotAppended | MaybeAppended | None, offset: int = -1) -> None:
        """In the event loop. Metrics count by what is known, in the words of the problem's member `appended`."""
        known = "yes" if error is None else "no" if isinstance(error, NotAppended) else "unknown"
        metrics.API_APPENDS.labels(known).inc()
        if self.span:
            self.span.end()
        if error is None:
            metrics.API_APPEND_SECONDS.observe(time.perf_counter() - self.started)
        if self.future.done():
            return
        if error is None:
            self.future.set_result(offset)
        else:
            self.future.set_exception(error)
            self.future.exception()  # retrieved: the request may be gone


class Appender:
    """One idempotent producer, polled by a thread of its own, which hands its reports to the event loop in batches."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._connection = clients.Connection(name)
        self._name = name
        self._status = logs.StatusLog(log, name)
        self._producer: clients.LastingProducer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._gathered: list[_Append] = []
        """Not produced yet: others are under way."""
        self._under_way = 0
        self._due: asyncio.TimerHandle | None = None
        self._reports: list[tuple[_Append, KafkaError | None, int]] = []
        """Only the thread that polls uses it: librdkafka reports within `poll` and `flush`."""

    def require(self) -> None:
        """Raises KafkaUnavailable when no broker was reachable at the last check: a command could only wait in the producer."""
        if self._connection.away.is_set():
            raise clients.away(self._settings, KafkaError(KafkaError._ALL_BROKERS_DOWN))

    def back(self) -> None:
        """The brokers are reachable."""
        self._connection.seen()

    def open(self, parts: Parts) -> None:
        """In the event loop that will append."""
        self._loop = asyncio.get_running_loop()
        self._producer = clients.LastingProducer(self._settings, self._name, self._connection)
        self._thread = parts.thread("appender", self._poll)

    async def close(self) -> None:
        """Waits a moment for appends under way."""
        self._produce_gathered()
        self._closing.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S * 2)

    def append(self, command: Command, value: bytes, topic: Topic) -> asyncio.Future[int]:
        """Begin to append; the future gets the command's offset, or NotAppended or MaybeAppended."""
        assert self._loop is not None, "it is open"
        span = tracing.start_here("append", SpanKind.PRODUCER) if tracing.recording() else None
        future, headers = self._loop.create_future(), tracing.carrier(span)
        append = _Append(future, time.perf_counter(), span, command, value, topic, headers)
        self._gathered.append(append)
        if not self._under_way:
            self._produce_gathered()
        elif self._due is None:
            self._due = self._loop.call_later(GATHER_S, self._produce_gathered)
        return append.future

    def _produce_gathered(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        gathered, self._gathered = self._gathered, []
        for append in gathered:
            self._produce(append)

    def _produce(self, append: _Append) -> None:
        def report(error: KafkaError | None, message: Message) -> None:
            self._reports.append((append, error, -1 if error else message.offset()))

        stream = append.command.stream
        try:
            self._producer.now.produce(
                append.topic.name,
                append.value,
                key=stream.encode(),
                partition=partition_of(stream, append.topic.partitions),
                headers=append.headers,
                on_delivery=report,
            )
        except BufferError:
            append.end(NotAppended("too many commands wait to be sent"))
        except KafkaException as error:
            # the thread replaces a producer that can't go on
            append.end(NotAppended(error.args[0].str()))
        else:
            self._under_way += 1

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(POLL_S)
            self._wake()
        with suppress(KafkaException):
            self._producer.now.flush(CLOSE_S)
        self._wake()

    def _wake(self) -> None:
        reports, self._reports = self._reports, []
        if reports and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reported, reports)

    def _reported(self, reports: list[tuple[_Append, KafkaError | None, int]]) -> None:
        self._under_way -= len(reports)
        for append, error, offset in reports:
            if error is None:
                self._connection.seen()
                append.end(None, offset)
            else:
                if clients.is_denied(error):
                    what = clients.denied(self._settings, error, f"Write of topic '{self._settings.commands_topic}'")
                    self._status.wrong("append", str(what), level=logging.ERROR)
                # after any other error an earlier try, whose report was lost, may have got through
                known = error.code() == KafkaError.MSG_SIZE_TOO_LARGE
                append.end((NotAppended if known else MaybeAppended)(error.str()))
        if not self._under_way:
            self._produce_gathered()
