"""The reading rule: which records of `events` count (docs/protocol.md). Every reader, live or batch, applies this one function.

An opening at offset k makes k the current epoch. A commit counts if and only if its epoch is the current one and its `seq`
is the last one plus one. Any other record is void: it has no effect, ever. So a zombie's late append, a resend, a duplicated
opening and the commits after a lost record do no harm, whatever clocks, leases or group membership say.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from infra.log.records import ENVELOPE, Commit, Head, Opening, Record, UnreadableRecord, decode_event, decode_value


class Reading(NamedTuple):
    """How far a partition of `events` has been read: all that a reader needs to go on."""

    next_offset: int
    epoch: int
    """Offset of the last opening, -1 before the first."""
    seq: int
    command_offset: int
    """Offset in `commands` of the last command whose commit counted, -1 before the first."""


START = Reading(next_offset=0, epoch=-1, seq=0, command_offset=-1)


class Counted(NamedTuple):
    """A commit that counts, with its record's offset and time."""

    offset: int
    time_ms: int
    commit: Commit


class Void(NamedTuple):
    """A record without any effect. `reason` is one of garbage, epoch (written by a fenced writer), seq (after a lost record)."""

    offset: int
    reason: str


def read(
    reading: Reading, records: Iterable[Record], decode: Callable[[bytes], Commit | Head | Opening] = decode_value
) -> tuple[Reading, list[Counted], list[Void]]:
    """Apply the rule to records of one partition in offset order; records before the position are skipped.

    Returns the position after them, the commits that count and the void records. Raises UnreadableRecord.
    """
    next_offset, epoch, seq, command_offset = reading
    counted: list[Counted] = []
    void: list[Void] = []
    new = tuple.__new__
    for record in records:
        _, offset, time_ms, _, value = record
        if offset < next_offset:
            continue
        if value is None or not value.startswith(ENVELOPE):
            void.append(Void(offset, "garbage"))
            next_offset = offset + 1
            continue
        try:
            entry = decode(value)
        except Exception:  # of an event, perhaps, whose place `decode` of the fold tells
            if (plain := decode_event(record)) is None:
                raise
            entry = plain
        if isinstance(entry, Opening):
            epoch, seq = offset, 0
        elif entry.epoch != epoch or epoch < 0:  # -1 is not an epoch: nothing counts before the first opening
            void.append(Void(offset, "epoch"))
        elif entry.seq != seq + 1:
            void.append(Void(offset, "seq"))
        else:
            seq, command_offset = entry.seq, entry.command_offset
            counted.append(new(Counted, (offset, time_ms, entry)))
        next_offset = offset + 1
    return Reading(next_offset, epoch, seq, command_offset), counted, void


def read_readable(
    reading: Reading, records: Sequence[Record], decode: Callable[[bytes], Commit | Opening] = decode_value
) -> tuple[Reading, list[Counted], list[Void], UnreadableRecord | None]:
    """Apply the rule up to the first record that can't be read, and return that error too."""
    try:
        return *read(reading, records, decode), None
    except UnreadableRecord as error:
        stop = error
    counted: list[Counted] = []
    void: list[Void] = []
    for record in records:
        try:
            reading, more, empty = read(reading, [record], decode)
        except UnreadableRecord:
            break
        counted += more
        void += empty
    return reading, counted, void, stop
