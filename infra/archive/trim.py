"""Trimming: Kafka gives up the beginning of the log, as far as the archive holds it and nobody is about to read it.

Readers do well without it, for they go on in the archive (`source.read_range`). What is asked for here is more than they need:
that nobody has to, and that a database restored from a backup finds the manifest that it knew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from infra.archive.check import check_file
from infra.archive.manifest import ends_of, files_of
from infra.archive.store import Store
from infra.database.connect import Connection, connect, naming
from infra.errors import SamefoldError
from infra.faultpoints import reach
from infra.log import clients
from infra.log.topics import TIMEOUT_S, Topic, offsets_at
from infra.settings import Settings


class TrimRefused(SamefoldError):
    """Kafka does not trim the topic."""


class Limit(NamedTuple):
    """An offset below which somebody allows a partition to be cut, and who that is."""

    offset: int
    whose: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition's records with offsets in [first, to) are to go. `held` says who keeps more from going, "" for nobody."""

    partition: int
    first: int
    to: int
    held: str

    @property
    def records(self) -> int:
        return self.to - self.first


def plan(
    settings: Settings, topic: Topic, connection: Connection, *, before: datetime | None = None, keep: int = 0
) -> list[Cut]:
    """What may be cut of records older than `before`, if given, but for the newest `keep` of each partition.

    Raises KafkaAway, psycopg.Error.
    """
    wanted = {partition: max(end - keep, 0) for partition, end in topic.end.items()}
    if before is not None:
        older = offsets_at(settings, topic, int(before.timestamp() * 1000))
        wanted = {partition: min(offset, older.get(partition, offset)) for partition, offset in wanted.items()}
    limits: dict[int, list[Limit]] = {partition: [] for partition in wanted}
    for partition, limit in _limits(settings, topic, connection):
        limits[partition].append(limit)
    return [
        _cut(partition, topic.first[partition], wanted[partition], limits[partition]) for partition in sorted(wanted)
    ]


def _cut(partition: int, first: int, wanted: int, limits: list[Limit]) -> Cut:
    lowest = min(limits, key=lambda limit: limit.offset)
    to = max(min(wanted, lowest.offset), first)
    return Cut(partition, first, to, lowest.whose if lowest.offset < wanted else "")


def trim(
    settings: Settings, topic: Topic, cuts: list[Cut], advance: Callable[[int], None] = lambda _count: None
) -> list[Cut]:
    """Cut each partition, after its archive files were read and checked; what was cut, by the limits as they are now.

    Raises ArchiveDamaged, ArchiveMissing, ManifestBroken, ArchiveAway, TrimRefused, KafkaAway, DatabaseAway.
    """
    reach("trim planned")
    store = Store(settings)
    done = []
    with naming(settings), connect(settings, "samefold archive trim") as connection:
        now = {cut.partition: cut for cut in plan(settings, topic, connection)}
        for cut in cuts:
            to = min(cut.to, now[cut.partition].to)
            if to <= cut.first:
                continue
            for file in files_of(connection, topic.name, cut.partition, cut.first, to):
                check_file(store, file)
                advance(min(file.end.next_offset, to) - max(file.start.next_offset, cut.first))
            reach("archive verified")
            _delete(settings, topic.name, cut.partition, to)
            reach("partition trimmed")
            done.append(Cut(cut.partition, cut.first, to, cut.held))
    return done


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
                "it would not know what was archived since",
            ),
        )
    agents = "select partition, next_offset, agent from positions where topic = %s"
    for partition, offset, agent in connection.execute(agents, (topic.name,)).fetchall():
        yield partition, Limit(offset, f"agent '{agent}', which goes on there")
    made = "select table_name from builds where state in ('loading', 'past-loading')"
    for (table,) in connection.execute(made).fetchall():
        for partition in topic.end:
            yield partition, Limit(0, f"the build {table}, which is being made")
    builds = (
        "select p.partition, p.next_offset, b.table_name, b.state from builds b join build_positions p on p.build = b.id "
        "where p.topic = %s and b.state in ('ready', 'old')"
    )
    for partition, offset, table, state in connection.execute(builds, (topic.name,)).fetchall():
        yield partition, Limit(offset, f"the table {table} ({state}), which would catch up from there")


def _delete(settings: Settings, topic: str, partition: int, to: int) -> None:
    admin = clients.admin(settings)  # a name of its own: without one it would end before the answer comes
    try:
        [future] = admin.delete_records([TopicPartition(topic, partition, to)]).values()
        future.result(TIMEOUT_S)
    except TimeoutError as error:
        raise clients.away(settings, KafkaError(KafkaError._TIMED_OUT)) from error
    except KafkaException as error:
        if clients.may_pass(error.args[0]):
            raise clients.away(settings, error) from error
        raise TrimRefused(
            f"Kafka does not trim {topic}[{partition}]: {error.args[0].str()}.",
            "The account needs the right to delete records of the topic.",
        ) from error
