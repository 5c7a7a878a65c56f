"""Reads the whole log: a range of a topic's partition from Kafka, and from the archive what Kafka does not hold."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import Consumer

from infra.log.partitioner import partition_of
from infra.log.records import Commit, Record, decode_event, decode_head, time_of
from infra.log.rule import START, read
from infra.log.source import LogTrimmed, NotHeld, read_held
from infra.log.topics import describe
from infra.settings import Settings


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


class Historic(NamedTuple):
    """A stream's commit with its record; `void` tells why it has no effect, None where it has."""

    record: Record
    commit: Commit
    void: str | None


def commits_of(settings: Settings, stream: str) -> Iterator[list[Historic]]:
    """The commits of a stream in order, those of each batch of records that was read; most batches have none.

    Reads the stream's whole partition. Raises TopicMissing, KafkaUnavailable, LogTrimmed, UnreadableRecord.
    """
    topic = describe(settings, settings.events_topic)
    partition, key = partition_of(stream, topic.partitions), stream.encode()
    reading = START
    for records in read_range(settings, topic.name, partition, 0, topic.end[partition]):
        reading, _, voids = read(reading, records, decode_head)
        why = {void.offset: void.reason for void in voids}
        found = []
        for record in records:
            void = why.get(record.offset)
            if record.key == key and void != "garbage":
                commit = decode_event(record)
                if isinstance(commit, Commit) and commit.stream == stream:
                    found.append(Historic(record, commit, void))
        yield found


def history_of(settings: Settings, stream: str) -> Iterator[dict[str, Any]]:
    """The commits of a stream in order, as plain data with `partition`, `offset`, `time` and `void`. Raises as `commits_of`."""
    for found in commits_of(settings, stream):
        for record, _, void in found:
            at = time_of(record.time_ms).isoformat()
            where = {"void": void, "partition": record.partition, "offset": record.offset, "time": at}
            yield msgspec.json.decode(record.value or b"") | where
