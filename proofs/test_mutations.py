"""Each mutation still has its place in the code and tests to catch it; `make mutants` runs them."""

import pytest

from proofs.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_the_code_and_names_tests_that_exist(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    file, _, word = mutation.tests.partition(" -k ")
    assert f"{word}" in (ROOT / file).read_text()
