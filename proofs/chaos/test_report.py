"""make test: without a run. A run holds only where faults took effect, work came back in time and snapshots were compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from proofs.chaos.catalogue import ALONE, KINDS
from proofs.chaos.effects import Effects
from proofs.chaos.mix import Deck
from proofs.chaos.report import Result, write


def result() -> Result:
    effects = Effects()
    for kind in KINDS * 2:
        effects.took_effect(kind)
    with effects.recovery("handler"):
        pass
    return Result(7, 20.0, effects, seconds=970.0, snapshots=10)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: run.violations.append("C: rows differ"),
        *(lambda run, kind=kind: run.effects.by_kind.subtract([kind]) for kind in (KINDS[0], KINDS[-1])),
        lambda run: run.effects.seconds.update({"API, once the store answers": [1.0, 61.0]}),
        lambda run: setattr(run, "snapshots", 0),
    ],
    ids=["a violation", "too few of the first kind", "too few of the last kind", "late", "no snapshot"],
)
def test_a_run_that_lacks_something_does_not_hold(spoil: Callable[[Result], object], tmp_path: Path) -> None:
    run = result()
    assert run.holds
    spoil(run)
    text = write(run, tmp_path, "run").read_text()
    assert all(said in text for said in ("seed 7: **does not hold**", *run.violations, "| handler | 1 |"))
    assert all(f"too few: {kind} (1)" in text for kind in run.too_few())
    told = json.loads((tmp_path / "run.json").read_text())
    assert (told["seed"], told["holds"], told["recovery_s"]["handler"]["n"]) == (7, False, 1)


def test_a_deck_deals_all_before_one_comes_again() -> None:
    deck = Deck(ALONE, seed=1)
    count = len(ALONE.faults)
    dealt = [deck.deal().kind for _ in range(2 * count)]
    assert sorted(dealt[:count]) == sorted(dealt[count:]) == sorted(fault.kind for fault in ALONE.faults)
