"""`python -m proofs [PART…] --minutes M --seed S` (`make prove`): what only chance, length or a second copy of the tree can find.

Each part is a few programs, run one after another. A table says what each ran and found; it stays in a report's folder with
all that the programs printed. Exit code 0 where nothing was found, 1 otherwise, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

from proofs.patches import ROOT

FINDS = re.compile(r"^(?:FOUND|SURVIVED|FAILED|ERROR) .*", re.MULTILINE)
SHOWN = 5
"""Findings of one program that stand in the table; all are in its log."""
TESTS = ("pytest", "-q", "-n", "2", "--dist", "loadgroup", "-m")


PROGRAMS = {
    "chaos": {"proofs.chaos": r"\d+ faults took effect"},
    "models": {
        "proofs.model": r"[\d,]+ walks",
        "proofs.model_read": r"[\d,]+ schedules",
        "proofs.model_source": r"[\d,]+ walks",
    },
    "histories": {"proofs.one_fold": r"\d+ of \d+ histories"},
    "mutants": {"proofs.mutations": r"\d+ of \d+ mutants"},
    "demos": {},
    "bench-self": {},
    "new-services": {"proofs.one_fault": r"\d+ services"},
    "weather": {"proofs.weather": r"\d+ months"},
}
"""By part, modules that take --minutes and --seed, with what finds in what each prints how much it ran. After its programs come
the tests that have the mark `prove(part=…)`."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", choices=list(PROGRAMS), help="all without one")
    parser.add_argument("--minutes", type=float, help="for each search; without it each has its own default")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--report", type=Path, default=ROOT / ".samefold" / "prove", help="the folder of the reports")
    asked = parser.parse_args()
    folder: Path = asked.report / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{asked.seed}"
    folder.mkdir(parents=True)
    rows = ["| part | program | seed | runs | minutes | found |", "|---|---|---:|---|---:|---|"]
    is_found = False
    code = 130
    with suppress(KeyboardInterrupt):
        for part, arguments, runs in _commands(asked.parts or list(PROGRAMS), asked.minutes, asked.seed):
            print(f"\n{part}: python -m {' '.join(arguments)}", flush=True)
            row, found = _run(part, arguments, runs, asked.seed, folder)
            is_found = is_found or found
            rows.append(row)
        code = 1 if is_found else 0
    (folder / "report.md").write_text("\n".join(rows) + "\n")
    print("", *rows, f"what each printed: {folder}", sep="\n")
    return code


def _commands(parts: list[str], minutes: float | None, seed: int) -> Iterator[tuple[str, list[str], str]]:
    """Of each program its part, its command line, and what finds its runs."""
    for part in parts:
        for module, runs in PROGRAMS[part].items():
            if find_spec(module):
                timed = ["--seed", str(seed)] + (["--minutes", f"{minutes:g}"] if minutes else [])
                yield part, [module, *timed], runs
        yield part, [*TESTS, f"prove(part='{part}')"], r"\d+ passed"


def _run(part: str, arguments: list[str], runs: str, seed: int, folder: Path) -> tuple[str, bool]:
    """Run a program to its end; what it prints goes to the terminal, and into a file. A row of the table, and if it found any."""
    module = arguments[0]
    environment = {name: value for name, value in os.environ.items() if name != "TEST_RUN"} | {"TEST_SEED": str(seed)}
    began = time.monotonic()
    log = folder / f"{part}-{module}.log"
    command = [sys.executable, "-m", *arguments]
    with (
        log.open("w") as kept,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running,
    ):
        assert running.stdout
        try:
            for line in running.stdout:
                kept.write(line)
                print(line, end="", flush=True)
        finally:  # after Ctrl-C, which the program has got, too
            code = running.wait()
    printed = log.read_text()
    found = FINDS.findall(printed)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and module == "pytest":
        code = 0
    if code and not found:
        found = [f"exit code {code}: {(printed.strip().splitlines() or [''])[-1]}"]
    ran = (re.findall(runs, printed) or ["none"])[-1]
    shown = found[:SHOWN] + [f"and {len(found) - SHOWN} more"] * (len(found) > SHOWN)
    told, minutes = "<br>".join(shown).replace("|", "\\|") or "nothing", (time.monotonic() - began) / 60
    return f"| {part} | {module} | {seed} | {ran} | {minutes:.1f} | {told} |", bool(found)


if __name__ == "__main__":
    sys.exit(main())
