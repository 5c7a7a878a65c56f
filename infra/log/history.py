"""One stream's records out of the log: all of them for people, page by page for the API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from infra.log.partitioner import partition_of
from infra.log.records import Commit, Record, decode_event, time_of
from infra.log.rule import START, Counted, Reading, read
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which commits of a stream are looked for: those that count, beyond a version."""

    stream: str
    partition: int
    after: int
    """The version whose events, and all before, are not wanted."""
    to: int
    """The version after which there is none to be found; with `rejected`, only the range's end tells."""
    rejected: bool = False
    """Rejections too."""


class Page(NamedTuple):
    """Some of what is wanted, in order, and where to go on for more."""

    commits: list[Counted]
    next: Reading
    is_last: bool


def page_of(
    settings: Settings,
    wanted: Wanted,
    at: Reading,
    stop: int,
    *,
    most: int,
    most_bytes: int,
    seconds: float,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Page:
    """What a stream's partition holds of it in [at, stop): up to about that many events and bytes, or what is found in that time.

    So a page may be short, or empty, and still not the last: a stream's commits are found by reading its whole partition.
    Raises KafkaAway, LogTrimmed, UnreadableRecord, and what reading the archive raises.
    """
    found: list[Counted] = []
    events = size = 0
    deadline = time.monotonic() + seconds
    for records in read_range(settings, settings.events_topic, wanted.partition, at.next_offset, stop):
        was = at
        at, counted, _ = read(at, records)
        for one in counted:
            commit = one.commit
            if commit.stream != wanted.stream or not _is_wanted(wanted, commit):
                continue
            found.append(one)
            events += len(commit.events) or 1
            size += sum(len(event.data) for event in commit.events)
            if not wanted.rejected and commit.version >= wanted.to:
                return Page(found, _just_after(was, records, one), is_last=True)
            if events >= most or size >= most_bytes:
                return Page(found, _just_after(was, records, one), is_last=False)
        if is_stopped() or time.monotonic() > deadline:
            break
    return Page(found, at, is_last=at.next_offset >= stop)


def _is_wanted(wanted: Wanted, commit: Commit) -> bool:
    if commit.outcome == "accepted":
        return commit.version > wanted.after
    return wanted.rejected and commit.version >= wanted.after


def _just_after(was: Reading, records: list[Record], one: Counted) -> Reading:
    return read(was, [record for record in records if record.offset <= one.offset])[0]


def _plain(record: Record, void: str | None) -> dict[str, Any]:
    commit: dict[str, Any] = msgspec.json.decode(record.value or b"")
    where = {"partition": record.partition, "offset": record.offset, "time": time_of(record.time_ms).isoformat()}
    return commit | {"void": void} | where
