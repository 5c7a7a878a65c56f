"""The writers' promises (DESIGN §2a) among lost, late, doubled and disordered records, crashes, zombies and restores.

Each walk is one random life of such a world; a failure prints its seed and its story (`walk(SEED)` tells it again). That the walks
are hostile enough is shown by worlds that lack one rule each: every one of them is caught.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from commands.overlay import Overlay
from commands.writer import Snapshot, Writer
from infra.log.records import Commit, Opening, Record, decode_event
from infra.log.rule import Counted, Reading, Void, read
from tests.mutants import (
    BelievesAnyAcknowledgement,
    BelievesOldSnapshots,
    EvictsAnyEpoch,
    EvictsByOffset,
    EvictsOnAcknowledgement,
    FoldsEverything,
    GuessesItsEpoch,
    KeepsItsFirstBase,
    NeverTimesOut,
    OpensUnasked,
    ServesAfterAnyRead,
    with_overlay,
)
from tests.world_model import Handler, Rule, View, Violation, Wanted, walk

WALKS = 2_000


def test_no_walk_breaks_a_promise() -> None:
    first = random.randrange(2**32)  # from the seed that pytest prints
    for seed in range(first, first + WALKS):
        walk(seed)


# Worlds without a rule.

Result = tuple[Reading, list[Counted], list[Void]]


def counting(fits: Callable[[Commit, Reading], bool]) -> Callable[[Reading, Iterable[Record]], Result]:
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


class ResumesFromTheGroup(Handler):
    """Goes on where the group's offset stands: what somebody took, not what counts."""

    def resume_at(self, offset: int) -> int:
        return self.world.group_offset


class ReadsRowsAfterThePosition(Handler):
    """Two snapshots: the database may have been restored between them."""

    def load(self, wanted: Wanted) -> Callable[[], Snapshot]:
        positions = self.world.database.snapshot().positions

        def later() -> Snapshot:
            rows = self.world.database.snapshot(wanted)
            return Snapshot(positions, rows.generation, rows.fits, rows.rows, rows.outcomes)

        return later


class ForgetsRejections(Overlay):
    def answered(self, stream: str, command_id: str) -> bool:
        return super().answered(stream, command_id) and (stream, command_id) not in self.rejected

    def __init__(self) -> None:
        super().__init__()
        self.rejected: set[tuple[str, str]] = set()

    def _enter(self, entries: Any, mark: int, commit: Commit) -> Any:
        if commit.reason:
            self.rejected.add((commit.stream, commit.command_id))
        return super()._enter(entries, mark, commit)


class KeepsItsOverlay(Writer):
    """Opens again without dropping what it had appended."""

    def _forget(self) -> None:
        kept = getattr(self, "overlay", None)
        super()._forget()
        if kept is not None:
            self.overlay = kept


class AsksNoOutcomes(Writer):
    def wants(self, commands: Sequence[Any]) -> Wanted:
        return super().wants(commands)[0], set()


def forgets_epoch_and_seq(view: View, rule: Rule, records: Sequence[Record]) -> View:
    """An agent that stores no more of its position than the offset."""
    return replace(view, reading=view.reading._replace(epoch=-1, seq=0)).after(rule, records)


def answers_from_any_record(view: View, rule: Rule, records: Sequence[Record]) -> View:
    """An agent that stores the outcomes of void commits too."""
    after = view.after(rule, records)
    every = [entry for record in records if isinstance(entry := decode_event(record), Commit)]
    return replace(after, outcomes=after.outcomes | {(commit.stream, commit.command_id): commit for commit in every})


class Draft:
    """The rule of an early draft: a writer is known by its name, not by where it opened."""

    def __init__(self) -> None:
        self.writers: dict[int, str] = {}

    def __call__(self, reading: Reading, records: Iterable[Record]) -> Result:
        records = list(records)
        for record in records:
            entry = decode_event(record)
            if isinstance(entry, Opening):
                self.writers[record.offset] = entry.writer
        return counting(
            lambda commit, reading: (
                self.writers.get(commit.epoch) == self.writers.get(reading.epoch) and commit.seq == reading.seq + 1
            )
        )(reading, records)


WITHOUT = {
    "seq": ("A", {"rule": no_seq_check}),
    "seq: the way of the command offsets": ("G", {"rule": no_seq_check}),
    "seq without gaps": ("B", {"rule": no_gap_check}),
    "epoch": ("A", {"rule": no_epoch_check}),
    "epoch by offset": ("A", {"rule": Draft()}),
    "resume after what counts": ("F", {"handler": ResumesFromTheGroup}),
    "rule 1, one snapshot": ("B", {"handler": ReadsRowsAfterThePosition}),
    "rule 1, newer rows": ("B", {"writer": with_overlay(FoldsEverything)}),
    "rule 2": ("B", {"writer": BelievesOldSnapshots}),
    "rule 2, a base that rises": ("A", {"writer": KeepsItsFirstBase}),
    "rule 3, never on acknowledgement": ("B", {"writer": EvictsOnAcknowledgement}),
    "rule 3, by seq": ("B", {"writer": with_overlay(EvictsByOffset)}),
    "rule 3, of this epoch": ("B", {"writer": with_overlay(EvictsAnyEpoch)}),
    "rule 4, to its end": ("A", {"writer": ServesAfterAnyRead}),
    "rule 4, an exact offset": ("F", {"writer": GuessesItsEpoch}),
    "rule 5, a timeout": ("F", {"writer": NeverTimesOut}),
    "rule 5, in line": ("F", {"writer": BelievesAnyAcknowledgement}),
    "rule 6": ("F", {"writer": OpensUnasked}),
    "rejections in the overlay": ("A", {"writer": with_overlay(ForgetsRejections)}),
    "outcomes from the database": ("A", {"writer": AsksNoOutcomes}),
    "a new overlay for each opening": ("B", {"writer": KeepsItsOverlay}),
    "epoch and seq in the position": ("C", {"agent": forgets_epoch_and_seq}),
    "outcomes of counted commits only": ("D", {"agent": answers_from_any_record}),
}
"""What a world lacks, and the promise that is then broken within the same number of walks."""


@pytest.mark.parametrize(("promise", "parts"), WITHOUT.values(), ids=WITHOUT.keys())
def test_a_world_without_it_breaks_a_promise(promise: str, parts: dict[str, Any]) -> None:
    with patch("commands.writer.read", parts.get("rule", read)):
        for seed in range(WALKS):
            try:
                walk(seed, **parts)
            except Violation as violation:
                if str(violation).startswith(promise):
                    return
    pytest.fail(f"{WALKS} walks, and {promise} was never broken")


def test_the_rule_put_together_from_its_parts_breaks_none() -> None:
    # so what the worlds without seq or epoch lack is just that
    with patch("commands.writer.read", the_rule):
        for seed in range(200):
            walk(seed, rule=the_rule)


def test_a_stored_position_that_continues_to_another_result_is_noticed() -> None:
    world = walk(0)
    wrong = world.truth[-1].reading._replace(command_offset=-1, seq=7)
    world.backups.append(replace(world.truth[-1], reading=wrong))
    with pytest.raises(Violation, match=r"^H: "):
        world.settle()


def test_a_walk_is_told_again_by_its_seed() -> None:
    assert walk(7).trace == walk(7).trace
    assert walk(7).log != walk(8).log
