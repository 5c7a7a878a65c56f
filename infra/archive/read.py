"""The archive's records: the beginning of the log, where Kafka need not hold it any more.

A file is read wholly and its hash compared with the manifest's before any record leaves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from infra.archive.files import decode
from infra.archive.manifest import ArchiveFile, files_of
from infra.archive.store import Store, opened
from infra.database.connect import connect, naming
from infra.errors import SamefoldError
from infra.log.records import Record
from infra.settings import Settings


class ArchiveDamaged(SamefoldError):
    """A file of the archive is not what was written."""


class ArchiveMissing(SamefoldError):
    """A file that the manifest names is not there."""


def content_of(store: Store, file: ArchiveFile) -> bytes:
    """A file's bytes, whose hash is the manifest's. Raises ArchiveMissing, ArchiveDamaged, ArchiveAway."""
    cure = "Restore it from a copy of the archive; `samefold archive check` names every file that differs."
    content = store.read(file.path)
    if content is None:
        raise ArchiveMissing(f"The archive lacks {file.path}, which its manifest names.", cure)
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise ArchiveDamaged(f"{file.path} is damaged: its hash is {found[:16]}…, not {file.sha256[:16]}….", cure)
    return content


def records_of(store: Store, file: ArchiveFile) -> Iterator[list[Record]]:
    """A file's records, in batches. Raises ArchiveMissing, ArchiveDamaged, ArchiveAway."""
    return decode(content_of(store, file), file.partition)


def read_archived(
    settings: Settings, topic: str, partition: int, start: int, stop: int | None = None
) -> Iterator[tuple[list[Record], int]]:
    """The archived records with offsets in [start, stop), in batches, each with the offset after it; nothing where `start` is not
    archived.

    Raises ArchiveMissing, ArchiveDamaged, WrongArchive, ManifestBroken, ArchiveAway, DatabaseAway.
    """
    if settings.database_url is None:
        return
    with naming(settings), connect(settings, "samefold archive") as connection:
        files = files_of(connection, topic, partition, start, stop)
        if not files or files[0].start.next_offset > start:
            return
        store = opened(settings, connection, topic)
    for file in files:
        end = file.end.next_offset if stop is None else min(file.end.next_offset, stop)
        for records in records_of(store, file):
            if records[0].offset < start or records[-1].offset >= end:
                wanted = [record for record in records if start <= record.offset < end]
            else:
                wanted = records
            if wanted:
                yield wanted, wanted[-1].offset + 1
        yield [], end
