"""make test: texts only. Each mutation still has its place in the code and tests to catch it; `make prove` runs them."""

import re

import pytest

from proofs import patches
from proofs.model_read import mutants
from proofs.model_read.editing import edited
from proofs.mutations import MUTATIONS
from proofs.patches import ROOT, Patch

READ_SIDE = patches.read(mutants.TEXTS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_the_code_and_names_tests_that_exist(mutation: Patch) -> None:
    assert mutation.edits
    for edit in mutation.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1
        assert edit.new != edit.old
    file, _, word = mutation.facts["tests"].partition(" -k ")
    assert re.search(
        rf'def test_\w*{word}|"{word}"', (ROOT / file).read_text()
    )  # a test's name, or a parameter's value


def test_a_mutation_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    "edits", [*(one.edits for one in READ_SIDE), mutants.AHEAD], ids=lambda edits: edits[0].old[:30]
)
def test_each_text_of_a_mutant_of_the_read_side_changes_the_code(edits: tuple[patches.Edit, ...]) -> None:
    for edit in edits:
        with edited(edit):
            pass
