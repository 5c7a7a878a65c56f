"""Kafka clients, all their settings in one place.

Every produced key goes through murmur2 (`partitioner`); every consumer starts where it is told or fails (`auto.offset.reset`),
reads by position and never lets Kafka's group offsets decide anything.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, DeletedRecords

from infra.errors import SamefoldError
from infra.log.partitioner import LIBRDKAFKA_NAME
from infra.settings import Settings

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 5
SOON_S = 10.0
"""A producer that can't go on so soon after another one could not is no accident."""
END_S = 5.0
"""Reports of what is purged come at once; one that does not come counts as lost in time, as any other."""


class KafkaAway(SamefoldError):
    """Kafka does not answer. It may come back: processes wait, commands end."""


class ProducerRefused(SamefoldError):
    """Kafka lets no producer of this process go on."""


class Connection:
    """What librdkafka says about its connections, kept down to one log line a change."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.away = threading.Event()

    def on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self.away.is_set():
            self.away.set()
            log.warning("%s: Kafka does not answer; waiting for it", self.name)

    def seen(self) -> None:
        """Anything arrived from the broker."""
        if self.away.is_set():
            self.away.clear()
            log.info("%s: Kafka answers again", self.name)


def _common(settings: Settings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "bootstrap.servers": settings.kafka,
        "security.protocol": settings.kafka_security_protocol,
        "log_level": 2,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1_000,
        "socket.keepalive.enable": True,
        # librdkafka 2.8 waits a second at a client's end for metrics that nobody asked for
        "enable.metrics.push": False,
    }
    if settings.kafka_sasl_mechanism:
        config["sasl.mechanism"] = settings.kafka_sasl_mechanism
        config["sasl.username"] = settings.kafka_sasl_username
        if settings.kafka_sasl_password:
            config["sasl.password"] = settings.kafka_sasl_password.get_secret_value()
    if settings.kafka_ssl_ca_location:
        config["ssl.ca.location"] = str(settings.kafka_ssl_ca_location)
    return config


def producer(settings: Settings, *, connection: Connection | None = None) -> Producer:
    """An idempotent producer, `acks=all`. `linger.ms` is 0: what queues up while a request is under way makes the next batch."""
    return Producer(
        _common(settings)
        | {
            "enable.idempotence": True,
            "acks": "all",
            "max.in.flight": MAX_IN_FLIGHT,
            "linger.ms": 0,
            "compression.type": "lz4",
            "partitioner": LIBRDKAFKA_NAME,
            "message.timeout.ms": int(settings.ack_timeout_s * 1000),
            "message.max.bytes": settings.max_commit_bytes + 100_000,
            "queue.buffering.max.messages": 500_000,
        }
        | ({"error_cb": connection.on_error} if connection else {})
    )


class LastingProducer:
    """An idempotent producer, `now`, and another one in its place when it can't go on, which librdkafka calls a fatal error.

    What it had under way is reported as failed then, and may be in the log, or get there yet. `poll` and `renew` may be called from
    several threads.
    """

    def __init__(self, settings: Settings, who: str, connection: Connection | None = None) -> None:
        self._settings = settings
        self._who = who
        self._connection = connection
        self._lock = threading.Lock()
        self._renewed_at = float("-inf")
        self.now = producer(settings, connection=connection)

    def poll(self, seconds: float) -> None:
        """Serve reports. Raises what their callbacks raise, ProducerRefused."""
        polled = self.now
        try:
            polled.poll(seconds)
        except KafkaException as error:
            if not is_finished(error.args[0]):
                raise
            self.renew(polled, error.args[0])

    def renew(self, finished: Producer, error: KafkaError) -> None:
        """Replace it, unless that is done; all its reports are served before this returns. Raises ProducerRefused."""
        with self._lock:
            if self.now is not finished:
                return
            if time.monotonic() - self._renewed_at < SOON_S:
                raise ProducerRefused(
                    f"{self._who}: Kafka lets no producer go on, not even a new one: {error.str()}.",
                    "The broker's log says why. May this account write to the topic, and with idempotence?",
                )
            self._renewed_at = time.monotonic()
            self.now = producer(self._settings, connection=self._connection)
        log.warning("%s: the producer can't go on (%s); another one is made", self._who, error.str())
        finished.purge()
        deadline = time.monotonic() + END_S
        while len(finished) and time.monotonic() < deadline:
            try:
                finished.poll(0.1)
            except KafkaException as again:
                if not is_finished(again.args[0]):
                    raise


def _consumer(settings: Settings, extra: dict[str, Any], connection: Connection | None) -> Consumer:
    return Consumer(
        _common(settings)
        | {
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            # the default of 1000 ms stalls a fast reader for a second each time its queue was full
            "fetch.queue.backoff.ms": 1,
            "queued.max.messages.kbytes": 32_768,
            "fetch.wait.max.ms": 100,
        }
        | extra
        | ({"error_cb": connection.on_error} if connection else {})
    )


def group_consumer(
    settings: Settings,
    group: str,
    *,
    instance: str,
    connection: Connection,
    on_commit: Callable[[KafkaError | None, list[TopicPartition]], None],
    on_finished: Callable[[KafkaError], None],
) -> Consumer:
    """A consumer that shares a topic's partitions with its group, as a static member named `instance`.

    `on_commit` is told what became of a commit; `on_finished`, when it can't go on: what it polls need not say so.
    """

    def on_error(error: KafkaError) -> None:
        (on_finished if is_finished(error) else connection.on_error)(error)

    return _consumer(
        settings,
        {
            "group.id": group,
            "group.instance.id": instance,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": settings.session_timeout_ms,
            "heartbeat.interval.ms": max(settings.session_timeout_ms // 5, 200),
            "topic.metadata.refresh.interval.ms": 5_000,
            "error_cb": on_error,
            "on_commit": on_commit,
        },
        None,
    )


def range_consumer(settings: Settings, *, tells_ends: bool = True, connection: Connection | None = None) -> Consumer:
    """A consumer for `assign`: no group, and where it `tells_ends`, an event at each partition's end.

    One that is to pause must not tell ends: librdkafka before 2.13.2 takes the event for a record (its issue 4844), and leaves out
    a record when it is resumed.
    """
    # a fetch for the partition before would hold up the next one for as long as it may wait
    only = {"group.id": f"{settings.group_prefix}-reader", "enable.partition.eof": tells_ends, "fetch.wait.max.ms": 5}
    return _consumer(settings, only, connection)


def agent_consumer(settings: Settings) -> Consumer:
    """A consumer for `assign`, which fetches what is new for as long as the agent lives."""
    only = {
        "group.id": f"{settings.group_prefix}-reader",
        # partitions share one queue: what waits of one that is far behind holds up the others
        "queued.max.messages.kbytes": 8_192,
        # a fetch under way holds up the next assignment for as long as it may wait
        "fetch.wait.max.ms": 50,
    }
    return _consumer(settings, only, None)


def assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
    """Have it read these partitions, each from its offset, and no others.

    librdkafka 2.8 aborts the process when a partition is assigned anew while it is being stopped: it is taken away first.
    """
    consumer.unassign()
    consumer.assign(partitions)


def admin(settings: Settings) -> AdminClient:
    return AdminClient(_common(settings))


def delete_records(client: AdminClient, before: list[TopicPartition]) -> dict[TopicPartition, Future[DeletedRecords]]:
    """Have Kafka delete what is before these offsets.

    confluent-kafka 2.9 gives back a reference to the list that it never took: memory would be freed that is still in use.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(before))
    asked: dict[TopicPartition, Future[DeletedRecords]] = client.delete_records(before)
    return asked


def is_finished(error: KafkaError) -> bool:
    """Whether the client that says so can't go on. What comes as `_FATAL` does not say of itself that it is fatal."""
    return bool(error.fatal()) or error.code() == KafkaError._FATAL


def may_pass(error: KafkaError) -> bool:
    """Whether an error is of the kind that goes away by itself: broker or coordinator away, timed out, moving."""
    return bool(error.retriable()) or error.code() in _PASSING


_PASSING = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError._RESOLVE,
    KafkaError._UNKNOWN_PARTITION,  # of a topic that the client has only heard of, after a broker's restart
    KafkaError._NOENT,  # of a partition that nobody leads at the moment
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
}


def away(settings: Settings, error: KafkaException | KafkaError) -> KafkaAway:
    """The named error for Kafka not answering, with the broker's address and without any secret."""
    return KafkaAway(
        f"Kafka at {settings.kafka} does not answer ({error}).",
        "Start it (`samefold dev up` for the local one), or correct SAMEFOLD_KAFKA_BOOTSTRAP.",
    )
