"""Appends commands to their topic, and says exactly what is known when that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException, Message

from infra.log import clients
from infra.log.partitioner import partition_of
from infra.log.records import Command
from infra.log.topics import Topic
from infra.processes.process_end import Parts
from infra.settings import Settings

POLL_S = 0.5
CLOSE_S = 2.0


class NotAppended(Exception):
    """The command is not in the log and never will be, by this try."""


class MaybeAppended(Exception):
    """The command may be in the log, or get there yet: its outcome tells."""


class Appender:
    """One idempotent producer, polled from a thread of its own, which wakes the event loop once for all it was told at a time."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._connection = clients.Connection(name)
        self._name = name
        self._producer: clients.LastingProducer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._told: list[tuple[asyncio.Future[int], KafkaError | None, int]] = []

    def require(self) -> None:
        """Raises KafkaAway when all brokers were unreachable at the last look: what would be appended could only wait."""
        if self._connection.away.is_set():
            raise clients.away(self._settings, KafkaError(KafkaError._ALL_BROKERS_DOWN))

    def back(self) -> None:
        """The brokers were seen."""
        self._connection.seen()

    def open(self, parts: Parts) -> None:
        """In the event loop that will append."""
        self._loop = asyncio.get_running_loop()
        self._producer = clients.LastingProducer(self._settings, self._name, self._connection)
        self._thread = parts.thread("appender", self._poll)

    async def close(self) -> None:
        """Waits a moment for what is under way."""
        self._closing.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S * 2)

    def append(
        self, command: Command, value: bytes, topic: Topic, headers: Sequence[tuple[str, bytes]] = ()
    ) -> asyncio.Future[int]:
        """Begin to append; the future gets the command's offset, or NotAppended or MaybeAppended. Raises NotAppended."""
        assert self._loop is not None, "it is open"
        future: asyncio.Future[int] = self._loop.create_future()
        partition = partition_of(command.stream, topic.partitions)

        def told(error: KafkaError | None, message: Message) -> None:
            with self._lock:
                self._told.append((future, error, -1 if error else message.offset()))

        try:
            self._producer.now.produce(
                topic.name,
                value,
                key=command.stream.encode(),
                partition=partition,
                headers=list(headers),
                on_delivery=told,
            )
        except BufferError as error:
            raise NotAppended("too many commands wait to be sent") from error
        except KafkaException as error:
            # of a producer that can't go on the thread hears too, and replaces it
            raise NotAppended(error.args[0].str()) from error
        return future

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(POLL_S)
            self._wake()
        with suppress(KafkaException):
            self._producer.now.flush(CLOSE_S)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            told, self._told = self._told, []
        if told and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, told)

    def _tell(self, told: Sequence[tuple[asyncio.Future[int], KafkaError | None, int]]) -> None:
        for future, error, offset in told:
            if error is None:
                self._connection.seen()
                if not future.done():
                    future.set_result(offset)
            elif not future.done():
                # of all others an earlier try, of which we were not told, may have got through
                known = error.code() == KafkaError.MSG_SIZE_TOO_LARGE
                future.set_exception((NotAppended if known else MaybeAppended)(error.str()))
                future.exception()  # it may be that nobody waits for it any more
