"""For each guarantee a shortest schedule that breaks without it: `traces.txt`, made anew by `python -m proofs.model_read --traces`.

A choice is an actor's name, or `!` and a fault; so many in a row are written `name*9`. After the last one whoever is on goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("traces.txt")


class Trace(NamedTuple):
    """`choices`, in `scenario`, break `promise` without the guarantee that the mutant lacks."""

    mutant: str
    scenario: str
    promise: str
    choices: list[str]


def read() -> dict[str, Trace]:
    """The stored traces, by mutant."""
    found = {}
    for block in FILE.read_text().split("\n\n"):
        if block.strip():
            mutant, scenario, promise, choices = block.strip().split("\n")
            found[mutant] = Trace(mutant, _after(scenario), _after(promise), unfold(_after(choices)))
    return found


def write(traces: Iterable[Trace]) -> None:
    blocks = [f"{t.mutant}\n  in {t.scenario}\n  breaks {t.promise}\n  by {folded(t.choices)}\n" for t in traces]
    FILE.write_text("\n".join(blocks))


def _after(line: str) -> str:
    return line.strip().partition(" ")[2]


def folded(choices: Iterable[str]) -> str:
    runs = [(choice, sum(1 for _ in same)) for choice, same in groupby(choices)]
    return ", ".join(choice if count == 1 else f"{choice}*{count}" for choice, count in runs)


def unfold(text: str) -> list[str]:
    choices = []
    for part in filter(None, text.split(", ")):
        choice, _, count = part.partition("*")
        choices += [choice] * int(count or 1)
    return choices
