"""Readers, agents and shells that each lack one rule; the writers that do are in `tests/engine/commands/mutants.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from commands.writer import Snapshot
from infra.log.records import Commit, Opening, Record, decode_event
from infra.log.rule import Counted, Reading, Void
from proofs.model.handler import Handler, Seen, answer
from proofs.model.history import Rule, View
from proofs.model.world import World

Result = tuple[Reading, list[Counted], list[Void]]

# Reading rules.


def counting(fits: Callable[[Commit, Reading], bool]) -> Rule:
    """A reading rule by which a commit counts if it fits."""

    def rule(reading: Reading, records: Iterable[Record]) -> Result:
        counted, void = [], []
        for record in records:
            if record.offset < reading.next_offset:
                continue
            entry = decode_event(record)
            after = reading._replace(next_offset=record.offset + 1)
            if isinstance(entry, Opening):
                after = after._replace(epoch=record.offset, seq=0)
            elif isinstance(entry, Commit) and fits(entry, reading):
                after = after._replace(seq=entry.seq, command_offset=entry.command_offset)
                counted.append(Counted(record.offset, record.time_ms, entry))
            else:
                void.append(Void(record.offset, "unfit"))
            reading = after
        return reading, counted, void

    return rule


the_rule = counting(lambda commit, reading: commit.epoch == reading.epoch and commit.seq == reading.seq + 1)
no_seq_check = counting(lambda commit, reading: commit.epoch == reading.epoch)
no_gap_check = counting(lambda commit, reading: commit.epoch == reading.epoch and commit.seq > reading.seq)
no_epoch_check = counting(lambda commit, reading: commit.seq == reading.seq + 1)


def counts_otherwise_in_batches(reading: Reading, records: Iterable[Record]) -> Result:
    """Live as it should be; a reader of many records at once does not look at `seq`."""
    records = list(records)
    return (the_rule if len(records) == 1 else no_seq_check)(reading, records)


def epoch_by_name(reading: Reading, records: Iterable[Record]) -> Result:
    """The rule of an early draft: a writer is known by its name, not by where it opened. Keys tell who opened where."""
    records = list(records)
    names = dict(word.split(b"=") for word in (records[-1].key or b"").split()) if records else {}

    def writer(epoch: int) -> bytes | None:
        return names.get(str(epoch).encode())

    def fits(commit: Commit, before: Reading) -> bool:
        return writer(commit.epoch) == writer(before.epoch) and commit.seq == before.seq + 1

    return counting(fits)(reading, records)


# Agents.


def forgets_epoch_and_seq(view: View, rule: Rule, records: Sequence[Record]) -> View:
    """An agent that stores no more of its position than the offset."""
    return replace(view, reading=view.reading._replace(epoch=-1, seq=0)).after(rule, records)


def answers_from_any_record(view: View, rule: Rule, records: Sequence[Record]) -> View:
    """An agent that stores the outcomes of void commits too."""
    after = view.after(rule, records)
    every = [entry for record in records if isinstance(entry := decode_event(record), Commit)]
    return replace(after, outcomes={**after.outcomes, **{(c.stream, c.command_id): c for c in every}})


def answers_before_it_writes(view: View, rule: Rule, records: Sequence[Record]) -> View:
    """An agent that stores outcomes in a transaction of their own, before the one with the rows."""
    after = view.after(rule, records)
    return replace(after, rows=view.rows)


def skips_rejections(view: View, rule: Rule, records: Sequence[Record]) -> View:
    """An agent that stores what was accepted only."""
    after = view.after(rule, records)
    return replace(after, outcomes={key: commit for key, commit in after.outcomes.items() if not commit.reason})


# Shells.


class ResumesFromTheGroup(Handler):
    """Goes on where the group's offset stands: what some handler took, not what counts."""

    __slots__ = ()

    def resume_at(self, world: World, offset: int) -> int:
        return world.group_offset


class KeepsWhatItHolds(Handler):
    """Goes on with the commands that it had read in an earlier epoch, instead of after the last that counts."""

    __slots__ = ()

    def resume_at(self, world: World, offset: int) -> int:
        return max(self.next_command, offset)


class ReadsRowsAfterThePosition(Handler):
    """Two snapshots: the database may have been restored between them."""

    __slots__ = ()

    def snapshot(self, world: World, seen: Seen) -> Snapshot:
        return answer(seen, world.database, self.code)
