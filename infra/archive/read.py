"""Reads and checks the archive's files. A file's hash is compared with the manifest's before any of its records is returned."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from infra.archive.files import decode
from infra.archive.manifest import ArchiveFile, files_of
from infra.archive.store import Store, opened
from infra.database.connect import session
from infra.errors import SamefoldError
from infra.log.records import Record
from infra.log.rule import read
from infra.settings import Settings


class ArchiveDamaged(SamefoldError):
    """A file of the archive differs from the manifest."""


class ArchiveMissing(SamefoldError):
    """A file that the manifest lists does not exist."""


def content_of(store: Store, file: ArchiveFile) -> bytes:
    """A file's bytes, with the manifest's hash. Raises ArchiveMissing, ArchiveDamaged, ArchiveAway."""
    hint = "Restore it from a copy of the archive; `samefold archive check` lists every file that differs."
    content = store.read(file.path)
    if content is None:
        raise ArchiveMissing(f"The archive lacks {file.path}, which its manifest lists.", hint)
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise ArchiveDamaged(f"{file.path} is damaged: its hash is {found[:16]}…, not {file.sha256[:16]}….", hint)
    return content


def read_archived(
    settings: Settings, topic: str, partition: int, start: int, stop: int | None = None
) -> Iterator[tuple[list[Record], int]]:
    """The archived records of [start, stop), in batches, each with the offset after it; none where `start` is not archived.

    Raises ArchiveMissing, ArchiveDamaged, WrongArchive, ManifestBroken, ArchiveAway, DatabaseUnavailable.
    """
    if settings.database_url is None:
        return
    with session(settings, "samefold archive") as connection:
        files = files_of(connection, topic, partition, start, stop)
        if not files or files[0].start.next_offset > start:
            return
        store = opened(settings, connection, topic)
    for file in files:
        end = file.end.next_offset if stop is None else min(file.end.next_offset, stop)
        for records in decode(content_of(store, file), partition):
            if records[0].offset < start or records[-1].offset >= end:
                wanted = [record for record in records if start <= record.offset < end]
            else:
                wanted = records
            if wanted:
                yield wanted, wanted[-1].offset + 1
        yield [], end


@dataclass(frozen=True, slots=True)
class Portion:
    """A task: check one partition of the archive."""

    settings: Settings
    topic: str
    partition: int


@dataclass(slots=True)
class Checked:
    """A task's result; `wrong` has a sentence for each file that differs."""

    partition: int
    files: int = 0
    records: int = 0
    size: int = 0
    wrong: list[str] = field(default_factory=list)


def check_partition(portion: Portion, advance: Callable[[int], None] = lambda _count: None) -> Checked:
    """Check all files of a partition. Raises WrongArchive, ManifestBroken, ArchiveAway, DatabaseUnavailable."""
    with session(portion.settings, "samefold archive check") as connection:
        store = opened(portion.settings, connection, portion.topic)
        files = files_of(connection, portion.topic, portion.partition)
    found = Checked(portion.partition)
    for file in files:
        try:
            check_file(store, file)
        except (ArchiveDamaged, ArchiveMissing) as error:
            found.wrong.append(error.message)
        found.files, found.records, found.size = found.files + 1, found.records + file.rows, found.size + file.size
        advance(file.end.next_offset - file.start.next_offset)
    return found


def check_file(store: Store, file: ArchiveFile) -> None:
    """Check a file's hash, the offsets of its records, and that they lead from its first reading state to its last.

    Raises ArchiveDamaged, ArchiveMissing, ArchiveAway.
    """
    reading, rows, last = file.start, 0, file.start.next_offset - 1
    for records in decode(content_of(store, file), file.partition):
        for record in records:
            if not last < record.offset < file.end.next_offset:
                raise _differs(file, f"offset {record.offset} is out of place")
            last = record.offset
        rows += len(records)
        reading, _, _ = read(reading, records)
    if rows != file.rows:
        raise _differs(file, f"it holds {rows} records, not {file.rows}")
    if reading._replace(next_offset=file.end.next_offset) != file.end:
        raise _differs(file, "its records lead to another reading state")


def _differs(file: ArchiveFile, why: str) -> ArchiveDamaged:
    return ArchiveDamaged(
        f"{file.path} differs from the manifest: {why}.",
        "Another program changed the table or wrote the file. Restore both from backups of the same time.",
    )
