"""Kafka clients, with all their settings.

Producers use murmur2 (`partitioner`). Consumers read by position, never by Kafka's group offsets, and fail where the position is
missing (`auto.offset.reset`).
"""

import ctypes
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, DeletedRecords

from infra import tls
from infra.errors import SamefoldError
from infra.log import names
from infra.log.partitioner import LIBRDKAFKA_NAME
from infra.settings import Settings

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 5
TRANSACTION_MS = 10_000
"""Until the broker aborts the transaction of a producer that is silent. Meanwhile consumers wait."""
MAX_COMMAND_BYTES = 262_144
MAX_COMMIT_BYTES = 900_000
"""Of one command's events. With what stands around them, a record stays below Kafka's usual limit of 1 MiB."""
ACK_TIMEOUT_S = 30.0
"""Until an append without an answer counts as lost. A broker that fails over answers sooner."""
SOON_S = 10.0
"""A new producer that fails within this time is not replaced again."""
ACLS = "`samefold topics --acls` prints what each process needs"
AT_ONCE_S = 0.5
"""More than an answer takes. A broker that is later loses its connection, and is connected to again."""
END_S = 5.0
"""For the reports of purged records, which come at once. A missing report times out, as any other."""


class KafkaUnavailable(SamefoldError):
    """Kafka does not answer. Processes wait for it, commands end."""


class KafkaRefused(SamefoldError):
    """Kafka or this client refuses the other: a certificate, a password or a right is wrong. Waiting does not help."""


class ProducerRefused(SamefoldError):
    """Every producer of this process fails."""


class Connection:
    """Whether a client is connected to Kafka, with one log line a change."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.away = threading.Event()

    def on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self.away.is_set():
            self.away.set()
            log.warning("%s: Kafka does not answer; waiting for it", self.name)

    def seen(self) -> None:
        """A message or report arrived from the broker."""
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
        # librdkafka 2.8 would wait a second for its own metrics when a client closes
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
    """An idempotent producer, `acks=all`. `linger.ms` is 0: records that queue up during a request are the next batch."""
    return Producer(
        _common(settings)
        | {
            "enable.idempotence": True,
            "acks": "all",
            "max.in.flight": MAX_IN_FLIGHT,
            "linger.ms": 0,
            "compression.type": "lz4",
            "partitioner": LIBRDKAFKA_NAME,
            "message.timeout.ms": int(ACK_TIMEOUT_S * 1000),
            "message.max.bytes": MAX_COMMIT_BYTES + 100_000,
            "queue.buffering.max.messages": 500_000,
        }
        | ({"error_cb": connection.on_error} if connection else {})
    )


def transactional_producer(
    settings: Settings, transactional_id: str, most_bytes: int, on_error: Callable[[KafkaError], None]
) -> Producer:
    """A producer of transactions, which fences the one before with this id by `init_transactions`.

    After any error, which `on_error` may get too, it must be destroyed, never aborted and used again
    (docs/adr/0013-hanging-transactions.md).
    """
    return Producer(
        _common(settings)
        | {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_MS,
            "message.timeout.ms": TRANSACTION_MS,
            "linger.ms": 0,
            "compression.type": "lz4",
            "message.max.bytes": most_bytes,
            "queue.buffering.max.messages": 0,  # no limit: one batch of the log
            # the coordinator may still be ending the last transaction when the next one begins, and refuses it for some
            # milliseconds; by default the first retry comes after 100 ms, and later ones after up to a second
            "retry.backoff.ms": 10,
            "retry.backoff.max.ms": 100,
            "error_cb": on_error,
        }
    )


class LastingProducer:
    """An idempotent producer, `now`, which is replaced after a fatal error of librdkafka.

    Its records in flight are then reported as failed, but may be in the log, or still get there. `poll` and `renew` may be called
    from several threads.
    """

    def __init__(self, settings: Settings, who: str, connection: Connection | None = None) -> None:
        self._settings = settings
        self._who = who
        self._connection = connection
        self._lock = threading.Lock()
        self._renewed_at = float("-inf")
        self.now = producer(settings, connection=connection)

    def poll(self, seconds: float) -> None:
        """Serve delivery reports. Raises what their callbacks raise, ProducerRefused."""
        polled = self.now
        try:
            polled.poll(seconds)
        except KafkaException as error:
            if not is_finished(error.args[0]):
                raise
            self.renew(polled, error.args[0])

    def renew(self, finished: Producer, error: KafkaError) -> None:
        """Replace it, unless that is done. All its reports are served before this returns. Raises ProducerRefused."""
        with self._lock:
            if self.now is not finished:
                return
            if time.monotonic() - self._renewed_at < SOON_S:
                raise ProducerRefused(
                    f"{self._who}: the producer{_of(self._settings)} failed, and so did the one that replaced it: {error.str()}.",
                    f"Read the broker's log. Check that this account may write to the topic: {ACLS}.",
                )
            self._renewed_at = time.monotonic()
            self.now = producer(self._settings, connection=self._connection)
        log.warning("%s: the producer failed (%s) and was replaced", self._who, error.str())
        finished.purge()
        deadline = time.monotonic() + END_S
        while len(finished) and time.monotonic() < deadline:
            try:
                finished.poll(0.1)
            except KafkaException as again:
                if not is_finished(again.args[0]):
                    raise


def append_all(
    settings: Settings, writer: Producer, topic: str, records: Iterable[tuple[bytes, bytes | None]], seconds: float
) -> list[int]:
    """Append keys and values to partition 0 and wait for the acknowledgements; the offsets.

    Raises KafkaUnavailable, ProducerRefused. A record that is not acknowledged may still get there. The producer is of no use then.
    """
    offsets: list[int] = []
    wrong: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            offsets.append(message.offset())
        else:
            wrong.append(error)

    for key, value in records:
        writer.produce(topic, value, key, 0, delivered)
    missing = writer.flush(seconds)
    if not missing and not wrong:
        return offsets
    with suppress(KafkaException):
        writer.purge()
    error = wrong[0] if wrong else KafkaError(KafkaError._MSG_TIMED_OUT)
    if may_pass(error) or error.code() == KafkaError._MSG_TIMED_OUT:
        raise away(settings, error)
    raise ProducerRefused(
        f"Topic '{topic}' can't be written: {error.str()}.", f"Check that this account may write to the topic: {ACLS}."
    )


def _consumer(settings: Settings, extra: dict[str, Any]) -> Consumer:
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

    `on_commit` gets the result of a commit, `on_finished` a fatal error, which `poll` need not return.
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
    )


def range_consumer(settings: Settings, *, tells_ends: bool = True, group: str | None = None) -> Consumer:
    """A consumer for `assign`, without a group. `tells_ends`: it returns an event at each partition's end.

    `group` is one that it may ask for: librdkafka does, all the same.

    A consumer that pauses must not have these events: librdkafka before 2.13.2 takes one for a record (its issue 4844), and skips
    a record when it is resumed.
    """
    # a pending fetch of the partition before would delay the next one
    only = {
        "group.id": group or names.readers(settings.group_prefix),
        "enable.partition.eof": tells_ends,
        "fetch.wait.max.ms": 5,
    }
    return _consumer(settings, only)


def agent_consumer(settings: Settings, *, gather_ms: int = 0, tells_ends: bool = False) -> Consumer:
    """A consumer for `assign`, which fetches new records for as long as the agent runs, after they gathered for `gather_ms`.

    `tells_ends` is as in `range_consumer`.
    """
    only = {
        "enable.partition.eof": tells_ends,
        "group.id": names.readers(settings.group_prefix),
        # partitions share one queue: records of one that is far behind delay the others
        "queued.max.messages.kbytes": 8_192,
        # a pending fetch delays the next assignment; a partition that is behind has so many bytes at once
        "fetch.wait.max.ms": gather_ms or 50,
        "fetch.min.bytes": 256 * 1024 if gather_ms else 1,
    }
    return _consumer(settings, only)


def learn_leaders(client: Producer | Consumer, topic: str) -> None:
    """Learn who leads a topic that exists, before the client first uses it. Waits up to AT_ONCE_S.

    librdkafka asks for the topics that it knows when it connects, and for one that is new to it only once a second (seen with 2.8:
    a first record, or a first fetch, by a client that was older than a moment took 0.7 to 1.0 s, and 5 ms after this).
    """
    with suppress(KafkaException):
        client.list_topics(topic, AT_ONCE_S)


def fetch_at_once(consumer: Consumer, topic: str, resumed: Iterable[int]) -> None:
    """Have resumed partitions fetched now, where none was before. Waits up to AT_ONCE_S for the brokers that lead them.

    librdkafka's thread for a broker sleeps for up to a second while none of its partitions is fetched (seen with 2.8: 0 to 1,000 ms
    after `resume`, evenly), and only a request to that broker wakes it. This asks for the ends of these partitions. Beside a fetch
    it would not be needed, and be answered only after it.
    """
    with suppress(KafkaException):
        consumer.offsets_for_times([TopicPartition(topic, partition, OFFSET_END) for partition in resumed], AT_ONCE_S)


def assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
    """Have it read these partitions, each from its offset, and no others.

    librdkafka 2.8 aborts the process if a partition is assigned again while it is being stopped; hence the `unassign`.
    """
    consumer.unassign()
    consumer.assign(partitions)


def admin(settings: Settings, on_error: Callable[[KafkaError], None] | None = None) -> AdminClient:
    """`on_error` gets the reasons of broken connections within `poll`. Raises KafkaRefused where it can't be made."""
    try:
        return AdminClient(_common(settings) | ({"error_cb": on_error} if on_error else {}))
    except KafkaException as error:
        raise KafkaRefused(
            f"No client of Kafka can be made: {error.args[0].str()}.",
            f"Check {settings.of_kafka('ssl_ca_location')} and the other settings of this Kafka.",
        ) from error


def delete_records(client: AdminClient, before: list[TopicPartition]) -> dict[TopicPartition, Future[DeletedRecords]]:
    """Have Kafka delete the records before these offsets.

    confluent-kafka 2.9 releases a reference to the list that it never took; without the extra one, used memory would be freed.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(before))
    asked: dict[TopicPartition, Future[DeletedRecords]] = client.delete_records(before)
    return asked


def is_finished(error: KafkaError) -> bool:
    """Whether the client has failed for good. An error with the code `_FATAL` may lack the flag."""
    return bool(error.fatal()) or error.code() == KafkaError._FATAL


def may_pass(error: KafkaError) -> bool:
    """Whether the error may pass: the broker or coordinator is unavailable or moves, or a request timed out."""
    return bool(error.retriable()) or error.code() in _PASSING


MOVING = {
    KafkaError._TIMED_OUT,
    KafkaError._UNKNOWN_PARTITION,  # after a broker's restart, when the client knows the topic but not its partitions
    KafkaError._NOENT,  # a partition has no leader at the moment
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
"""A leader or coordinator is being elected: the cluster answers, and soon with what was asked for."""
_PASSING = MOVING | {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError._RESOLVE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
}


_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_PLACE = re.compile(r"(?:\w+://)?\[?([^/\[\]]+?)\]?:(\d+)/\S*: (.*)")
"""How librdkafka begins an error of a connection: with the broker's address."""


def is_denied(error: KafkaError) -> bool:
    """Whether an ACL is missing."""
    return error.code() in _DENIED


def denied(settings: Settings, error: KafkaError, right: str) -> KafkaRefused:
    """The error for a missing ACL; `right` says which, such as "Read of topic 'events'"."""
    hint = "Let the other team add it: docs/sources.md has the rights" if settings.is_others else f"Add it: {ACLS}"
    return KafkaRefused(f"An ACL of Kafka is missing{_of(settings)}: {right} ({error.str()}).", f"{hint}.")


def _of(settings: Settings) -> str:
    return f" for user '{settings.kafka_sasl_username}'" if settings.kafka_sasl_username else ""


def refusal(settings: Settings, error: KafkaError) -> KafkaRefused | None:
    """The named error for a connection that one side refuses; None for one that may come back by itself."""
    found = _PLACE.match(error.str())
    host, port, why = found.groups() if found else ("", "0", error.str())
    why = re.sub(r" \(after .*", "", why)
    place, ca = f"Kafka at {host}:{port}", settings.kafka_ssl_ca_location
    # a proxy without its broker, or a broker that stops, breaks connections too, in any state: these pass
    if error.code() == KafkaError._AUTHENTICATION and "Local:" not in why and "Disconnected" not in why:
        return KafkaRefused(
            f"{place} refuses user '{settings.kafka_sasl_username}': {why}.",
            f"Correct {' or '.join(map(settings.of_kafka, ('sasl_username', 'sasl_password', 'sasl_mechanism')))}.",
        )
    if error.code() == KafkaError._SSL and (wrong := tls.fault(host, int(port), str(ca) if ca else None)):
        return KafkaRefused(
            f"The certificate of {place} is not accepted: {wrong}.",
            f"Renew it, or that of its authority in {settings.of_kafka('ssl_ca_location')} ({ca or 'not set'})."
            if "expired" in wrong
            else f"Its authority must be in {settings.of_kafka('ssl_ca_location')} ({ca or 'not set'}), and '{host}' among its "
            "names.",
        )
    is_plain = not settings.kafka_security_protocol.endswith("SSL")
    if (
        error.code() == KafkaError._TRANSPORT
        and is_plain
        and "security.protocol" in why
        and tls.speaks(host, int(port))
    ):
        return KafkaRefused(
            f"{place} expects TLS, but {settings.of_kafka('security_protocol')} is {settings.kafka_security_protocol}.",
            "Set it to SASL_SSL or SSL.",
        )
    return None


def away(settings: Settings, error: KafkaException | KafkaError) -> KafkaUnavailable:
    """The error for a Kafka that does not answer, with the broker's address and without any secret."""
    return KafkaUnavailable(
        f"Kafka at {settings.kafka} does not answer ({error}).",
        f"Start it (`samefold dev up` for the local one), or correct {settings.of_kafka('bootstrap')}.",
    )
