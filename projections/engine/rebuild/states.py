"""The domain's states that a journal is told, while its build catches up: where they come from.

The fold of a range needs each touched stream's state just before it, at the *build's* position. In this order:

1. The context's snapshots are among the builds that are moved: their rows stand at the same position. Nothing to do here.
2. `SnapshotStates`: the live snapshots, seen through a REPEATABLE READ snapshot that was taken when the agent stood exactly
   where the build stands now. Each round takes one, catches up to exactly its positions, and keeps it for the next round
   and for the switch, which so asks for a few rows instead of folding anything again.
3. `LogStates`: the first round, when there is no such snapshot (after a load, when going back). The log before the build's
   position is folded once more, but only for the streams that the range touches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from infra.database.connect import Connection, connect, patient_ms
from infra.domain_model.contexts import contexts
from infra.log.rule import START, Reading
from infra.settings import Settings
from projections.engine.fold.fold import NOTHING_BLOCKED, Held, State, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.rebuild import workers
from projections.engine.rebuild.load import counted_to
from projections.engine.rebuild.workers import Advance
from projections.engine.store.commit import prepare
from projections.engine.store.positions import Positions, read_positions
from projections.engine.store.rows import loaded, select_rows
from projections.engine.views.core_views import snapshot_view, snapshot_view_name


class StatesBefore(Protocol):
    """States of streams as they were at one position of the log."""

    def read(self, name: str, streams: Collection[str]) -> Mapping[str, State]:
        """By stream, version and state; `name` is the context's snapshot view. Streams without events are left out."""


class Snapshot:
    """One moment of the database, held open on a connection of its own."""

    def __init__(self, settings: Settings, agent: str, topic: str) -> None:
        self._connection: Connection = connect(settings, f"samefold catch-up {agent}")
        try:
            # it is kept between two transactions that catch up; one of them may be idle several times
            self._connection.execute(f"set idle_in_transaction_session_timeout = {10 * patient_ms(settings)}")
            self._connection.execute("begin isolation level repeatable read, read only")
            prepare(self._connection)
            self.positions: Positions | None = read_positions(self._connection, agent, topic)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, streams: Collection[str]) -> Mapping[str, State]:
        context = next(context for context in contexts().values() if snapshot_view_name(context.name) == name)
        assert self.positions is not None, "an agent that never started has no builds"
        query, parameters = select_rows(snapshot_view(context), self.positions.tables[name], list(streams))
        found = self._connection.execute(query, parameters).fetchall()
        return loaded(snapshot_view(context), context.state, found)

    def keep(self) -> None:
        """Say that it is still wanted, between two transactions that catch up.

        Whoever freezes loses it in the end, and with it the locks on its tables.
        """
        self._connection.execute("select 1")

    def close(self) -> None:
        self._connection.close()


class LogStates:
    """The states at `at` of the streams that [at, to) touches, folded from the log.

    All is read when it is made: a catch-up's transaction must not wait for it. `advance` is told how far it is.
    """

    def __init__(
        self,
        settings: Settings,
        topic: str,
        at: Mapping[int, Reading],
        to: Mapping[int, Reading],
        names: Iterable[str],
        *,
        processes: int | None = None,
        advance: Advance = lambda _count: None,
    ) -> None:
        parts = [
            _Part(settings, topic, partition, name, before, to[partition])
            for partition, before in at.items()
            for name in names
            if before not in (START, to[partition])
        ]
        count = workers.processes_for(sum(part.at.next_offset for part in parts), processes)
        self._found: dict[str, dict[str, State]] = {part.name: {} for part in parts}
        for part, states in zip(parts, workers.run(_states_before, parts, count, advance), strict=True):
            self._found[part.name].update(states)

    def read(self, name: str, streams: Collection[str]) -> Mapping[str, State]:
        known = self._found.get(name, {})
        return {stream: known[stream] for stream in streams if stream in known}


@dataclass(frozen=True, slots=True)
class _Part:
    settings: Settings
    topic: str
    partition: int
    name: str
    """Of the context's snapshot view."""
    at: Reading
    to: Reading


def _states_before(part: _Part, advance: Advance) -> dict[str, State]:
    """States at `at` of the context's streams that have events in [at, to)."""
    name = part.name
    where = (part.settings, part.topic, part.partition)
    touched = {one.commit.stream for batch in counted_to(*where, part.to, part.at) for one in batch.counted}
    context = next(context for context in contexts().values() if snapshot_view_name(context.name) == name)
    plan = Plan({name: snapshot_view(context)})
    held = Held(plan)
    for batch in counted_to(*where, part.at):
        few = [one for one in batch.counted if one.commit.stream in touched]
        held.absorb(fold(plan, decode(plan, part.partition, few), held, NOTHING_BLOCKED))
        advance(batch.next.next_offset - batch.was.next_offset)
    rows: dict[str, Any] = held.rows[name]
    return rows
