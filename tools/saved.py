"""The service's own source files as they are saved, and digests of what uses them. Nothing of the service is imported."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from infra.database.revisions import ROOT

FOLDERS = ("domain", "projections", "projections/queries", "projections/migrations", "policies")


class Synced(NamedTuple):
    """What the code needs to run: the agents that its views name, and by module of a process a digest of the files it uses."""

    agents: list[str]
    code: dict[str, str]


def own_files(root: Path = ROOT) -> list[Path]:
    """The service's own source files, of which an editor's temporary ones are none."""
    found = [*root.glob("access.py"), *(file for folder in FOLDERS for file in (root / folder).glob("*.py"))]
    return sorted(file for file in found if file.stem.isidentifier() or file.parent.name == "migrations")


class Sources:
    """The service's own modules as they were when this was made, before they are imported: an older digest only repeats work."""

    def __init__(self, root: Path = ROOT) -> None:
        files = {file.relative_to(root).with_suffix(""): file for file in own_files(root)}
        self._texts = {
            ".".join(name.parts): file.read_bytes() for name, file in files.items() if name.parent.name != "migrations"
        }

    def processes(self, *, with_policies: bool, with_public: bool, with_hooks: bool = False) -> dict[str, str]:
        """By the module of each process that the service needs, a digest of the files that it uses."""
        domain, views = self._in("domain"), self._in("projections")
        policies = domain | self._in("policies")
        asked = self._in("projections.queries") | {"access"} | (policies if with_hooks else set())
        return {
            "commands.handler": self._digest(domain),
            "projections.engine.live.agent": self._digest(domain | views),
            **({"policies.engine.process": self._digest(policies)} if with_policies else {}),
            **({"policies.engine.publisher": self._digest(policies)} if with_public else {}),
            "api": self._digest(domain | views | asked),
        }

    def fold_of(self, module: str) -> str:
        """A digest of what a view's or a context's module folds: it and what it imports, without docstrings and `decide`."""
        parts = []
        for name in sorted(self._closure({module})):
            tree = ast.parse(self._texts[name])
            tree.body = [
                one for one in tree.body if not (name.startswith("domain.") and getattr(one, "name", "") == "decide")
            ]
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                    and ast.get_docstring(node) is not None
                ):
                    del node.body[0]
            parts.append(ast.dump(tree))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _in(self, package: str) -> set[str]:
        return {name for name in self._texts if name.rpartition(".")[0] == package}

    def _digest(self, names: set[str]) -> str:
        texts = [f"{name}\n".encode() + self._texts[name] for name in sorted(self._closure(names))]
        return hashlib.sha256(b"".join(texts)).hexdigest()[:16]

    def _closure(self, names: set[str]) -> set[str]:
        """These modules and those that they import, of the service's own."""
        found, left = set[str](), [*(names & self._texts.keys())]
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += self._texts.keys() & set(_imported(name, self._texts[name]))
        return found


def _imported(module: str, text: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(text, f"{module.replace('.', '/')}.py")):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            package = ".".join([*above, *filter(None, [node.module])])
            yield package
            yield from (f"{package}.{one.name}" for one in node.names)
