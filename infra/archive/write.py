"""Archiving: writes the log up to now into files, and enters each in the manifest.

A file's name has its range and its hash. One INSERT enters it, which succeeds for one archiver only: a partition is one chain
(`archive_files`). An archiver that dies in between leaves a file that the manifest does not list. A later archiver removes it once
the chain extends beyond the file's first offset: then no archiver can enter it any more.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from psycopg import errors

from infra.archive.files import Row, encode
from infra.archive.manifest import ArchiveFile, end_of, files_of
from infra.archive.store import Store, opened
from infra.database.connect import Connection, session
from infra.log.records import Headers, Record
from infra.log.rule import Reading, read
from infra.log.source import LogTrimmed, NotHeld, read_held
from infra.log.topics import Topic
from infra.processes.faultpoints import reach
from infra.settings import Settings

MOST_RECORDS = 50_000
"""A file ends at a multiple of this at the latest."""
MOST_BYTES = 64_000_000
"""Approximate limit for the records of one file, which is built in memory."""


@dataclass(frozen=True, slots=True)
class Share:
    """A task: archive one partition up to `end`. `records` is how many are new."""

    settings: Settings
    topic: str
    topic_id: str
    partition: int
    end: int
    records: int


@dataclass(slots=True)
class Archived:
    """A task's result. [`first`, `end`) are the offsets that it archived itself."""

    partition: int
    first: int
    end: int
    files: int = 0
    records: int = 0
    size: int = 0
    swept: int = 0


class _Range(NamedTuple):
    start: Reading
    end: Reading
    rows: list[Row]


def shares(settings: Settings, topic: Topic, archived: Mapping[int, int]) -> list[Share]:
    """The tasks that archive a topic up to its ends, the largest first. `archived`: see `ends_of`."""
    found = [
        Share(settings, topic.name, topic.id, partition, end, max(end - archived.get(partition, 0), 0))
        for partition, end in topic.end.items()
    ]
    return sorted(found, key=lambda share: -share.records)


def archive_partition(share: Share, advance: Callable[[int], None] = lambda _count: None) -> Archived:
    """Archive a partition up to the share's end. Several archivers may run: each record is archived once.

    Raises LogTrimmed where the log lacks records that are not archived, UnreadableRecord, WrongArchive, ArchiveAway,
    KafkaUnavailable, DatabaseUnavailable.
    """
    with session(share.settings, f"samefold archive {share.partition}") as connection:
        store = opened(share.settings, connection, share.topic)
        at = end_of(connection, share.topic, share.partition)
        done = Archived(share.partition, at.next_offset, at.next_offset)
        while at.next_offset < share.end:
            for one in _ranges(share, at):
                reach("range read")
                file, content = _made(share, one)
                if not (store.put(file.path, content) and _enter(connection, file)):
                    break  # another archiver was faster: go on where the chain ends now
                reach("file entered")
                done.files, done.records, done.size = done.files + 1, done.records + file.rows, done.size + file.size
                done.end = file.end.next_offset
                advance(file.end.next_offset - file.start.next_offset)
            at = end_of(connection, share.topic, share.partition)
        done.swept = _sweep(store, connection, share)
        reach("archive swept")
    return done


def _ranges(share: Share, at: Reading) -> Iterator[_Range]:
    """The ranges to archive from `at` on, one a file."""
    rows: list[Row] = []
    size = 0
    next_boundary = _boundary_after(at.next_offset)
    headers: dict[int, Headers] = {}
    read_to = at.next_offset
    for records, read_to in _read(share, at.next_offset, headers):  # noqa: B007
        for _, offset, time_ms, key, value in records:
            if offset >= next_boundary or size >= MOST_BYTES:
                end = _end(share, at, rows, offset if offset < next_boundary else offset - offset % MOST_RECORDS)
                yield _Range(at, end, rows)
                at, rows, size, next_boundary = end, [], 0, _boundary_after(end.next_offset)
            rows.append((offset, time_ms, key, value, headers.pop(offset, None)))
            size += len(key or b"") + len(value or b"")
    if read_to > at.next_offset:
        yield _Range(at, _end(share, at, rows, read_to), rows)


def _read(share: Share, start: int, headers: dict[int, Headers]) -> Iterator[tuple[list[Record], int]]:
    try:
        yield from read_held(share.settings, share.topic, share.partition, start, share.end, headers=headers)
    except NotHeld as error:
        raise LogTrimmed(
            f"{share.topic}[{share.partition}] does not hold offset {start} any more, where the archive ends.",
            "It was trimmed without `samefold archive trim`, or the database was restored to before the trim. Restore either.",
        ) from error


def _boundary_after(offset: int) -> int:
    return (offset // MOST_RECORDS + 1) * MOST_RECORDS


def _end(share: Share, start: Reading, rows: list[Row], end: int) -> Reading:
    """The reading state after these records, at an offset that may lie beyond the last one."""
    after, _, _ = read(
        start, (Record(share.partition, offset, time, key, value) for offset, time, key, value, _ in rows)
    )
    return after._replace(next_offset=end)


def _made(share: Share, one: _Range) -> tuple[ArchiveFile, bytes]:
    first, end = one.start.next_offset, one.end.next_offset
    about = {"topic": share.topic, "topic_id": share.topic_id, "partition": str(share.partition)}
    about |= {"first_offset": str(first), "end_offset": str(end)}
    content = encode(one.rows, {f"samefold.{name}": value for name, value in about.items()})
    sha256 = hashlib.sha256(content).hexdigest()
    path = f"{_folder(share)}/{first:020d}-{end:020d}-{sha256[:16]}.parquet"
    last_ms = max((row[1] for row in one.rows), default=None)
    where = (share.topic, share.topic_id, share.partition, path)
    return ArchiveFile(*where, len(one.rows), len(content), sha256, last_ms, one.start, one.end), content


def _folder(share: Share) -> str:
    return f"{share.topic}/{share.topic_id.translate(_URL_SAFE)}/partition={share.partition}"


_URL_SAFE = str.maketrans("+/", "-_")
"""librdkafka encodes a topic's id with slashes; Kafka's own tools write it like this."""


def _enter(connection: Connection, file: ArchiveFile) -> bool:
    """Append this file to the chain; whether it is in it now."""
    (first, *start), (end, *after) = file.start, file.end
    what = (file.topic_id, file.path, file.rows, file.size, file.sha256, file.last_ms)
    try:
        entered = connection.execute(
            "insert into archive_files (topic, partition, first_offset, end_offset, follows, topic_id, path, rows, bytes, sha256, "
            "last_ms, epoch, seq, command_offset, end_epoch, end_seq, end_command_offset) "
            "values (%s, %s, %s, %s, nullif(%s, 0), %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) on conflict do nothing",
            (file.topic, file.partition, first, end, first, *what, *start, *after),
        )
    except errors.ForeignKeyViolation:
        return False  # the database was restored: the chain ends before this file
    return entered.rowcount == 1


_NAME = re.compile(r"(\d{20})-\d{20}-[0-9a-f]{16}\.parquet(\.[0-9a-f]{32}\.tmp)?")


def _sweep(store: Store, connection: Connection, share: Share) -> int:
    """Remove the files that killed or slower archivers left: those that begin below the chain's end and are not in it."""
    files = files_of(connection, share.topic, share.partition)
    chain = {file.path for file in files}
    end = files[-1].end.next_offset if files else 0  # from the same query, or a file entered since would be removed
    swept = 0
    for name in store.names(_folder(share)):
        path = f"{_folder(share)}/{name}"
        if (found := _NAME.fullmatch(name)) and int(found[1]) < end and path not in chain:
            store.remove(path)
            swept += 1
    return swept
