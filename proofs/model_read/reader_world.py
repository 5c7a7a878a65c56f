"""The agent's `Reader` between a consumer, a database and a group that do as they like.

Answers come late, also those of turns that are over; fetches are lost on the way or delivered twice; others move the positions;
COMMIT's fate is unknown; the database is restored; partitions come and go. The consumer is as aiokafka's: it hands out what
follows its position, which a seek sets, and nothing that it fetched for another position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from uuid import UUID

from infra.log.records import Record
from infra.log.rule import START, Reading, read
from infra.processes.gathering import Window
from projections.engine.fold.fold import NOTHING_BLOCKED
from projections.engine.live.reader import Action, Apply, Reader, ReadPositions, Seek, Stop, Wait, WaitForNewerCode
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.positions import Live, Positions
from proofs.checker import Violation
from proofs.model_read.log import Log, Story

CODE = {"balances": 1}
BATCH = 2


RECORDS = "no record is passed over"
FAULTS = ("lose", "twice", "away", "unknown", "unapplied", "other", "restore", "revoke", "assign", "set")


class _Fixed(Window):
    """Does not follow the batches: copies of a world share it, and here is no time."""

    def began(self, count: int) -> None:
        pass

    def took(self, seconds: float) -> None:
        pass


@dataclass
class _Question:
    """A thing to be done in the database for the reader; `answer` once it is done."""

    action: ReadPositions | Apply
    answer: Positions | BatchResult | None = None
    done: bool = False


@dataclass
class ReaderWorld:
    """One partition's life, or two partitions'. `left` is how often what may still go wrong."""

    log: Mapping[int, Sequence[Record]]
    left: dict[str, int]
    positions: dict[int, Reading] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    questions: list[_Question] = field(default_factory=list)
    live: int = 1

    def __post_init__(self) -> None:
        self.reader = Reader(CODE, batch=BATCH, window=_Fixed(1.0), lanes=2)
        self.positions = dict.fromkeys(self.log, START)
        self._do(self.reader.assigned(sorted(self.log)))

    # ── choices ──

    def choices(self) -> list[str]:
        found = []
        for partition in self.reader.fetching:
            if self._next(partition):
                found.append(f"fetch {partition}")
                found += [f"{fault} {partition}" for fault in ("lose", "twice") if self.left.get(fault)]
        for number, question in enumerate(self.questions):
            if question.done:
                found.append(f"answer {number}")
            else:
                found.append(f"do {number}")
                found += [f"{fault} {number}" for fault in ("away", "unknown", "unapplied") if self.left.get(fault)]
        if self.reader.due is not None:
            found.append("tick")
        for fault in ("other", "restore", "revoke", "assign", "set"):
            if self.left.get(fault):
                found.append(fault)
        return found

    def after(self, choice: str) -> ReaderWorld:
        """Raises Violation."""
        new = self._copy()
        new._choose(choice)
        return new

    def _copy(self) -> ReaderWorld:
        new = copy(self)
        new.left, new.positions, new.at = dict(self.left), dict(self.positions), dict(self.at)
        new.questions = [copy(question) for question in self.questions]
        new.reader = copy(self.reader)
        vars(new.reader).update((name, _copied(value)) for name, value in vars(self.reader).items())
        return new

    def _choose(self, choice: str) -> None:
        what, _, number = choice.partition(" ")
        if what in self.left:
            self.left[what] -= 1
        match what:
            case "fetch" | "lose" | "twice":
                self._fetch(int(number), what)
            case "do" | "away" | "unknown" | "unapplied":
                self._answer(self.questions[int(number)], what)
            case "answer":
                self._give_answer(self.questions.pop(int(number)))
            case "tick":
                self._do(self.reader.tick(1e9))
            case "other":
                self._another_agent_folds()
            case "restore":
                self.positions = dict.fromkeys(self.log, START)
            case "revoke":
                self.at = {}
                self._do(self.reader.assigned(()))
            case "assign":
                self.at = {}
                self._do(self.reader.assigned(sorted(self.log)))
            case _:
                self.live = 3 - self.live

    def settle(self) -> None:
        """Nothing goes wrong any more. Raises Violation where the log's end is not reached."""
        end = self._copy()
        end.live = 1
        end.at = {}
        end._do(end.reader.assigned(sorted(self.log)))
        for _ in range(400):
            usual = [c for c in end.choices() if c.split()[0] in ("answer", "do", "fetch", "tick")]
            if not usual:
                break
            end._choose(usual[-1] if usual[-1].startswith("answer") else usual[0])
        for partition, records in self.log.items():
            if end.positions[partition].next_offset != records[-1].offset + 1:
                raise Violation(RECORDS, f"stands at {end.positions}, and nothing more happens")

    # ── consumer ──

    def _next(self, partition: int) -> list[Record]:
        if partition not in self.at:
            return []
        return [record for record in self.log[partition] if record.offset >= self.at[partition]][:2]

    def _fetch(self, partition: int, how: str) -> None:
        records = self._next(partition)
        if how != "twice":
            self.at[partition] = records[-1].offset + 1
        if how != "lose":
            end = self.log[partition][-1].offset + 1
            self._do(self.reader.records(partition, records, end, 0.0))

    # ── database ──

    def _answer(self, question: _Question, how: str) -> None:
        question.done = True
        action = question.action
        if isinstance(action, ReadPositions):
            question.answer = None if how == "away" else self._now()
        elif how in ("away", "unapplied"):
            question.answer = BatchResult(CommitStatus.AWAY if how == "away" else CommitStatus.UNKNOWN)
        else:
            readings = self._apply(action)
            fate = (
                CommitStatus.FENCED
                if readings is None
                else CommitStatus.UNKNOWN
                if how == "unknown"
                else CommitStatus.APPLIED
            )
            question.answer = BatchResult(fate, readings or {})

    def _apply(self, action: Apply) -> dict[int, Reading] | None:
        """The compare-and-set, and what it lets through must be all that the log has there."""
        if self.live != 1 or any(self.positions[p] != was for p, (was, _) in action.takes.items()):
            return None
        after = {}
        for partition, (was, records) in action.takes.items():
            last = records[-1].offset
            there = [record for record in self.log[partition] if was.next_offset <= record.offset <= last]
            if list(records) != there:
                offsets = [record.offset for record in records]
                has = [record.offset for record in there]
                raise Violation(RECORDS, f"from {was.next_offset} on it folds {offsets}, but the log has {has}")
            after[partition] = read(was, records)[0]
        self.positions |= after
        return after

    def _another_agent_folds(self) -> None:
        for partition, reading in self.positions.items():
            behind = [record for record in self.log[partition] if record.offset >= reading.next_offset]
            if behind:
                self.positions[partition] = read(reading, behind[:1])[0]
                return

    def _now(self) -> Positions:
        live = {name: Live(self.live, f"{name}_v{self.live}") for name in CODE}
        return Positions("core", "events", "t", UUID(int=1), dict(self.positions), live, NOTHING_BLOCKED)

    # ── reader ──

    def _give_answer(self, question: _Question) -> None:
        turn = question.action.turn
        match question.answer:
            case None:
                self._do(self.reader.away(turn))
            case Positions() as positions:
                self._do(self.reader.positions(turn, positions))
            case BatchResult() as done:
                assert isinstance(question.action, Apply)
                self._do(self.reader.done(turn, done, 0.0, question.action.lane))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ReadPositions() | Apply():
                    self.questions.append(_Question(action))
                case Seek(partition, offset):
                    self.at[partition] = offset
                case Wait():
                    pass
                case WaitForNewerCode(error) | Stop(error):
                    raise error

    def print(self) -> object:
        """Everything that decides what may follow; turns are counted from the reader's own."""
        reader = self.reader
        parts = (
            (p, part.reading, part.wanted, part.hole_to, part.end, tuple(r.offset for r in part.buffer))
            for p, part in reader._parts.items()
        )
        under_way = frozenset((lane, frozenset(taken)) for lane, taken in reader.under_way.items())
        known = [frozenset(one.items()) for one in (self.positions, self.at, self.left)]
        asked = tuple(sorted(_plain(question, reader.turn) for question in self.questions))
        return frozenset(parts), reader._assigned, under_way, reader.due, *known, asked, self.live


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return replace(value, buffer=[*value.buffer]) if hasattr(value, "buffer") else value


def _plain(question: _Question, turn: int) -> tuple[Any, ...]:
    action, answer = question.action, question.answer
    takes = (
        tuple((p, was, tuple(r.offset for r in records)) for p, (was, records) in action.takes.items())
        if isinstance(action, Apply)
        else ()
    )
    content: str = ""
    if isinstance(answer, Positions):
        content = repr((sorted(answer.readings.items()), answer.live_set))
    elif isinstance(answer, BatchResult):
        content = repr((answer.status.value, sorted(answer.readings.items())))
    return isinstance(action, Apply), min(turn - action.turn, 3), takes, question.done, content


# ── logs and worlds ──


def short_log() -> dict[int, list[Record]]:
    story = Story().open().deposit("accounts/a", 1).deposit("accounts/a", 2).deposit("accounts/a", 3)
    return dict(Log([story]).records)


def log_with_holes() -> dict[int, list[Record]]:
    """Two partitions; in one, offsets are missing, as after a transactional producer: nothing that counts was ever there."""
    story = Story().open().deposit("accounts/a", 1).garbage().deposit("accounts/a", 2).deposit("accounts/a", 3)
    other = Story().open().deposit("accounts/b", 4).deposit("accounts/b", 5)
    records = dict(Log([story.garbage().garbage(), other]).records)
    records[0] = [record for record in records[0] if record.offset not in (2, 5)]
    return records


def reader_of(random: Random) -> ReaderWorld:
    faults = {fault: random.randrange(3) for fault in FAULTS}
    faults["lose"] = min(faults["lose"], 1)
    return ReaderWorld(log_with_holes() if random.random() < 0.5 else short_log(), faults)
