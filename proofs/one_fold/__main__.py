"""One fold, any view: `python -m proofs.one_fold --minutes M --seed S` generates contexts and views with what happens in
them, folds all in every way, and compares it with what a plain reading of their functions gives.

Of the first history that differs the modules and events are printed.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from proofs.one_fold.expect import Found
from proofs.one_fold.generate import HistorySpec, histories, sources
from tools.dev.stack import Stack

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("commands", "domain", "infra", "projections", "proofs", "spark_jobs", "tests", "tools")
AT_ONCE = 50
"""Histories in one log."""
A_MINUTE = 200
"""More than can be folded in one."""


@contextmanager
def tree(specs: Mapping[int, HistorySpec]) -> Iterator[Path]:
    """A copy of this tree that has these histories' modules, too."""
    with tempfile.TemporaryDirectory(prefix="one-fold-") as name:
        folder = Path(name)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        for number, spec in specs.items():
            for path, text in sources(number, spec):
                (folder / path).write_text(text)
        yield folder


def fold(stack: Path, specs: Mapping[int, HistorySpec], seed: str) -> Found:
    """One run, in a process of its own."""
    with tree(specs) as folder:
        place = folder / "place"
        place.mkdir()
        (place / "specs").write_bytes(pickle.dumps(dict(specs)))
        command = [sys.executable, "-m", "proofs.one_fold.run", str(place), "--stack", str(stack), "--seed", seed]
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return Found(differences=[(None, "run", (done.stdout + done.stderr)[-6_000:])])
        found: Found = pickle.loads((place / "report").read_bytes())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.one_fold")
    parser.add_argument("--minutes", type=float, default=10.0, help="then no more are begun")
    parser.add_argument("--seed", type=int, default=314159)
    asked = parser.parse_args()
    count = math.ceil(asked.minutes) * A_MINUTE
    specs = dict(enumerate(histories(count, asked.seed)))
    total = Found()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="samefold-") as name:
        Path(name).chmod(0o711)
        stack = Stack(Path(name))
        try:
            for first in range(0, len(specs), AT_ONCE):
                if time.monotonic() - began > 60 * asked.minutes:
                    break
                some = {number: specs[number] for number in range(first, min(first + AT_ONCE, len(specs)))}
                # a stack of its own for each, so that what one leaves behind slows none
                stack.up()
                total.add(fold(stack.folder, some, f"{asked.seed} {first}"))
                print(
                    f"{total.histories} of {len(specs)} histories, {total.events} events, {total.folded} kept whole, "
                    f"{len(total.differences)} differences, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
        finally:
            stack.down()
    for number in sorted({number for number, _, _ in total.differences if number is not None})[:1]:
        for _, text in sources(number, specs[number]):
            print(text[text.index("projections.engine") :])
        print(*specs[number].events, sep="\n")
    print("\nreached:", *(f"  {count:6} {what}" for what, count in sorted(total.reached.items())), sep="\n")
    print("\ndifferences:", *(f"  {one}" for one in total.differences[:200]), sep="\n")
    return 1 if total.differences else 0


if __name__ == "__main__":
    sys.exit(main())
