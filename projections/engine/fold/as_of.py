"""Where a fold of the past ends: as of a time, or at positions.

A time is one cut per partition: just before the first record to which the broker gave a later time. So of several records with
one time, all are folded or none, and nothing after a record to which a fast clock gave a later time. Positions are offsets as
`samefold views` prints them: all records below are folded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from infra.errors import SamefoldError
from infra.log import topics
from infra.log.records import Record
from infra.log.rule import Reading
from infra.settings import Settings

AsOf: TypeAlias = datetime | Mapping[int, int]
"""A time with its offset from UTC, or next offsets by partition; a partition that is not named is folded to its end."""

_AGO = re.compile(r"-(\d{1,18})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_POSITIONS = re.compile(r"\d{1,18}:\d{1,18}(?:[,\s]+\d{1,18}:\d{1,18})*")


class BadMoment(SamefoldError):
    """The value of `--as-of` is not a moment of this log."""

    exit_code = 2


class Cut(NamedTuple):
    """The end of a partition's fold: an offset, or the first record later than `until_ms` if that comes before."""

    next_offset: int
    until_ms: int | None = None
    """Milliseconds since the epoch."""

    def before(self, records: Sequence[Record]) -> list[Record]:
        """The records before the cut."""
        until = self.until_ms
        if until is None or not any(record.time_ms > until for record in records):
            return list(records)
        return list(takewhile(lambda record: record.time_ms <= until, records))

    def is_reached(self, reading: Reading) -> bool:
        """Whether a fold that ended at this reading may have ended at the cut, judging by the offset."""
        return reading.next_offset == self.next_offset or (
            self.until_ms is not None and reading.next_offset < self.next_offset
        )


def parse_as_of(text: str, now: datetime) -> AsOf:
    """`2026-11-21T14:30:00+01:00`, `-15m` (also s, h, d), or `0:123,1:456`. Raises BadMoment."""
    text = text.strip()
    if ago := _AGO.fullmatch(text):
        try:
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        except OverflowError:
            raise BadMoment(f"'{text}' is before the calendar begins.", "Give a later time.") from None
    if _POSITIONS.fullmatch(text):
        pairs = [pair.split(":") for pair in re.split(r"[,\s]+", text)]
        offsets = {int(partition): int(offset) for partition, offset in pairs}
        if len(offsets) < len(pairs):
            raise BadMoment(f"'{text}' names a partition twice.", "Name each partition once.")
        return offsets
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadMoment(
            f"'{text}' is neither a time nor positions.",
            "Write a time as 2026-11-21T14:30:00+01:00, a time ago as -15m (s, m, h, d), or positions as 0:123,1:456.",
        ) from None
    if at.tzinfo is None:
        raise BadMoment(
            f"'{text}' has no time zone.",
            f"Write {at.isoformat()}Z for UTC, or add your offset: {at.isoformat()}+01:00.",
        )
    return at


def in_words(as_of: AsOf) -> str:
    """The text that `parse_as_of` reads as this: a time in UTC, or positions."""
    if isinstance(as_of, datetime):
        return as_of.astimezone(UTC).isoformat(timespec="milliseconds")
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(as_of.items()))


def cuts(settings: Settings, topic: topics.Topic, as_of: AsOf, now: datetime) -> dict[int, Cut]:
    """Each partition's cut, never beyond the end of `topic`, which is described now. Raises BadMoment, KafkaUnavailable."""
    if isinstance(as_of, datetime):
        if as_of > now:
            raise BadMoment(
                f"{in_words(as_of)} is in the future, and its events are not in the log yet.",
                "Give a time in the past.",
            )
        until_ms = (as_of - _EPOCH) // timedelta(milliseconds=1)
        # Kafka's index is only a bound, never before the cut: the fold compares each record's time itself
        later = topics.offsets_at(settings, topic, max(until_ms + 1, 0))
        return {partition: Cut(min(later.get(partition, end), end), until_ms) for partition, end in topic.end.items()}
    for partition, offset in as_of.items():
        if offset > topic.end.get(partition, -1):
            ends = " ".join(f"{number}:{end}" for number, end in sorted(topic.end.items()))
            raise BadMoment(f"'{topic.name}' has no position {partition}:{offset}.", f"Give positions up to {ends}.")
    return {partition: Cut(as_of.get(partition, end)) for partition, end in topic.end.items()}


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
