"""Reading archive files again: do they hold what the manifest says?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from infra.archive.manifest import ArchiveFile, files_of
from infra.archive.read import ArchiveDamaged, ArchiveMissing, records_of
from infra.archive.store import Store, opened
from infra.database.connect import connect, naming
from infra.log.rule import read
from infra.settings import Settings


@dataclass(frozen=True, slots=True)
class Portion:
    """One partition of the archive: what a task is told."""

    settings: Settings
    topic: str
    partition: int


@dataclass(slots=True)
class Checked:
    """What a task found in its partition; `wrong` is a sentence for each file that differs."""

    partition: int
    files: int = 0
    records: int = 0
    size: int = 0
    wrong: list[str] = field(default_factory=list)


def check_partition(portion: Portion, advance: Callable[[int], None] = lambda _count: None) -> Checked:
    """Check all files of a partition. Raises WrongArchive, ManifestBroken, ArchiveAway, DatabaseAway."""
    with naming(portion.settings), connect(portion.settings, "samefold archive check") as connection:
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
    """Hash, records, their offsets, and that the reading state leads from the file's start to its end.

    Raises ArchiveDamaged, ArchiveMissing, ArchiveAway.
    """
    reading, rows, last = file.start, 0, file.start.next_offset - 1
    for records in records_of(store, file):
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
        f"{file.path} is not what the manifest says: {why}.",
        "Restore both from copies of one time: somebody changed the table or made the file by hand.",
    )
