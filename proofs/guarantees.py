"""The list of guarantees: each with its tests, the ring that runs them and the mutants that prove them.

`python -m proofs.guarantees` writes it into docs/guarantees.md: a row for each of the tables in docs/failures.md, security.md
and reliability.md. A mutant proves a row if its test is one of the row's; the tables of the models name their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from proofs.mutations import MUTATIONS
from proofs.patches import ROOT
from tools.testing.rings import RINGS

PAGE = ROOT / "docs" / "guarantees.md"
FOLDERS = ("tests", "proofs", "demo", "benchmarks", "tools")
NAMED = re.compile(r"`(?:[\w/]+/)?(test_\w+\.py)(?:::(test_\w+)| -k (\w+))?`")
MODELS = (
    "The write side under a model checker",
    "The read side under a model checker",
    "A source under a model checker",
)
"""Sections whose tables have no column of tests: one test has a trace for each guarantee that was switched off."""
MODEL_TEST = "test_without_a_guarantee_choices_that_the_real_code_passes_break_its_promise"
HEAD = """# Guarantees, their tests and the mutants that prove the tests

Written by `python -m proofs.guarantees` from the tables of [failures](failures.md), [security](security.md) and
[reliability](reliability.md), the marks of the tests and `proofs/mutations.txt`; a test compares. The ring is the fastest one
that checks the guarantee. A mutant is the guarantee switched off, with the test that notices.

{rows} rows, {tests} without a test, {mutants} without a mutant (—).

| page | guarantee | test | ring | mutants |
|---|---|---|---|---:|
"""


@dataclass(frozen=True)
class Test:
    """All tests of a file whose name contains a word."""

    file: str
    word: str

    def holds(self, test_id: str) -> bool:
        file, _, name = test_id.partition("::")
        return file == self.file and self.word in name


@dataclass(frozen=True)
class Guarantee:
    page: str
    text: str
    tests: tuple[Test, ...]
    mutants: int


def guarantees() -> list[Guarantee]:
    """All rows, in the order of the pages."""
    return [one for page in ("failures", "security", "reliability") for one in _of(page)]


def _of(page: str) -> Iterator[Guarantee]:
    section = head = ""
    for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
        if line.startswith("## "):
            section, head = line.removeprefix("## ").partition(" (")[0], ""
        elif not line.startswith("|"):
            head = ""
        elif not head:
            head = line
        elif not line.startswith("|-") and (section in MODELS or "test" in head):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if section in MODELS:
                tests: tuple[Test, ...] = (Test("proofs/test_models.py", MODEL_TEST),)
                mutants = len([one for one in cells[2].split(";") if one.strip()]) if len(cells) > 2 else 0
            else:
                tests = tuple(Test(_paths()[file], test or word) for file, test, word in NAMED.findall(cells[-1]))
                mutants = sum(any(_proves(mutation.facts["tests"], test) for test in tests) for mutation in MUTATIONS)
            text = cells[1] if page == "security" else cells[0]
            yield Guarantee(page, text, tests, mutants)


@cache
def _paths() -> dict[str, str]:
    """Of each module of tests, by its name."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py"))
    return {path.name: str(path.relative_to(ROOT)) for path in found}


def _proves(arguments: str, test: Test) -> bool:
    """Whether a mutant that is caught by a run of pytest with these arguments is caught by this test."""
    file, _, word = arguments.partition(" -k ")
    return file == test.file and (not test.word or word in test.word)


def rings() -> dict[str, str]:
    """The ring of each test of the project, by its id."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rings.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-qq", f"--rings={file}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the tests can't be collected: {done.stdout}{done.stderr}")
        found: dict[str, str] = json.loads(file.read_text())
        return found


def fastest(tests: Sequence[Test], ring_of: Mapping[str, str]) -> str | None:
    """The fastest ring in which one of these tests runs; None where none is there."""
    found = {ring for test_id, ring in ring_of.items() if any(test.holds(test_id) for test in tests)}
    return next((ring for ring in RINGS if ring in found), None)


def table(ring_of: Mapping[str, str]) -> str:
    """The page."""
    lines = []
    lacking = 0
    rows = guarantees()
    for row in rows:
        ring = fastest(row.tests, ring_of)
        lacking += ring is None
        shown = [
            f"`{Path(test.file).name}{f'::{test.word}' if test.word.startswith('test_') else ''}`" for test in row.tests
        ]
        more = f" and {len(shown) - 1} more" if len(shown) > 1 else ""
        lines.append(
            f"| {row.page} | {row.text} | {shown[0] if shown else '—'}{more} | {ring or '—'} | {row.mutants or '—'} |\n"
        )
    mutants = sum(not row.mutants for row in rows)
    return HEAD.format(rows=len(rows), tests=lacking, mutants=mutants) + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(table(rings()))
    print(PAGE.read_text().split("\n\n")[2])
