"""Logs as they may come to be: any commands, writers that take over from each other, and whatever else may reach the topic.

Writers keep the protocol (an opening, then commits decided on what counted before it and on what they appended
since); the way to the topic does not: records are lost, repeated, held back and reordered, fenced writers go on, and
foreign producers append. All of it comes out of a `random.Random`, be it Hypothesis's or a seeded one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Any, Protocol

import msgspec

from domain import accounts
from domain.accounts import (
    ChargeFee,
    CloseAccount,
    Command,
    CreditInterest,
    Deposit,
    Details,
    Event,
    OpenAccount,
    ReleaseHold,
    ReturnMoney,
    State,
    Withdraw,
)
from domain.language import Refusal
from infra.log.partitioner import partition_of
from infra.log.records import EventRecord, Reason
from proofs.one_fold.oracle import PARKING, POISON, Skip
from proofs.one_fold.views.holders import TOO_LARGE
from tests.engine.log import commit, opening

GARBAGE: tuple[bytes | None, ...] = (
    None,
    b"",
    b"garbage",
    b"\xff\x00\xfe",
    b"[]",
    b'{"samefold": "commit/1"}',
    b' {"samefold":"opening/1","writer":"w","commands_topic_id":"t"}',
    b'{"stream":"accounts/1","samefold":"commit/1","epoch":0,"seq":1}',
)
NAMES = ("", "576-", "Zürich/", "o'Neil \"\\ ", "\u202eabc", "🏦", "a" * 150)
WORDS = ("", "rent", "Kč → €", "a\\b\"c'd", "%s {}", "🏦" * 5, "x" * 200)
DAYS = (date(2026, 1, 1), date(2026, 1, 2), date(2024, 2, 29), date.min, date.max)
CENTS = (1, 2, 99, 100, 10**14)
LIMITS = (0, 1_000, 10**14)


@dataclass(slots=True)
class History:
    """A log by partition and offset. `made` counts what it is made of."""

    logs: list[list[bytes | None]]
    skips: list[Skip]
    made: Counter[str]


def history(
    chance: random.Random,
    partitions: int,
    steps: int,
    *,
    letters: str = "hpme",
    poison: float = 0.03,
    refused: float = 0.0,
    streams: int = 4,
) -> History:
    """So many steps in all. `letters` are those of the views that meet poison, in `poison` of the movements; of `refused` a
    view makes rows that the database refuses."""
    made: Counter[str] = Counter()
    parts = [
        _Partition(
            n,
            chance,
            made,
            _Bank(n, _streams(chance, n, partitions, streams), chance, made, (letters, poison, refused)),
        )
        for n in range(partitions)
    ]
    for _ in range(steps):
        chance.choice(parts).step()
    skips = [
        Skip(view, stream, first, first + chance.randrange(3))
        for part in parts
        for stream in part.clients.streams
        for view in (*PARKING, "statement", "daily_totals")
        if chance.randrange(12) == 0
        for first in [chance.randrange(1, 6)]
    ]
    made["skip"] = len(skips)
    return History([part.log for part in parts], skips, made)


def given_history(
    chance: random.Random, partitions: int, given: Sequence[tuple[str, Sequence[EventRecord]]]
) -> list[list[bytes | None]]:
    """A log by partition and offset, in which each of these commits counts once, in this order within its partition."""
    made: Counter[str] = Counter()
    logs = []
    for number in range(partitions):
        own = [one for one in given if partition_of(one[0], partitions) == number]
        part = _Partition(number, chance, made, _Given(number, own))
        while part.true.last < len(own) - 1:
            part.step()
        logs.append(part.log)
    return logs


@dataclass(frozen=True, slots=True)
class _Sent:
    """A command as it stands in `commands`."""

    offset: int
    stream: str
    id: str
    commands: Sequence[Any]
    refused: bool
    """Recorded as malformed, whatever it holds."""


@dataclass(slots=True)
class _Known:
    """What a writer knows: states by stream, the commands answered, the last one's offset."""

    states: dict[str, tuple[int, Any]] = field(default_factory=dict)
    answered: set[tuple[str, str]] = field(default_factory=set)
    last: int = -1

    def copy(self) -> _Known:
        return _Known(dict(self.states), set(self.answered), self.last)

    def learn(self, sent: _Sent, version: int, state: Any) -> None:
        self.states[sent.stream] = (version, state)
        self.answered.add((sent.stream, sent.id))
        self.last = sent.offset


@dataclass(slots=True)
class _Writer:
    epoch: int
    known: _Known
    seq: int = 0


@dataclass(slots=True)
class _Appended:
    """A commit on its way, and what is known once it counts."""

    value: bytes
    epoch: int
    seq: int
    sent: _Sent
    version: int
    state: Any


class _Clients(Protocol):
    """What is sent to a partition, and what becomes of it."""

    streams: Sequence[str]

    def sent(self, offset: int) -> _Sent:
        """The command at an offset of `commands`; the same one for every writer."""

    def decide(self, sent: _Sent, state: Any) -> tuple[list[EventRecord], Any, Reason | None]:
        """Events, the state after them (None is that of a new stream), and why it is rejected."""


class _Partition:
    def __init__(self, number: int, chance: random.Random, made: Counter[str], clients: _Clients) -> None:
        self.number = number
        self.chance = chance
        self.made = made
        self.clients = clients
        self.log: list[bytes | None] = []
        self.writers: list[_Writer] = []
        self.held: list[_Appended] = []
        self.appended: list[_Appended] = []
        self.epoch, self.seq, self.true = -1, 0, _Known()

    def step(self) -> None:
        chance = self.chance
        newest = self.writers[-1] if self.writers else None
        if newest is None or ((newest.epoch, newest.seq) != (self.epoch, self.seq) and chance.randrange(3) == 0):
            acts: list[tuple[int, Callable[[], None]]] = [(8, self._open), (1, self._garbage), (1, self._impostor)]
        else:
            acts = [
                (60, self._commit),
                (4, self._open),
                (6, self._fenced),
                (2, self._lose),
                (2, self._hold),
                (4, self._release),
                (2, self._swap),
                (4, self._repeat),
                (3, self._garbage),
                (2, self._impostor),
            ]
        [act] = chance.choices([act for _, act in acts], [weight for weight, _ in acts])
        self.made[act.__name__.strip("_")] += 1
        act()

    # ── what writers do ──

    def _open(self) -> None:
        epoch = len(self.log)
        self._opening(opening(writer=f"w{len(self.writers)}"))
        self.writers.append(_Writer(epoch, self.true.copy()))

    def _commit(self) -> None:
        self._append(self._next(self.writers[-1]))

    def _fenced(self) -> None:
        """One that does not know it yet."""
        if len(self.writers) > 1:
            self._append(self._next(self.chance.choice(self.writers[:-1])))

    def _lose(self) -> None:
        self._next(self.writers[-1])

    def _hold(self) -> None:
        self.held.append(self._next(self.writers[-1]))

    def _release(self) -> None:
        if self.held:
            self._append(self.held.pop(self.chance.randrange(len(self.held))))

    def _swap(self) -> None:
        first, second = self._next(self.writers[-1]), self._next(self.writers[-1])
        self._append(second)
        self._append(first)

    def _repeat(self) -> None:
        """Any record once more: an opening, too, begins an epoch then, in which no writer appends."""
        offset = self.chance.randrange(len(self.log))
        again = [one for one in self.appended if one.value == self.log[offset]]
        value = self.log[offset]
        if again:
            self._append(again[0])
        elif value is not None and value.startswith(b'{"samefold":"opening/1"'):
            self._opening(value)
        elif value is None or b'"command_id":"impostor"' not in value:  # which might be in line by now
            self.log.append(value)

    def _garbage(self) -> None:
        self.log.append(self.chance.choice(GARBAGE))

    def _impostor(self) -> None:
        """Epochs that no opening began, and numbers out of line."""
        epoch, seq = self.chance.choice(
            [(-1, 1), (len(self.log) + 3, 1), (self.epoch, self.seq), (self.epoch, self.seq + 2), (self.epoch, -1)]
        )
        stream = self.chance.choice(self.clients.streams)
        self.log.append(commit(epoch, seq, stream=stream, version=7, command_id="impostor", command_offset=10**6))

    def _opening(self, value: bytes) -> None:
        self.epoch, self.seq = len(self.log), 0
        self.log.append(value)

    def _append(self, one: _Appended) -> None:
        if (one.epoch, one.seq) == (self.epoch, self.seq + 1):
            self.seq = one.seq
            self.true.learn(one.sent, one.version, one.state)
        self.appended.append(one)
        self.log.append(one.value)

    def _next(self, writer: _Writer) -> _Appended:
        """The writer's next commit: of the next command that it has not answered."""
        offset = writer.known.last + 1
        while ((sent := self.clients.sent(offset)).stream, sent.id) in writer.known.answered:
            offset += 1
        version, state = writer.known.states.get(sent.stream, (0, None))
        events: list[EventRecord] = []
        reason = Reason("malformed", "It can't be read: 'x\\y'.") if sent.refused else None
        if reason is None:
            events, state, reason = self.clients.decide(sent, state)
        writer.seq += 1
        value = commit(
            writer.epoch,
            writer.seq,
            stream=sent.stream,
            version=version + len(events),
            events=events,
            command_id=sent.id,
            command_offset=sent.offset,
            reason=reason,
        )
        self.made[f"of {len(events)} events" if events else "refused"] += 1
        writer.known.learn(sent, version + len(events), state)
        return _Appended(value, writer.epoch, writer.seq, sent, version + len(events), state)


class _Given:
    """Commits that are given, decided whatever the state; then nothing but what can't be read."""

    def __init__(self, number: int, commits: Sequence[tuple[str, Sequence[EventRecord]]]) -> None:
        self.number = number
        self.commits = commits
        self.streams: Sequence[str] = [stream for stream, _ in commits] or [f"-/{number}"]

    def sent(self, offset: int) -> _Sent:
        if offset < len(self.commits):
            stream, events = self.commits[offset]
            return _Sent(offset, stream, f"c{offset}", events, refused=False)
        return _Sent(offset, f"-/{self.number}", f"topic:{self.number}:{offset}", (), refused=True)

    def decide(self, sent: _Sent, state: Any) -> tuple[list[EventRecord], Any, Reason | None]:
        return list(sent.commands), state, None


class _Bank:
    """Customers of the sample bank."""

    def __init__(
        self,
        number: int,
        streams: Sequence[str],
        chance: random.Random,
        made: Counter[str],
        trouble: tuple[str, float, float],
    ) -> None:
        self.number = number
        self.streams = streams
        self.chance = chance
        self.made = made
        self.letters, self.poison, self.refused = trouble
        self.commands: list[_Sent] = []

    def decide(self, sent: _Sent, state: Any) -> tuple[list[EventRecord], Any, Reason | None]:
        events: list[Event] = []
        reason = None
        state = state or State()
        for command in sent.commands:
            try:
                decided = accounts.decide(command, state)
            except Refusal as refusal:
                reason = None if events else Reason(refusal.code, refusal.message)
                break
            for event in decided:
                events.append(event)
                state = accounts.evolve(state, event)
        records = [EventRecord(type(event).__name__, msgspec.Raw(msgspec.json.encode(event))) for event in events]
        return records, state, reason

    def sent(self, offset: int) -> _Sent:
        while len(self.commands) <= offset:
            self.commands.append(self._new(len(self.commands)))
        return self.commands[offset]

    def _new(self, offset: int) -> _Sent:
        chance = self.chance
        kind = chance.randrange(20)
        if kind == 0:
            return _Sent(offset, f"-/{self.number}", f"topic:{self.number}:{offset}", (), refused=True)
        if kind <= 2 and self.commands:
            again = chance.choice(self.commands)
            self.made["sent twice"] += 1
            return _Sent(offset, again.stream, again.id, again.commands, again.refused)
        stream = chance.choice(self.streams)
        seen = any(one.stream == stream for one in self.commands)
        count = chance.choice((1, 1, 1, 1, 2, 3))
        commands = tuple(self._command(opens=not seen and n == 0) for n in range(count))
        return _Sent(offset, stream, f"{chance.choice(WORDS[:3])}{offset}", commands, refused=False)

    def _command(self, *, opens: bool) -> Command:
        chance = self.chance
        on = chance.choice(DAYS) if chance.randrange(4) == 0 else DAYS[0] + timedelta(days=chance.randrange(5))
        if opens or chance.randrange(15) == 0:
            return OpenAccount(overdraft_limit=chance.choice(LIMITS), on=on, owner=f"{on:%A}")
        if chance.randrange(12) == 0:
            return CloseAccount(on=on)
        kind: Any = chance.choice((Deposit, Deposit, Withdraw, Withdraw, CreditInterest, ChargeFee))
        # the same few amounts over and over: sums come to nothing now and then, and an account can be closed
        cents = chance.choice(CENTS) if chance.randrange(3) == 0 else chance.choice((100, 250))
        command: Command = kind(cents=cents, on=on, details=self._details())
        if not isinstance(command, Withdraw):
            return command
        match chance.randrange(6):  # holds of the same reference meet
            case 0 | 1:
                return replace(command, hold="h")
            case 2:
                return ReturnMoney(hold="h", on=on, details=command.details)
            case 3:
                return ReleaseHold(hold="h")
            case _:
                return command

    def _details(self) -> Details:
        chance = self.chance
        purpose = chance.choice(WORDS)
        if self.letters and chance.random() < self.poison:
            self.made["poison"] += 1
            purpose = POISON + "".join(letter for letter in self.letters if chance.randrange(2)) + self.letters[0]
        elif self.refused and chance.random() < self.refused:
            purpose = TOO_LARGE
        return Details(
            operation=chance.choice(WORDS), purpose=purpose, counter_bank=chance.choice(("", "YZ")), counter_account=""
        )


def _streams(chance: random.Random, partition: int, partitions: int, count: int) -> list[str]:
    """Streams that live in the partition."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        stream = f"accounts/{NAMES[(len(found) + partition) % len(NAMES)]}{number}"
        number += 1
        if partition_of(stream, partitions) == partition:
            found.append(stream)
    return found
