"""The commits that a writer appended, or read up to its opening, and that the database does not show yet.

It holds the newest state of each stream and every outcome (rejections too). An entry stays until the database's own position shows
it. An acknowledgement is not enough: a command would be decided on a state that lacks the commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from commands.decision import Versioned
from domain.engine.contexts import Context, decode_event
from infra.log.records import Commit, EventRecord
from infra.log.rule import Counted, Reading
from infra.processes.time_limit import watched


class Inconsistent(Exception):
    """There is a gap between a row and the overlay: the snapshot is too old or too new. The writer opens again."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    mark: int
    """Own entries: their seq. Entries read before the opening: their offset in `events`."""
    stream: str
    command_id: str


class _Stream:
    """A stream's part of the overlay: its state if known, else the commits to fold on its row."""

    __slots__ = ("entries", "state", "unfolded")

    def __init__(self) -> None:
        self.entries = 0
        self.state: Versioned | None = None
        self.unfolded: list[tuple[int, list[EventRecord]]] = []


class Overlay:
    """One partition's overlay. `len()` is the number of commits in it."""

    def __init__(self) -> None:
        self._read: deque[_Entry] = deque()
        self._own: deque[_Entry] = deque()
        self._streams: dict[str, _Stream] = {}
        self._answered: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._read) + len(self._own)

    def add_read(self, counted: Sequence[Counted]) -> None:
        """Commits read before the opening, in order."""
        for offset, _, commit in counted:
            stream = self._enter(self._read, offset, commit)
            if commit.events:
                stream.unfolded.append((commit.version, commit.events))

    def add_own(self, commit: Commit, after: Versioned) -> None:
        """A commit of this writer, before it is acknowledged."""
        self._enter(self._own, commit.seq, commit).state = after

    def answered(self, stream: str, command_id: str) -> bool:
        return (stream, command_id) in self._answered

    def knows(self, stream: str) -> bool:
        """Whether `state` needs no row."""
        entry = self._streams.get(stream)
        return entry is not None and entry.state is not None

    def state(self, stream: str, row: Versioned | None, context: Context) -> Versioned:
        """The newest state: the newer of row and overlay wins, by version. Raises Inconsistent."""
        before = row or Versioned(0, context.initial)
        entry = self._streams.get(stream)
        if entry is None:
            return before
        if entry.state is None:
            entry.state = _fold(before, entry.unfolded, context)
            entry.unfolded = []
        return entry.state

    def evict(self, position: Reading, epoch: int) -> bool:
        """Drop what the database shows at `position`; whether anything was dropped."""
        before = len(self)
        while self._read and self._read[0].mark < position.next_offset:
            self._leave(self._read.popleft())
        if position.epoch == epoch:
            while self._own and self._own[0].mark <= position.seq:
                self._leave(self._own.popleft())
        return len(self) < before

    def _enter(self, entries: deque[_Entry], mark: int, commit: Commit) -> _Stream:
        name = commit.stream
        entries.append(_Entry(mark, name, commit.command_id))
        self._answered.add((name, commit.command_id))
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream()
        stream.entries += 1
        return stream

    def _leave(self, entry: _Entry) -> None:
        self._answered.discard((entry.stream, entry.command_id))
        stream = self._streams[entry.stream]
        stream.entries -= 1
        if not stream.entries:
            del self._streams[entry.stream]


@watched(lambda local: f"folding events up to version {local['after']} in {local['context'].name}")
def _fold(row: Versioned, commits: list[tuple[int, list[EventRecord]]], context: Context) -> Versioned:
    version, state = row.version, row.state
    for after, events in commits:
        if after <= version:
            continue
        if after - len(events) != version:
            raise Inconsistent(f"row at version {version}, next commit starts at {after - len(events)}")
        for event in events:
            state = context.fold(state, decode_event(context, event.type, event.data))
        version = after
    return Versioned(version, state)
