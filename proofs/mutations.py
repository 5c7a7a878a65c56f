"""Guarantees switched off one at a time, each with the test that notices: `python -m proofs.mutations [WORD…]`.

They are in `mutations.txt`, with pytest's arguments. Each is made in a copy of the tree at HEAD, the tests are run there, and a
mutation that they let pass is a failure. The protocol's own rules have their mutants in `proofs/model`, those of the read side's
statements in `proofs/model_read`; here are those of the processes around them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from proofs import patches
from proofs.patches import ROOT, Patch

MUTATIONS = patches.read(Path(__file__).with_suffix(".txt"))
SLOWNESS = "0.25"
"""A test that waits in vain has caught the mutation: it need not wait for as long as one that must never fail by chance."""
FAILED = 1
"""pytest's exit code for tests that ran and failed; any other says nothing about the mutation."""


def survives(mutation: Patch) -> str | None:
    """Run a mutation's tests on a copy of the tree that has it; pytest's output where they did not fail."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        subprocess.run(["git", "init", "--quiet", folder], check=True)  # tests that copy the tree ask git for its files
        for edit in mutation.edits:
            file = Path(folder) / edit.file
            file.write_text(file.read_text().replace(edit.old, edit.new, 1))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.facts["tests"].split()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder, "TEST_SLOWNESS": SLOWNESS},
            capture_output=True,
            text=True,
            check=False,
        )
        # a fixture's error alone, as of a database that does not start, catches nothing
        is_caught = done.returncode == FAILED and re.search(r"\d+ failed", done.stdout)
        return None if is_caught else done.stdout + done.stderr


def main() -> int:
    """The exit code: 1 when a mutation survived."""
    parser = argparse.ArgumentParser(prog="python -m proofs.mutations")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those whose name has one of these words")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then no more are begun")
    parser.add_argument("--seed", type=int, help="their order; without it, that of the file")
    asked = parser.parse_args()
    chosen = [one for one in MUTATIONS if not asked.words or any(word in one.name for word in asked.words)]
    if asked.seed is not None:
        random.Random(asked.seed).shuffle(chosen)
    end = time.monotonic() + 60 * asked.minutes
    ran = survivors = 0
    for mutation in chosen:
        if time.monotonic() > end:
            break
        output = survives(mutation)
        ran += 1
        survivors += output is not None
        print(
            f"{'caught  ' if output is None else 'SURVIVED'}  {mutation.name}  ({mutation.facts['tests']})", flush=True
        )
        if output is not None:
            print(output[-2_000:])
    print(f"{ran} of {len(MUTATIONS)} mutants, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
