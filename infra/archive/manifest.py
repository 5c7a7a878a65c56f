"""The archive's manifest: the table `archive_files`. A file that it does not list is not part of the archive.

A partition's files are a chain from offset 0 on, which the table's constraints keep complete. A row never changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log.rule import START, Reading


class ManifestBroken(SamefoldError):
    """The manifest's files do not form a chain: another program changed the table."""


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A file of the archive. It holds the records with offsets in [start.next_offset, end.next_offset)."""

    topic: str
    topic_id: str
    partition: int
    path: str
    """Below `archive_url`."""
    rows: int
    size: int
    """In bytes."""
    sha256: str
    last_ms: int | None
    """Time of the newest record in ms since the epoch; None without records."""
    start: Reading
    end: Reading


_COLUMNS = """f.topic, f.topic_id, f.partition, f.path, f.rows, f.bytes, f.sha256, f.last_ms,
  f.first_offset, f.epoch, f.seq, f.command_offset, f.end_offset, f.end_epoch, f.end_seq, f.end_command_offset"""
_FILES = f"""
select {_COLUMNS} from archive_files f join topics t using (topic, topic_id)
 where f.topic = %(topic)s and (%(partition)s::int is null or f.partition = %(partition)s)
   and f.end_offset > %(start)s and (%(stop)s::bigint is null or f.first_offset < %(stop)s)
 order by f.partition, f.first_offset
"""  # noqa: S608
_END = f"""
select {_COLUMNS} from archive_files f where f.topic = %s and f.partition = %s order by f.first_offset desc limit 1
"""  # noqa: S608


def files_of(
    connection: Connection, topic: str, partition: int | None = None, start: int = 0, stop: int | None = None
) -> list[ArchiveFile]:
    """The files of a topic, or of one of its partitions, that overlap [start, stop), by partition and offset.

    Files of another topic of the same name are left out. Raises ManifestBroken, psycopg.Error.
    """
    asked = {"topic": topic, "partition": partition, "start": start, "stop": stop}
    files = [_file(row) for row in connection.execute(_FILES, asked)]
    for before, after in pairwise(files):
        if before.partition == after.partition and before.end != after.start:
            raise _broken(after)
    for file in files:
        if file.start.next_offset == 0 and file.start != START:
            raise _broken(file)
    return files


def end_of(connection: Connection, topic: str, partition: int) -> Reading:
    """The reading state at which a partition's archive ends. Raises psycopg.Error."""
    row = connection.execute(_END, (topic, partition)).fetchone()
    return _file(row).end if row else START


def ends_of(connection: Connection, topic: str, entered_before: datetime | None = None) -> Mapping[int, int]:
    """By partition, the offset up to which the log is archived, or was at a time. Partitions without files are left out."""
    found = connection.execute(
        "select f.partition, max(f.end_offset) from archive_files f join topics t using (topic, topic_id) "
        "where f.topic = %s and (%s::timestamptz is null or f.at <= %s) group by 1",
        (topic, entered_before, entered_before),
    )
    return dict(found.fetchall())


def _file(row: tuple[Any, ...]) -> ArchiveFile:
    topic, topic_id, partition, path, rows, size, sha256, last_ms, *states = row
    return ArchiveFile(
        topic, topic_id, partition, path, rows, size, sha256, last_ms, Reading(*states[:4]), Reading(*states[4:])
    )


def _broken(file: ArchiveFile) -> ManifestBroken:
    return ManifestBroken(
        f"The archive's manifest does not lead to {file.path}: the file before it ends elsewhere.",
        "Only `samefold archive` may write to archive_files. Restore the table from a backup.",
    )
