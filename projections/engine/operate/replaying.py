"""Repair a parked stream: replay it with corrected code, or drop its first parked event, which leaves that out for good.

Both lock all the agent's positions, fold the stream's events from the log up to exactly these, and set a new generation, so that
agents read the stream's rows again and no longer treat it as parked. Most of the log is read before the locks are taken.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from psycopg import errors

from infra.database.connect import Connection, session
from infra.errors import SamefoldError
from infra.log.contract import require_contract
from infra.log.rule import START, Counted, Reading
from infra.settings import Settings
from projections.engine.fold.fold import Blocked, Parked, RowCache, decode
from projections.engine.fold.plan import Plan
from projections.engine.operate.verify import NotLive
from projections.engine.rebuild.builds import (
    Build,
    BuildState,
    builds_of,
    end_loaders,
    lock_builds,
    lock_skips,
    read_skips,
    remove_table,
)
from projections.engine.rebuild.folded import counted_to
from projections.engine.store.parking import ParkedStream, parked_streams
from projections.engine.store.positions import Positions, lock_positions, read_positions, set_generation
from projections.engine.store.writing import fold_and_write
from projections.engine.views.view import View

FEW_RECORDS = 2_000
"""Records that may be left to read under the locks."""
LOCK_TIMEOUT_MS = 200
PAUSE_S = 0.2
GIVE_UP_S = 60.0


class NotParked(SamefoldError):
    """The stream is not parked in the view's live table."""


class StreamBusy(SamefoldError):
    """The positions could not be locked in time."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay. `parked` is where the stream is parked now, None where all its events are in the table."""

    view: str
    stream: str
    events: int
    """Folded into the table."""
    dropped: int | None
    """The version of the dropped event."""
    parked: Parked | None
    abandoned: tuple[str, ...]
    """Tables that had folded the dropped event, and can't be gone back to."""


def replay(settings: Settings, view: View, stream: str) -> Replayed:
    """Fold a parked stream's events into the live table. Raises NotParked, NotLive, PoisonEvent, LogChanged, StreamBusy."""
    return _Replay(settings, view, stream, dropping=False).run()


def drop(settings: Settings, view: View, stream: str, version: int | None = None) -> Replayed:
    """Leave the first parked event out of the view for good, in every later build too, and replay the rest.

    With a version only if it is that one: somebody else may have dropped it. Raises as `replay`.
    """
    return _Replay(settings, view, stream, dropping=True, version=version).run()


@dataclass
class _Replay:
    settings: Settings
    view: View
    stream: str
    dropping: bool
    version: int | None = None
    """Of the event to drop, if any other is not."""
    reading: Reading = START
    commits: list[Counted] = field(default_factory=list)
    """The stream's, up to the reading."""

    def run(self) -> Replayed:
        with session(self.settings, "samefold parked", short_transactions=True) as connection:
            require_contract(self.settings, connection)
            deadline = time.monotonic() + GIVE_UP_S
            while True:
                parked, positions = self._look(connection)
                self._read_to(parked.partition, positions.readings[parked.partition])
                try:
                    done, abandoned = self._attempt(connection)
                except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
                    if time.monotonic() > deadline:
                        raise StreamBusy(
                            f"The positions of agent '{self.view.agent}', or tables of view '{self.view.name}' in a switch, "
                            f"were locked for {GIVE_UP_S:.0f} s.",
                            "Nothing has changed: run the command again.",
                        ) from error
                    time.sleep(PAUSE_S)  # each try takes locks that the agent needs
                    continue
                if done is not None:
                    for build in abandoned:
                        end_loaders(connection, build.id)
                        remove_table(connection, build)
                    return done

    def _look(self, connection: Connection) -> tuple[ParkedStream, Positions]:
        positions = read_positions(connection, self.view.agent, self.settings.events_topic)
        live = positions.live.get(self.view.name) if positions else None
        if positions is None or live is None or live.version != self.view.version:
            raise NotLive(
                f"View '{self.view.name}' is not live as version {self.view.version}, which is this code's.",
                "`samefold views` says what is: resume it first if it is stopped, else run the command with the code that is live.",
            )
        for one in parked_streams(connection):
            if (one.table, one.stream) == (live.table, self.stream):
                return one, positions
        raise NotParked(
            f"Stream {self.stream} is not parked in view '{self.view.name}'.",
            "`samefold parked list` shows those that are.",
        )

    def _read_to(self, partition: int, end: Reading) -> None:
        """Collect the stream's commits up to exactly a position, from the log's beginning: a journal needs the earlier states."""
        for batch in counted_to(self.settings, self.settings.events_topic, partition, end, self.reading):
            self.reading = batch.next
            self.commits += [one for one in batch.counted if one.commit.stream == self.stream]

    def _attempt(self, connection: Connection) -> tuple[Replayed | None, list[Build]]:
        """The result and the abandoned builds; None when too many records are left to read under the locks."""
        with connection.transaction():
            connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
            locked = lock_positions(connection, [self.view.agent], self.settings.events_topic)
            parked, positions = self._look(connection)
            if self.version not in (None, parked.since_version):
                raise NotParked(
                    f"Stream {self.stream} is parked since version {parked.since_version} now, not {self.version}.",
                    "Nothing was dropped. `samefold parked show` has the event.",
                )
            end = positions.readings[parked.partition]
            if end.next_offset - self.reading.next_offset > FEW_RECORDS:
                return None, []
            self._read_to(parked.partition, end)
            abandoned = self._skip(connection, parked) if self.dropping else []
            events, again = self._fold(connection, parked)
            self._record(connection, parked, again)
            set_generation(connection, self.settings.events_topic, locked, "replay")
        dropped = parked.since_version if self.dropping else None
        removed = [build for build in abandoned if build.state in (BuildState.LOADING, BuildState.READY)]
        tables = tuple(build.table for build in abandoned)
        return Replayed(self.view.name, self.stream, events, dropped, again, tables), removed

    def _skip(self, connection: Connection, parked: ParkedStream) -> list[Build]:
        """Record the skip, and abandon the view's other tables that are beyond the event: they may contain it."""
        lock_skips(connection, [parked.view])
        connection.execute(
            "insert into skips (view, stream, version, through, partition, reason) values (%s, %s, %s, %s, %s, %s)",
            (parked.view, parked.stream, parked.since_version, parked.since_version, parked.partition, parked.error),
        )
        others = [build for build in builds_of(connection, [parked.view]) if build.table != parked.table]
        abandoned = [
            build
            for build in lock_builds(connection, [build.id for build in others])
            if build.state in (BuildState.LOADING, BuildState.READY, BuildState.OLD)
            and (at := build.positions.get(parked.partition)) is not None
            and at.next_offset > parked.since_offset
        ]
        connection.execute(
            "update builds set state = 'abandoned' where id = any(%s)", ([build.id for build in abandoned],)
        )
        return abandoned

    def _fold(self, connection: Connection, parked: ParkedStream) -> tuple[int, Parked | None]:
        """Fold the stream's events from the parked one on into the table; how many, and where the stream is parked again."""
        view, key = self.view, (self.view.name, self.stream)
        plan = Plan({view.name: view})
        skips = [(1, parked.since_version - 1), *read_skips(connection, [view.name]).skips.get(key, ())]
        blocked = Blocked({}, {key: skips})
        batch = decode(plan, parked.partition, self.commits)
        held, tables = {parked.partition: RowCache(plan)}, {view.name: parked.table}
        # states are folded from the stream's beginning; only the view's own rows come from the database
        _, again = fold_and_write(connection, plan, tables, [batch], held=held, blocked=blocked)
        stop = again[0].version if again else None
        taken = [
            item
            for item in batch.items
            if type(item.event) in view.subscription
            and not blocked.blocks(view.name, item.at)
            and (stop is None or item.at.version < stop)
        ]
        return len(taken), again[0] if again else None

    def _record(self, connection: Connection, parked: ParkedStream, again: Parked | None) -> None:
        where = (parked.table, parked.stream)
        if again is None:
            connection.execute("delete from parked where table_name = %s and stream = %s", where)
        else:
            connection.execute(
                "update parked set since_offset = %s, since_version = %s, error = %s where table_name = %s and stream = %s",
                (again.offset, again.version, again.error, *where),
            )


def parked_events(settings: Settings, parked: ParkedStream, end: Reading) -> list[tuple[int, str, bytes]]:
    """A stream's parked events, from the log up to a position: version, type and body of each."""
    found: list[tuple[int, str, bytes]] = []
    for batch in counted_to(settings, settings.events_topic, parked.partition, end):
        for one in batch.counted:
            if one.commit.stream == parked.stream:
                first = one.commit.version - len(one.commit.events) + 1
                found += [(v, e.type, bytes(e.data)) for v, e in enumerate(one.commit.events, first)]
    return [event for event in found if event[0] >= parked.since_version]
