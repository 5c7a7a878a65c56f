"""Marks: reading states at offsets of the log, from which a reader may begin instead of at its start (ADR 24).

The agent `core` writes one for about every 50,000 records of a partition into `log_marks`, and so does a rebuild; the archive's
manifest has those at which its files end. `read_from` checks a mark against the log before it uses it.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import chain

from infra.archive.whole_log import read_range
from infra.database.connect import Connection, session
from infra.log.records import Opening, Record, decode_event, decode_head
from infra.log.rule import START, Reading, read
from infra.log.topics import Topic
from infra.settings import Settings

log = logging.getLogger(__name__)

EVERY = 50_000
"""Records of a partition from one mark to the next, about: each is the first one beyond a multiple of this."""
TRIES = 3
"""Marks that are checked; where none of them is right, a reader begins at the log's start."""


def write(connection: Connection, topic: str, topic_id: str, known: Iterable[tuple[int, Reading]]) -> None:
    """Record the states of these partitions, unless there are marks between the same multiples. Raises psycopg.Error."""
    for partition, reading in known:
        connection.execute(
            "insert into log_marks (topic, topic_id, partition, number, next_offset, epoch, seq, command_offset) "
            "values (%s, %s, %s, %s, %s, %s, %s, %s) on conflict do nothing",
            (topic, topic_id, partition, reading.next_offset // EVERY, *reading),
        )


def between(settings: Settings, topic: Topic, partition: int, start: int, stop: int) -> list[Reading]:
    """The marks in (start, stop), by offset, not checked: where a scan may be split. Raises DatabaseUnavailable."""
    found = _known(settings, topic, partition, start, stop - 1, None)
    return list({one.next_offset: one for one in found[::-1]}.values())


def read_from(
    settings: Settings, topic: Topic, partition: int, start: int, stop: int
) -> tuple[Reading, Iterator[list[Record]]]:
    """The reading state at `start`, and the records of [start, stop) in batches, as `read_range` gives them.

    It reads from the nearest mark that the log confirms, up to `start` by the rule. Raises what `read_range` raises,
    UnreadableRecord, DatabaseUnavailable.
    """
    batches: Iterator[list[Record]]
    for reading in [*_known(settings, topic, partition, 0, start, TRIES), START]:
        batches = read_range(settings, topic.name, partition, max(reading.next_offset - 1, 0), stop)
        if reading == START:
            break
        first = next(batches, [])
        if first and _confirms(first[0], reading):
            batches = chain([first[1:]], batches)
            break
        why = "the record before it is no such commit: the database was restored, or a file of the archive ends with a void record"
        log.warning("ignored the mark %s of %s[%d]: %s", tuple(reading), topic.name, partition, why)
    for records in batches if reading.next_offset < start else ():
        reading, _, _ = read(reading, (one for one in records if one.offset < start), decode_head)
        rest = [one for one in records if one.offset >= start]
        if rest or reading.next_offset == start:
            batches = chain([rest], batches)
            break
    return reading._replace(next_offset=start), filter(None, batches)


def _confirms(record: Record, mark: Reading) -> bool:
    """Whether the log holds, just before a mark, a commit with its epoch, sequence number and command's offset.

    That it counted only all records since the opening could prove; the opening's own record proves nothing more than the epoch in
    this one, which only its writer writes. So a mark that somebody forged behind a void commit is believed, as a position is.
    """
    if record.offset != mark.next_offset - 1:
        return False
    entry = decode_event(record)
    if isinstance(entry, Opening):  # where a file of the archive may end
        return (record.offset, 0) == (mark.epoch, mark.seq)
    return entry is not None and (entry.epoch, entry.seq, entry.command_offset) == mark[1:]


_KNOWN = """
with wanted as (select %s topic, %s topic_id, %s::int partition, %s::bigint start, %s::bigint stop)
select m.next_offset, m.epoch, m.seq, m.command_offset from log_marks m join wanted using (topic, topic_id, partition)
 where m.next_offset > start and m.next_offset <= stop
union
select f.end_offset, f.end_epoch, f.end_seq, f.end_command_offset
  from archive_files f join wanted using (topic, topic_id, partition)
 where f.end_offset > start and f.end_offset <= stop
 order by 1 desc limit %s
"""


def _known(settings: Settings, topic: Topic, partition: int, start: int, stop: int, most: int | None) -> list[Reading]:
    """The newest states in (start, stop], the newest first; none without a database."""
    if settings.database_url is None:
        return []
    with session(settings, "samefold marks") as connection:
        found = connection.execute(_KNOWN, (topic.name, topic.id, partition, start, stop, most))
        return [Reading(*row) for row in found]
