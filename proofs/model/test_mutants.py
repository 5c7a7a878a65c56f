"""Each guarantee is needed: a world without it breaks a promise, by a stored trace and by a search from scratch."""

import pytest

from proofs import traces
from proofs.model.explore import Found
from proofs.model.lacking import the_rule
from proofs.model.mutants import MUTANTS
from proofs.model.setting import Parts
from proofs.model.traces import FILE, replay, search

TRACES = traces.read(FILE)


@pytest.mark.parametrize("name", MUTANTS)
def test_its_trace_breaks_just_that_promise(name: str) -> None:
    mutant = MUTANTS[name]
    violation = replay(mutant, TRACES[name].choices, mutant.parts())
    assert violation is not None
    assert violation.promise == mutant.promise


@pytest.mark.parametrize("name", MUTANTS)
def test_the_product_passes_that_very_trace(name: str) -> None:
    assert replay(MUTANTS[name], TRACES[name].choices, Parts(names=MUTANTS[name].parts().names)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_search_finds_it_again(name: str) -> None:
    found = search(name)
    assert isinstance(found, Found), found
    assert len(found.trace) == len(TRACES[name].choices)  # a shortest one, as the stored one is


@pytest.mark.parametrize("name", MUTANTS)
def test_the_rule_put_together_from_its_parts_passes(name: str) -> None:
    # so what the worlds without seq or epoch lack is just that
    assert replay(MUTANTS[name], TRACES[name].choices, Parts(rule=the_rule)) is None


def test_each_stored_trace_belongs_to_a_mutant() -> None:
    assert TRACES.keys() == MUTANTS.keys()
