"""Guarantees switched off, as data: `mutations.txt` and each `mutants.txt` have a block for each.

    == what is missing then
    in the file
    -its old text, in one or more lines
    +the new text; without such a line, the old lines go
    key: what else is known of it

There may be several files, and several texts of a file. A text need not be whole lines. `edited` makes the change in this process,
for a while: functions' code is exchanged in place, for all importers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

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


@contextmanager
def edited(*edits: Edit) -> Iterator[None]:
    """While it lasts, the modules are as if every `old` in them had been written `new`."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for file in dict.fromkeys(edit.file for edit in edits):
            module = import_module(file.removesuffix(".py").replace("/", "."))
            for owner, name, new in _changes(module, tuple(edit for edit in edits if edit.file == file)):
                undo.append((owner, name, getattr(owner, name)))
                setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in reversed(undo):
            setattr(owner, name, old)


@cache
def _changes(module: ModuleType, edits: tuple[Edit, ...]) -> list[tuple[Any, str, Any]]:
    source = inspect.getsource(module)
    for edit in edits:
        assert edit.old in source, f"{module.__name__} has changed: find what {edit.old!r} has become"
        source = source.replace(edit.old, edit.new)
    code = compile(source, str(module.__file__), "exec")
    codes = dict(_codes(code, ""))
    changes: list[tuple[Any, str, Any]] = []
    for path, function in _functions(module):
        if (new := codes.get(path)) is not None and _differs(function.__code__, new):
            changes.append((function, "__code__", new))
    other = ModuleType(module.__name__)
    exec(code, other.__dict__)
    for name, value in vars(other).items():
        if isinstance(value, str | int) and not name.startswith("__") and vars(module)[name] != value:
            changes.append((module, name, value))
    assert changes, f"{edits} change nothing"
    return changes


def _codes(code: CodeType, path: str) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant, constant.co_qualname)


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in [value, *(vars(value).values() if isinstance(value, type) else ())]:
            function = inspect.unwrap(getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield function.__qualname__, function


def _differs(one: CodeType, other: CodeType) -> bool:
    """Whether they do other things; where their lines stand does not count."""
    if (one.co_code, one.co_names, len(one.co_consts)) != (other.co_code, other.co_names, len(other.co_consts)):
        return True
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return any(_differs(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else a != b for a, b in pairs)
