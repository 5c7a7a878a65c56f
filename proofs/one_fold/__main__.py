"""One fold, any view: `python -m proofs.one_fold --histories N --seed S` generates contexts and views with what happens in
them, folds all in every way, and compares it with what a plain reading of their functions gives.

What differs is made smaller, as long as it still differs, and printed as the modules and events of one history.
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
from dataclasses import replace
from itertools import islice
from pathlib import Path

from infra.dev.stack import Stack
from proofs.one_fold.expect import Found
from proofs.one_fold.generate import HistorySpec, histories, sources

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("commands", "domain", "infra", "projections", "proofs", "spark_jobs", "tests")
AT_ONCE = 50
"""Histories in one log."""
A_MINUTE = 200
"""More than can be folded in one."""
TRIES = 12
"""Rounds in which a history that differs is made smaller."""
A_ROUND = 40


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


def fold(stack: Path, specs: Mapping[int, HistorySpec], seed: str, *, spark: bool) -> Found:
    """One run, in a process of its own."""
    with tree(specs) as folder:
        place = folder / "place"
        place.mkdir()
        (place / "specs").write_bytes(pickle.dumps(dict(specs)))
        command = [sys.executable, "-m", "proofs.one_fold.run", str(place), "--stack", str(stack), "--seed", seed]
        done = subprocess.run(
            [*command, *(["--spark"] if spark else [])],
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


def smaller(spec: HistorySpec) -> Iterator[HistorySpec]:
    """This history with less in it, the boldest first."""
    if len(spec.views) > 1:
        yield from (replace(spec, views=(view,)) for view in spec.views)
    width = len(spec.events) // 2
    while width:
        for start in range(0, len(spec.events), width):
            yield replace(spec, events=spec.events[:start] + spec.events[start + width :])
        width //= 2
    yield from (replace(spec, state=spec.state[:n] + spec.state[n + 1 :]) for n in range(len(spec.state)))
    for place, view in enumerate(spec.views):
        for n in range(len(view.columns) if len(view.columns) > 1 else 0):
            less = replace(view, columns=view.columns[:n] + view.columns[n + 1 :])
            yield replace(spec, views=(*spec.views[:place], less, *spec.views[place + 1 :]))


def shrunk(stack: Path, spec: HistorySpec, seed: str) -> tuple[HistorySpec, list[tuple[str, str]]]:
    """The smallest history found that differs still, and how. In each round many smaller ones are folded side by side."""
    why: list[tuple[str, str]] = []
    for turn in range(TRIES):
        candidates = dict(enumerate(islice(smaller(spec), A_ROUND)))
        found = fold(stack, candidates, f"{seed} {turn}", spark=False).differences
        bad = [number for number in candidates if any(number == of for of, _, _ in found)]
        if not bad:
            break
        best = min(bad, key=lambda number: len(pickle.dumps(candidates[number])))
        spec, why = candidates[best], [(step, text) for of, step, text in found if of == best]
    return spec, why


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.one_fold")
    parser.add_argument("--histories", type=int, help="300, or as many as can be folded in --minutes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then no more are begun")
    parser.add_argument("--seed", type=int, default=314159)
    parser.add_argument("--no-spark", action="store_true")
    asked = parser.parse_args()
    spark = not asked.no_spark
    count = asked.histories or (300 if math.isinf(asked.minutes) else math.ceil(asked.minutes) * A_MINUTE)
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
                total.add(fold(stack.folder, some, f"{asked.seed} {first}", spark=spark))
                print(
                    f"{total.histories} of {len(specs)} histories, {total.events} events, {total.folded} kept whole, "
                    f"{len(total.differences)} differences, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
            wrong = sorted({number for number, _, _ in total.differences if number is not None})
            for number in wrong[:5]:
                spec, why = shrunk(stack.folder, specs[number], f"{asked.seed} shrinks {number}")
                print(f"\n── history {number}, made smaller ──")
                for _, text in sources(0, spec):
                    print(text[text.index("projections.engine") :])
                print(*spec.events, *why, sep="\n")
        finally:
            stack.down()
    print("\nreached:", *(f"  {count:6} {what}" for what, count in sorted(total.reached.items())), sep="\n")
    print("\ndifferences:", *(f"  {one}" for one in total.differences[:200]), sep="\n")
    return 1 if total.differences else 0


if __name__ == "__main__":
    sys.exit(main())
