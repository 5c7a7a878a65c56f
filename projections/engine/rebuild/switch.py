"""The switch: make other tables live for readers and agents, in one short transaction without DDL.

It locks all positions of the agents in partition order, so that no agent folds. It folds what is left of the log up to exactly
these positions into the new tables, moves the pointers, and sets a new generation, which fences batches that were folded before.
Going back is the same, run from the older version's code. So is removing a view that the code no longer has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from psycopg import errors

from infra.database.connect import Connection, longest_transaction_ms, patient_ms
from infra.errors import SamefoldError
from infra.log.clients import KafkaUnavailable
from infra.log.rule import Reading
from infra.processes.engines import SILENT, Progress
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.rebuild.builds import Build, BuildState, builds_of, by_id, lock_builds, positions_of
from projections.engine.rebuild.catch_up import AHEAD, Group, NotArrived, Tail, groups_at
from projections.engine.rebuild.indexing import hand_made, make_missing
from projections.engine.store.commit import Batch
from projections.engine.store.event_types import drop_other_event_types
from projections.engine.store.positions import POINTERS, lock_positions, set_generation, write_build_positions
from projections.engine.views.sql_views import WAIT_S, is_in_sql_view, replace_sql_view
from projections.engine.views.view import CORE, View

log = logging.getLogger(__name__)

LOCK_TIMEOUT_MS = 200
FEW_RECORDS = 200
"""Records that may be left to fold under the locks."""
FETCH_S = 0.5
"""How long to wait under the locks for a record that has not been read ahead."""
PATIENCE = 3
"""Tries with too many records left after which twice as many are allowed, up to one read: agents may commit more at once."""
PAUSE_S = 0.05
GIVE_UP_S = 120.0


class SetDiffers(SamefoldError):
    """After the switch, the live views would not be those of this code."""


class SwitchTimedOut(SamefoldError):
    """The switch was not possible in time. Nothing has changed, and the builds are ready."""


class _TooMuch(Exception):
    """More is left to fold than may be folded under the locks."""


class _Behind(Exception):
    """A view moves to an agent whose positions are still behind those of the agent it leaves."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """What is live of a view."""

    view: str
    agent: str
    version: int
    table: str


@dataclass(frozen=True, slots=True)
class Move:
    """The agents whose live sets a switch changes, in the order of locking, and the pointers that it replaces or removes."""

    agents: tuple[str, ...]
    outgoing: tuple[Pointer, ...]
    """Live now, and not afterwards."""
    removed: tuple[str, ...]
    """The outgoing views that this code no longer has."""


@dataclass(frozen=True, slots=True)
class Switched:
    """What a switch did, in milliseconds and commits. `gap_ms` is how long agents paused."""

    tables: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    catch_up_ms: float = 0
    switch_ms: float = 0
    gap_ms: float = 0
    commits: int = 0
    tries: int = 0


def pointers(connection: Connection) -> dict[str, Pointer]:
    """What is live, and of a stopped view what was: a switch of others leaves it alone."""
    found = connection.execute(f"select view, agent, version, table_name from {POINTERS} p order by view")  # noqa: S608
    return {view: Pointer(view, agent, version, table) for view, agent, version, table in found}


def plan_move(live: Mapping[str, Pointer], incoming: Iterable[str], views: Mapping[str, View]) -> Move:
    """What making `incoming` live changes; `views` are all of this code's. Raises SetDiffers when the sets would differ.

    Any switch of its agent removes a view that this code no longer has.
    """
    coming = {name: views[name] for name in incoming}
    strangers = [pointer for name, pointer in live.items() if name not in views]
    agents = {view.agent for view in coming.values()} | {live[name].agent for name in coming if name in live}
    if not coming:
        agents = {pointer.agent for pointer in strangers}
    removed = [pointer for pointer in strangers if pointer.agent in agents]
    after = {name: (pointer.agent, pointer.version) for name, pointer in live.items() if pointer not in removed}
    after |= {name: (view.agent, view.version) for name, view in coming.items()}
    wrong = []
    for name in sorted({*after, *views}):
        wanted = (views[name].agent, views[name].version) if name in views else None
        if after.get(name) != wanted and agents & {pair[0] for pair in (after.get(name), wanted) if pair}:
            wrong.append(name)
    if wrong:
        raise SetDiffers(
            f"After the switch, {', '.join(wrong)} would differ from this code, and no agent could run.",
            "`samefold rebuild` without names rebuilds all that this code needs and switches them together. If all the "
            "tables exist, `samefold switch` without names switches them.",
        )
    outgoing = [live[name] for name in coming if name in live]
    return Move(tuple(sorted(agents)), (*outgoing, *removed), tuple(pointer.view for pointer in removed))


def switch(
    settings: Settings,
    connection: Connection,
    builds: Sequence[Build],
    views: Mapping[str, View],
    *,
    progress: Progress = SILENT,
    give_up_s: float = GIVE_UP_S,
    wait_s: float = WAIT_S,
) -> Switched:
    """Catch the builds up and make them live; `views` are all of this code's. The builds are `ready` or `old`.

    `connection` is in autocommit mode and has claimed the views. `wait_s` is for sessions that lock a SQL view.

    Raises SetDiffers, SwitchTimedOut, BuildAbandoned, MovedElsewhere, Ahead, ViewInUse and what folding raises.
    """
    return _Switch(settings, connection, builds, views, progress).run(give_up_s, wait_s)


@dataclass
class _Switch:
    settings: Settings
    connection: Connection
    builds: Sequence[Build]
    views: Mapping[str, View]
    progress: Progress

    def __post_init__(self) -> None:
        self.topic = self.settings.events_topic
        self.live = pointers(self.connection)
        self.move = plan_move(self.live, [build.view for build in self.builds], self.views)
        self.groups: dict[str, Group] = {}
        """By agent, once its builds are at the same positions."""
        self.tails: dict[str, Tail] = {}
        self.commits = 0

    def run(self, give_up_s: float, wait_s: float) -> Switched:
        began = time.monotonic()
        few, tries, too_much, waited = FEW_RECORDS, 0, 0, 0.0
        try:
            # a release with other declarations may have loaded them
            make_missing(
                self.connection, [self.views[b.view] for b in self.builds], [build.table for build in self.builds]
            )
            for build in self.builds:
                if not is_in_sql_view(self.connection, build.view, build.table):
                    replace_sql_view(self.connection, build.view, wait_s=wait_s)
            outgoing = {pointer.table for pointer in self.move.outgoing} - {build.table for build in self.builds}
            if left := hand_made(self.connection, outgoing):
                log.warning("made by hand, and left behind by this switch: %s", ", ".join(left))
            # catching up holds no lock that agents or readers need, and a batch takes as long as the views' code
            self.connection.execute(f"set idle_in_transaction_session_timeout = {patient_ms(self.settings)}")
            while True:
                self._round()
                if not tries:
                    self.progress.begin("switch")
                tries += 1
                trying = time.monotonic()
                try:
                    gap = self._attempt(few)
                except _TooMuch:
                    too_much += 1
                    if too_much % PATIENCE == 0:
                        few = min(2 * few, AHEAD)
                except (_Behind, KafkaUnavailable):
                    # each try takes locks that the agent needs to move on
                    time.sleep(PAUSE_S)
                except (NotArrived, errors.LockNotAvailable, errors.DeadlockDetected):
                    pass
                else:
                    now = time.monotonic()
                    return Switched(
                        tables={build.view: build.table for build in self.builds},
                        removed=self.move.removed,
                        catch_up_ms=1000 * (trying - began - waited),
                        switch_ms=1000 * (now - trying + waited),
                        gap_ms=1000 * gap,
                        commits=self.commits,
                        tries=tries,
                    )
                waited += time.monotonic() - trying
                if time.monotonic() - began > give_up_s:
                    raise SwitchTimedOut(
                        f"In {give_up_s:.0f} s there was no moment at which the rest of the log was short enough.",
                        "Nothing has changed. The builds are ready: `samefold switch` tries again.",
                    )
        finally:
            for tail in self.tails.values():
                tail.close()

    # ── while the agents go on ──

    def _round(self) -> None:
        """Catch every agent's builds up to the current positions of the agent that they follow."""
        for agent in {build.agent for build in self.builds}:
            leader = leader_of(agent, self.live)
            positions = positions_of(self.connection, leader, self.topic)
            if agent not in self.groups:
                self.groups[agent] = self._level(leader, [build for build in self.builds if build.agent == agent])
                self.tails[agent] = Tail(self.settings, self.topic, self.groups[agent].at)
                self.progress.begin("catch up", _distance(self.groups[agent].at, positions.readings))
            self._catch_up(self.groups[agent], self.tails[agent], positions.readings)
            self.tails[agent].read_ahead()

    def _level(self, leader: str, builds: Sequence[Build]) -> Group:
        """Catch builds at different positions up to the highest, beginning with the lowest."""
        group, *others = groups_at(leader, self.views, builds)
        for other in others:
            self.progress.begin("catch up", _distance(group.at, other.at))
            with Tail(self.settings, self.topic, group.at) as tail:
                self._catch_up(group, tail, other.at)
            together = [*group.builds.values(), *other.builds.values()]
            group = Group(leader, self.views, by_id(self.connection, [build.id for build in together]))
        return group

    def _catch_up(self, group: Group, tail: Tail, to: Mapping[int, Reading]) -> None:
        self.commits += group.catch_up(self.connection, tail, to, self.progress.advance)

    # ── under the locks ──

    def _attempt(self, few: int) -> float:
        """The switch itself; how long the agents paused, in seconds.

        Raises _TooMuch, _Behind, NotArrived, having changed nothing.
        """
        folded: list[tuple[Group, Sequence[Batch]]] = []
        with self.connection.transaction():
            self.connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
            idle_ms = self.settings.idle_in_transaction_timeout_ms
            self.connection.execute(f"set local idle_in_transaction_session_timeout = {idle_ms}")
            self.connection.execute(f"set local transaction_timeout = {longest_transaction_ms(self.settings)}")
            # a new agent has none: it uses CORE's
            at = lock_positions(
                self.connection, {*self.move.agents, *leaders(self.move, self.live).values()}, self.topic
            )
            locked = time.monotonic()
            reach("switch locked")
            live = pointers(self.connection)
            names = {build.view for build in self.builds} | {name for name in live if name not in self.views}
            tables = {pointer.table for pointer in live.values()}
            outgoing = [build for build in builds_of(self.connection, names) if build.table in tables]
            builds = lock_builds(self.connection, [*(build.id for build in self.builds), *(b.id for b in outgoing)])
            move = plan_move(live, [build.view for build in self.builds], self.views)
            if move.agents != self.move.agents or leaders(move, live) != leaders(move, self.live):
                raise SetDiffers("Another switch has changed the live views meanwhile.", "Run the command again.")
            to = self._targets(at, live, move)
            for agent, group in self.groups.items():
                group.check([build for build in builds if build.id in group.ids])
                group.require_not_ahead(to[agent])
                if _distance(group.at, to[agent]) > few:
                    raise _TooMuch
            self._require_in_sql_views()
            for agent, group in self.groups.items():
                batches = self.tails[agent].exactly(group.at, to[agent], FETCH_S)
                if batches:
                    group.fold(self.connection, self.topic, batches)
                    folded.append((group, batches))
            with self.connection.pipeline():  # one round trip: the agents are waiting
                self._point(move, outgoing, to, live)
            reach("switch written")
        reach("switch done")
        for group, applied in folded:
            group.moved(applied)
            self.commits += sum(len(batch.counted) for batch in applied)
        return time.monotonic() - locked

    def _targets(
        self, at: Mapping[str, dict[int, Reading]], live: Mapping[str, Pointer], move: Move
    ) -> dict[str, dict[int, Reading]]:
        """The positions that each agent's tables must reach. A view that moves to another agent must not lose rows."""
        to = {agent: at[leader] for agent, leader in leaders(move, live).items()}
        for build in self.builds:
            if (before := live.get(build.view)) is not None and before.agent != build.agent:
                behind = [p for p, reading in to[build.agent].items() if reading < at[before.agent][p]]
                if behind:
                    raise _Behind
        return to

    def _require_in_sql_views(self) -> None:
        for build in self.builds:
            if not is_in_sql_view(self.connection, build.view, build.table):
                raise SetDiffers(
                    f"The SQL view '{build.view}' does not read {build.table} yet.",
                    "It was replaced by hand: run the command again.",
                )

    def _point(
        self, move: Move, outgoing: Sequence[Build], to: Mapping[str, dict[int, Reading]], live: Mapping[str, Pointer]
    ) -> None:
        """Write the new states, pointers and generation."""
        execute = self.connection.execute
        gone = {pointer.table for pointer in move.outgoing}
        for build in outgoing:
            if build.table in gone and build.state is BuildState.LIVE:  # a stopped one is old, at its own positions
                execute("update builds set state = 'old' where id = %s", (build.id,))
                write_build_positions(self.connection, build.id, self.topic, to[live[build.view].agent])
        execute("delete from live where view = any(%s)", (list(move.removed),))
        execute("delete from stopped_views where view = any(%s)", ([*move.removed, *(b.view for b in self.builds)],))
        for build in self.builds:
            execute("update builds set state = 'live' where id = %s", (build.id,))
            execute(
                "insert into live (view, agent, version, table_name) values (%s, %s, %s, %s) on conflict (view) do update "
                "set agent = excluded.agent, version = excluded.version, table_name = excluded.table_name",
                (build.view, build.agent, build.version, build.table),
            )
        were, are = ({(one.view, one.agent, one.version) for one in some} for some in (move.outgoing, self.builds))
        if CORE in move.agents and were != are:
            drop_other_event_types(self.connection)  # those agents fold no more, and their handlers wait
        set_generation(self.connection, self.topic, {agent: to[agent] for agent in move.agents}, "switch")


def _distance(at: Mapping[int, Reading], to: Mapping[int, Reading]) -> int:
    """Records between two positions."""
    return sum(to[partition].next_offset - reading.next_offset for partition, reading in at.items())


def leader_of(agent: str, live: Mapping[str, Pointer]) -> str:
    """The agent whose positions a build follows: its own, or CORE where its own has no live view, so does not move."""
    return agent if any(pointer.agent == agent for pointer in live.values()) else CORE


def leaders(move: Move, live: Mapping[str, Pointer]) -> dict[str, str]:
    return {agent: leader_of(agent, live) for agent in move.agents}
