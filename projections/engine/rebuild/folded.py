"""Read a partition from its beginning to exactly an end, fold it, and the rows that its tables then hold.

For loading, verification and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from infra.archive.whole_log import read_range
from infra.log.records import Commit, Head, Opening, decode_value, time_of
from infra.log.rule import START, Reading, read
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.fold.errors import LogChanged
from projections.engine.fold.fold import Blocked, Changes, Parked, RowCache, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.store.commit import Batch
from projections.engine.views.view import Kind, View

StoredRow = tuple[Any, ...]
"""A table's row: stored values in column order, the partition last."""


def counted_to(
    settings: Settings,
    topic: str,
    partition: int,
    end: Reading | Cut,
    start: Reading = START,
    decode: Callable[[bytes], Commit | Head | Opening] = decode_value,
) -> Iterator[Batch]:
    """The commits that count from `start` up to exactly `end`, in batches.

    The last batch arrives at `end`; a cut at a time may stop earlier, at the first later record. Raises LogChanged when the log
    leads elsewhere.
    """
    reading = start
    for records in read_range(settings, topic, partition, start.next_offset, end.next_offset):
        was = reading
        taken = end.before(records) if isinstance(end, Cut) else records
        reading, counted, _ = read(was, taken, decode)
        yield Batch(partition, was, reading, counted)
        if len(taken) < len(records):
            return
    if isinstance(end, Cut):
        # offsets without a record may lie before it
        yield Batch(partition, reading, reading._replace(next_offset=end.next_offset), [])
    else:
        require_arrival(topic, partition, end, reading, start)


def require_arrival(topic: str, partition: int, end: Reading | Cut, reached: Reading, start: Reading = START) -> None:
    """Raises LogChanged unless reading `reached` its end."""
    if not (end.is_reached(reached) if isinstance(end, Cut) else reached == end):
        raise LogChanged(topic, partition, start, reached, end)


class Folded:
    """A partition's fold from its beginning. Keeps all rows but those that are only ever added."""

    def __init__(self, plan: Plan, blocked: Blocked) -> None:
        self.plan = plan
        self.blocked = blocked
        self.held = RowCache(plan)
        self.sums: dict[str, dict[tuple[Any, ...], list[Any]]] = {view: {} for view in plan.sums}
        self.parked: list[Parked] = []

    def fold(self, batch: Batch) -> Changes:
        """Fold a batch and keep its changes, which are returned."""
        changes = fold(self.plan, decode(self.plan, batch.partition, batch.counted), self.held, self.blocked)
        self.held.merge(changes)
        for view, more in changes.sums.items():
            sums, merge = self.sums[view], self.plan.sums[view].merge
            for key, increments in more.items():
                before = sums.get(key)
                sums[key] = increments if before is None else merge(before, increments)
        if changes.parked:
            self.parked += changes.parked
            self.blocked = self.blocked.and_parked(changes.parked)
        return changes

    def parked_of(self, view: str) -> list[Parked]:
        return [parked for parked in self.parked if parked.view == view]

    def kept_rows(self, view: View, partition: int) -> Iterator[StoredRow]:
        """The rows of a view whose rows are kept."""
        match view.kind:
            case Kind.SNAPSHOT:
                encode = msgspec.json.encode
                states = self.held.rows[view.name].items()
                return ((stream, version, encode(state), partition) for stream, (version, state) in states)
            case Kind.ENTITY:
                return _stored(view, (row for row in self.held.rows[view.name].values() if row is not None), partition)
            case _:
                in_order = itemgetter(*map([*view.key, *view.values].index, view.stored))
                sums = self.sums[view.name].items()
                return _stored(view, (in_order((*key, *increments)) for key, increments in sums), partition)


def added_rows(view: View, changes: Changes) -> Iterator[StoredRow]:
    """The rows that a batch adds to a journal or to the outcomes."""
    if view.kind is Kind.OUTCOMES:
        rows = [view.function(one.commit, time_of(one.time_ms)) for one in changes.counted]
    else:
        rows = changes.added[view.name]
    yield from _stored(view, rows, changes.partition)


def _stored(view: View, rows: Iterable[Any], partition: int) -> Iterator[StoredRow]:
    last = (partition,)
    converters = [(i, c) for i, column in enumerate(view.stored) if (c := column.type.to_database) is not None]
    if not converters:
        for row in rows:
            yield row + last
        return
    for row in rows:
        yield converted(row + last, converters)


def converted(row: StoredRow, converters: Sequence[tuple[int, Callable[[Any], Any]]]) -> StoredRow:
    """The row with the values at these places converted; None stays None."""
    values = [*row]
    for index, convert in converters:
        if values[index] is not None:
            values[index] = convert(values[index])
    return tuple(values)
