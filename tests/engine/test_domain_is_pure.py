"""The domain decides by its arguments alone: no clock, no chance, no input or output, nothing of the program."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import domain

# What can be imported without reaching out of the process or into its surroundings. Anything else is refused, so that a
# module nobody thought of is refused too.
PURE = {
    *("__future__", "abc", "bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "decimal", "enum"),
    *(
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "math",
        "operator",
        "re",
        "statistics",
        "string",
        "types",
        "typing",
    ),
    *("pydantic", "domain"),
}
CLOCKS = {"now", "utcnow", "today"}
REACHES_OUT = {"open", "print", "input", "eval", "exec", "compile", "__import__", "breakpoint"}


def impurities(source: str) -> Iterator[str]:
    """What in a module's text is not pure, each with its line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names if not _is_pure(alias.name)]
            case ast.ImportFrom(module=str(module), level=0) if not _is_pure(module):
                found = [module]
            case ast.Attribute(attr=name) if name in CLOCKS:
                found = [name]
            case ast.Name(id=name) if name in REACHES_OUT:
                found = [name]
            case _:
                continue
        yield from (f"line {node.lineno}: {name}" for name in found)


def _is_pure(module: str) -> bool:
    return module.partition(".")[0] in PURE


@pytest.mark.parametrize("file", sorted(Path(domain.__path__[0]).rglob("*.py")), ids=lambda file: file.name)
def test_the_domain_is_pure(file: Path) -> None:
    assert list(impurities(file.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "import os.path",
        "import random as chance",
        "from uuid import uuid4",
        "import logging",
        "from infra.settings import Settings",
        "import msgspec",
        "day = date.today()",
        "at = datetime.now(UTC)",
        "clock = datetime.now",
        "print(state)",
        "text = open('rates.json').read()",
        "__import__('os')",
    ],
)
def test_the_check_catches(line: str) -> None:
    source = Path(domain.__path__[0], "accounts.py").read_text() + f"\ndef decide_otherwise():\n    {line}\n"
    assert len(list(impurities(source))) == 1
