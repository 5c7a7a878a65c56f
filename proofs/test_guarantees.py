"""make test-all: collecting all tests takes a while. Each guarantee has a test, and each module says which rings it is in."""

import ast
import re
from collections import defaultdict

import pytest

from proofs.guarantees import PAGE, fastest, guarantees, rings, table
from proofs.patches import ROOT
from tools.testing.rings import RINGS

FIRST_LINE = re.compile(r"make ((?:test|test-all|prove)(?: \+ (?:test-all|prove))*): \S.*")


@pytest.fixture(scope="module")
def ring_of() -> dict[str, str]:
    return rings()


@pytest.mark.slow
def test_the_page_is_what_the_tables_the_marks_and_the_mutants_say(ring_of: dict[str, str]) -> None:
    assert PAGE.read_text() == table(ring_of), "`python -m proofs.guarantees` writes it anew"


@pytest.mark.slow
def test_each_guarantee_has_tests_and_is_checked_before_make_prove(ring_of: dict[str, str]) -> None:
    rows = guarantees()
    assert len(rows) > 100
    assert [test for row in rows for test in row.tests if fastest([test], ring_of) is None] == [], "no such test"
    assert [row.text for row in rows if fastest(row.tests, ring_of) not in RINGS[:2]] == []


@pytest.mark.slow
def test_each_module_says_first_which_rings_it_is_in(ring_of: dict[str, str]) -> None:
    found = defaultdict(set)
    for test, ring in ring_of.items():
        found[test.partition("::")[0]].add(ring)
    wrong = []
    for file, its_rings in found.items():
        text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
        says = FIRST_LINE.match(text)
        if not says or says[1] != " + ".join(ring for ring in RINGS if ring in its_rings):
            wrong.append(f"{file}: {' + '.join(ring for ring in RINGS if ring in its_rings)}")
    assert wrong == []
