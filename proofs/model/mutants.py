"""Every guarantee of the write side, switched off one at a time, and the promise that a small world then breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from commands.overlay import Overlay
from commands.writer import Writer
from proofs.model import lacking as no
from proofs.model.handler import Handler
from proofs.model.history import Fold, Rule
from proofs.model.setting import Bounds, Era, Parts
from tests.engine.commands import mutants as w


@dataclass(frozen=True)
class Mutant:
    guarantee: str
    """What it lacks, in the terms of docs/protocol.md; numbers are its rules."""
    promise: str
    """The letter of §2a, or the number of the rule, whose check it fails."""
    bounds: Bounds
    """A world in which it does."""
    parts: Callable[[], Parts]


def _bounds(commands: str, kinds: str = "", *, births: int = 1, openings: int = 2) -> Bounds:
    """A world with these commands, separated by commas, and one fault of each of these kinds."""
    listed = tuple(part.strip() for part in commands.split(","))
    some = frozenset(kinds.split())
    return Bounds(listed, births, openings, len(some), some)


def _rule(rule: Rule) -> Callable[[], Parts]:
    return lambda: Parts(rule=rule)


def _agent(fold: Fold) -> Callable[[], Parts]:
    return lambda: Parts(fold=fold)


def _writer(writer: type[Writer]) -> Callable[[], Parts]:
    return lambda: Parts(writer=writer)


def _overlay(overlay: type[Overlay]) -> Callable[[], Parts]:
    return lambda: Parts(writer=w.with_overlay(overlay))


def _shell(handler: type[Handler]) -> Callable[[], Parts]:
    return lambda: Parts(handler=handler)


_SWITCH = (Era("g", 1, 1), Era("h", 2, 0))
"""To another version of the write model."""
_REPAIR = (Era("g", 1, 1), Era("h", 1, 0))
"""A build whose rows are a cent off is replaced by one of the same version that is right."""

MUTANTS: dict[str, Mutant] = {
    "no_seq_check": Mutant("seq", "A", _bounds("fill 1 a", "copied"), _rule(no.no_seq_check)),
    "no_seq_check_order": Mutant("seq", "G", _bounds("fill 1 a 1, fill 1 b 2", "overtaken"), _rule(no.no_seq_check)),
    "no_gap_check": Mutant(
        "seq without gaps", "B", _bounds("fill 1 a, spend 1 b", "overtaken"), _rule(no.no_gap_check)
    ),
    "no_epoch_check": Mutant("epoch", "A", _bounds("fill 1 a, fill 1 b", births=2), _rule(no.no_epoch_check)),
    "counts_otherwise_in_batches": Mutant(
        "one rule for every reader, live or batch",
        "H",
        _bounds("fill 1 a", "copied"),
        _rule(no.counts_otherwise_in_batches),
    ),
    "epoch_by_name": Mutant(
        "the epoch is the opening's offset",
        "A",
        _bounds("fill 1 a", "copied", births=2),
        lambda: Parts(rule=no.epoch_by_name, names=True),
    ),
    "agent_forgets_epoch_and_seq": Mutant(
        "epoch and seq in the position", "C", _bounds("fill 1 a"), _agent(no.forgets_epoch_and_seq)
    ),
    "agent_answers_from_void": Mutant(
        "outcomes of counted commits only",
        "D",
        _bounds("fill 1 a, spend 1 b", births=2),
        _agent(no.answers_from_any_record),
    ),
    "agent_answers_first": Mutant(
        "rows and outcomes in one transaction", "E", _bounds("fill 1 a"), _agent(no.answers_before_it_writes)
    ),
    "agent_skips_rejections": Mutant("rejections are answers", "C", _bounds("spend 1 a"), _agent(no.skips_rejections)),
    "resumes_from_the_group": Mutant(
        "resume after what counts", "F", _bounds("fill 1 a", "lost"), _shell(no.ResumesFromTheGroup)
    ),
    "keeps_what_it_holds": Mutant(
        "what was read in another epoch is dropped", "F", _bounds("fill 1 a", "lost"), _shell(no.KeepsWhatItHolds)
    ),
    "resumes_where_the_database_stands": Mutant(
        "rule 8, resume after what counts", "8", _bounds("fill 1 a", births=2), _writer(w.ResumesWhereTheDatabaseStands)
    ),
    "rows_after_the_position": Mutant(
        "rule 1, one snapshot",
        "B",
        replace(_bounds("fill 1 a, spend 1 b", "restore", births=2, openings=2), split=True),
        _shell(no.ReadsRowsAfterThePosition),
    ),
    "folds_everything": Mutant(
        "rule 1, rows may be newer",
        "B",
        _bounds("fill 5 a, spend 10 b", births=2),
        _overlay(w.FoldsEverything),
    ),
    "believes_old_snapshots": Mutant(
        "rule 2", "B", _bounds("fill 1 a, spend 1 b", "restore"), _writer(w.BelievesOldSnapshots)
    ),
    "keeps_its_first_base": Mutant(
        "rule 2, a base that rises", "B", _bounds("fill 1 a, spend 1 b", "restore"), _writer(w.KeepsItsFirstBase)
    ),
    "keeps_its_first_base_doubles": Mutant(
        "rule 2, a base that rises", "A", _bounds("fill 1 a, fill 1 a", "restore"), _writer(w.KeepsItsFirstBase)
    ),
    "evicts_on_acknowledgement": Mutant(
        "rule 3, never on an acknowledgement", "B", _bounds("fill 1 a, spend 1 b"), _writer(w.EvictsOnAcknowledgement)
    ),
    "evicts_by_offset": Mutant("rule 3, by seq", "B", _bounds("fill 1 a, spend 1 b"), _overlay(w.EvictsByOffset)),
    "evicts_any_epoch": Mutant(
        "rule 3, of this epoch", "B", _bounds("fill 1 a, fill 1 b, spend 2 c", births=2), _overlay(w.EvictsAnyEpoch)
    ),
    "evicts_one_early": Mutant(
        "rule 3, beyond the offset", "A", _bounds("fill 1 a, fill 1 a", births=2), _overlay(w.EvictsOneEarly)
    ),
    "evicts_before_it_decides": Mutant(
        "the overlay holds what `wants` left out",
        "B",
        replace(_bounds("fill 1 a, spend 1 b"), split=True),
        _writer(w.EvictsBeforeItDecides),
    ),
    "serves_after_any_read": Mutant(
        "rule 4, to its end", "A", _bounds("fill 1 a", births=2), _writer(w.ServesAfterAnyRead)
    ),
    "guesses_its_epoch": Mutant(
        "rule 4, an exact offset", "4", _bounds("fill 1 a", "doubtful", births=2), _writer(w.GuessesItsEpoch)
    ),
    "never_times_out": Mutant("rule 5, a timeout", "F", _bounds("fill 1 a", "unsaid lost"), _writer(w.NeverTimesOut)),
    "believes_any_acknowledgement": Mutant(
        "rule 5, in line", "F", _bounds("fill 1 a", "lost"), _writer(w.BelievesAnyAcknowledgement)
    ),
    "opens_unasked": Mutant(
        "rule 6", "6", replace(_bounds("fill 1 a", births=2, openings=3), prompt=False), _writer(w.OpensUnasked)
    ),
    "has_always_room": Mutant(
        "rule 7", "7", replace(_bounds("fill 1 a, fill 1 b"), run_ahead=1), _writer(w.HasAlwaysRoom)
    ),
    "counts_only_own": Mutant(
        "rule 7, what was read too",
        "7",
        replace(_bounds("fill 1 a, fill 1 b", births=2), run_ahead=1),
        _overlay(w.CountsOnlyOwn),
    ),
    "opens_far_from_the_end": Mutant(
        "rule 9", "9", replace(_bounds("fill 1 a", births=2), run_ahead=1), _writer(w.OpensFarFromTheEnd)
    ),
    "blind_for_versions": Mutant(
        "rule 10, versions",
        "10",
        replace(_bounds("fill 1 a, spend 1 b", openings=1), eras=_SWITCH, prologue=1),
        _writer(w.BlindForVersions),
    ),
    "blind_for_versions_decides": Mutant(
        "rule 10, versions",
        "B",
        replace(_bounds("fill 1 a, spend 2 b", births=2, openings=1), eras=_SWITCH, prologue=1),
        _writer(w.BlindForVersions),
    ),
    "blind_for_generations": Mutant(
        "rule 10, generations",
        "B",
        replace(_bounds("fill 1 a, fill 1 b, spend 3 c"), eras=_REPAIR, prologue=1),
        _writer(w.BlindForGenerations),
    ),
    "forgets_rejections": Mutant(
        "rejections in the overlay", "A", _bounds("spend 1 a, spend 1 a"), _overlay(w.ForgetsRejections)
    ),
    "asks_no_outcomes": Mutant(
        "outcomes from the database", "A", _bounds("fill 1 a, fill 1 a"), _writer(w.AsksNoOutcomes)
    ),
    "keeps_its_overlay": Mutant(
        "a new overlay for each opening", "B", _bounds("fill 1 a, spend 1 b", "lost"), _writer(w.KeepsItsOverlay)
    ),
}
