"""The jobs behind `samefold archive` and its commands: partition by partition, on an engine."""

from __future__ import annotations

from dataclasses import dataclass

from infra.archive.manifest import ArchiveFile, ends_of, files_of
from infra.archive.read import Checked, Portion, check_partition
from infra.archive.store import adopt
from infra.archive.write import Archived, archive_partition, shares
from infra.database.connect import session
from infra.log.contract import require_contract
from infra.processes.engines import SILENT, EngineFor, Progress, local
from infra.settings import Settings


def archive_log(settings: Settings, *, engine_for: EngineFor = local, progress: Progress = SILENT) -> list[Archived]:
    """Archive the log up to its current ends; the results by partition.

    Raises what `archive_partition` raises, ContractBroken.
    """
    with session(settings, "samefold archive") as connection:
        topic = require_contract(settings, connection)
        archived = ends_of(connection, topic.name)
        adopt(settings, connection, topic.name, empty=not archived)
        work = shares(settings, topic, archived)
    records = sum(share.records for share in work)
    engine = engine_for(records)
    progress.begin("archive", records)
    return sorted(engine.run(archive_partition, work, records, progress.advance), key=lambda one: one.partition)


def check_archive(settings: Settings, *, engine_for: EngineFor = local, progress: Progress = SILENT) -> list[Checked]:
    """Read and check all files of the archive; the results by partition. Raises ManifestBroken, ArchiveAway, ContractBroken."""
    with session(settings, "samefold archive check") as connection:
        topic = require_contract(settings, connection)
        ends = _ends(files_of(connection, topic.name))
    records = sum(ends.values())
    engine = engine_for(records)
    progress.begin("check", records)
    work = [Portion(settings, topic.name, partition) for partition in sorted(ends)]
    return engine.run(check_partition, work, records, progress.advance)


@dataclass(frozen=True, slots=True)
class PartitionNow:
    """A partition's status: Kafka holds [first, end), the archive [0, archived); `size` is in bytes.

    `until_ms` is the time of the newest archived record, in ms since the epoch; None where there is none.
    """

    partition: int
    first: int
    end: int
    archived: int
    files: int
    records: int
    size: int
    until_ms: int | None


def status(settings: Settings) -> list[PartitionNow]:
    """The status of each partition. Raises ContractBroken, ManifestBroken, KafkaUnavailable, DatabaseUnavailable."""
    with session(settings, "samefold archive status") as connection:
        topic = require_contract(settings, connection)
        files = files_of(connection, topic.name)
    ends = _ends(files)
    return [
        PartitionNow(
            partition,
            topic.first[partition],
            topic.end[partition],
            ends.get(partition, 0),
            len(mine := [file for file in files if file.partition == partition]),
            sum(file.rows for file in mine),
            sum(file.size for file in mine),
            max((file.last_ms for file in mine if file.last_ms is not None), default=None),
        )
        for partition in range(topic.partitions)
    ]


def _ends(files: list[ArchiveFile]) -> dict[int, int]:
    return {file.partition: file.end.next_offset for file in files}
