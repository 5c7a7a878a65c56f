"""make test: texts only. Each mutation still has its place in the code and tests to catch it; `make prove` runs them."""

import re

import pytest

from proofs.mutations import MUTATIONS
from proofs.patches import ROOT, Patch


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_the_code_and_names_tests_that_exist(mutation: Patch) -> None:
    assert mutation.edits
    for edit in mutation.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1
        assert edit.new != edit.old
    file, _, word = mutation.facts["tests"].partition(" -k ")
    # a test's name, or a parameter's value
    assert re.search(rf'def test_\w*{word}|"{word}"', (ROOT / file).read_text())


def test_a_mutation_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
