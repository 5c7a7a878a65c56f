"""The processes of a run: the product's own code, with as little of a shell around it as there can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from infra.database.connect import Connection, DatabaseUnavailable, connect
from infra.processes.gathering import Window
from projections.engine.fold.errors import EngineStop
from projections.engine.fold.plan import Plan
from projections.engine.live.reader import Action, Apply, Reader, ReadPositions, Seek, Stop, Wait, WaitForNewerCode
from projections.engine.live.worker import Worker
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.positions import Positions
from projections.engine.views.core_views import code_set
from projections.engine.views.view import View

if TYPE_CHECKING:
    from proofs.model_read.world import World

LOOKS = 6
"""How often an agent that is held looks at the positions before it gives up; a real one never does."""


class _Worker(Worker):
    """Without the event types that agents record for handlers: there are no handlers here."""

    def record_event_types(self, connection: Connection, positions: Positions | None = None) -> None:
        pass


class Agent:
    """An agent process as `projections/engine/live/agent.py` is one, sure to own these partitions; it ends at the log's end.

    A loop that fetches and talks to the reader, and for each lane a connection with a thread of its own. It ends after so many
    `batches` too. With `gives_up`, the group takes the partitions away after each batch and gives them back. So many batches are
    `interrupted`: that happens right after one was sent to its lane, over a channel, which is slower than the positions' way.
    """

    def __init__(
        self,
        world: World,
        name: str,
        views: Mapping[str, View],
        partitions: Sequence[int],
        batch: int,
        *,
        lanes: int = 1,
        batches: int | None = None,
        gives_up: bool = False,
        interrupted: int = 0,
        work: Worker | None = None,
        reader: Reader | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.partitions = partitions
        self.batch = batch
        self.most = batches
        self.gives_up = gives_up
        self.interrupted = interrupted
        self.work = work or _Worker(world.settings, "core", views, name, _plan(views), lanes=lanes)
        self.lanes = [_Lane(number) for number in range(lanes)]
        self.reader = reader or Reader(code_set(dict(views)), batch=batch, window=Window(0.0), lanes=lanes)
        self.inbox: deque[Callable[[], None]] = deque()
        self.timers: list[ReadPositions] = []
        self.at: dict[int, int] = {}
        self.looks = self.applied = 0
        self.prompt = lanes == 1
        """With one lane, loop and lane only ever wait for each other."""
        self.ended = False

    def start(self) -> None:
        """Its threads, from now on."""
        play = self.world.play
        play.add(self.name, self._run)
        for lane in self.lanes:
            play.add(f"{self.name}.{lane.number}", partial(self._serve, lane), self.name)

    # ── the loop ──

    def _run(self) -> None:
        try:
            self._do(self.reader.assigned(self.partitions))
            while not self.ended:
                if self.inbox:
                    self.inbox.popleft()()
                elif not self._fetch() and not self._idle():
                    return
        finally:
            self.ended = True

    def _idle(self) -> bool:
        """Wait for a lane, or for time to pass; False where all is done."""
        play = self.world.play
        if self.timers:
            timer = self.timers.pop(0)
            play.sleep(timer.after, lambda: bool(self.inbox))
            if timer.turn == self.reader.turn:
                self._read_positions(timer)
        elif any(lane.jobs or lane.busy for lane in self.lanes):
            play.wait_until(lambda: bool(self.inbox), prompt=self.prompt)
        elif actions := self.reader.tick(play.now + 1):
            self._do(actions)
        else:
            return self._goes_on()
        return True

    def _goes_on(self) -> bool:
        """Whether there is more to come when all is folded."""
        self.world.at_end.add(self.name)
        return False

    def _waits(self, error: EngineStop) -> None:
        """Other code must fold what comes next."""
        raise error

    def _fetch(self) -> bool:
        for partition in self.reader.fetching:
            log = self.world.log.records[partition]
            if records := log[self.at[partition] : self.at[partition] + self.batch]:
                self.at[partition] += len(records)
                self._do(self.reader.records(partition, records, len(log), self.world.play.now))
                return True
        return False

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ReadPositions(_, 0.0):
                    self._read_positions(action)
                case ReadPositions():
                    self.timers.append(action)
                case Seek(partition, offset):
                    self.at[partition] = offset
                case Apply(turn, takes, lane):
                    self._call(lane, partial(self.work.apply, takes, turn, lane), partial(self._applied, action))
                    if self.interrupted:
                        self.interrupted -= 1
                        self._regain()
                case Wait():
                    self.looks += 1
                    self.ended = self.ended or self.looks == LOOKS
                case WaitForNewerCode(error):
                    self._waits(error)
                case Stop(error):
                    raise error

    def _read_positions(self, action: ReadPositions) -> None:
        self._call(0, partial(self.work.positions, action.turn), partial(self._positions, action), reads=True)

    def _positions(self, action: ReadPositions, found: Positions | DatabaseUnavailable | None) -> None:
        if isinstance(found, DatabaseUnavailable):
            self._do(self.reader.away(action.turn))
        else:
            self._do(self.reader.positions(action.turn, found))

    def _applied(self, action: Apply, done: BatchResult | DatabaseUnavailable) -> None:
        done = BatchResult(CommitStatus.AWAY) if isinstance(done, DatabaseUnavailable) else done
        self._do(self.reader.done(action.turn, done, self.world.play.now, action.lane))
        if done.status is CommitStatus.APPLIED:
            self.applied += 1
            self.ended = self.ended or self.applied == self.most
            if self.gives_up:
                self._regain()

    def _regain(self) -> None:
        self._do(self.reader.assigned(()))
        self._do(self.reader.assigned(self.partitions))

    def _call(self, lane: int, job: Callable[[], Any], then: Callable[[Any], None], *, reads: bool = False) -> None:
        jobs = self.lanes[lane].jobs
        (jobs.appendleft if reads else jobs.append)((job, then))

    # ── a lane ──

    def _serve(self, lane: _Lane) -> None:
        play = self.world.play
        while True:
            play.wait_until(lambda: self.ended or bool(lane.jobs), prompt=self.prompt)
            if self.ended:
                return
            job, then = lane.jobs.popleft()
            lane.busy = True
            if self.world.pings:
                play.pause()
                with suppress(DatabaseUnavailable):
                    self.work.ping(lane.number)
            try:
                answer = job()
            except DatabaseUnavailable as away:
                answer = away
            except BaseException:
                self.ended = True
                raise
            self.inbox.append(partial(then, answer))
            lane.busy = False


@dataclass
class _Lane:
    """What the thread of a connection is to do."""

    number: int
    jobs: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=deque)
    busy: bool = False


_plans: dict[tuple[int, ...], Plan] = {}


def _plan(views: Mapping[str, View]) -> Plan:
    which = tuple(map(id, views.values()))
    if which not in _plans:
        _plans[which] = Plan(views)
    return _plans[which]


class Stopped(Exception):
    """The view has no row in the table of live ones."""


def reader(world: World, times: int, *, sql_view: bool) -> None:
    """A client that asks for all balances over and over; each answer must show all that any client saw before the question."""
    table = "balances_v1"
    connection = connect(world.settings, "reader")
    found: dict[str, str]
    for _ in range(times):
        known = dict(world.seen)
        try:
            if sql_view:
                found = dict(connection.execute("select * from balances").fetchall())
            else:
                table, found = _ask(connection, table)
        except psycopg.OperationalError:
            connection = connect(world.settings, "reader")
        except Stopped:
            continue
        else:
            world.saw(known, {account: trail.count(" ") for account, trail in found.items()})


def _ask(connection: Connection, table: str) -> tuple[str, dict[str, str]]:
    """If the pointer names another table than the one asked, that one is asked, and its answer stands."""
    rows: list[tuple[Any, ...]] = []
    for _ in range(2):
        query = (
            f"select l.table_name, b.account, b.trail from live l left join {table} b on true where l.view = 'balances'"
        )
        rows = connection.execute(query.encode()).fetchall()
        if not rows:
            raise Stopped
        if rows[0][0] == table:
            break
        table = rows[0][0]
    return table, {account: trail for _, account, trail in rows if account is not None}
