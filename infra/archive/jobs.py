"""The jobs behind `samefold archive` and its commands: partition by partition, on an engine."""

from collections.abc import Iterator
from typing import Any

from infra.archive.manifest import ends_of, files_of
from infra.archive.read import Checked, Portion, check_partition
from infra.archive.store import adopt
from infra.archive.write import Archived, archive_partition, shares
from infra.database.connect import session
from infra.log.contract import require_contract
from infra.log.records import time_of
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
        ends = {file.partition: file.end.next_offset for file in files_of(connection, topic.name)}
    records = sum(ends.values())
    engine = engine_for(records)
    progress.begin("check", records)
    work = [Portion(settings, topic.name, partition) for partition in sorted(ends)]
    return engine.run(check_partition, work, records, progress.advance)


def status(settings: Settings) -> Iterator[dict[str, Any]]:
    """Each partition: Kafka holds [first, end), the archive [0, archived) in so many files, records and bytes.

    `until` is the time of the newest archived record; None where there is none. Raises ContractBroken, ManifestBroken,
    KafkaUnavailable, DatabaseUnavailable.
    """
    with session(settings, "samefold archive status") as connection:
        topic = require_contract(settings, connection)
        files = files_of(connection, topic.name)
    for partition in range(topic.partitions):
        mine = [file for file in files if file.partition == partition]
        newest_ms = max((file.last_ms for file in mine if file.last_ms is not None), default=None)
        yield {
            "partition": partition,
            "first": topic.first[partition],
            "end": topic.end[partition],
            "archived": mine[-1].end.next_offset if mine else 0,
            "files": len(mine),
            "records": sum(file.rows for file in mine),
            "bytes": sum(file.size for file in mine),
            "until": None if newest_ms is None else time_of(newest_ms).isoformat(),
        }
