"""A run holds only where faults took effect and snapshots were compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proofs.chaos.catalogue import ALONE, KINDS
from proofs.chaos.effects import Effects
from proofs.chaos.mix import Deck
from proofs.chaos.report import Result, write


def result(times: int = 2) -> Result:
    effects = Effects()
    for kind in KINDS * times:
        effects.took_effect(kind)
    with effects.recovery("handler"):
        pass
    return Result(7, 20.0, effects, seconds=970.0, snapshots=10)


def test_a_run_with_enough_of_everything_holds() -> None:
    assert result().holds


def test_a_run_with_a_violation_does_not_hold() -> None:
    run = result()
    run.violations.append("C: rows differ")
    assert not run.holds


@pytest.mark.parametrize("kind", KINDS[::9])
def test_a_run_in_which_a_kind_of_fault_took_effect_too_seldom_does_not_hold(kind: str) -> None:
    run = result()
    run.effects.by_kind[kind] -= 1
    assert (run.holds, run.too_few()) == (False, {kind: 1})


def test_a_run_in_which_work_came_back_late_does_not_hold() -> None:
    run = result()
    run.effects.seconds["API, once the store answers"] = [1.0, 61.0]
    assert (run.holds, run.late()) == (False, ["API, once the store answers: 61.0"])


def test_a_run_without_a_snapshot_does_not_hold() -> None:
    run = result()
    run.snapshots = 0
    assert not run.holds


def test_the_report_tells_seed_faults_violations_and_recovery(tmp_path: Path) -> None:
    run = result()
    run.violations.append("C: rows differ")
    text = write(run, tmp_path, "run").read_text()
    assert all(said in text for said in ("seed 7", "C: rows differ", "| killed: commit sent | 2 |", "| handler | 1 |"))
    told = json.loads((tmp_path / "run.json").read_text())
    assert (told["seed"], told["faults"], told["holds"]) == (7, 2 * len(KINDS), False)
    assert told["recovery_s"]["handler"]["n"] == 1


def test_a_deck_deals_all_before_one_comes_again() -> None:
    deck = Deck(ALONE, seed=1)
    count = len(ALONE.faults)
    dealt = [deck.deal().kind for _ in range(2 * count)]
    assert sorted(dealt[:count]) == sorted(dealt[count:]) == sorted(fault.kind for fault in ALONE.faults)
