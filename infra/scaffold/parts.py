"""Parts of a service: a context, an event, a command, a view, each with its test, written into the files where they belong.

Existing files are changed by inserting lines: where is found in their syntax tree, and all else stays as it is.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from infra.errors import SamefoldError
from infra.scaffold.names import BadName, class_name, module, names_of, words

SKELETON = Path(__file__).parent / "skeleton"
TYPES = {
    "bool": "",
    "int": "",
    "str": "",
    "date": "datetime",
    "datetime": "datetime",
    "Decimal": "decimal",
    "UUID": "uuid",
    "Text": "domain.language",
    "Cents": "domain.language",
    "CentsOrZero": "domain.language",
}
"""Types of fields, and the modules that they come from."""


class AlreadyThere(SamefoldError):
    """What is to be written exists."""


class NoPlace(SamefoldError):
    """The place in a file where something is to be written was not found."""


class Kind(StrEnum):
    """What a view's rows are."""

    ENTITY = "entity"
    JOURNAL = "journal"
    SUMMARY = "summary"


@dataclass(slots=True)
class Written:
    """Files that were written or changed, below the service's root, and what to do next."""

    files: list[Path] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


class Parts:
    """Writes parts of the service in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def service(self, context: str) -> Written:
        """The first context of a new service with its view, their tests, and one of the service as a whole."""
        names = names_of(context)
        written = self.context(context)
        for source, file in (
            ("first_view", f"projections/{names.one}_names.py"),
            ("test_first_view", f"tests/test_{names.one}_names.py"),
            ("test_service", "tests/test_service.py"),
        ):
            self._write(written, file, names.told(_skeleton(source)))
        return written

    def context(self, name: str) -> Written:
        """Raises BadName, AlreadyThere."""
        names, written = names_of(name), Written()
        file = f"domain/{name}.py"
        self._write(written, file, names.told(_skeleton("context")))
        self._write(written, f"tests/test_{name}.py", names.told(_skeleton("test_context")))
        written.next = [
            f"Say in {file} what {name} are: rename its event, command and refusal, or add more of them.",
            *_new_table(f"the states of {name}"),
        ]
        return written

    def event(self, name: str, context: str | None, fields: Sequence[str]) -> Written:
        """Raises BadName, AlreadyThere, NoPlace."""
        class_name(name, "an event", "RoomBooked")
        context = self._context(context)
        source = Source(self.root / "domain" / f"{context}.py")
        source.add_fact(name, "Event", fields)
        source.add_case("evolve", f"case {name}():", "return state")
        test = self._test_of(context)
        test.imports += [
            "from hypothesis import given as for_all",
            f"from domain.{context} import {name}, State, evolve",
            "from infra.testing.facts import facts",
        ]
        test.append(
            f"@for_all(event=facts({name}))\n"
            f"def test_{words(name)}_leaves_the_state_as_it_is(event: {name}) -> None:\n"
            "    assert evolve(State(), event) == State()\n"
        )
        return self._changed(
            source,
            test,
            next=[
                f"Say in domain/{context}.py, in `evolve`, what {name} makes of the state. If State changes, raise STATE_VERSION.",
                f"A view that cares: name {name} in its function's annotation and add one `case`; raise its VERSION.",
                f"A command that leads to it: `samefold add command … --event {name}`.",
            ],
        )

    def command(self, name: str, context: str | None, fields: Sequence[str], event: str | None) -> Written:
        """A command that leads to an event, whose fields it brings, or, without one, to nothing yet.

        Raises BadName, AlreadyThere, NoPlace.
        """
        class_name(name, "a command", "BookRoom")
        context = self._context(context)
        source = Source(self.root / "domain" / f"{context}.py")
        own = list(fields)
        decided = "[]"
        if event:
            of_event = source.fields(event)
            own += [
                f"{field}:{kind}"
                for field, kind in of_event.items()
                if field not in {one.partition(":")[0] for one in fields}
            ]
            decided = f"[{event}({', '.join(f'{field}=command.{field}' for field in of_event)})]"
        source.add_fact(name, "Command", own)
        source.add_case("decide", f"case {name}():", f"return {decided}")
        test = self._test_of(context)
        test.imports += [
            "from hypothesis import given as for_all",
            f"from domain.{context} import {name}, State, decide{f', {event}' if event else ''}",
            "from infra.testing.facts import facts",
        ]
        test.append(
            f"@for_all(command=facts({name}))\n"
            f"def test_{words(name)}_leads_to_{words(event) if event else 'nothing_yet'}(command: {name}) -> None:\n"
            f"    assert decide(command, State()) == {decided}\n"
        )
        path = f"{context}/<id>/{words(name).replace('_', '-')}"
        return self._changed(
            source,
            test,
            next=[
                f"Say in domain/{context}.py, in `decide`, when {name} is refused, and which events it leads to.",
                f"Over HTTP it is `POST /{path}` (GET /docs shows it).",
            ],
        )

    def view(self, name: str, context: str | None, kind: Kind) -> Written:
        """Raises BadName, AlreadyThere, NoPlace."""
        module(name, "a view", "free_rooms")
        context = self._context(context)
        names, written = names_of(context), Written()
        event = Source(self.root / "domain" / f"{context}.py").members("Event")[0]
        row = "".join(word.capitalize() for word in name.split("_")) + "Row"

        def told(skeleton: str) -> str:
            text = names.told(_skeleton(skeleton))
            sentence = name.replace("_", " ").capitalize()
            return (
                text.replace('"""VIEW:', f'"""{sentence}:')
                .replace("VIEW", name)
                .replace("ROW", row)
                .replace("EVENT", event)
            )

        file = f"projections/{name}.py"
        self._write(written, file, told(f"view_{kind}"))
        self._write(written, f"tests/test_{name}.py", told(f"test_view_{kind}"))
        written.next = [
            f"Say in {file} what the view shows: its columns, its events, what they make of a row.",
            *_new_table(name),
        ]
        return written

    def _context(self, name: str | None) -> str:
        there = sorted(
            file.stem for file in (self.root / "domain").glob("*.py") if file.stem not in ("__init__", "language")
        )
        known = f"There are: {', '.join(there)}." if there else "There is none yet: `samefold add context NAME`."
        if name is None and len(there) == 1:
            return there[0]
        if name is None:
            raise BadName("In which context?", f"Say `--context NAME`. {known}")
        if name not in there:
            raise BadName(f"There is no context '{name}'.", known)
        return name

    def _write(self, written: Written, name: str, text: str) -> None:
        file = self.root / name
        if file.exists():
            raise AlreadyThere(f"{name} exists already.", "Choose another name, or change that file.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        written.files.append(Path(name))
        tidy(file)

    def _test_of(self, context: str) -> Source:
        file = self.root / "tests" / f"test_{context}.py"
        if not file.exists():
            file.write_text(f'"""Tests of {context}."""\n')
        return Source(file)

    def _changed(self, *sources: Source, next: list[str]) -> Written:  # noqa: A002
        for source in sources:
            source.save()
        return Written([source.file.relative_to(self.root) for source in sources], next)


class Source:
    """A file of Python to be changed; nothing is written before `save`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.imports: list[str] = []
        self._lines = file.read_text().splitlines()

    def members(self, union: str) -> list[str]:
        """The names in `Event: TypeAlias = A | B`, those of aliases in it too. Raises NoPlace."""
        names = [node.id for node in ast.walk(self._alias(union).value) if isinstance(node, ast.Name)]  # type: ignore[arg-type]
        return [found for name in names for found in ([name] if self._class(name) else self.members(name))]

    def fields(self, fact: str) -> dict[str, str]:
        """The fields of an event that have to be given, with their types as they are written. Raises NoPlace."""
        found = self._class(fact)
        if found is None:
            raise self._no_place(f"no class {fact}", f"Add the event first: `samefold add event {fact}`.")
        return {
            node.target.id: ast.unparse(node.annotation)
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None
        }

    def add_fact(self, name: str, union: str, fields: Sequence[str]) -> None:
        """A class with these fields (`name:Text`) before the alias of its union, and its name in there."""
        if self._class(name) is not None:
            raise AlreadyThere(
                f"{self.file.name} has a class {name} already.", "Choose another name, or change that class."
            )
        body = [self._field(one) for one in fields] or ['"""Say here what it means."""']
        alias = self._alias(union)
        end = alias.value.end_lineno, alias.value.end_col_offset  # type: ignore[union-attr]
        line = self._lines[(end[0] or 1) - 1]
        self._lines[(end[0] or 1) - 1] = f"{line[: end[1]]} | {name}{line[end[1] :]}"
        self._lines[alias.lineno - 1 : alias.lineno - 1] = [
            "@fact",
            f"class {name}:",
            *(f"    {one}" for one in body),
            "",
            "",
        ]

    def add_case(self, function: str, pattern: str, body: str) -> None:
        """One more case of the function's last `match`, before `case _`. Raises NoPlace."""
        functions = [node for node in self._tree().body if isinstance(node, ast.FunctionDef) and node.name == function]
        matches = [node for found in functions for node in ast.walk(found) if isinstance(node, ast.Match)]
        if not matches:
            raise self._no_place(f"no `match` in a function `{function}`", "Write the new case there by hand.")
        last = matches[-1].cases[-1]
        is_wildcard = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        place = last.pattern.lineno - 1 if is_wildcard else last.body[-1].end_lineno or 0
        indent = " " * (matches[-1].col_offset + 4)
        self._lines[place:place] = [f"{indent}{pattern}", f"{indent}    {body}"]

    def append(self, text: str) -> None:
        self._lines += ["", "", *text.splitlines()]

    def save(self) -> None:
        """Write the file, its imports sorted and merged. Raises NoPlace where it would not be Python."""
        body = self._tree().body
        is_documented = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        place = body[0].end_lineno or 0 if is_documented else 0
        self._lines[place:place] = ["", *self.imports] if self.imports else []
        text = "\n".join(self._lines) + "\n"
        ast.parse(text)
        self.file.write_text(text)
        tidy(self.file)

    def _field(self, told: str) -> str:
        name, _, kind = told.partition(":")
        if not name.isidentifier() or not kind:
            raise BadName(f"{told!r} is not a field.", "Write NAME:TYPE, such as `guest:Text`.")
        if kind not in TYPES and kind.isidentifier() and self._class(kind) is None:
            raise BadName(
                f"{kind!r} is not a type that Samefold knows.",
                f"It knows {', '.join(TYPES)}; others are written by hand.",
            )
        if TYPES.get(kind):
            self.imports.append(f"from {TYPES[kind]} import {kind}")
        return f"{name}: {kind}"

    def _tree(self) -> ast.Module:
        return ast.parse("\n".join(self._lines))

    def _class(self, name: str) -> ast.ClassDef | None:
        return next((node for node in self._tree().body if isinstance(node, ast.ClassDef) and node.name == name), None)

    def _alias(self, name: str) -> ast.AnnAssign | ast.Assign:
        for node in self._tree().body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if isinstance(node, ast.Assign | ast.AnnAssign) and any(
                isinstance(one, ast.Name) and one.id == name for one in targets
            ):
                return node
        raise self._no_place(
            f"no `{name}: TypeAlias = …`", "Write it as the other contexts have it, or add the class by hand."
        )

    def _no_place(self, what: str, cure: str) -> NoPlace:
        return NoPlace(f"{self.file.name} has {what}.", cure)


def tidy(file: Path) -> None:
    """Sort and merge imports, and format, where the formatter is installed."""
    if find_spec("ruff") is not None:
        for arguments in (["check", "--select=I", "--fix"], ["format"]):
            subprocess.run([sys.executable, "-m", "ruff", *arguments, "--quiet", str(file)], check=False)


def _skeleton(name: str) -> str:
    return (SKELETON / f"{name}.txt").read_text()


def _new_table(what: str) -> list[str]:
    return [
        f'Its table: `samefold db revision -m "{what}"`, then `samefold db upgrade`.',
        "Where the service runs already: deploy, then `samefold rebuild`.",
    ]
