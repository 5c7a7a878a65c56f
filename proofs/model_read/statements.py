"""The SQL in the source of the read side, which the model must know: what only a rare schedule sends is found at once."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from proofs.model_read.catalogue import even
from proofs.model_read.sql import UnknownStatement, call_of

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("projections.engine.", "infra.database.")
FIRST_WORDS = re.compile(
    "(alter|analyze|comment|create|delete|drop|insert|listen|lock|notify|select|set|truncate|update|with) "
)

NOT_MODELLED = {
    "infra.database.revisions": "migrations run before anything else does",
    "projections.engine.store.command_types": "they are the write side's; their generation is set as a switch sets it",
    "projections.engine.rebuild.slow_load": "the model's rows are never refused",
    "projections.engine.verify.verify": "verify reads only",
    "projections.engine.live.startup": "the first start is tested on PostgreSQL",
}
"""Modules that no scenario runs, and why."""
IN_PARTS = {
    "projections.engine.rebuild.builds._SELECT",
    "projections.engine.rebuild.builds._builds",
    "projections.engine.rebuild.builds._make_table",
    "projections.engine.rebuild.builds.drop_keys",
    "projections.engine.store.rows._delete",
    "projections.engine.store.rows._insert_into",
    "projections.engine.store.rows._select",
}
"""Functions that put a statement together out of names and lists: each run of a scenario sends them."""


class Sql(NamedTuple):
    """A statement as it stands in the source; `{}` where the name of a table comes."""

    place: str
    line: int
    text: str


def modules_run() -> list[str]:
    """The modules of the read side that the scenarios import, and nothing that another test has imported."""
    script = "import sys, proofs.model_read.scenarios; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return sorted(name for name in done.stdout.split() if name.startswith(PACKAGES) and name not in NOT_MODELLED)


def statements_in(module: str, source: str | None = None) -> Iterator[Sql]:
    """All SQL in a module: literals, f-strings and sums of them and of the module's constants."""
    loaded = importlib.import_module(module)
    text = source if source is not None else Path(str(loaded.__file__)).read_text()
    yield from _walk(ast.parse(text), vars(loaded), module)


def _walk(node: ast.AST, names: Mapping[str, Any], place: str) -> Iterator[Sql]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.expr) and (text := _text(node, names)) is not None:
        if FIRST_WORDS.match(even(text)):
            yield Sql(place, node.lineno, even(text))
        return
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield from _walk(child, names, f"{place}.{name}")
            case ast.Assign(targets=[ast.Name(id=name)]) if place in sys.modules:
                yield from _walk(child, names, f"{place}.{name}")
            case _:
                yield from _walk(child, names, place)


def _text(node: ast.expr, names: Mapping[str, Any]) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = [_text(value, names) for value in values]
            return None if None in parts else "".join(map(str, parts))
        case ast.FormattedValue(value=ast.Name(id=name)):
            return str(names[name]) if isinstance(names.get(name), str | int) else "1"
        case ast.FormattedValue():
            return "1"
        case ast.Name(id=name):
            return names[name] if isinstance(names.get(name), str) else None
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _text(left, names), _text(right, names)
            return None if one is None or other is None else one + other
        case _:
            return None


def is_known(text: str) -> bool:
    """Whether the model knows the statement, with some table's name in it."""
    for name in ('"balances_v1"', "balances_v1"):
        try:
            call_of(text.replace("{}", name), None)
        except UnknownStatement:
            continue
        return True
    return False


def unknown(module: str, source: str | None = None) -> list[Sql]:
    """What the model was never taught, of the statements in a module that its scenarios run."""
    found = statements_in(module, source)
    return [one for one in found if one.place not in IN_PARTS and not is_known(one.text)]
