"""Schedules as text, and made smaller: what both model checkers do with a list of choices.

A choice is a few words; `name*9` is nine in a row. A file of traces has a block for each mutant:

    the mutant's name
      breaks the promise that it breaks
      by choice, choice*2, another choice
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


class Trace(NamedTuple):
    """`choices` break `promise` without the guarantee that the mutant lacks."""

    promise: str
    choices: list[str]


def read(file: Path) -> dict[str, Trace]:
    """The stored traces, by mutant."""
    found = {}
    for block in filter(str.strip, file.read_text().split("\n\n")):
        mutant, promise, choices = block.strip().split("\n")
        found[mutant] = Trace(_after(promise), unfolded(_after(choices)))
    return found


def write(file: Path, traces: Mapping[str, Trace]) -> None:
    blocks = [f"{mutant}\n  breaks {one.promise}\n  by {folded(one.choices)}\n" for mutant, one in traces.items()]
    file.write_text("\n".join(blocks))


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


def _after(line: str) -> str:
    return line.strip().partition(" ")[2]
