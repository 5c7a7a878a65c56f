"""One stream's records out of the log, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from infra.log.partitioner import partition_of
from infra.log.records import Commit, Record, decode_event, time_of
from infra.log.rule import START, read
from infra.log.source import read_range
from infra.log.topics import describe
from infra.settings import Settings


def history_of(settings: Settings, stream: str) -> Iterator[dict[str, Any]]:
    """The commits of a stream in order, as plain data; `void` says why a record has no effect, None where it has.

    Reads the stream's whole partition. Raises TopicMissing, KafkaAway, LogTrimmed, UnreadableRecord.
    """
    topic = describe(settings, settings.events_topic)
    partition = partition_of(stream, topic.partitions)
    reading = START
    for records in read_range(settings, topic.name, partition, 0, topic.end[partition]):
        reading, _, voids = read(reading, records)
        why = {void.offset: void.reason for void in voids}
        key = stream.encode()
        for record in records:
            if record.key == key and why.get(record.offset) != "garbage":
                entry = decode_event(record)
                if isinstance(entry, Commit) and entry.stream == stream:
                    yield _plain(record, why.get(record.offset))


def _plain(record: Record, void: str | None) -> dict[str, Any]:
    commit: dict[str, Any] = msgspec.json.decode(record.value or b"")
    where = {"partition": record.partition, "offset": record.offset, "time": time_of(record.time_ms).isoformat()}
    return commit | {"void": void} | where
