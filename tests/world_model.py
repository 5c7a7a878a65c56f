"""One partition in memory, in a hostile world: the real writers, everything around them a model (DESIGN §2a).

Appends arrive late, twice, out of order or never; acknowledgements late, never or without an offset; handlers freeze, crash and
come back beside each other; the read model lags and is restored to older states. `World.step` does one random thing,
`World.settle` ends the faults and lets the rest finish. Whatever breaks a promise raises Violation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from commands.decision import Versioned, decide
from commands.intake import Received
from commands.writer import (
    Action,
    Append,
    Confirm,
    Limits,
    Load,
    Open,
    Phase,
    ReadLog,
    Refuse,
    Serve,
    Snapshot,
    Wait,
    Writer,
)
from infra.contexts import decode_event
from infra.log.records import Commit, Record
from infra.log.rule import START, Counted, Reading, Void, read
from tests.log import TOPIC_ID, opening
from tests.purse import PURSE, Fill, Spend

Rule = Callable[[Reading, Iterable[Record]], tuple[Reading, list[Counted], list[Void]]]
Fold = Callable[["View", Rule, Sequence[Record]], "View"]
Key = tuple[str, str]
Wanted = tuple[set[Key], set[Key]]

MAX_BYTES = 10_000
ACK_TIMEOUT = 30


class Violation(AssertionError):
    """A promise of DESIGN §2a is broken; the letter comes first."""


@dataclass(frozen=True)
class View:
    """What a reader made of the log so far."""

    reading: Reading = START
    rows: dict[str, Versioned] = field(default_factory=dict)
    outcomes: dict[Key, Commit] = field(default_factory=dict)

    def after(self, rule: Rule, records: Sequence[Record]) -> View:
        reading, counted, _ = rule(self.reading, records)
        rows, outcomes = dict(self.rows), dict(self.outcomes)
        for _, _, commit in counted:
            state: Any = rows[commit.stream].state if commit.stream in rows else PURSE.state()
            for event in commit.events:
                state = PURSE.evolve(state, decode_event(PURSE, event.type, event.data))
            rows[commit.stream] = Versioned(commit.version, state)
            outcomes[commit.stream, commit.command_id] = commit
        return View(reading, rows, outcomes)

    def snapshot(self, wanted: Wanted = (set(), set())) -> Snapshot:
        rows = {stream: self.rows[stream] for _, stream in wanted[0] if stream in self.rows}
        return Snapshot({0: self.reading}, "g", True, rows, frozenset(wanted[1] & self.outcomes.keys()))


@dataclass
class Flight:
    """An append under way, and who waits for its acknowledgement."""

    value: bytes
    acknowledge: Callable[[int | None], None] | None


@dataclass
class Report:
    """Of one append of a commit. Kafka's client makes them in the order of the appends; some never come."""

    epoch: int
    seq: int
    offset: int | None = None
    came: bool = False

    def acknowledge(self, offset: int | None) -> None:
        self.offset, self.came = offset, True


class Handler:
    """A shell around a writer, as `commands/handler.py` is one; between any two of its steps it may be frozen for ever."""

    def __init__(self, world: World, name: str, writer: type[Writer]) -> None:
        self.world = world
        self.name = name
        self.writer = writer(0, TOPIC_ID, Limits(world.run_ahead, MAX_BYTES, ACK_TIMEOUT))
        self.next_command = 0
        self.opened_at = 0.0
        self.reports: deque[Report] = deque()
        self.todo: Callable[[], Action | None] | None = self.writer.start

    def step(self) -> None:
        """One thing that a process may do next."""
        chance = self.world.chance
        while self.reports and self.reports[0].epoch != self.writer.epoch:
            self.reports.popleft()
        if self.reports and self.reports[0].came and (self.todo is None or chance(0.5)):
            report = self.reports.popleft()
            self.do(self.writer.on_acknowledged(report.seq, report.offset, self.world.now))
        elif self.todo is not None:
            todo, self.todo = self.todo, None
            self.do(todo())
        elif self.writer.phase is Phase.OPENING and self.world.now - self.opened_at > ACK_TIMEOUT:
            self.do(self.writer.on_opened(None))  # Kafka's client reports every append, in the end as timed out
        elif self.writer.phase is Phase.SERVING:
            if chance(0.3):
                self.do(self.writer.on_snapshot(self.world.database.snapshot()))
            else:
                self.take_commands()
        self.do(self.writer.on_clock(self.world.now))

    def take_commands(self) -> None:
        count = min(self.writer.room, self.world.random.randint(1, 3))
        batch = self.world.commands[self.next_command : self.next_command + max(count, 0)]
        self.next_command += len(batch)
        self.world.group_offset = max(self.world.group_offset, self.next_command)
        load = self.load(self.writer.wants(batch))
        self.todo = lambda: self.decide(batch, load())

    def load(self, wanted: Wanted) -> Callable[[], Snapshot]:
        """A reading of the database, made now; its answer may take its time."""
        snapshot = self.world.database.snapshot(wanted)
        return lambda: snapshot

    def decide(self, batch: Sequence[Received], snapshot: Snapshot) -> None:
        for action in self.writer.on_commands(batch, snapshot, self.world.now):
            self.do(action)

    def do(self, action: Action | None) -> None:
        world, writer = self.world, self.writer
        match action:
            case None:
                return
            case Load():
                position = world.database.snapshot()
                self.todo = lambda: writer.on_position(position, len(world.log))
            case Open():
                self.opened_at = world.now
                world.flights.append(Flight(opening(self.name), self.opened(writer.openings)))
            case ReadLog(start, stop):
                some = world.log[start : min(stop, start + world.random.randint(0, 4))]
                self.todo = lambda: writer.on_log(some)
            case Serve(offset):
                self.next_command = self.resume_at(offset)
            case Append(seq, _, value):
                self.reports.append(Report(writer.epoch, seq))
                world.flights.append(Flight(value, self.reports[-1].acknowledge))
            case Wait(_):
                self.todo = writer.start
            case Confirm(_):
                self.todo = self.confirm
            case Refuse(why):
                raise Violation(f"refused: {why}")
        world.note(self.name, action)

    def opened(self, number: int) -> Callable[[int | None], None]:
        def acknowledge(offset: int | None) -> None:
            if self.writer.openings == number:
                self.todo = lambda: self.writer.on_opened(offset)

        return acknowledge

    def confirm(self) -> Action | None:
        if self.world.assignee is self:
            return self.writer.on_confirmed()
        self.todo = self.confirm
        return None

    def resume_at(self, offset: int) -> int:
        return offset


class World:
    def __init__(
        self,
        seed: int,
        *,
        writer: type[Writer] = Writer,
        handler: type[Handler] = Handler,
        rule: Rule = read,
        agent: Fold = View.after,
    ) -> None:
        self.random = Random(seed)
        self.rule = rule
        self.fold = agent
        self.handler_type = handler
        self.writer_type = writer
        self.trace: list[tuple[object, ...]] = []
        self.now = 0.0
        self.run_ahead = self.random.choice([3, 5, 8])
        self.commands = _commands(self.random)
        self.group_offset = 0
        self.log: list[Record] = []
        self.flights: list[Flight] = []
        self.truth = [View()]
        """By length of the log: what counts."""
        self.answers: dict[Key, Commit] = {}
        self.database = View()
        self.backups = [View()]
        self.born = 0
        self.handlers = [self.new_handler() for _ in range(self.random.choice([2, 2, 3]))]
        self.assignee = self.handlers[0]

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def note(self, *what: object) -> None:
        self.trace.append(what)

    def new_handler(self) -> Handler:
        self.born += 1
        return self.handler_type(self, f"w{self.born}", self.writer_type)

    # ── one random thing ──

    def step(self) -> None:
        self.now += 1
        [what] = self.random.choices(
            [
                self.some_handler,
                self.some_flight,
                self.agent,
                self.restore,
                self.crash,
                self.reassign,
                self.time_passes,
            ],
            [50, 30, 15, 1, 1, 3, 1],
        )
        what()

    def some_handler(self) -> None:
        self.random.choice(self.handlers).step()

    def some_flight(self) -> None:
        if not self.flights:
            return
        number = 0 if self.chance(0.8) else self.random.randrange(len(self.flights))
        flight = self.flights.pop(number)
        [fate] = self.random.choices(["arrives", "unanswered", "vague", "twice", "lost", "failed"], [80, 4, 2, 6, 4, 4])
        self.note(fate, flight.value)
        if fate == "twice":
            self.flights.append(Flight(flight.value, None))
        offset = None if fate in ("lost", "failed") else self.append(flight.value)
        if flight.acknowledge and fate not in ("unanswered", "lost"):
            flight.acknowledge(None if fate == "vague" else offset)

    def agent(self) -> None:
        """The read model commits a batch."""
        start = self.database.reading.next_offset
        self.show(self.fold(self.database, self.rule, self.log[start : start + self.random.randint(1, 4)]))
        self.backups.append(self.database)

    def restore(self) -> None:
        self.show(self.random.choice(self.backups))
        self.note("the database was restored")

    def crash(self) -> None:
        """A handler dies; what it appended is still under way, and another one takes its place."""
        gone = self.random.randrange(len(self.handlers))
        self.note(self.handlers[gone].name, "crashed")
        self.handlers[gone] = self.assignee = self.new_handler()

    def reassign(self) -> None:
        """The group moves the partition; whoever had it may learn of it late."""
        self.assignee = self.random.choice(self.handlers)
        if self.assignee.todo is None and self.assignee.writer.phase is not Phase.SERVING and self.chance(0.5):
            self.assignee.todo = self.assignee.writer.start

    def time_passes(self) -> None:
        self.now += ACK_TIMEOUT

    # ── what must hold ──

    def append(self, value: bytes) -> int:
        """The log gets a record: promises A, B and G."""
        offset = len(self.log)
        self.log.append(Record(0, offset, 0, None, value))
        before = self.truth[-1]
        _, counted, _ = self.rule(before.reading, self.log[offset:])
        for _, _, commit in counted:
            self.check_commit(before, commit)
        self.truth.append(before.after(self.rule, self.log[offset:]))
        return offset

    def check_commit(self, before: View, commit: Commit) -> None:
        key = (commit.stream, commit.command_id)
        if key in before.outcomes:
            raise Violation(f"A: {key} counts twice")
        if commit.command_offset <= before.reading.command_offset:
            raise Violation(f"G: command {commit.command_offset} after {before.reading.command_offset}")
        state = before.rows.get(commit.stream, Versioned(0, PURSE.state()))
        right = decide(
            self.commands[commit.command_offset], state, epoch=commit.epoch, seq=commit.seq, max_bytes=MAX_BYTES
        )
        if commit != right.commit:
            raise Violation(f"B: {commit} was not decided on {state}")

    def show(self, view: View) -> None:
        """The database commits: promises C and D."""
        for key, commit in view.outcomes.items():
            if self.answers.setdefault(key, commit) != commit:
                raise Violation(f"D: the answer to {key} changed")
        if view != self.truth[view.reading.next_offset]:
            raise Violation(f"C: the read model at {view.reading} is not the fold of what counts")
        self.database = view

    # ── the end ──

    def settle(self, rounds: int = 150) -> None:
        """The faults stop: promises F and H."""
        self.note("the faults stop")
        wanted = {(command.stream, command.id) for command in self.commands}
        for _ in range(rounds):
            if wanted <= self.database.outcomes.keys():
                break
            self.now += 5
            for handler in self.handlers:
                handler.step()
            flights, self.flights = self.flights, []
            for flight in flights:
                offset = self.append(flight.value)
                if flight.acknowledge:
                    flight.acknowledge(offset)
            self.show(self.fold(self.database, self.rule, self.log[self.database.reading.next_offset :]))
        else:
            raise Violation(f"F: no answer to {wanted - self.database.outcomes.keys()}")
        for backup in self.backups:
            if self.fold(backup, self.rule, self.log[backup.reading.next_offset :]) != self.truth[-1]:
                raise Violation(f"H: the position {backup.reading} continues to another result")


def _commands(random: Random) -> list[Received]:
    """Commands on two purses, with repeated ids, where what is decided depends on what was decided before."""
    commands = []
    for offset in range(random.randint(4, 8)):
        command = random.choice([Fill, Spend, Spend])(cents=random.randint(1, 3))
        stream, id_ = f"purse/{random.randint(1, 2)}", f"c{random.randint(1, 6)}"
        expected = random.randint(0, 2) if random.random() < 0.15 else None
        commands.append(Received(offset, stream, id_, "f", expected, PURSE, command))
    return commands


def walk(seed: int, steps: int = 150, **parts: Any) -> World:
    """One life of a world. A Violation carries the seed and what happened."""
    world = World(seed, **parts)
    try:
        for _ in range(steps):
            world.step()
        world.settle()
    except Violation as violation:
        violation.add_note("\n".join([f"walk({seed}):", *(" ".join(map(str, what)) for what in world.trace)]))
        raise
    return world
