"""The fold of counted commits into row changes: pure, and the same for the live agent, rebuilds, Spark and verify.

`decode` turns commits into the events that views subscribed to. `keys_to_load` names the rows that the fold needs, and the
caller loads those that are not cached. `fold` applies the events in order and leaves the cached rows unchanged, so a batch can
be folded again, with a stream parked or after a lost race.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from infra.log.rule import Counted
from infra.processes.time_limit import FAULTS, TooSlow, in_main_thread, watched
from projections.engine.fold.errors import EngineStop, OutOfStep, UnknownEvent, UnreadableEvent, poison
from projections.engine.fold.exact import Exact
from projections.engine.fold.plan import Plan, Step
from projections.engine.views.column_types import BadRow
from projections.engine.views.event_context import At
from projections.engine.views.view import Kind, View

TOO_MANY_ROWS = 100_000
"""Of one event in one view: it may never stop making them."""
_ABSENT: Any = object()

StreamState = tuple[int, Any]
"""A stream's version and the domain's state at it."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """One event that some view subscribed to. `id` is the stream's name without its context."""

    step: Step
    id: str
    at: At
    event: Any


class Decoded(NamedTuple):
    """A decoded batch of one partition, which can be folded any number of times."""

    partition: int
    counted: Sequence[Counted]
    items: Sequence[Item]
    touched: Mapping[Step, Mapping[str, str]]
    """By step, the streams that have such events: id to name."""


class Blocked(NamedTuple):
    """The events that views leave out: parked streams from a version on, and dropped events."""

    parked: Mapping[tuple[str, str], int]
    """By (view, stream): the first version that is not in the view's table."""
    skips: Mapping[tuple[str, str], Sequence[tuple[int, int]]]
    """By (view, stream): (first, last) versions that were dropped for good."""

    def blocks(self, view: str, at: At) -> bool:
        key = (view, at.stream)
        since = self.parked.get(key)
        if since is not None and at.version >= since:
            return True
        return any(first <= at.version <= last for first, last in self.skips.get(key, ()))

    def and_parked(self, parked: Iterable[Parked]) -> Blocked:
        """The same, with these streams parked, too."""
        since = {(one.view, one.stream): one.version for one in parked}
        return Blocked({**self.parked, **since}, self.skips)


NOTHING_BLOCKED = Blocked({}, {})


class Parked(NamedTuple):
    """A stream that a view leaves out from now on."""

    view: str
    stream: str
    partition: int
    offset: int
    version: int
    error: str


@dataclass(slots=True)
class Changes:
    """How a batch of one partition changes each view's rows. An entity's key is the stream's id, or `key`'s tuple."""

    partition: int
    counted: Sequence[Counted]
    states: dict[str, dict[str, StreamState]]
    """By snapshot view (also when only a journal needs the states): stream to version and state."""
    rows: dict[str, dict[Any, Any]]
    """By entity view: key to row, None for a deleted one."""
    added: dict[str, list[Any]] = field(default_factory=dict)
    """By journal view: new rows in order."""
    sums: dict[str, dict[tuple[Any, ...], list[Any]]] = field(default_factory=dict)
    """By summary view: key to increments, in the order of the columns that are not keys."""
    parked: list[Parked] = field(default_factory=list)
    """The streams that this batch parked."""


def changed_rows(plan: Plan, changes: Changes) -> int:
    """How many rows the changes write or delete, in all views."""
    by_view = {**changes.states, **changes.rows, **changes.added, **changes.sums}
    return sum(
        len(changes.counted if view.kind is Kind.OUTCOMES else by_view[name]) for name, view in plan.views.items()
    )


class RowCache:
    """The row cache of one partition: by view, key to row (None: known to be absent), stream to StreamState.

    It is valid only while this process is the only one that changes the rows. Its owner clears it when it reads the position
    again. With a `limit`, `rows` become `older` when they are more; what no batch has needed since is dropped the next time.
    """

    __slots__ = ("limit", "older", "rows")

    def __init__(self, plan: Plan, limit: int | None = None) -> None:
        names = [*plan.states, *(view.name for view in plan.entities)]
        self.rows: dict[str, dict[Any, Any]] = {name: {} for name in names}
        self.older: dict[str, dict[Any, Any]] = {name: {} for name in names}
        self.limit = limit

    def lacking(self, name: str, keys: set[Any]) -> list[Any]:
        """Those of the keys that the cache lacks. All others are in `rows` now, until the next `merge`."""
        # `difference`, not `- rows.keys()` or `intersection`, which would visit the whole cache
        rows, older = self.rows[name], self.older[name]
        absent = keys.difference(rows)
        lacking = absent.difference(older)
        for key in absent - lacking:
            rows[key] = older.pop(key)
        return list(lacking)

    def merge(self, changes: Changes) -> None:
        """Add the changes of a committed batch."""
        for name, changed in (*changes.states.items(), *changes.rows.items()):
            self.rows[name].update(changed)
        if self.limit is not None and sum(map(len, self.rows.values())) > self.limit:
            self.rows, self.older = {name: {} for name in self.rows}, self.rows

    def clear(self) -> None:
        for rows in (*self.rows.values(), *self.older.values()):
            rows.clear()


def decode(plan: Plan, partition: int, counted: Sequence[Counted]) -> Decoded:
    """The events that the plan's views subscribed to. Raises UnknownEvent, UnreadableEvent."""
    work = partial(_decode, plan, partition, counted)
    return in_main_thread(work) if plan.reads_older else work()  # an author's upcaster may never end


def _decode(plan: Plan, partition: int, counted: Sequence[Counted]) -> Decoded:
    items: list[Item] = []
    append = items.append
    touched: defaultdict[Step, dict[str, str]] = defaultdict(dict)
    for offset, time_ms, commit in counted:
        events = commit.events
        if not events:
            continue
        stream = commit.stream
        context, _, ident = stream.partition("/")
        steps = plan.steps.get(context)
        if steps is None:
            raise UnknownEvent(stream, None, partition=partition, offset=offset)
        version = commit.version - len(events)
        for record in events:
            version += 1
            step = steps.get(record.type, _ABSENT)
            if step is None:
                continue
            if step is _ABSENT:
                raise UnknownEvent(stream, record.type, partition=partition, offset=offset)
            event: Any = record.data
            if type(event) is msgspec.Raw:
                try:
                    event = step.decode(event)
                except MemoryError:
                    raise
                except Exception as error:
                    raise UnreadableEvent(stream, record.type, error, partition=partition, offset=offset) from error
            touched[step][ident] = stream
            append(Item(step, ident, At(stream, version, time_ms, partition, offset), event))
    return Decoded(partition, counted, items, touched)


def keys_to_load(plan: Plan, batch: Decoded, held: RowCache) -> dict[str, list[Any]]:
    """By view, the keys of rows (streams, for snapshots) that the fold needs and `held` lacks."""
    wanted: defaultdict[str, set[Any]] = defaultdict(set)
    for step, streams in batch.touched.items():
        if step.states is not None:
            wanted[step.states].update(streams.values())
        for view in step.entities:
            if view.key_function is None:
                wanted[view.name].update(streams)
            elif view.name not in wanted:
                wanted[view.name] = in_main_thread(partial(_keys, view, plan.exact[view.name], batch.items))
    return {name: absent for name, keys in wanted.items() if (absent := held.lacking(name, keys))}


@watched(lambda local: f"event {local['item'].at.version} of {local['item'].at.stream}")
def _keys(view: View, exact: Exact, items: Sequence[Item]) -> set[Any]:
    key, subscription = view.key_function, view.subscription
    assert key is not None
    found = set()
    for item in items:
        if type(item.event) in subscription:
            try:
                found.add(exact.key(key(item.event, item.at)))
            except FAULTS as error:
                # an Exception fails in the fold too, which handles it; others might not, and the fold would miss the row
                if isinstance(error, MemoryError) or not isinstance(error, Exception):
                    raise poison(view.name, item.at, error) from error
    return found


def fold(plan: Plan, batch: Decoded, held: RowCache, blocked: Blocked = NOTHING_BLOCKED) -> Changes:
    """The changes that a batch of one partition makes. `held` must have what `keys_to_load` named; it is not changed.

    Every row is made exact at the event that made it (see `exact`). To be fast, all rows are checked together at the end. If one
    is not exact, the batch is folded again, with each row checked at its event. Raises PoisonEvent where a view that does not
    park fails, OutOfStep where rows and log do not belong together.
    """
    checked = plan.inexact
    inexact: frozenset[str] | None = None
    if not batch.items:  # no author's function is called
        return _fold(plan, batch, held, blocked, checked)[0]
    try:
        changes, replaced = in_main_thread(partial(_fold, plan, batch, held, blocked, checked))
        inexact = frozenset(
            name for name in plan.exact if name not in checked and not _exact(plan, changes, replaced, name)
        )
        if not inexact:
            return changes
    except EngineStop as stop:  # perhaps caused by an earlier row that is not exact
        if isinstance(stop.__cause__, TooSlow):
            raise
    changes, _ = in_main_thread(partial(_fold, plan, batch, held, blocked, plan.exact))
    if inexact and not changes.parked:
        plan.inexact |= inexact
    return changes


def _exact(plan: Plan, changes: Changes, replaced: Mapping[str, list[Any]], view: str) -> bool:
    """Whether all the view's rows are exact, also those that later ones replaced."""
    exact, more = plan.exact[view], replaced[view]
    match plan.views[view].kind:
        case Kind.ENTITY:
            changed = changes.rows[view]
            keys, rows = [*changed, *more[0::2]], [*changed.values(), *more[1::2]]
            if None in rows:
                keys = [key for key, row in zip(keys, rows, strict=True) if row is not None]
                rows = [row for row in rows if row is not None]
            return exact.are(rows, keys)
        case Kind.JOURNAL:
            streams = chain.from_iterable(map(repeat, map(_STREAM, more), map(len, map(_ROWS, more))))
            return exact.are(changes.added[view]) and exact.are_own(changes.added[view], list(streams))
        case _:
            return exact.are(more)


@watched(lambda local: f"event {local['at'].version} of {local['at'].stream}")
def _fold(
    plan: Plan, batch: Decoded, held: RowCache, blocked: Blocked, checked: Container[str]
) -> tuple[Changes, dict[str, list[Any]]]:
    """The changes, with each row of the views in `checked` made exact at its event; and by view, the rows that they don't show.

    Of an entity view these are the rows that later ones replaced, as key, row, key, row, …; of a summary, all increments; of a
    journal, (stream, new rows) for each event.
    """
    partition = batch.partition
    states: dict[str, dict[str, StreamState]] = {name: {} for name in plan.states}
    rows: dict[str, dict[Any, Any]] = {view.name: {} for view in plan.entities}
    sums: dict[str, dict[tuple[Any, ...], list[Any]]] = {name: {} for name in plan.sums}
    changes = Changes(partition, batch.counted, states, rows, sums=sums)
    replaced: dict[str, list[Any]] = {name: [] for name in plan.views}
    known, exact = held.rows, plan.exact
    parks = bool(blocked.parked or blocked.skips)
    after: Any = None
    for item in batch.items:
        step, at, event = item.step, item.at, item.event
        stream = at.stream
        context = step.states
        if context is not None:
            moved = states[context]
            version, before = moved.get(stream) or known[context].get(stream) or (0, step.initial)
            if at.version != version + 1:
                raise OutOfStep(stream, version, at.version - 1, partition=partition, offset=at.offset)
            try:
                after = step.evolve(before, event)
            except FAULTS as error:
                raise poison(context, at, error) from error
            moved[stream] = (version + 1, after)
        else:
            after = None
        for entity in step.entities:
            name = entity.name
            if parks and blocked.blocks(name, at):
                continue
            try:
                key: Any = item.id
                if entity.key_function is not None:
                    key = exact[name].key(entity.key_function(event, at))
                    exact[name].require_own(key, stream)
                changed = rows[name]
                row = changed.get(key, _ABSENT)
                if row is _ABSENT:
                    row = known[name].get(key)
                else:
                    replaced[name] += (key, row)
                row = entity.evolve(row, event, at)
                changed[key] = exact[name].entity(key, row) if name in checked and row is not None else row
            except FAULTS as error:
                blocked = _park(entity, at, error, changes, blocked)
                parks = True
        for journal in step.journals:
            name = journal.name
            if parks and blocked.blocks(name, at):
                continue
            try:
                more = [*islice(journal.function(event, after, at), TOO_MANY_ROWS)]
                if more[TOO_MANY_ROWS - 1 :]:
                    raise BadRow(f"it makes {TOO_MANY_ROWS} lines or more of one event")
                if name in checked:
                    more = [exact[name].line(row, at) for row in more]
                replaced[name].append((stream, more))
            except FAULTS as error:
                blocked = _park(journal, at, error, changes, blocked)
                parks = True
        for summary in step.summaries:
            name = summary.name
            if parks and blocked.blocks(name, at):
                continue
            try:
                more = [*islice(summary.function(event, at), TOO_MANY_ROWS)]
                if more[TOO_MANY_ROWS - 1 :]:
                    raise BadRow(f"it makes {TOO_MANY_ROWS} increments or more of one event")
                if name in checked:
                    more = list(map(exact[name].row, more))
                replaced[name] += more
                of_view, how = sums[name], plan.sums[name]
                for row in more:
                    key = how.key(row)
                    increments, before = how.increments(row), of_view.get(key)
                    if how.placed:
                        increments = how.located(increments, at)
                    of_view[key] = list(increments) if before is None else how.merge(before, increments)
            except FAULTS as error:
                blocked = _park(summary, at, error, changes, blocked)
                parks = True
    for name in plan.journals:
        changes.added[name] = list(chain.from_iterable(map(_ROWS, replaced[name])))
    return changes, replaced


_STREAM, _ROWS = itemgetter(0), itemgetter(1)


def _park(view: View, at: At, error: BaseException, changes: Changes, blocked: Blocked) -> Blocked:
    """Park the stream for the view from this event on, or raise PoisonEvent where the view does not park."""
    found = poison(view.name, at, error)
    if view.on_poison != "park" or isinstance(error, TooSlow | MemoryError):  # a rebuild may be able to fold it
        raise found from error
    parked = Parked(view.name, at.stream, at.partition, at.offset, at.version, found.cause)
    changes.parked.append(parked)
    return blocked.and_parked([parked])
