"""The processes of policies over a bank: the product's worker, outbox, activations and sender, with a modelled producer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, NamedTuple

import msgspec
import psycopg
from msgspec import UNSET

from infra.database.connect import Connection, connect
from infra.log import clients, topics
from infra.log.records import Command, Record
from infra.log.topics import Topic
from infra.processes.gathering import Window
from infra.settings import Settings
from policies.engine.activations import EVER, NotHeld, activations_of, resume, start_new, switch
from policies.engine.relay import mark_sent, read_unsent
from policies.engine.sender import Sender, UnsentCommand
from policies.engine.worker import LOOK_AGAIN_S, PolicyWorker, difference
from projections.engine.fold.errors import EngineStop
from projections.engine.live.reader import Reader
from proofs.checker import Violation
from proofs.model_read.actors import Agent
from proofs.model_read.bank import MOVING, PARTITIONS, Bank, Topics, moving
from proofs.model_read.database import State
from proofs.model_read.oracle import LOST
from proofs.model_read.policy_oracle import PolicyOracle, positions_of
from proofs.model_read.world import World

NOW = datetime(2030, 1, 1, tzinfo=UTC)
MOST = 100
LOOKS = 5
"""How often a relay that has nothing to do looks at the outbox before it ends; a real one never does."""
ROUNDS = 8
"""Agents and relays that settle a run take turns so often."""


class PolicyWorld(World):
    """A world whose log is a bank's. Without `keeps_flying`, what a crashed relay has in flight is lost."""

    _topics: ClassVar[dict[State, Topics]] = {}
    """What Kafka held when a run began, by the database's state then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.log, Bank)
        self.bank = self.log
        self.judge = self.watch = PolicyOracle(self.bank)
        self.keeps_flying = False
        self.unanswered = 0
        """So many commands arrive, and are reported as failed."""
        self.in_flight: list[str] = []
        self.was_at: dict[int, int] = {}
        """The policy's positions when the database was restored."""
        self.switches = False
        """A switch is under way that no restore may come into."""

    def begin(self, before: Iterable[Callable[[Any], object]]) -> list[State]:
        states = super().begin(before)
        self._topics[states[-1]] = deepcopy(self.bank.topics)
        return states

    def begin_again(self, states: list[State]) -> None:
        self.bank.take(self._topics[states[-1]])
        super().begin_again(states)

    def may_restore(self) -> list[int]:
        return [] if self.switches else super().may_restore()

    def restore(self, back: int) -> None:
        self.was_at = positions_of(self.tables)
        super().restore(back)

    def has_caught_up(self) -> bool:
        """Whether the policy has read again what it had read before the database was restored."""
        at = positions_of(self.tables)
        return all(at.get(partition, 0) >= offset for partition, offset in self.was_at.items())

    def _describe(self, _settings: Settings, name: str, **_how: Any) -> Topic:
        ends = self.bank.topics.ends
        if name == "policies":
            ends = {0: len(self.bank.topics.activations)}
        elif name == "commands":
            ends = {0: 0}  # the service was never asked anything when the policy was made live
        return Topic(name, "topic", len(ends), dict.fromkeys(ends, 0), ends)

    def _replaced(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        return [
            *super()._replaced(),
            (topics, "Admin", lambda *_: None),
            (topics, "ensure_policies", lambda settings, _admin: self._describe(settings, "policies")),
            (clients, "producer", lambda _settings: _Producer(self)),
        ]

    def shared(self) -> object:
        topics = self.bank.topics
        commands, activations = (one.id for one in topics.commands), (one.value for one in topics.activations)
        more = (frozenset(self.was_at.items()), self.switches, self.unanswered)
        return super().shared(), tuple(commands), tuple(activations), tuple(self.in_flight), *more

    # ── at the end ──

    def is_done(self) -> bool:
        """Whether all is read, and nothing is left to be sent."""
        return positions_of(self.tables) == self.bank.topics.ends and not self.in_flight and not self.unsent()

    def unsent(self) -> set[str]:
        """Ids of wishes that are not marked as sent."""
        return {row["id"] for row in self.tables["outbox"] if row["kind"] and row["sent_at"] is row["dead"] is None}

    def relays(self) -> bool:
        """Whether a relay is at work."""
        return any(not actor.done and actor.name.startswith("relay") for actor in self.play.actors.values())

    def _do_the_rest(self) -> None:
        self.keeps_flying = False
        self.unanswered = 0
        if self.tables["activations"]:  # a copy from before it was made live is held until then
            self.alone(lambda: self.play.add("operator", partial(_resume, self.settings)))
        for _ in range(ROUNDS):
            for version in self.judge.made_live():
                self.alone(PolicyAgent(self, f"settler{version}", version, 100).start)
            if self.is_done():
                break
            self.alone(_Relay("relay", self).start)
        else:
            raise Violation(LOST, f"there is no end to {self.tables['outbox']}")
        self.judge.check(self.tables)
        self.judge.check_end(self.tables)


class _Acknowledged(NamedTuple):
    """What a delivery report says."""

    position: int

    def offset(self) -> int:
        return self.position


class _Producer:
    """Appends activations."""

    def __init__(self, world: PolicyWorld) -> None:
        self.world = world
        self.waiting: list[tuple[bytes, Callable[[Any, Any], None]]] = []

    def produce(
        self, _topic: str, value: bytes, _key: bytes, _partition: int, delivered: Callable[[Any, Any], None]
    ) -> None:
        self.waiting.append((value, delivered))

    def flush(self, _seconds: float) -> int:
        found = self.world.bank.topics.activations
        for value, delivered in self.waiting:
            record = Record(0, len(found), 0, None, value)
            found.append(record)
            delivered(None, _Acknowledged(record.offset))
        self.waiting.clear()
        return 0


class PolicyAgent(Agent):
    """The agent of a policy, which goes on while a relay makes more to read."""

    def __init__(self, world: PolicyWorld, name: str, version: int, batch: int) -> None:
        self.of = world
        policy = moving(version)
        code = {policy.agent: version}
        reader = Reader(
            code, batch=batch, window=Window(0.0), difference=difference, look_again=LOOK_AGAIN_S, waits=EngineStop
        )
        work = PolicyWorker(world.settings, policy, name)
        super().__init__(world, name, {}, range(PARTITIONS), batch, work=work, reader=reader)

    def _goes_on(self) -> bool:
        self.world.play.wait_until(lambda: self._there_is_more() or not self.of.relays(), prompt=False)
        return self._there_is_more()

    def _there_is_more(self) -> bool:
        records = self.world.log.records
        return any(self.at[partition] < len(records[partition]) for partition in self.reader.fetching)

    def _waits(self, error: EngineStop) -> None:
        """The other version's agent folds it; this one waits for its other partitions."""


class _Relay:
    """As `policies/engine/relay.py` is one, sure to own all partitions; it ends when it has nothing to do for long."""

    def __init__(self, name: str, world: PolicyWorld) -> None:
        self.name = name
        self.world = world
        self.mine = {(MOVING, partition) for partition in range(PARTITIONS)}
        self.sender = Sender()
        self.reports: list[tuple[UnsentCommand, bool]] = []
        self.sends = 0
        self.known: set[str] = set()

    def start(self) -> None:
        self.world.play.add(self.name, self._run)

    def _run(self) -> None:
        connection: Connection | None = None
        looks = 0
        while looks < LOOKS:
            if connection is None or connection.closed:
                connection = connect(self.world.settings, self.name)
            try:
                looks = 0 if self._serve(connection) else looks + 1
            except psycopg.OperationalError:
                connection.close()
            if self.world.is_done():
                return
            self._wait()

    def _wait(self) -> None:
        """Until something is reported or wished, or for a while."""
        play = self.world.play
        if not self.known:
            play.sleep(1.0)
            return
        play.wait_until(
            lambda: bool(self.reports or not self._flying() or self.world.unsent() - self.known), prompt=False
        )
        play.now += 1.0

    def _flying(self) -> bool:
        return any(name.startswith(f"{self.name}.") for name in self.world.in_flight)

    def _serve(self, connection: Connection) -> bool:
        """One turn of the loop; whether there was anything to do."""
        sends = self.sends
        for row in self.sender.again():
            self._send(row)
        while self.reports:
            row, is_there = self.reports.pop(0)
            if not is_there:
                self.sender.failed(row)
                continue
            for following in self.sender.acknowledged(row, self.world.play.now):
                self._send(following)
        if ids := self.sender.to_mark(self.world.play.now):
            mark_sent(connection, ids)
            self.sender.marked(ids)
            self.known.difference_update(ids)
        self.sender.assigned(self.mine)
        rows = list(read_unsent(connection, self.mine, NOW, MOST + self.sender.known))
        self.known |= {row.id for row in rows}
        for row in self.sender.unsent(rows, NOW)[0]:
            self._send(row)
        return bool(ids) or self.sends > sends or bool(self.known)

    def _send(self, row: UnsentCommand) -> None:
        """It arrives at some time, or never if the process ends before."""
        self.sends += 1
        name = f"{self.name}.{self.sends}"
        self.world.in_flight.append(name)
        actor = self.world.play.add(name, partial(self._arrive, name, row), self.name)
        if self.world.keeps_flying:
            actor.process = ""

    def _arrive(self, name: str, row: UnsentCommand) -> None:
        play = self.world.play
        try:
            play.pause()
            body = msgspec.Raw(row.body.encode())
            depth = row.depth or UNSET
            command = Command(row.id, row.target, row.type, body, None, row.correlation_id, row.causation_id, depth)
            self.world.bank.topics.send(command)
            self.world.play.changes += 1
            is_answered = not self.world.unanswered
            self.world.unanswered -= not is_answered
            play.pause()
            self.reports.append((row, is_answered))
        finally:
            self.world.in_flight.remove(name)


# ── steps of a scenario ──


def _resume(settings: Settings) -> None:
    with suppress(NotHeld):
        resume(settings, None, EVER)


def policy_agent(name: str, version: int, batch: int) -> Callable[[PolicyWorld], None]:
    return lambda world: PolicyAgent(world, name, version, batch).start()


def relay(name: str = "relay") -> Callable[[PolicyWorld], None]:
    return lambda world: _Relay(name, world).start()


def make_live(world: PolicyWorld) -> None:
    """The first version, of a service without history."""
    with connect(world.settings, "start") as connection:
        assert start_new(world.settings, connection, moving(1)) or activations_of(connection, MOVING)


def to_second(world: PolicyWorld) -> None:
    """`samefold policies switch`."""
    switch(world.settings, moving(2))


def to_second_as_the_page_says(world: PolicyWorld) -> None:
    """The same, but after a restore only when the policy has caught up, and with no restore meanwhile: docs/policies.md."""
    world.play.pause()
    if world.has_caught_up():
        world.switches = True
        try:
            to_second(world)
        finally:
            world.switches = False
