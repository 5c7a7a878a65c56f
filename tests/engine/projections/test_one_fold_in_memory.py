"""One fold, in memory: the engine's own functions, batch by batch, on generated histories against the oracle; and that the oracle
catches each of the mistakes that a fold could make."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from infra.log import rule
from infra.log.records import Commit, Record, decode_event
from infra.log.rule import Counted, Reading, Void
from infra.testing.fixtures import SEED
from projections.engine.fold.errors import EngineStop
from projections.engine.fold.fold import Blocked, Held
from projections.engine.fold.plan import Plan, Step
from projections.engine.rebuild import folded as engine_folded
from proofs.bank_oracle import Entry
from proofs.one_fold.folding import in_memory
from proofs.one_fold.histories import History, history
from proofs.one_fold.kinds import all_kinds
from proofs.one_fold.oracle import fold

VIEWS = all_kinds()
RICH = 600
"""Steps of a history in which everything happens."""

generated = settings(deadline=None, database=None)


def timed(made: History) -> list[list[Entry]]:
    """The log as a broker would have it, a record each second."""
    return [[Entry(1_767_225_600_000 + 1000 * n, value) for n, value in enumerate(log)] for log in made.logs]


def memory_differences(made: History, chance: random.Random) -> list[str]:
    logs = timed(made)
    expected = fold(logs, skips=made.skips)
    found = in_memory(logs, VIEWS, made.skips, chance)
    return [
        *(["positions"] if found.places != expected.places else []),
        *(["parked"] if found.parked != expected.parked else []),
        *(line for view in VIEWS for line in expected.differences(view, found.rows[view])),
    ]


@seed(SEED)
@settings(generated, max_examples=settings().max_examples)
@given(chance=st.randoms(use_true_random=False), partitions=st.integers(1, 16), steps=st.integers(1, 40))
def test_in_memory_any_short_history(chance: random.Random, partitions: int, steps: int) -> None:
    assert memory_differences(history(chance, partitions, steps, poison=0.2), chance) == []


@pytest.mark.slow
@seed(SEED)
@settings(generated, max_examples=150)
@given(chance=st.randoms(use_true_random=True), partitions=st.integers(1, 16))
def test_in_memory_any_long_history(chance: random.Random, partitions: int) -> None:
    assert memory_differences(history(chance, partitions, RICH), chance) == []


HAPPENED = {
    "commit",
    "open",
    "fenced",
    "lose",
    "hold",
    "release",
    "swap",
    "repeat",
    "garbage",
    "impostor",
    "refused",
    "poison",
    "skip",
    "sent twice",
    "of 1 events",
    "of 3 events",
}


def test_what_histories_are_made_of() -> None:
    """All that a log may hold is in them, or the tests here would prove little."""
    made: Counter[str] = Counter()
    commits = void = parked = 0
    for number in range(3):
        one = history(random.Random(f"{SEED} {number}"), 2, RICH)
        expected = fold(timed(one), skips=one.skips)
        made += one.made
        commits, void, parked = commits + expected.commits, void + expected.void, parked + len(expected.parked)
        assert all(expected.rows[view] for view in VIEWS)
    assert commits > 500
    assert void > 200
    assert parked > 3
    assert {what for what in HAPPENED if not made[what]} == set()


# ── mutants: what the comparison would be worth if it could not fail ──


def _seq_unread(reading: Reading, entry: Commit) -> Reading:
    return reading._replace(seq=entry.seq - 1) if entry.epoch == reading.epoch else reading


def _epoch_unread(reading: Reading, entry: Commit) -> Reading:
    return reading._replace(epoch=entry.epoch, seq=reading.seq) if entry.epoch >= 0 else reading


def _nothing_void(reading: Reading, entry: Commit) -> Reading:
    return reading._replace(epoch=max(entry.epoch, 0), seq=entry.seq - 1) if entry.epoch >= 0 else reading


def reading_by(rule_of: Callable[[Reading, Commit], Reading]) -> Callable[[pytest.MonkeyPatch], None]:
    """The reading rule, with its state put right for each commit before it is asked."""
    right = rule.read

    def wrong(reading: Reading, records: Iterable[Record], *decode: Any) -> tuple[Reading, list[Counted], list[Void]]:
        counted: list[Counted] = []
        void: list[Void] = []
        for record in records:
            entry = decode_event(record)
            before = rule_of(reading, entry) if isinstance(entry, Commit) else reading
            reading, more, empty = right(before, [record], *decode)
            counted += more
            void += empty
        return reading, counted, void

    return lambda patch: patch.setattr(rule, "read", wrong)


def _journals_lag(patch: pytest.MonkeyPatch) -> None:
    """A journal is told the state before its event."""
    step_of = Plan._step

    def step(self: Plan, context: Any, event: type, decode: Any) -> Step | None:
        found = step_of(self, context, event, decode)
        if found is None or found.states is None:
            return found
        before: dict[str, Any] = {}
        evolve = found.evolve

        def remembering(state: Any, event: Any) -> Any:
            before["state"] = state
            return evolve(state, event)

        def told(rows: Any) -> Any:
            return lambda event, _after, at: rows(event, before["state"], at)

        journals = tuple(replace(journal, rows=told(journal.rows)) for journal in found.journals)
        return replace(found, evolve=remembering, journals=journals)

    patch.setattr(Plan, "_step", step)


def _sums_twice(patch: pytest.MonkeyPatch) -> None:
    add = engine_folded.add_sums

    def twice(plan: Plan, view: str, sums: Any, more: Any) -> None:
        add(plan, view, sums, more)
        add(plan, view, sums, more)

    patch.setattr(engine_folded, "add_sums", twice)


def _parked_forgotten(patch: pytest.MonkeyPatch) -> None:
    """From one batch to the next."""
    patch.setattr(engine_folded, "blocking", lambda blocked, _parked: blocked)


def _skips_unread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Blocked, "blocks", lambda self, view, at: at.version >= self.parked.get((view, at.stream), 10**9))


def _deletions_kept(patch: pytest.MonkeyPatch) -> None:
    """A row that is taken away is there again in the next batch."""
    absorb = Held.merge

    def keep(self: Any, changes: Any) -> None:
        was = {name: dict(rows) for name, rows in self.rows.items()}
        absorb(self, changes)
        for name, changed in changes.rows.items():
            self.rows[name].update({key: was[name].get(key) for key, row in changed.items() if row is None})

    patch.setattr(Held, "merge", keep)


MUTANTS = {
    "seq unread": reading_by(_seq_unread),
    "epoch unread": reading_by(_epoch_unread),
    "nothing void": reading_by(_nothing_void),
    "a journal lags": _journals_lag,
    "sums added twice": _sums_twice,
    "parked streams forgotten": _parked_forgotten,
    "skips unread": _skips_unread,
    "deletions kept": _deletions_kept,
}


@pytest.mark.parametrize("mutate", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_of_the_fold_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [history(random.Random(f"{SEED} {number}"), 2, RICH) for number in range(3)]
    mutate(monkeypatch)
    assert any(map(_is_caught, made))


def _is_caught(made: History) -> bool:
    try:
        return bool(memory_differences(made, random.Random(SEED)))
    except EngineStop:  # the engine itself noticed
        return True
