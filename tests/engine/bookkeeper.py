"""Histories written by hand: a writer that appends openings and commits to `events`, and an agent that folds them.

For tests of the read side that need precise histories, or many events soon, without a handler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from typing import Any

import msgspec

from domain.accounts import AccountOpened, Details, Event, FeeCharged, MoneyDeposited, MoneyWithdrawn
from infra.database.connect import connect
from infra.log import topics
from infra.log.clients import producer
from infra.log.contract import Contract
from infra.log.partitioner import partition_of
from infra.log.records import Commit, EventRecord, Opening, Reason, encode
from infra.log.rule import Reading
from infra.processes.engines import A, Local, R
from infra.processes.workers import Advance
from infra.settings import Settings
from projections.engine.fold.plan import Plan
from projections.engine.live.startup import ensure_started, set_difference
from projections.engine.rebuild.catch_up import Tail
from projections.engine.store.commit import BatchResult, CommitStatus, Committer
from projections.engine.store.positions import read_positions
from projections.engine.views.core_views import agent_views, code_set
from projections.engine.views.view import View
from tests.engine.spine import beside, set_up

DAY = date(2026, 1, 1)
TRANSFER = Details(operation="transfer", purpose="rent", counter_bank="YZ", counter_account="1")


class Bookkeeper:
    """The one writer of all partitions: commits go where their stream lives, in one epoch per partition."""

    def __init__(self, world: Settings) -> None:
        self.world = world
        self.topic = topics.describe(world, world.events_topic)
        self._producer = producer(world)
        self._epoch: dict[int, int] = {}
        self._seq: dict[int, int] = {}
        self._versions: dict[str, int] = {}
        self._commands = 0
        for partition in range(self.topic.partitions):
            self.open(partition)

    def open(self, partition: int) -> None:
        """A new epoch."""
        offsets: list[int] = []
        self._append(partition, None, encode(Opening("keeper", "commands")), lambda _, m: offsets.append(m.offset()))
        self.flush()
        self._epoch[partition], self._seq[partition] = offsets[0], 0

    def commit(self, account: str, *events: Event, refused: Reason | None = None, **more: Any) -> None:
        """What one command did on an account: events, or nothing and a reason; `more` are the commit's own fields."""
        stream = f"accounts/{account}"
        partition = partition_of(stream, self.topic.partitions)
        self._seq[partition] += 1
        self._commands += 1
        version = self._versions[stream] = self._versions.get(stream, 0) + len(events)
        commit = Commit(
            stream=stream,
            version=version,
            events=[EventRecord(type(event).__name__, msgspec.Raw(msgspec.json.encode(event))) for event in events],
            command_id=f"c{self._commands}",
            command_offset=self._commands,
            fingerprint="f" * 32,
            outcome="rejected" if refused else "accepted",
            reason=refused,
            epoch=self._epoch[partition],
            seq=self._seq[partition],
        )
        value = encode(msgspec.structs.replace(commit, **more))
        self._append(partition, stream.encode(), value)

    def garbage(self, partition: int, value: bytes = b"garbage") -> None:
        self._append(partition, None, value)

    def life(self, accounts: Sequence[str], rounds: int, first_day: date = DAY) -> None:
        """Open the accounts that are new, then move money on each in turn, with refusals, fees and double events between."""
        for account in accounts:
            if f"accounts/{account}" not in self._versions:
                self.commit(account, AccountOpened(overdraft_limit=1000, on=first_day), by=f"owner of {account}")
        for number in range(rounds):
            on = first_day + timedelta(days=number % 5)
            for index, account in enumerate(accounts):
                match (number + index) % 5:
                    case 0:
                        self.commit(account, MoneyWithdrawn(cents=3, on=on), FeeCharged(cents=1, on=on))
                    case 1:
                        self.commit(account, refused=Reason("insufficient-funds", "No."))
                    case _:
                        self.commit(account, MoneyDeposited(cents=10 + index, on=on, details=TRANSFER))
        self.flush()

    def flush(self) -> None:
        assert self._producer.flush(20) == 0

    def _append(
        self, partition: int, key: bytes | None, value: bytes, delivered: Callable[[Any, Any], None] | None = None
    ) -> None:
        while True:
            try:
                self._producer.produce(
                    self.world.events_topic, value, key=key, partition=partition, on_delivery=delivered
                )
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)


def folded_lives(world: Settings, accounts: Sequence[str], events: int) -> Bookkeeper:
    """A new world in which each account has lived that many events, all of them folded; and who wrote them."""
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(accounts, events)
    fold_all(world)
    return keeper


def start(world: Settings, views: Mapping[str, View] | None = None) -> None:
    """The first start of the agent `core`."""
    with connect(world, "test") as db:
        ensure_started(
            db, "core", views or agent_views("core"), Contract.of(topics.describe(world, world.events_topic))
        )


def fold_all(world: Settings, views: Mapping[str, View] | None = None, *, most: int = 5_000) -> dict[int, Reading]:
    """Fold the log's records up to its end now, as an agent of these views would; where it stands then."""
    agent = Folder(world, views or agent_views("core"))
    end = topics.describe(world, world.events_topic).end
    with connect(world, "test agent") as db:
        return agent.fold(db, end, most)


class Folder:
    """An agent's work without its shell: reads positions, folds batches, and reads positions again when it is fenced."""

    def __init__(self, world: Settings, views: Mapping[str, View]) -> None:
        self.world = world
        self.views = views
        self.plan = Plan(views)
        self.fenced = 0

    def fold(self, db: Any, end: Mapping[int, int], most: int) -> dict[int, Reading]:
        while True:
            positions = read_positions(db, "core", self.world.events_topic)
            assert positions is not None
            if set_difference(positions.live_set, code_set(dict(self.views))) is not None:
                return dict(positions.readings)
            committer = Committer(self.plan, positions)
            at = dict(positions.readings)
            with Tail(self.world, self.world.events_topic, at) as tail:
                outcome = BatchResult(CommitStatus.APPLIED)
                while outcome.status is CommitStatus.APPLIED:
                    batches = tail.towards(at, _ends(at, end), most)
                    if not batches:
                        return at
                    outcome = committer.apply(db, batches)
                    if outcome.status is CommitStatus.APPLIED:
                        at.update({batch.partition: batch.next for batch in batches})
                assert outcome.status is CommitStatus.FENCED, outcome
                self.fenced += 1


def _ends(at: Mapping[int, Reading], end: Mapping[int, int]) -> dict[int, Reading]:
    """Targets by offset alone: what counts up to there is for the reading rule to say."""
    return {partition: AnyReading(end[partition], *reading[1:]) for partition, reading in at.items()}


class AnyReading(Reading):
    """A target of which only the offset is known."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and other.next_offset == self.next_offset

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def live_agent(world: Settings, views: Mapping[str, View] | None = None, *, most: int = 40) -> Iterator[Folder]:
    """A folder in a thread, that goes on for as long as the `with` lasts; it waits while its set is not the live one."""
    folder, ended = Folder(world, views or agent_views("core")), threading.Event()

    def run() -> None:
        with connect(world, "test agent") as db:
            while not ended.wait(0.005):
                folder.fold(db, topics.describe(world, world.events_topic).end, most)

    with beside(run, ended.set, "live agent"):
        yield folder


class Meanwhile(Local):
    """An engine during whose run something else happens first."""

    def __init__(self, before: Callable[[], object]) -> None:
        super().__init__(1)
        self.before = before

    def run(self, task: Callable[[A, Advance], R], arguments: Sequence[A], records: int, advance: Advance) -> list[R]:
        self.before()
        return super().run(task, arguments, records, advance)
