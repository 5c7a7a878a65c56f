"""The writer of one partition, as a state machine without I/O (docs/protocol.md, ADR 10).

Facts go in (a database snapshot, an acknowledgement, records, the clock), actions come out. `commands/handler.py` carries them out,
and so does a model checker. The phases of a partition:

    LOADING ──position──▶ OPENING ──acknowledged at o──▶ READING ──record at o consumed──▶ SERVING
       ▲                                                                                      │
       └──────── the group confirms ◀────────── UNCONFIRMED ◀──── a ReopenReason, in any phase ┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

import msgspec

from commands.decision import Decided, Versioned, decide, is_slow
from commands.intake import Received
from commands.overlay import Inconsistent, Overlay
from domain.engine.contexts import UnknownEvent, UnreadableEvent
from infra.log.records import Headers, Opening, Reason, Record, decode_event
from infra.log.rule import Reading, read
from projections.engine.store.command_types import CommandType


class Phase(Enum):
    LOADING = "waiting for the read model"
    OPENING = "opening"
    READING = "reading up to its opening"
    SERVING = "serving"
    UNCONFIRMED = "waiting for the group's confirmation"


class ReopenReason(StrEnum):
    """Why a writer gives up its epoch, to open the partition again when the group has confirmed it."""

    OPENING = "opening"
    """It was not acknowledged, or its offset holds another record."""
    ACKNOWLEDGEMENT = "acknowledgement"
    """Of a commit: out of order, without an offset, or late."""
    FENCED = "fenced"
    """Another writer opened the partition."""
    GENERATION = "generation"
    """Rows or pointers were changed by a switch, a replay or a restore."""
    DATABASE = "database"
    """It is older than before, or a row does not match the log."""
    COMMAND = "command"
    """Only another release's handlers can decide it."""
    EVENT = "event"
    """A newer release wrote an event before the opening. Only an agent of that release can fold it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one database snapshot shows of the read model (rule 1).

    `positions` by partition; `rows` by stream, absent where there is none; `outcomes` holds the (stream, command id) that have one;
    `generation` and `fits` (the live versions are those of this code) are rule 10. `unknown` are the live command types
    that this code can't decide, `unrecorded` those of this code that are not live; `newer` are the event types that some agents can
    fold and this code can't, `unfoldable` those of this code that no agent can.
    """

    positions: Mapping[int, Reading]
    generation: str
    fits: bool
    rows: Mapping[str, Versioned] = field(default_factory=dict)
    outcomes: frozenset[tuple[str, str]] = frozenset()
    unknown: frozenset[CommandType] = frozenset()
    unrecorded: frozenset[CommandType] = frozenset()
    newer: frozenset[str] = frozenset()
    unfoldable: frozenset[str] = frozenset()


class Load(NamedTuple):
    """Read the database's position of this partition, and the end of `events`."""


class Open(NamedTuple):
    """Append an opening, and pass the offset of its acknowledgement to `on_opened`."""


class ReadLog(NamedTuple):
    """Read `events` of this partition, offsets [start, stop), into `on_log`."""

    start: int
    stop: int


class Serve(NamedTuple):
    """Read `commands` of this partition from `offset` on, into `on_commands`."""

    offset: int


class Append(msgspec.Struct, frozen=True, gc=False):
    """Append a commit, and pass the offset of its acknowledgement to `on_acknowledged`."""

    seq: int
    stream: str
    value: bytes
    headers: Headers | None = None
    reason: Reason | None = None
    """Why the command is rejected; None if it is accepted."""


class Wait(NamedTuple):
    """Load again a moment later. `why` is for the log."""

    why: str


class Confirm(NamedTuple):
    """Ask the group, after a jittered pause, whether this process is the assignee (rule 6); then call `on_confirmed`."""

    why: str
    reason: ReopenReason | None = None
    """None for a further attempt."""


class Refuse(NamedTuple):
    """Topics and positions are inconsistent: stop the process. `why` is for its error."""

    why: str


Action = Load | Open | ReadLog | Serve | Append | Wait | Confirm | Refuse


@dataclass(frozen=True, slots=True)
class Limits:
    run_ahead: int
    """Commits by which a writer may be ahead of the read model (rules 7 and 9)."""
    max_commit_bytes: int
    ack_timeout_s: float


_NOTHING = Versioned(0, None)


class Writer:
    """One partition's writer. Every method that takes a fact returns the action that follows from it."""

    def __init__(self, partition: int, commands_topic_id: str, limits: Limits) -> None:
        self.partition = partition
        self.commands_topic_id = commands_topic_id
        self.limits = limits
        self.phase = Phase.LOADING
        self.openings = 0
        self.left: tuple[int, CommandType] | None = None
        """Offset and type of the command that only another release can decide."""
        self.unfolded: tuple[int, str] | None = None
        """An agent must have folded the log up to this offset: this code can't, and why."""
        self._forget()

    def _forget(self) -> None:
        self.epoch = -1
        self.seq = 0
        self.acknowledged = 0
        self.unacknowledged_since: float | None = None
        self.base = 0
        self.generation = ""
        self.reading = Reading(0, -1, 0, -1)
        self.last_command = -1
        self.unknown: frozenset[CommandType] = frozenset()
        self.overlay = Overlay()

    @property
    def room(self) -> int:
        """How many commands may be decided before the read model must catch up (rule 7)."""
        return self.limits.run_ahead - len(self.overlay)

    # ── taking over ──

    def start(self) -> Action:
        self._forget()
        self.phase = Phase.LOADING
        return Load()

    def on_position(self, snapshot: Snapshot, log_end: int) -> Action:
        """The database's position, read before the opening is appended: so it can't lie beyond the opening."""
        position = snapshot.positions.get(self.partition)
        if position is None:
            return Wait("waits for the first agent: the read model has no positions yet")
        if not snapshot.fits:
            return Wait(
                "the live states or outcomes are of another version than this code's: `samefold doctor` names what to run"
            )
        if self.left and self.left[1] in snapshot.unknown and position.command_offset < self.left[0]:
            return Wait(
                f"a command waits for a handler of the release that knows '{self.left[1]}'; start one, or if no release knows it "
                "any more, run `samefold switch` with this code"
            )
        if self.unfolded and position.next_offset <= self.unfolded[0]:
            return Wait(f"{self.unfolded[1]} This partition waits until an agent has folded it")
        if log_end < position.next_offset:
            return Refuse("The read model's position lies beyond the log's end: the log was recreated or lost records.")
        if log_end - position.next_offset > self.limits.run_ahead:
            return Wait(f"the read model is behind by records: {log_end - position.next_offset}")
        self.base = position.next_offset
        self.generation = snapshot.generation
        self.reading = position
        self.unknown = snapshot.unknown
        self.phase = Phase.OPENING
        self.openings += 1
        return Open()

    def on_opened(self, offset: int | None) -> Action:
        """The opening was acknowledged, or was not: then `offset` is None (rule 4)."""
        if self.phase is not Phase.OPENING:
            return Wait("already past this opening")
        if offset is None or offset < self.base:
            return self._give_up(ReopenReason.OPENING, "the opening has no acknowledgement")
        self.epoch = offset
        self.phase = Phase.READING
        return ReadLog(self.reading.next_offset, offset + 1)

    def on_log(self, records: Sequence[Record]) -> Action:
        """Records of `events` up to the opening. Reading ends only when the record at its offset was consumed (rule 4)."""
        for record in records:
            entry = decode_event(record)
            if isinstance(entry, Opening) and entry.commands_topic_id != self.commands_topic_id:
                return Refuse("Earlier commits were decided from another topic of commands: it was recreated.")
        self.reading, counted, _ = read(self.reading, records)
        self.overlay.add_read(counted)
        if self.reading.next_offset <= self.epoch:
            return ReadLog(self.reading.next_offset, self.epoch + 1)
        if (self.reading.epoch, self.reading.seq) != (self.epoch, 0):
            return self._give_up(ReopenReason.OPENING, "the record at the opening's offset is not the opening")
        self.last_command = self.reading.command_offset
        self.phase = Phase.SERVING
        return Serve(self.last_command + 1)

    # ── serving ──

    def wants(self, commands: Sequence[Received]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """What `on_commands` needs from the database: ({(context, stream)}, {(stream, command id)})."""
        streams = set()
        outcomes = set()
        for command in commands:
            if not self.overlay.answered(command.stream, command.id):
                outcomes.add((command.stream, command.id))
            if command.context and not self.overlay.knows(command.stream):
                streams.add((command.context.name, command.stream))
        return streams, outcomes

    def on_commands(self, commands: Sequence[Received], snapshot: Snapshot, now: float) -> list[Action]:
        """Decide at most `room` commands, in order, on a snapshot that holds what `wants` named.

        Those behind one that was too slow are left: `last_command` is the last one that has its outcome.
        """
        if action := self._distrust(snapshot):
            return [action]
        actions: list[Action] = []
        for command in commands:
            if command.offset <= self.last_command:
                continue
            key = (command.stream, command.id)
            if self.overlay.answered(*key) or key in snapshot.outcomes:
                self.last_command = command.offset
                continue
            if command.unknown is not None and command.unknown in self.unknown:
                return [*actions, self._leave(command.offset, command.unknown)]
            try:
                decided = self._decide(command, snapshot)
            except Inconsistent as error:
                return [*actions, self._give_up(ReopenReason.DATABASE, str(error))]
            except (UnknownEvent, UnreadableEvent) as error:
                self.unfolded = self.epoch, error.message
                return [*actions, self._give_up(ReopenReason.EVENT, error.message)]
            self.seq += 1
            self.last_command = command.offset
            self.overlay.add_own(decided.commit, decided.after)
            actions.append(Append(self.seq, command.stream, decided.value, command.headers, decided.commit.reason))
            # many of these in one batch would cost the handler its place
            if (why := decided.commit.reason) and is_slow(why):
                break
        if actions and self.unacknowledged_since is None:
            self.unacknowledged_since = now
        # not before: `wants` left out what the overlay had, so the overlay must keep it until the batch is decided
        self._evict(snapshot)
        return actions

    def _distrust(self, snapshot: Snapshot) -> Action | None:
        """Gives up the epoch if this snapshot's rows may not be used (rules 2 and 10)."""
        position = snapshot.positions.get(self.partition)
        if position is None or position.next_offset < self.base:
            return self._give_up(
                ReopenReason.DATABASE, "the database is older than before: it was restored, or is a replica that lags"
            )
        if snapshot.generation != self.generation or not snapshot.fits:
            return self._give_up(ReopenReason.GENERATION, "the read model's generation changed")
        if position.epoch > self.epoch:
            return self._give_up(ReopenReason.FENCED, "another writer opened this partition")
        return None

    def _evict(self, snapshot: Snapshot) -> None:
        """Drop what the database shows at its position; from now on no older rows may be used (rules 2, 3)."""
        position = snapshot.positions[self.partition]
        if self.overlay.evict(position, self.epoch):
            self.base = position.next_offset

    def on_acknowledged(self, seq: int, offset: int | None, now: float) -> Action | None:
        """A commit of this epoch was acknowledged. One writer's offsets are contiguous, in order of seq: epoch + seq."""
        if self.phase is not Phase.SERVING:
            return None
        if seq != self.acknowledged + 1 or offset != self.epoch + seq:
            return self._give_up(
                ReopenReason.ACKNOWLEDGEMENT, f"commit {seq} of epoch {self.epoch} was acknowledged at {offset}"
            )
        self.acknowledged += 1
        self.unacknowledged_since = now if self.acknowledged < self.seq else None
        return None

    def on_clock(self, now: float) -> Action | None:
        """A commit must be acknowledged in time (rule 5)."""
        since = self.unacknowledged_since
        if self.phase is Phase.SERVING and since is not None and now - since > self.limits.ack_timeout_s:
            return self._give_up(ReopenReason.ACKNOWLEDGEMENT, "a commit was not acknowledged in time")
        return None

    # ── opening again ──

    def on_confirmed(self) -> Action:
        """The group, asked after the epoch was given up, confirmed this process as the assignee (rule 6)."""
        return self.start()

    def _give_up(self, reason: ReopenReason, why: str) -> Action:
        """The only way back: forget everything, get confirmed, open again."""
        self._forget()
        self.phase = Phase.UNCONFIRMED
        return Confirm(why, reason)

    def _leave(self, offset: int, kind: CommandType) -> Action:
        """Leave the command to a handler that knows it: a rejection by this code could never be taken back."""
        self.left = (offset, kind)
        why = f"command '{kind}' at offset {offset} is live but unknown to this code; another release must decide it"
        return self._give_up(ReopenReason.COMMAND, why)

    def _decide(self, command: Received, snapshot: Snapshot) -> Decided:
        before = _NOTHING
        if command.context:
            before = self.overlay.state(command.stream, snapshot.rows.get(command.stream), command.context)
        return decide(command, before, epoch=self.epoch, seq=self.seq + 1, max_bytes=self.limits.max_commit_bytes)
