"""How an agent reads the log: a state machine without I/O.

Inputs are facts (partitions assigned, positions read, records fetched, a batch's result, the clock); outputs are actions (read the
positions, seek, apply a batch, wait, stop). The agent's process carries them out, or a model checker. The consumer group is not
trusted: positions come from the database, which fences each batch.

A *turn* lasts from one reading of the positions to the next; what belongs to an earlier turn is ignored. A *lane* is one connection
to the database, with at most one batch at a time. To *hold* is to wait until this code's views are live.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate

from infra.errors import SamefoldError
from infra.log.records import Record
from infra.log.rule import Reading
from infra.processes.gathering import Window
from projections.engine.fold.errors import EngineStop, OtherCode
from projections.engine.live.startup import set_difference
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.positions import Positions

BATCH_BYTES = 32 * 1024 * 1024
"""Size at which a batch is full."""
FEW = 8
"""While another batch runs, or under load, the next one starts at once only with this fraction (1/8) of a full batch."""
LOOK_AGAIN_S = 0.1
"""How often the positions are read while another set of views is live."""
NEWER_S = 5.0
"""How often an agent that met an event of a newer release checks whether that release's agents have folded it."""
AGAIN = 12
"""After so many of those checks, an event that this code knows, but could not take, is tried again: why may have passed."""
BACKOFF_S = (0.05, 5.0)


@dataclass(frozen=True, slots=True)
class ReadPositions:
    """Read the agent's positions after so many seconds. Answered by `positions` or `away` of that turn."""

    turn: int
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Seek:
    """Fetch the partition from this offset on, at once: no record that was fetched before may follow."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these records, each partition's from its position on, in one transaction. Answered by `done`."""

    turn: int
    takes: Mapping[int, tuple[Reading, Sequence[Record]]]
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Log why this agent is not folding: another set of views is live."""

    why: str


@dataclass(frozen=True, slots=True)
class WaitForNewerCode:
    """Log that one partition waits until other code has folded this event. The others continue."""

    error: EngineStop

    @property
    def why(self) -> str:
        waits = f"partition {self.error.partition} waits for an agent of {self.error.other_code}, the others continue"
        return f"{waits}: {self.error.code}: {self.error}"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process with this error."""

    error: SamefoldError


Action = ReadPositions | Seek | Apply | Wait | WaitForNewerCode | Stop


@dataclass(slots=True)
class _Partition:
    """One partition that is being read. `buffer` has the records from `reading` on, without those of the running batch."""

    reading: Reading
    wanted: int
    """Offset that the next record should have."""
    hole_to: int | None = None
    """The offset that came instead of `wanted`. If it comes again after a seek, the log itself has the gap."""
    buffer: list[Record] = field(default_factory=list)
    size: int = 0
    since: float = 0.0
    """When the oldest record of the buffer came."""
    end: int = 0
    """The partition's end as last reported."""


@dataclass(eq=False)
class Reader:
    """Reads an agent's assigned partitions. `code` is {view: version} of this code; times are in seconds.

    `difference` says how the live versions differ from `code`, as text, and None if they don't; `look_again` is how often the
    positions are read while they differ. At an error of `waits`, a partition waits; at any other, the agent stops.

    Up to `lanes` batches run at once: while the database writes one, another is folded. No two of them have the same partition,
    and each is fenced by its own positions.
    """

    code: Mapping[str, int]
    _: KW_ONLY
    batch: int
    window: Window = field(default_factory=Window)
    lanes: int = 1
    difference: Callable[[Mapping[str, int], Mapping[str, int]], str | None] = set_difference
    look_again: float = LOOK_AGAIN_S
    waits: type[EngineStop] = OtherCode

    def __post_init__(self) -> None:
        self.turn = 0
        self.due: float | None = None
        """When to call `tick`, unless something else happens before."""
        self._assigned: frozenset[int] = frozenset()
        self._parts: dict[int, _Partition] = {}
        self.under_way: dict[int, Collection[int]] = {}
        """By lane, the partitions of its batch."""
        self._began: dict[int, float] = {}
        """By lane, when its batch was begun."""
        self._newer: dict[int, EngineStop] = {}
        """By partition, the error at its position: of an event that this code does not know, or could not take."""
        self._checks = 0
        self._check_at = 0.0
        self._checking = False
        """Whether the next positions decide which of those partitions continue."""
        self._failures = 0
        self._holds = True

    @property
    def assigned_partitions(self) -> frozenset[int]:
        return self._assigned

    @property
    def own_partitions(self) -> frozenset[int]:
        """The assigned partitions; none while it holds."""
        return frozenset() if self._holds else self._assigned

    @property
    def fetching(self) -> list[int]:
        """The partitions to fetch now; none while the buffers are full. Each has been sought in this turn."""
        parts = self._parts.values()
        waiting, size = sum(len(part.buffer) for part in parts), sum(part.size for part in parts)
        return [*self._parts] if waiting < 4 * self.batch * self.lanes and size < BATCH_BYTES * self.lanes else []

    def assigned(self, partitions: Sequence[int]) -> list[Action]:
        """The consumer group assigned exactly these partitions; none during a rebalance."""
        self._assigned = frozenset(partitions)
        return self._ask()

    def positions(self, turn: int, positions: Positions | None) -> list[Action]:
        """The agent's positions were read; None if it has never run."""
        if turn != self.turn:
            return []
        difference = self.difference(positions.live_set if positions else {}, self.code)
        self._holds = positions is None or difference is not None
        if positions is None or difference is not None:
            self._failures = 0
            retired = "no view of this agent is live any more; " if positions and not positions.live else ""
            return [Wait(f"{retired}{difference or 'no positions yet'}"), ReadPositions(turn, self.look_again)]
        mine = self._assigned & positions.readings.keys()
        if self._checking:
            at = {partition: positions.readings[partition].next_offset for partition in mine}
            self._newer = {
                partition: stop
                for partition, stop in self._newer.items()
                if at.get(partition) == stop.offset and (isinstance(stop, OtherCode) or self._checks % AGAIN)
            }
            self._checking = False
        for partition in sorted(mine - self._newer.keys()):
            reading = positions.readings[partition]
            self._parts[partition] = _Partition(reading, reading.next_offset)
        return [Seek(partition, part.wanted) for partition, part in self._parts.items()]

    def away(self, turn: int) -> list[Action]:
        """The database is unavailable."""
        return self._ask(self._backoff()) if turn == self.turn else []

    def records(self, partition: int, records: Sequence[Record], end: int, now: float) -> list[Action]:
        """Records were fetched, in offset order; `end` is the partition's end as last reported by the broker."""
        part = self._parts.get(partition)
        if part is None or not records:
            return []
        part.end = max(end, records[-1].offset + 1)
        if records[0].offset < part.wanted:
            records = [record for record in records if record.offset >= part.wanted]
        actions: list[Action] = []
        kept = without_hole(records, (part.wanted, part.hole_to))
        if kept:
            if not part.buffer:
                part.since = now
            part.buffer += kept
            part.size += sum(len(record.value or b"") for record in kept)
            part.wanted = kept[-1].offset + 1
            part.hole_to = None
        if len(kept) < len(records):
            # a fetch may have been lost
            part.hole_to = records[len(kept)].offset
            actions.append(Seek(partition, part.wanted))
        return actions + self.tick(now)

    def done(self, turn: int, result: BatchResult, now: float, lane: int = 0) -> list[Action]:
        """A lane's batch has ended."""
        if turn != self.turn:
            return []
        self.under_way.pop(lane, None)
        self.window.took(now - self._began[lane])
        if result.status is not CommitStatus.APPLIED:
            if result.stop is not None:  # a view was stopped, which is no failure: others may stop at the same event
                self._failures = 0
            return self._ask(self._backoff())
        self._failures = 0
        for partition, reading in result.readings.items():
            self._parts[partition].reading = reading
        if isinstance(result.stop, self.waits):
            if not self._newer:
                self._check_at = now + NEWER_S
            # the batch's other partitions may have been cut short too, so the positions are read again
            self._newer[result.stop.partition] = result.stop
            return [WaitForNewerCode(result.stop), *self._ask()]
        return [Stop(result.stop)] if result.stop else self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Start batches in the free lanes, unless more records are known to come soon."""
        self.due = None
        if self._newer and now >= self._check_at:
            self._check_at, self._checking = now + NEWER_S, True
            self._checks += 1
            return self._ask()
        actions: list[Action] = []
        for lane in [lane for lane in range(self.lanes) if lane not in self.under_way]:
            free = {
                partition: part
                for partition, part in self._parts.items()
                if not any(partition in taken for taken in self.under_way.values())
            }
            there = sum(len(part.buffer) for part in free.values())
            if not there:
                break
            due = min(part.since for part in free.values() if part.buffer) + self.window.seconds
            more_is_known = there < self.batch and any(part.wanted < part.end for part in free.values())
            may_gather = there < self.batch // FEW and (self.under_way or there < self.window.enough)
            if now < due and (more_is_known or may_gather):
                self.due = due
                break
            takes = self._take(free, now)
            self.window.began(sum(len(records) for _, records in takes.values()))
            self.under_way[lane] = takes.keys()
            self._began[lane] = now
            actions.append(Apply(self.turn, takes, lane))
        return actions

    def _take(self, free: Mapping[int, _Partition], now: float) -> dict[int, tuple[Reading, list[Record]]]:
        """Take a batch from as few partitions as fill it, so that other lanes find some too. Partitions take turns."""
        takes = {}
        room, room_bytes = self.batch, BATCH_BYTES
        for partition, part in free.items():
            if not part.buffer:
                continue
            count, size = len(part.buffer), part.size
            if count > room or size > room_bytes:
                sizes = list(accumulate(len(record.value or b"") for record in part.buffer[:room]))
                count = min(bisect_left(sizes, room_bytes) + 1, len(sizes))
                size = sizes[count - 1]
            takes[partition] = (part.reading, part.buffer[:count])
            part.buffer = part.buffer[count:]
            part.size -= size
            part.since = now
            self._parts[partition] = self._parts.pop(partition)
            room, room_bytes = room - count, room_bytes - size
            if room <= 0 or room_bytes <= 0:
                break
        return takes

    def _ask(self, after: float = 0.0) -> list[Action]:
        """Begin a new turn: drop all buffers, ignore running batches, and read the positions."""
        self.turn += 1
        self._parts.clear()
        self.under_way.clear()
        self.due = None
        return [ReadPositions(self.turn, after)] if self._assigned else []

    def _backoff(self) -> float:
        self._failures += 1
        return backoff(self._failures)


def backoff(failures: int) -> float:
    """Seconds to wait: 0 after the first failure, then longer and random, so that two agents stop fencing each other."""
    if failures <= 1:
        return 0.0
    longest = min(BACKOFF_S[0] * 2.0 ** min(failures, 10), BACKOFF_S[1])
    return random.uniform(longest / 2, longest)


def without_hole(records: Sequence[Record], first: Container[int | None]) -> Sequence[Record]:
    """The records up to the first gap; `first` are the offsets that the first record may have."""
    if not records or records[0].offset not in first:
        return ()
    start = records[0].offset
    if records[-1].offset - start == len(records) - 1:
        return records
    for index, record in enumerate(records):
        if record.offset != start + index:
            return records[:index]
    return records
