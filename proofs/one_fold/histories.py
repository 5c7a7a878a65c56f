"""Logs as they may come to be: writers that take over from each other, and whatever else may reach the topic.

Writers keep the protocol (an opening, then commits decided on what counted before it and on what they appended since); the way to
the topic does not: records are lost, repeated, held back and reordered, fenced writers go on, and foreign producers append.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infra.log.partitioner import partition_of
from infra.log.records import EventRecord, Reason
from tests.engine.log import commit, opening

Given = tuple[str, Sequence[EventRecord]]
"""What one command becomes: its stream and its events; without events, a rejection."""

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
REFUSED = Reason("refused", "It can't be done: 'x\\y'.")


@dataclass(slots=True)
class History:
    """A log by partition and offset, and how often each thing happened that it is made of."""

    logs: list[list[bytes | None]]
    made: Counter[str]


def history(chance: random.Random, partitions: int, given: Sequence[Given]) -> History:
    """A log in which each of these counts once, in this order within its partition."""
    made: Counter[str] = Counter()
    logs = []
    for number in range(partitions):
        own = [one for one in given if partition_of(one[0], partitions) == number]
        part = _Partition(number, chance, made, own)
        while part.true.last < len(own) - 1:
            part.step()
        logs.append(part.log)
    return History(logs, made)


@dataclass(slots=True)
class _Known:
    """What a writer knows: the version of each stream, and the offset of the last command that was answered."""

    versions: dict[str, int] = field(default_factory=dict)
    last: int = -1

    def learn(self, one: _Appended) -> None:
        self.versions[one.stream], self.last = one.version, one.offset


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
    stream: str
    version: int
    offset: int


class _Partition:
    """`commands` are those of its topic of commands, by offset."""

    def __init__(self, number: int, chance: random.Random, made: Counter[str], commands: Sequence[Given]) -> None:
        self.nobody: Given = (f"-/{number}", ())
        self.chance = chance
        self.made = made
        self.commands = commands
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
        self.writers.append(_Writer(epoch, _Known(dict(self.true.versions), self.true.last)))

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
        if not self.log:
            return
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
        stream, _ = self.chance.choice(self.commands or [self.nobody])
        self.log.append(commit(epoch, seq, stream=stream, version=7, command_id="impostor", command_offset=10**6))

    def _opening(self, value: bytes) -> None:
        self.epoch, self.seq = len(self.log), 0
        self.log.append(value)

    def _append(self, one: _Appended) -> None:
        if (one.epoch, one.seq) == (self.epoch, self.seq + 1):
            self.seq = one.seq
            self.true.learn(one)
        self.appended.append(one)
        self.log.append(one.value)

    def _next(self, writer: _Writer) -> _Appended:
        """The writer's next commit: of the next command that it has not answered."""
        offset = writer.known.last + 1
        stream, events = self.commands[offset] if offset < len(self.commands) else self.nobody
        version = writer.known.versions.get(stream, 0) + len(events)
        writer.seq += 1
        value = commit(
            writer.epoch,
            writer.seq,
            stream=stream,
            version=version,
            events=events,
            command_id=f"c{offset}",
            command_offset=offset,
            reason=None if events else REFUSED,
        )
        self.made[f"of {len(events)} events"] += 1
        one = _Appended(value, writer.epoch, writer.seq, stream, version, offset)
        writer.known.learn(one)
        return one
