"""make test + test-all + prove: stored traces take a second each, searches minutes. Each guarantee is needed: the code without it
breaks a promise of its model, by choices that the real code passes."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from proofs.checker import Checker, Mutant, is_killed, mutants_in
from proofs.model.checks import CHECKER as WRITE_SIDE
from proofs.model_read.checks import CHECKER as READ_SIDE
from proofs.model_read.explore import wander
from proofs.model_read.scenarios import SCENARIOS
from proofs.model_source.checks import CHECKER as SOURCES

pytestmark = pytest.mark.usefixtures("model_database")

CHECKERS = [
    pytest.param(WRITE_SIDE, id="write"),
    pytest.param(READ_SIDE, id="read", marks=pytest.mark.integration),
    pytest.param(SOURCES, id="sources"),
]
MUTANTS = [
    pytest.param(checker.values[0], mutant, id=mutant.name, marks=checker.marks)
    for checker in CHECKERS
    for mutant in mutants_in(checker.values[0].mutants).values()  # type: ignore[union-attr]
]


def those(*, harmful: bool, without: Collection[str] = ()) -> pytest.MarkDecorator:
    some = [one for one in MUTANTS if bool(one.values[1].promise) is harmful and one.id not in without]  # type: ignore[union-attr]
    return pytest.mark.parametrize(("checker", "mutant"), some)


@those(harmful=True)
def test_without_a_guarantee_choices_that_the_real_code_passes_break_its_promise(
    checker: Checker, mutant: Mutant
) -> None:
    assert is_killed(checker, mutant)


RARELY = {
    "generations are counted",
    "a table serves two builds",
    "no check of a build's state before it is moved on",
    "replay without the locks of the positions",
    "a drop and a pin at once",
    "a drop leaves tables alone that are beyond the event",
    "a switch of a policy keeps the generation",
    "a policy is switched before it has caught up after a restore",
    "rows kept over a fence",
    "rows kept over a reading of the positions",
    "a reader keeps asking the old table",
    "a build may be ahead of its agent",
}
"""Found by chance, or after many minutes: `python -m proofs.model_read --traces`."""


@pytest.mark.prove(part="mutants")
@those(harmful=True, without=RARELY)
def test_without_a_guarantee_a_search_finds_such_choices_again(checker: Checker, mutant: Mutant) -> None:
    found = checker.find(mutant)
    assert found is not None
    assert found.violation.promise == mutant.promise
    if checker is not READ_SIDE:  # the others' search is breadth first, so that the stored choices are the fewest
        assert len(found.choices) == len(mutant.choices)


@pytest.mark.slow
@those(harmful=False)
def test_what_is_harmless_to_leave_out_breaks_nothing(checker: Checker, mutant: Mutant) -> None:
    assert mutant.facts["harmless"]
    assert wander(SCENARIOS[mutant.world], 1, mutant, walks=3).commits > 0
