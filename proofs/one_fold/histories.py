"""Logs as they may come to be: writers that take over from each other, and whatever else may reach the topic.

Writers keep the protocol (an opening, then commits decided on what counted before it and on what they appended since); the way to
the topic does not: records are lost, repeated, held back and reordered, fenced writers go on, and foreign producers append.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
        part = _Partition(chance, made, own)
        while part.answered < len(own):
            part.step()
        logs.append(part.log)
    return History(logs, made)


@dataclass(slots=True)
class _Writer:
    """Its commit `seq` answers command `first + seq - 1`: it knows what counted before it, and what it sent."""

    epoch: int
    first: int
    seq: int = 0


Sent = tuple[_Writer, int]
"""A commit, by its writer and seq."""


class _Partition:
    """`commands` are those of its topic of commands, by offset; the first `answered` have a commit that counts."""

    def __init__(self, chance: random.Random, made: Counter[str], commands: Sequence[Given]) -> None:
        self.chance, self.made, self.commands = chance, made, commands
        self.log: list[bytes | None] = []
        self.writers: list[_Writer] = []
        self.openings: list[bytes] = []
        self.sent: list[Sent] = []
        self.epoch, self.seq, self.answered = -1, 0, 0

    def step(self) -> None:
        acts: dict[Callable[[], None], int] = {self._open: 4, self._garbage: 3, self._impostor: 2}
        if self.writers:
            more = {self._commit: 60, self._fenced: 6, self._hold: 4, self._swap: 2, self._repeat: 8, self._reopen: 1}
            newest = self.writers[-1]
            if (newest.epoch, newest.seq) == (self.epoch, self.seq) or self.chance.randrange(3):
                acts |= more
        [act] = self.chance.choices(list(acts), list(acts.values()))
        self.made[act.__name__.strip("_")] += 1
        act()

    def _open(self) -> None:
        writer = _Writer(len(self.log), self.answered)
        self.openings.append(opening(writer=f"w{len(self.writers)}"))
        self.writers.append(writer)
        self._opening(self.openings[-1])

    def _reopen(self) -> None:
        """An opening once more begins an epoch, too, in which no writer appends."""
        self._opening(self.chance.choice(self.openings))

    def _opening(self, value: bytes) -> None:
        self.epoch, self.seq = len(self.log), 0
        self.log.append(value)

    def _commit(self) -> None:
        self._append(self._next(self.writers[-1]))

    def _fenced(self) -> None:
        """One that does not know it yet."""
        self._append(self._next(self.chance.choice(self.writers)))

    def _hold(self) -> None:
        """It may come later, or never."""
        self._next(self.writers[-1])

    def _swap(self) -> None:
        first, second = self._next(self.writers[-1]), self._next(self.writers[-1])
        self._append(second)
        self._append(first)

    def _repeat(self) -> None:
        """Any commit that was sent: for the first time, or once more."""
        if self.sent:
            self._append(self.chance.choice(self.sent))

    def _garbage(self) -> None:
        self.log.append(self.chance.choice(GARBAGE))

    def _impostor(self) -> None:
        """Epochs that no opening began, and numbers out of line."""
        epoch, seq = self.chance.choice(
            [(-1, 1), (len(self.log) + 3, 1), (self.epoch, self.seq), (self.epoch, self.seq + 2), (self.epoch, -1)]
        )
        stream = self.chance.choice(self.commands)[0]
        self.log.append(commit(epoch, seq, stream=stream, version=7, command_id="impostor", command_offset=10**6))

    def _next(self, writer: _Writer) -> Sent:
        writer.seq += 1
        self.sent.append((writer, writer.seq))
        return self.sent[-1]

    def _append(self, sent: Sent) -> None:
        writer, seq = sent
        offset = writer.first + seq - 1
        if offset >= len(self.commands):
            return  # there is nothing to answer
        if (writer.epoch, seq) == (self.epoch, self.seq + 1):
            self.seq, self.answered = seq, offset + 1
        stream, events = self.commands[offset]
        version = sum(len(its) for name, its in self.commands[: offset + 1] if name == stream)
        self.made[f"of {len(events)} events"] += 1
        reason = None if events else REFUSED
        what: dict[str, Any] = {"stream": stream, "version": version, "events": events, "reason": reason}
        self.log.append(commit(writer.epoch, seq, command_id=f"c{offset}", command_offset=offset, **what))
