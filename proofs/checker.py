"""What the model checkers have in common: mutants and their traces, how a schedule is made smaller, one command line.

    python -m proofs.model|proofs.model_read|proofs.model_source --minutes 10 --seed 1     large worlds and random schedules
    python -m proofs.model|proofs.model_read|proofs.model_source --traces                  search for the trace of each mutant again

The last line of a long run says that every promise was kept, or a line begins with FOUND, and the exit code is 1. A choice is a few
words; `name*9` is nine in a row. A mutant's block in a `mutants.txt` (`proofs/patches.py`) says in which `world` it is tried, which
promise it `breaks` and `by` which choices; or why its lack is `harmless`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from proofs import patches
from proofs.patches import Patch


class Violation(AssertionError):
    """A promise is broken."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise


@dataclass
class Found(Exception):
    """A promise is broken in a world by these choices."""

    world: str
    violation: Violation
    choices: list[str]

    def __str__(self) -> str:
        return f"in {self.world}: {self.violation}\n  by {folded(self.choices)}"


class Mutant(Patch):
    @property
    def world(self) -> str:
        return self.facts["world"]

    @property
    def promise(self) -> str:
        """That it breaks; of one that is harmless, none."""
        return self.facts.get("breaks", "")

    @property
    def choices(self) -> list[str]:
        return unfolded(self.facts.get("by", ""))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        with patches.edited(*self.edits):
            yield


class Checker(NamedTuple):
    name: str
    mutants: Path
    replayed: Callable[[Mutant, bool], Violation | None]
    """What the mutant's choices break in its world; or without the mutant, if that is not in force."""
    find: Callable[[Mutant], Found | None]
    attack: Callable[[float, int], str]
    """For so many seconds, from a seed: what was looked at. Raises Found."""


def mutants_in(file: Path) -> dict[str, Mutant]:
    return {patch.name: Mutant(*patch) for patch in patches.read(file)}


def is_killed(checker: Checker, mutant: Mutant) -> bool:
    """Whether its choices break just its promise, and none without it."""
    broken = checker.replayed(mutant, True)
    return broken is not None and broken.promise == mutant.promise and checker.replayed(mutant, False) is None


# ── the command line ──


def main(checker: Checker) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {checker.name}", description="Promises under a model checker.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--traces", action="store_true", help="search for each mutant's trace and print it")
    arguments = parser.parse_args()
    if arguments.traces:
        return print_traces(checker)
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    try:
        seen = checker.attack(60 * arguments.minutes, arguments.seed)
    except Found as found:
        print(f"FOUND {found}")
        return 1
    print(f"{seen}: every promise was kept")
    return 0


def print_traces(checker: Checker) -> int:
    """As they stand in the file; of a mutant for which none is found, the stored one is still as good as any."""
    survivors = 0
    for name, mutant in mutants_in(checker.mutants).items():
        if mutant.promise:
            found = checker.find(mutant)
            survivors += found is None
            trace = f"breaks: {found.violation.promise}\nby: {folded(found.choices)}" if found else "SURVIVED"
            print(f"== {name}\n{trace}", flush=True)
    return int(survivors > 0)


# ── choices ──


def folded(choices: Iterable[str]) -> str:
    runs = [(choice, sum(1 for _ in same)) for choice, same in groupby(choices)]
    return ", ".join(choice if count == 1 else f"{choice}*{count}" for choice, count in runs)


def unfolded(text: str) -> list[str]:
    choices = []
    for part in filter(None, text.split(", ")):
        choice, _, count = part.partition("*")
        choices += [choice] * int(count or 1)
    return choices


def smallest(
    world: str, violation: Violation, choices: list[str], replayed: Callable[[list[str]], Violation | None]
) -> Found:
    """The same promise broken by fewer choices: no single one of them can be left out."""

    def fails(fewer: list[str]) -> bool:
        broken = replayed(fewer)
        return broken is not None and broken.promise == violation.promise

    choices = _shrunk(choices, fails)
    return Found(world, replayed(choices) or violation, choices)


def _shrunk(choices: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
    """A list from which no single choice can be left out without making it pass."""
    size = len(choices)
    while size:
        start, shorter = 0, False
        while start < len(choices):
            fewer = choices[:start] + choices[start + size :]
            if fails(fewer):
                choices, shorter = fewer, True
            else:
                start += size
        if size > 1 or not shorter:
            size //= 2
    return choices
