"""Trimming: deletes the beginning of the log from Kafka, where the archive holds it.

Readers would continue in the archive (`whole_log.read_range`). The limits here are stricter: no agent or build needs the deleted
records, and a database restored from a backup still has its manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from infra.archive.files import Row, rows_of
from infra.archive.manifest import ArchiveFile, ends_of, files_of
from infra.archive.read import check_file, content_of
from infra.archive.store import Store, opened
from infra.database.connect import Connection, session
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.contract import require_contract
from infra.log.records import Headers
from infra.log.source import NotHeld, read_held
from infra.log.topics import TIMEOUT_S, Topic, describe, offsets_at, require_same
from infra.processes.engines import SILENT, Progress
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.rebuild.builds import FILLING, abandon_dead, builds_of, claim_of
from projections.engine.rebuild.claims import builder, by_whom
from projections.engine.store.positions import AGENTS


class TrimRefused(SamefoldError):
    """Kafka refuses to delete records."""


class ArchiveDiffers(SamefoldError):
    """The archive holds other records than Kafka does."""


class Limit(NamedTuple):
    """An offset up to which a partition may be trimmed, and what needs the records from there on."""

    offset: int
    whose: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Delete a partition's records with offsets in [first, to). `held` is what needs the others, "" if nothing does."""

    partition: int
    first: int
    to: int
    held: str

    @property
    def records(self) -> int:
        return self.to - self.first


def plan_trim(settings: Settings, *, before: datetime | None = None, keep: int = 0) -> tuple[Topic, list[Cut]]:
    """The topic, and what may be deleted: see `_plan`. Raises ContractBroken, KafkaUnavailable, DatabaseUnavailable."""
    with session(settings, "samefold archive trim") as connection:
        topic = require_contract(settings, connection)
        return topic, _plan(settings, topic, connection, before=before, keep=keep)


def _plan(
    settings: Settings, topic: Topic, connection: Connection, *, before: datetime | None = None, keep: int = 0
) -> list[Cut]:
    """The records that may be deleted: older than `before`, if given, without the newest `keep` of each partition.

    Raises KafkaUnavailable, psycopg.Error.
    """
    wanted = {partition: max(end - keep, 0) for partition, end in topic.end.items()}
    if before is not None:
        older = offsets_at(settings, topic, int(before.timestamp() * 1000))
        wanted = {partition: min(offset, older.get(partition, offset)) for partition, offset in wanted.items()}
    limits: dict[int, list[Limit]] = {partition: [] for partition in wanted}
    for partition, limit in _limits(settings, topic, connection):
        limits[partition].append(limit)
    cuts = []
    for partition, end in sorted(wanted.items()):
        lowest, first = min(limits[partition], key=lambda limit: limit.offset), topic.first[partition]
        to = max(min(end, lowest.offset), first)
        cuts.append(Cut(partition, first, to, lowest.whose if lowest.offset < end else ""))
    return cuts


def trim_log(settings: Settings, topic: Topic, cuts: list[Cut], *, progress: Progress = SILENT) -> list[Cut]:
    """Delete each cut's records, within the current limits, after a check that the archive's files hold them. Returns what was cut.

    Raises ArchiveDiffers, TopicChanged, WrongArchive, ArchiveDamaged, ArchiveMissing, ManifestBroken, ArchiveAway, TrimRefused,
    KafkaUnavailable, DatabaseUnavailable.
    """
    reach("trim planned")
    progress.begin("check", sum(cut.records for cut in cuts))
    done = []
    with builder(settings, "archive trim") as connection:
        abandon_dead(connection, builds_of(connection))
        store = opened(settings, connection, topic.name)
        now = {cut.partition: cut for cut in _plan(settings, topic, connection)}
        for cut in cuts:
            to = min(cut.to, now[cut.partition].to)
            first = cut.first
            while first < to:
                held = describe(settings, topic.name)
                require_same(topic, held)
                first = max(first, held.first[cut.partition])
                try:
                    for file in files_of(connection, topic.name, cut.partition, first, to):
                        check_file(store, file)
                        start, stop = max(file.start.next_offset, first), min(file.end.next_offset, to)
                        _compare(settings, store, file, start, stop)
                        progress.advance(stop - start)
                except NotHeld:
                    continue  # another process trimmed this partition meanwhile
                break
            if to <= first:
                continue
            reach("archive verified")
            _delete(settings, topic.name, cut.partition, to)
            reach("partition trimmed")
            done.append(Cut(cut.partition, first, to, cut.held))
    return done


def _compare(settings: Settings, store: Store, file: ArchiveFile, start: int, stop: int) -> None:
    """Raises ArchiveDiffers unless the file and Kafka have the same records in [start, stop)."""
    archived = (row for row in rows_of(content_of(store, file)) if start <= row[0] < stop)
    for mine, theirs in zip_longest(archived, _held(settings, file.topic, file.partition, start, stop)):
        if mine != theirs:
            at = min(row[0] for row in (mine, theirs) if row)
            raise ArchiveDiffers(
                f"{file.path} differs from Kafka at {settings.kafka} at offset {at} of {file.topic}[{file.partition}].",
                "None of its records was deleted. The archive was made from another Kafka: move it and its rows in archive_files "
                "away, and archive again.",
            )


def _held(settings: Settings, topic: str, partition: int, start: int, stop: int) -> Iterator[Row]:
    headers: dict[int, Headers] = {}
    for records, _ in read_held(settings, topic, partition, start, stop, headers=headers):
        for _, offset, time_ms, key, value in records:
            yield offset, time_ms, key, value, headers.pop(offset, None)


def _limits(settings: Settings, topic: Topic, connection: Connection) -> Iterator[tuple[int, Limit]]:
    archived = ends_of(connection, topic.name)
    row = connection.execute("select now()").fetchone()
    assert row is not None, "now() is one row"
    known = ends_of(connection, topic.name, row[0] - timedelta(days=settings.archive_restore_days))
    for partition in topic.end:
        yield partition, Limit(archived.get(partition, 0), "the archive, which ends there")
        yield (
            partition,
            Limit(
                known.get(partition, 0),
                f"a database restored to {settings.archive_restore_days:g} days ago (SAMEFOLD_ARCHIVE_RESTORE_DAYS): "
                "its manifest would lack what was archived since",
            ),
        )
    agents = f"select partition, next_offset, agent from positions where topic = %s and agent in {AGENTS}"  # noqa: S608
    for partition, offset, agent in connection.execute(agents, (topic.name,)).fetchall():
        yield partition, Limit(offset, f"agent '{agent}', which continues there")
    for build in builds_of(connection):
        if build.state in FILLING and by_whom(connection, claim_of(build)):
            for partition in topic.end:
                yield partition, Limit(0, f"the build {build.table}, which is loading")
    builds = (
        "select p.partition, p.next_offset, b.table_name, b.state from builds b join build_positions p on p.build = b.id "
        "where p.topic = %s and b.state in ('ready', 'old')"
    )
    for partition, offset, table, state in connection.execute(builds, (topic.name,)).fetchall():
        yield partition, Limit(offset, f"the table {table} ({state}), which would catch up from there")


def _delete(settings: Settings, topic: str, partition: int, to: int) -> None:
    admin = clients.admin(settings)  # a variable: without one the client would be freed before the answer comes
    try:
        [future] = clients.delete_records(admin, [TopicPartition(topic, partition, to)]).values()
        future.result(TIMEOUT_S)
    except TimeoutError as error:
        raise clients.away(settings, KafkaError(KafkaError._TIMED_OUT)) from error
    except KafkaException as error:
        if clients.may_pass(error.args[0]):
            raise clients.away(settings, error) from error
        raise TrimRefused(
            f"Kafka refuses to delete records of {topic}[{partition}]: {error.args[0].str()}.",
            "Give the account the right to delete records of the topic.",
        ) from error
