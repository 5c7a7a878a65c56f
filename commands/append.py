"""Appends commands and webhooks' messages to their topics, and reports what is known of each: it is there, is not, or may be."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from opentelemetry.trace import Span, SpanKind

from infra.log import clients
from infra.log.partitioner import partition_of
from infra.log.records import Command, Headers
from infra.log.topics import Topic
from infra.observability import logs, metrics, tracing
from infra.processes.process_end import Parts
from infra.settings import Settings

log = logging.getLogger(__name__)

POLL_S = 0.5
CLOSE_S = 2.0
Report = Callable[[KafkaError | None, Message | None], None]
"""Gets an append's error, or None: the command is in the log."""


class NotAppended(Exception):
    """The command is not in the log and never will be, by this try."""


class MaybeAppended(Exception):
    """The command may be in the log, or get there yet: only its outcome shows."""


def produce(
    producer: Producer, topic: Topic, command: Command, value: bytes, report: Report, headers: Headers | None = None
) -> None:
    """Begin to append a command to its stream's partition. `report` is called within the producer's `poll` and `flush`.

    Raises BufferError where too many commands wait in the producer, KafkaException where it can append nothing.
    """
    _produce(producer, topic, command.stream, value, report, headers)


def _produce(producer: Producer, topic: Topic, key: str, value: bytes, report: Report, headers: Headers | None) -> None:
    producer.produce(
        topic.name,
        value,
        key=key.encode(),
        partition=partition_of(key, topic.partitions),
        headers=headers,
        on_delivery=report,
    )


def is_too_large(error: KafkaError) -> bool:
    """Whether the command is not in the log. After any other error, an earlier try whose report was lost may have got through."""
    return bool(error.code() == KafkaError.MSG_SIZE_TOO_LARGE)


class _Append(NamedTuple):
    """A record that waits to be produced, or was."""

    future: asyncio.Future[None]
    started: float
    span: Span | None
    key: str
    value: bytes
    topic: Topic
    headers: Headers
    """With the request's own trace, which is the current one only while the request runs."""

    def end(self, error: NotAppended | MaybeAppended | None) -> None:
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
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
            self.future.exception()  # retrieved: the request may be gone


class Appender:
    """One idempotent producer for an event loop, polled by a thread of its own, which hands over its reports in batches.

    `connection` says whether the producer reaches any broker.
    """

    def __init__(self, settings: Settings, name: str, connection: clients.Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._name = name
        self._status = logs.StatusLog(log, name)
        self._producer: clients.LastingProducer
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._closing = threading.Event()
        self._gathered: list[_Append] = []
        """Not produced yet, so that load makes batches."""
        self._due: asyncio.TimerHandle | None = None
        self._reports: list[tuple[_Append, KafkaError | None]] = []
        """Only the thread that polls uses it."""

    def open(self, parts: Parts) -> None:
        """In the event loop that will append."""
        self._loop = asyncio.get_running_loop()
        self._producer = clients.LastingProducer(self._settings, self._name, self._connection)
        self._thread = parts.thread("appender", self._poll)

    def prepare(self, topic: Topic) -> None:
        """Have the first append to this topic take no longer than others. Blocks; in any thread."""
        clients.learn_leaders(self._producer.now, topic.name)

    async def close(self) -> None:
        """Waits a moment for appends under way."""
        self._produce_gathered()
        self._closing.set()
        await asyncio.to_thread(self._thread.join, CLOSE_S * 2)

    def append(
        self, key: str, value: bytes, topic: Topic, gather_s: float = 0.0, headers: Headers = ()
    ) -> asyncio.Future[None]:
        """Begin to append; the future ends when the record is in its topic, or gets NotAppended or MaybeAppended.

        It may wait for others for `gather_s` seconds.
        """
        span = tracing.start_here("append", SpanKind.PRODUCER) if tracing.recording() else None
        future, headers = self._loop.create_future(), [*headers, *tracing.carrier(span)]
        self._gathered.append(_Append(future, time.perf_counter(), span, key, value, topic, headers))
        if not gather_s:
            self._produce_gathered()
        elif self._due is None:
            self._due = self._loop.call_later(gather_s, self._produce_gathered)
        return future

    def _produce_gathered(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        gathered, self._gathered = self._gathered, []
        for append in gathered:
            self._produce(append)

    def _produce(self, append: _Append) -> None:
        def report(error: KafkaError | None, _: Message | None) -> None:
            self._reports.append((append, error))

        try:
            _produce(self._producer.now, append.topic, append.key, append.value, report, append.headers)
        except BufferError:
            append.end(NotAppended("too many commands wait to be sent"))
        except KafkaException as error:
            # the thread replaces a producer that can't go on
            self._tell_denied(append.topic, error.args[0])
            append.end(NotAppended(error.args[0].str()))

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(POLL_S)
            self._wake()
        with suppress(KafkaException):
            self._producer.now.flush(CLOSE_S)
        self._wake()

    def _wake(self) -> None:
        reports, self._reports = self._reports, []
        if reports and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reported, reports)

    def _reported(self, reports: list[tuple[_Append, KafkaError | None]]) -> None:
        for append, error in reports:
            if error is None:
                self._connection.seen()
                append.end(None)
            else:
                self._tell_denied(append.topic, error)
                append.end((NotAppended if is_too_large(error) else MaybeAppended)(error.str()))

    def _tell_denied(self, topic: Topic, error: KafkaError) -> None:
        if clients.is_denied(error):
            what = clients.denied(self._settings, error, f"Write of topic '{topic.name}'")
            self._status.wrong("append", str(what), level=logging.ERROR)
