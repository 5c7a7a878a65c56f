"""Guarantees switched off, as data: `mutations.txt` and `model_read/mutants.txt` have a block for each.

    == what is missing then
    in the file
    -its old text, in one or more lines
    +the new text; without such a line, the old lines go
    key: what else is known of it

There may be several files, and several texts of a file. A text need not be whole lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Edit(NamedTuple):
    """In `file`, `old` becomes `new`."""

    file: str
    old: str
    new: str


class Patch(NamedTuple):
    """`facts` are the lines with a colon."""

    name: str
    edits: tuple[Edit, ...]
    facts: Mapping[str, str]


def read(file: Path) -> list[Patch]:
    """All patches of a file, in its order."""
    return [_patch(block.splitlines()) for block in f"\n{file.read_text()}".split("\n== ")[1:]]


def _patch(lines: list[str]) -> Patch:
    edits: list[Edit] = []
    facts = {}
    name, *rest = lines
    file, old, new = "", list[str](), list[str]()
    for line in [*rest, ""]:
        if old and not line.startswith("+") and not (line.startswith("-") and not new):
            edits.append(Edit(file, "\n".join(old), "\n".join(new)) if new else Edit(file, "\n".join([*old, ""]), ""))
            old, new = [], []
        if line.startswith("in "):
            file = line.removeprefix("in ")
        elif line.startswith("-"):
            old.append(line[1:])
        elif line.startswith("+"):
            new.append(line[1:])
        elif line:
            key, _, fact = line.partition(": ")
            facts[key] = fact
    return Patch(name, tuple(edits), facts)
