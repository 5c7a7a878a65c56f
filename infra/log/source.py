"""Reads a range of a topic's partition, without a consumer group: from Kafka, and from the archive what Kafka does not hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from infra.errors import SamefoldError
from infra.log import clients, names
from infra.log.partitioner import partition_of
from infra.log.records import Commit, Headers, Record, decode_event, time_of
from infra.log.rule import START, read
from infra.log.topics import describe
from infra.settings import Settings

BATCH = 1_000
"""Small enough for the processor's cache: with 10,000, decoding and folding took a quarter longer."""
NO_PROGRESS_S = 60.0


class LogTrimmed(SamefoldError):
    """A range of the log is missing: it was deleted without an archive, or the topic was recreated."""


class NotHeld(SamefoldError):
    """Kafka does not hold an offset any more. The archive may; `read_range` asks it."""


def read_range(
    settings: Settings, topic: str, partition: int, start: int, stop: int, *, consumer: Consumer | None = None
) -> Iterator[list[Record]]:
    """The records of `topic[partition]` with offsets in [start, stop), in order, in batches.

    It ends only at `stop`: it reads again where Kafka or the archive ends before. The last offset counts as read only when a record
    at or beyond it, or the partition's end beyond it, was received.
    Raises LogTrimmed where the range does not exist, KafkaUnavailable after 60 s without progress, and what `archived` raises.
    """
    position = start
    while position < stop:
        try:
            for records, position in read_held(settings, topic, partition, position, stop, consumer=consumer):  # noqa: B007, B020
                if records:
                    yield records
        except NotHeld:
            for records, position in archived(settings, topic, partition, position, stop):  # noqa: B007, B020
                if records:
                    yield records


def archived(
    settings: Settings, topic: str, partition: int, start: int, stop: int | None = None
) -> Iterator[tuple[list[Record], int]]:
    """The records from `start` on in the archive, in batches, each with the offset after it; the last batch may be empty.

    Raises LogTrimmed where `start` is not archived; ArchiveDamaged, ArchiveMissing, ManifestBroken, ArchiveAway,
    DatabaseUnavailable.
    """
    from infra.archive.read import read_archived  # imports Arrow, which only a trimmed log needs

    position = start
    for records, position in read_archived(settings, topic, partition, start, stop):
        yield records, position
    if position == start:
        raise LogTrimmed(
            f"{topic}[{partition}] does not hold offset {start} any more, and no archive has it.",
            "It was trimmed without `samefold archive`, or recreated: restore the topic, or the database that knows the archive.",
        )


def read_held(
    settings: Settings,
    topic: str,
    partition: int,
    start: int,
    stop: int,
    *,
    consumer: Consumer | None = None,
    headers: dict[int, Headers] | None = None,
) -> Iterator[tuple[list[Record], int]]:
    """The records of [start, stop) in Kafka, in batches, each with the offset after it; the last batch may be empty.

    `headers` receives the records' headers by offset. Raises NotHeld where Kafka does not hold the next record any more,
    LogTrimmed where the partition ends before `stop`, KafkaUnavailable.
    """
    if start >= stop:
        return
    new = tuple.__new__  # as Record(), in half the time
    own = consumer is None
    reader = consumer or clients.range_consumer(settings)
    try:
        reader.assign([TopicPartition(topic, partition, start)])
        position = start
        deadline = time.monotonic() + NO_PROGRESS_S
        while position < stop:
            batch: list[Record] = []
            wrong: Message | None = None
            # consume(n) waits for all n: ask for one first, then for what is there
            messages = reader.consume(1, 0.2) or []
            if messages and messages[0].error() is None:
                messages += reader.consume(min(BATCH, stop - position), 0)
            for message in messages:
                if message.error() is not None:
                    wrong = message
                    break
                offset = message.offset()
                if offset >= stop:
                    position = stop
                    break
                batch.append(new(Record, (partition, offset, message.timestamp()[1], message.key(), message.value())))
                position = offset + 1
                if headers is not None and (found := message.headers()):
                    headers[offset] = found
            if batch or position >= stop:
                deadline = time.monotonic() + NO_PROGRESS_S
                yield batch, position
            elif time.monotonic() > deadline:
                raise clients.away(settings, KafkaException(KafkaError(KafkaError._TIMED_OUT)))
            if wrong is not None and position < stop:
                error = wrong.error()
                if error.code() != KafkaError._PARTITION_EOF:
                    raise named(settings, topic, partition, position, error)
                position = max(position, wrong.offset() or 0)
                if position < stop:
                    raise LogTrimmed(
                        f"{topic}[{partition}] ends at {position}, but {stop} records were expected.",
                        "The topic was recreated or lost records. Restore it, or start with an empty database.",
                    )
                yield [], position
    finally:
        if own:
            reader.close()
        else:
            reader.unassign()


def is_not_held(error: KafkaError) -> bool:
    """Whether the broker does not hold the requested offset."""
    return error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


def named(settings: Settings, topic: str, partition: int, start: int, error: KafkaError) -> SamefoldError:
    """The named error for an error of a consumer that was to read from `start` on."""
    if is_not_held(error):
        return NotHeld(f"{topic}[{partition}] does not hold offset {start} any more.", "Read it from the archive.")
    if clients.is_denied(error):
        what = "group" if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED else "topic"
        right = (
            f"Describe of group '{names.readers(settings.group_prefix)}'"
            if what == "group"
            else f"Read of topic '{topic}'"
        )
        return clients.denied(settings, error, right)
    return clients.away(settings, error)


def history_of(settings: Settings, stream: str) -> Iterator[dict[str, Any]]:
    """The commits of a stream in order, as plain data. `void` says why a record has no effect; None where it has.

    Reads the stream's whole partition. Raises TopicMissing, KafkaUnavailable, LogTrimmed, UnreadableRecord.
    """
    topic = describe(settings, settings.events_topic)
    partition, key = partition_of(stream, topic.partitions), stream.encode()
    reading = START
    for records in read_range(settings, topic.name, partition, 0, topic.end[partition]):
        reading, _, voids = read(reading, records)
        why = {void.offset: void.reason for void in voids}
        for record in records:
            void = why.get(record.offset)
            if record.key == key and void != "garbage":
                entry = decode_event(record)
                if isinstance(entry, Commit) and entry.stream == stream:
                    at = time_of(record.time_ms).isoformat()
                    where = {"partition": partition, "offset": record.offset, "time": at}
                    yield msgspec.json.decode(record.value or b"") | {"void": void} | where
