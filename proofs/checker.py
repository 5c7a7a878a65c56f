"""What the two model checkers have in common: mutants and their traces, how a schedule is made smaller, one command line.

    python -m proofs.model|proofs.model_read --minutes 10 --seed 1     large worlds and random schedules
    python -m proofs.model|proofs.model_read --table                   promise → check → guarantees switched off, and noticed
    python -m proofs.model|proofs.model_read --traces                  search for the trace of each mutant again, and store it

The last line of a long run says that every promise was kept, or a line begins with FOUND, and the exit code is 1. A choice is a few
words; `name*9` is nine in a row. A mutant's block in a `mutants.txt` (`proofs/patches.py`) says in which `world` it is tried, which
promise it `breaks` and `by` which choices; or why its lack is `harmless`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    promises: Mapping[str, tuple[str, str]]
    """In words, and where each is checked."""
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
    parser.add_argument("--table", action="store_true", help="promise, check, mutants killed, as Markdown")
    parser.add_argument("--traces", action="store_true", help="search for each mutant's trace and store it")
    arguments = parser.parse_args()
    if arguments.table:
        return table(checker)
    if arguments.traces:
        return store_traces(checker)
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    try:
        seen = checker.attack(60 * arguments.minutes, arguments.seed)
    except Found as found:
        print(f"FOUND {found}")
        return 1
    print(f"{seen}: every promise was kept")
    return 0


def table(checker: Checker) -> int:
    """Print what is promised, where that is checked, and the mutants that break it, each by choices that the real code passes."""
    killed: dict[str, list[str]] = {promise: [] for promise in checker.promises}
    survivors = []
    for name, mutant in mutants_in(checker.mutants).items():
        if is_killed(checker, mutant):
            killed[mutant.promise].append(name)
        elif mutant.promise:
            survivors.append(name)
    print("| promise | checked at | guarantees switched off, each noticed |\n|---|---|---|")
    for promise, (words, check) in checker.promises.items():
        print(f"| {words} | {check} | {'; '.join(killed[promise])} |")
    print(*(f"SURVIVED: {name}" for name in survivors), sep="\n")
    return int(bool(survivors))


def store_traces(checker: Checker) -> int:
    """Of a mutant for which none is found, the stored one stays."""
    found = {}
    mutants = {name: mutant for name, mutant in mutants_in(checker.mutants).items() if mutant.promise}
    for name, mutant in mutants.items():
        if one := checker.find(mutant):
            found[name] = one
        print(f"{name}: {folded(one.choices) if one else 'SURVIVED'}", flush=True)
    checker.mutants.write_text("\n".join(_stored(checker.mutants.read_text().splitlines(), found)) + "\n")
    return int(len(found) < len(mutants))


def _stored(lines: Iterable[str], found: Mapping[str, Found]) -> Iterator[str]:
    name = ""
    for line in lines:
        name = line.removeprefix("== ") if line.startswith("== ") else name
        if name not in found or not line.startswith(("breaks: ", "by: ")):
            yield line
        elif line.startswith("breaks: "):
            yield f"breaks: {found[name].violation.promise}"
            if found[name].choices:
                yield f"by: {folded(found[name].choices)}"


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


def shrunk(choices: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
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
