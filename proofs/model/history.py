"""What counts: the log as a tree of all logs that were ever reached, each with its truth, worked out and judged once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from commands.decision import Versioned, decide
from commands.intake import Received
from domain.engine.contexts import decode_event
from infra.log.records import Commit, Opening, Record, encode
from infra.log.records import decode_event as decode_record
from infra.log.rule import START, Reading, read
from proofs.checker import Violation
from tests.engine.purse import PURSE, State

Key = tuple[str, str]

MAX_BYTES = 10_000
NEW = Versioned(0, State())


@dataclass(frozen=True)
class View:
    """What a reader made of the log so far."""

    reading: Reading = START
    rows: Mapping[str, Versioned] = field(default_factory=dict)
    outcomes: Mapping[Key, Commit] = field(default_factory=dict)

    def after(self, records: Sequence[Record]) -> View:
        reading, counted, _ = read(self.reading, records)
        rows, outcomes = dict(self.rows), dict(self.outcomes)
        for _, _, commit in counted:
            row = rows.get(commit.stream, NEW)
            state = row.state
            for event in commit.events:
                state = PURSE.evolve(state, decode_event(PURSE, event.type, event.data))
            rows[commit.stream] = Versioned(row.version + len(commit.events), state)
            outcomes[commit.stream, commit.command_id] = commit
        return View(reading, rows, outcomes)


Fold = Callable[[View, Sequence[Record]], View]


def agent(view: View, records: Sequence[Record]) -> View:
    """What an agent commits for these records."""
    after = view.after(records)
    return after  # noqa: RET504 - mutants take hold of either line


class Folds:
    """Views by one more record, each made once; equal views are the same object, so that `is` compares them."""

    def __init__(self) -> None:
        self._made: dict[tuple[Fold, int, Record], View] = {}
        self._known: dict[object, View] = {}

    def after(self, view: View, fold: Fold, record: Record) -> View:
        key = (fold, id(view), record)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self.same(fold(view, [record]))
        return made

    def same(self, view: View) -> View:
        """The one object for views of this content. It lives on, so its id stands for it."""
        rows = tuple(sorted(view.rows.items()))
        return self._known.setdefault((view.reading, rows, tuple(sorted(answers(view)))), view)


def answers(view: View) -> list[tuple[Key, bytes]]:
    """The outcomes, comparable."""
    return [(key, encode(commit)) for key, commit in view.outcomes.items()]


class Log:
    """A log that was reached. `append` checks promises A, B, G and H, once for each new log."""

    __slots__ = ("_after", "number", "records", "truth")

    def __init__(self, records: tuple[Record, ...], truth: tuple[View, ...], number: int) -> None:
        self.records = records
        self.truth = truth
        """By length of the log: what counts."""
        self.number = number
        """Equal for logs that differ in void records only: no reader that keeps the rule can distinguish them."""
        self._after: dict[tuple[bytes, int], Log] = {}

    def __len__(self) -> int:
        return len(self.records)

    def append(self, value: bytes, bend: int, judge: Judge) -> Log:
        """The log with one more record. `bend`: see `Judge.right_state`. Raises Violation."""
        key = (value, bend)
        longer = self._after.get(key)
        if longer is None:
            longer = self._after[key] = judge.judged(self, value, bend)
        return longer


class Judge:
    """Knows the commands and the rule, and so what a log must look like."""

    def __init__(self, commands: Sequence[Received], *, voids_are_alike: bool, names: bool = False) -> None:
        self.names = names
        """Whether each record's key lists the writers' openings up to it, for a rule that wants to know."""
        self.commands = commands
        self.voids_are_alike = voids_are_alike
        """Whether all readers keep the rule, so that what a void record holds makes no difference to anything."""
        self.folds = Folds()
        self.nothing = self.folds.same(View())
        self._numbers: dict[object, int] = {}
        self.root = self._log((), (self.nothing,))

    def _log(self, records: tuple[Record, ...], truth: tuple[View, ...]) -> Log:
        same: object = tuple(map(id, truth)) if self.voids_are_alike else records
        return Log(records, truth, self._numbers.setdefault(same, len(self._numbers)))

    def judged(self, log: Log, value: bytes, bend: int) -> Log:
        record = Record(0, len(log), 0, self._openers(log, value) if self.names else None, value)
        before = log.truth[-1]
        _, counted, _ = read(before.reading, [record])
        for _, _, commit in counted:
            self._check(before, commit, bend)
        after = self.folds.after(before, View.after, record)
        longer = self._log((*log.records, record), (*log.truth, after))
        for start, view in enumerate(longer.truth):
            reading, counted, _ = read(view.reading, longer.records[start:])
            if reading != after.reading or sum(len(c.commit.events) for c in counted) != _events(after) - _events(view):
                raise Violation("H", f"the position {view.reading} continues to another result")
        return longer

    def _openers(self, log: Log, value: bytes) -> bytes:
        known = (log.records[-1].key if log.records else None) or b""
        entry = decode_record(Record(0, len(log), 0, None, value))
        return known + f"{len(log)}={entry.writer} ".encode() if isinstance(entry, Opening) else known

    def _check(self, before: View, commit: Commit, bend: int) -> None:
        key = (commit.stream, commit.command_id)
        if key in before.outcomes:
            raise Violation("A", f"{key} counts twice")
        if commit.command_offset <= before.reading.command_offset:
            raise Violation("G", f"command {commit.command_offset} after {before.reading.command_offset}")
        state = self.right_state(before, commit.stream, bend)
        command = self.commands[commit.command_offset]
        right = decide(command, state, epoch=commit.epoch, seq=commit.seq, max_bytes=MAX_BYTES)
        if commit != right.commit:
            raise Violation("B", f"{encode(commit).decode()} was not decided on {state}")

    def right_state(self, before: View, stream: str, bend: int) -> Versioned:
        """The fold of what counts, as a build has it whose rows show so many cents more (0: as in the log)."""
        row = before.rows.get(stream, NEW)
        return Versioned(row.version, State(row.state.cents + bend)) if row.version else row


def _events(view: View) -> int:
    return sum(row.version for row in view.rows.values())
