"""Write parts of a service: a context, an event, a command, a view, a query, a policy, a source or a dataset, each with its test.

Existing files get lines inserted at places that their syntax tree shows; the rest of the file stays as it is.
"""

from __future__ import annotations

import ast
import keyword
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable

from domain.language import kebab
from infra.errors import SamefoldError
from tools.scaffold.names import BadName, Names, check_context, class_name, module, names_of, words

SKELETON = Path(__file__).parent / "skeleton"
TYPES = {
    "bool": "",
    "int": "",
    "str": "",
    "date": "datetime",
    "Moment": "domain.language",
    "Decimal": "decimal",
    "UUID": "uuid",
    "Text": "domain.language",
    "Cents": "domain.language",
    "CentsOrZero": "domain.language",
}
"""Types of fields, and the modules that they are imported from."""
RESTART = "`make run` follows what you save. Processes that run elsewhere have the old code: restart or deploy."


class AlreadyThere(SamefoldError):
    """The name of the new part is taken."""


class NoPlace(SamefoldError):
    """A file has no place for the new lines."""


class Kind(StrEnum):
    """What the rows of a view are."""

    ENTITY = "entity"
    JOURNAL = "journal"
    SUMMARY = "summary"


@dataclass(slots=True)
class Written:
    """The files that were written or changed, relative to the service's root, and the next steps."""

    files: list[Path] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


class Parts:
    """Writes parts of the service in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def service(self, context: str) -> Written:
        """The first context of a new service with its view, their tests, one of the service as a whole, and who may do what."""
        names = names_of(context)
        written = self.context(context)
        view = {
            f"projections/{names.one}_names.py": "first_view",
            f"tests/test_{names.one}_names.py": "test_first_view",
            "tests/test_service.py": "test_service",
            "access.py": "access",
        }
        written.files += self._write({file: names.apply(_skeleton(source)) for file, source in view.items()})
        return written

    def context(self, name: str) -> Written:
        """Raises BadName, AlreadyThere."""
        check_context(name)
        names = names_of(name)
        file = f"domain/{name}.py"
        texts = {file: _skeleton("context"), f"tests/test_{name}.py": _skeleton("test_context")}
        return Written(
            self._write({name: names.apply(text) for name, text in texts.items()}),
            [
                f"Edit {file}: rename its event, command and refusal, or add more of them.",
                "Edit access.py: who may send its commands? What is not allowed there is denied.",
                *_new_table(f"the states of {name}"),
            ],
        )

    def event(self, name: str, context: str | None, fields: Sequence[str]) -> Written:
        """Raises BadName, AlreadyThere, NoPlace."""
        class_name(name, "an event", "RoomBooked")
        context = self._context(context)
        source = Source(self.root / "domain" / f"{context}.py")
        source.add_fact(name, "Event", source.parse_fields(fields))
        source.add_case("evolve", f"case {name}():", "return state")
        test = self._test_of(context)
        test.imports.append(f"from domain.{context} import {name}, State, evolve")
        test.append(
            f"@for_all(event=facts({name}))\n"
            f"def test_{words(name)}_leaves_the_state_as_it_is(event: {name}) -> None:\n"
            "    assert evolve(State(), event) == State()\n"
        )
        return self._changed(
            source,
            test,
            next=[
                f"Edit `evolve` in domain/{context}.py: how does {name} change the state? If it does, raise STATE_VERSION.",
                f"If a view shows it: add {name} to the annotation of its function, add a `case`, raise its VERSION.",
                f"Add a command that leads to it: `samefold add command … --event {name}`.",
                *_new_table(words(name), "If you raised a version, its table"),
            ],
        )

    def command(self, name: str, context: str | None, fields: Sequence[str], event: str | None) -> Written:
        """A command that leads to an event and has that event's fields, or, without an event, leads to nothing yet.

        Raises BadName, AlreadyThere, NoPlace.
        """
        class_name(name, "a command", "BookRoom")
        context = self._context(context)
        source = Source(self.root / "domain" / f"{context}.py")
        own = source.parse_fields(fields)
        decided = "[]"
        if event:
            of_event = source.fields(event)
            for field in [field for field, kind in own.items() if of_event.get(field, kind) != kind]:
                raise BadName(
                    f"'{field}:{own[field]}' is not of {event}'s type, which is {of_event[field]}.",
                    "Leave the field out: the command gets it from the event.",
                )
            own = own | of_event
            decided = f"[{event}({', '.join(f'{field}=command.{field}' for field in of_event)})]"
        source.add_fact(name, "Command", own)
        source.add_case("decide", f"case {name}():", f"return {decided}")
        test = self._test_of(context)
        test.imports.append(f"from domain.{context} import {name}, State, decide{f', {event}' if event else ''}")
        test.append(
            f"@for_all(command=facts({name}))\n"
            f"def test_{words(name)}_leads_to_{words(event) if event else 'nothing_yet'}(command: {name}) -> None:\n"
            f"    assert decide(command, State()) == {decided}\n"
        )
        path = f"{context}/<id>/{kebab(name)}"
        return self._changed(
            source,
            test,
            next=[
                f"Edit `decide` in domain/{context}.py: when is {name} refused, and which events does it lead to?",
                RESTART,
                f"Over HTTP it is `POST /{path}` (GET /docs shows it); access.py says who may send it.",
            ],
        )

    def view(self, name: str, context: str | None, kind: Kind) -> Written:
        """Raises BadName, AlreadyThere, NoPlace."""
        from projections.engine.views.view import RESERVED

        module(name, "a view", "free_rooms")
        if RESERVED.fullmatch(name) or (self.root / "projections" / name).exists():
            raise BadName(f"The name '{name}' is reserved.", "Choose another name for the view.")
        context = self._context(context)
        names = names_of(context)
        event = Source(self.root / "domain" / f"{context}.py").members("Event")[0]
        row = "".join(word.capitalize() for word in name.split("_")) + "Row"

        known = {"VIEW": name, "ROW": row, "EVENT": event}
        file, test = f"projections/{name}.py", f"tests/test_{name}.py"
        texts = {file: _filled(f"view_{kind}", names, known), test: _filled(f"test_view_{kind}", names, known)}
        return Written(
            self._write(texts),
            [f"Edit {file}: its columns, its events, and how they change a row.", *_new_table(name)],
        )

    def query(self, name: str) -> Written:
        """Over the first view: its author names others. Raises BadName, AlreadyThere."""
        from projections.engine.views.view import RESERVED

        module(name, "a query", "largest_orders")
        views = sorted(file.stem for file in (self.root / "projections").glob("[a-z]*.py"))
        if RESERVED.fullmatch(name) or name in views:
            raise BadName(f"The name '{name}' is reserved, or a view's.", "Choose another name for the query.")
        if not views:
            raise BadName("There is no view to ask.", "`samefold add view NAME` writes one.")
        file, test, known = (
            f"projections/queries/{name}.py",
            f"tests/test_query_{name}.py",
            {"QUERY": name, "VIEW": views[0]},
        )
        return Written(
            self._write({file: _filled("query", None, known), test: _filled("test_query", None, known)}),
            [
                f"Edit {file}: its question, parameters, rows and SQL (docs/queries.md).",
                f"Edit {test}, too: given these rows of views, that answer.",
                f"Edit access.py: who may read {name}? What is not allowed there is denied.",
                RESTART,
                f"Over HTTP it is `GET /queries/{name}` (GET /docs shows it).",
            ],
        )

    def policy(self, name: str, context: str | None) -> Written:
        """Raises BadName, AlreadyThere, NoPlace."""
        module(name, "a policy", "reminders", most=30)
        if name == "public" or (self.root / "policies" / name).exists():
            raise BadName(f"The name '{name}' is reserved.", "Choose another name for the policy.")
        context = self._context(context)
        names = names_of(context)
        event, command, fields = Source(self.root / "domain" / f"{context}.py").pair()
        values = ", ".join(f"{field}=event.{field}" for field in fields)
        known = {"POLICY": name, "EVENT": event, "COMMAND": command, "FIELDS": values}
        file, test = f"policies/{name}.py", f"tests/test_policy_{name}.py"
        return Written(
            self._write({file: _filled("policy", names, known), test: _filled("test_policy", names, known)}),
            [
                f"Edit {file}: its events, and the commands and webhooks that follow from them (docs/policies.md).",
                RESTART,
                f"It reacts to what happens from then on. Elsewhere: from `samefold policies switch {name}` on, unless the service "
                "has never run.",
            ],
        )

    def source(self, name: str, context: str | None) -> Written:
        """Raises BadName, AlreadyThere, NoPlace."""
        module(name, "a source", "billing", most=25)
        context = self._context(context)
        names = names_of(context)
        command, fields = Source(self.root / "domain" / f"{context}.py").writable_command()
        key = names.one if names.one not in fields else f"{names.one}_key"
        known = {
            "NAME": name,
            "COMMAND": command,
            "KEY": key,
            "IMPORTS": "\n".join(f"from {TYPES[one]} import {one}" for one in fields.values() if TYPES[one]),
            "DECLARED": "\n    ".join(f"{field}: {kind}" for field, kind in fields.items()),
            "VALUES": ", ".join(f"{field}=message.{field}" for field in fields),
        }
        file, test = f"policies/from_{name}.py", f"tests/test_from_{name}.py"
        return Written(
            self._write({file: _filled("source", names, known), test: _filled("test_source", names, known)}),
            [
                f"Edit {file}: its types of messages, and the commands that follow from them (docs/sources.md).",
                f'Set SAMEFOLD_SOURCES={{"{name}": {{"topic": "…", "bootstrap": "…"}}}}; of a webhook {{"secrets": ["whsec_…"]}}',
                RESTART,
                'It begins with the first message that the topic has, or where `begin` of the setting says: "end", or a time.',
            ],
        )

    def dataset(self, name: str, context: str | None) -> Written:
        """Raises BadName, AlreadyThere, NoPlace."""
        module(name, "a dataset", "nights_by_month")
        if name == "events" or (self.root / "spark_jobs" / name).exists():
            raise BadName(f"The name '{name}' is reserved.", "Choose another name for the dataset.")
        context = self._context(context)
        event = Source(self.root / "domain" / f"{context}.py").members("Event")[0]
        names, known = names_of(context), {"DATASET": name, "EVENT": event}
        file, test = f"spark_jobs/{name}.py", f"tests/test_dataset_{name}.py"
        return Written(
            self._write({file: _filled("dataset", names, known), test: _filled("test_dataset", names, known)}),
            [
                f"Edit {file}: its question, and the columns that answer it.",
                f"Edit {test}, too: given these events, those rows. `pytest {test}` runs it.",
                f"`samefold lake update {name}` makes it.",
            ],
        )

    def _context(self, name: str | None) -> str:
        there = sorted(file.stem for file in (self.root / "domain").glob("[!_]*.py") if file.stem != "language")
        known = f"There are: {', '.join(there)}." if there else "There is none yet: `samefold add context NAME`."
        if name is None and len(there) == 1:
            return there[0]
        if name is None:
            raise BadName("The context is not given.", f"Add `--context NAME`. {known}")
        if name not in there:
            raise BadName(f"There is no context '{name}'.", known)
        return name

    def _write(self, texts: Mapping[str, str]) -> list[Path]:
        """Write new files, or none of them. Raises AlreadyThere."""
        for name in texts:
            if (self.root / name).exists():
                raise AlreadyThere(f"{name} exists already.", "Choose another name, or change that file.")
        for name, text in texts.items():
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            tidy(file)
        return [Path(name) for name in texts]

    def _test_of(self, context: str) -> Source:
        """The context's test, to which one of generated events or commands will be added."""
        source = Source(self.root / "tests" / f"test_{context}.py", f'"""Tests of {context}."""')
        source.imports += ["from hypothesis import given as for_all", "from tools.testing.facts import facts"]
        return source

    def _changed(self, *sources: Source, next: list[str]) -> Written:  # noqa: A002
        for source in sources:
            source.check()
        for source in sources:
            source.save()
        return Written([source.file.relative_to(self.root) for source in sources], next)


class Source:
    """A Python file to be changed; nothing is written before `save`. `new` is its text if there is no such file."""

    def __init__(self, file: Path, new: str = "") -> None:
        self.file = file
        self.imports: list[str] = []
        # not `splitlines`, which also ends lines where Python's syntax does not, as at U+2028
        self._lines = (file.read_text() if file.exists() or not new else new).rstrip("\n").split("\n")

    def members(self, union: str) -> list[str]:
        """The names in `Event: TypeAlias = A | B`, as written, and those in aliases that it names. Raises NoPlace."""
        nodes = [node for node in ast.walk(self._alias(union).value) if isinstance(node, ast.Name)]  # type: ignore[arg-type]
        names = [node.id for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))]
        return [found for name in names for found in ([name] if self._class(name) else self.members(name))]

    def fields(self, event: str) -> dict[str, str]:
        """An event's fields without a default, with their types as they are written. Raises NoPlace."""
        if event not in (known := self.members("Event")):
            raise self._no_place(
                f"no event {event}",
                f"It has {', '.join(known)}. A new one comes first: `samefold add event {event} --context {self.file.stem}`.",
            )
        return self._fields(event)

    def pair(self) -> tuple[str, str, list[str]]:
        """The first event with a command that can be made of its fields, and those fields. Raises NoPlace."""
        for event in self.members("Event"):
            known = self.fields(event).items()
            for command in self.members("Command"):
                if (needed := self._fields(command)).items() <= known:
                    return event, command, list(needed)
        raise self._no_place(
            "no command whose fields an event has", "Write the policy by hand: docs/policies.md has an example."
        )

    def writable_command(self) -> tuple[str, dict[str, str]]:
        """The first command whose fields have types that any file can import, and those fields. Raises NoPlace."""
        for command in self.members("Command"):
            if TYPES.keys() >= {*(fields := self._fields(command)).values()}:
                return command, fields
        raise self._no_place(
            f"no command with fields of {', '.join(TYPES)} alone",
            "Write the source by hand: docs/sources.md has an example.",
        )

    def _fields(self, name: str) -> dict[str, str]:
        found = self._class(name)
        assert found is not None, "a member of a union is a class"
        return {
            node.target.id: ast.unparse(node.annotation)
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None
        }

    def add_fact(self, name: str, union: str, fields: Mapping[str, str]) -> None:
        """Add a class with these fields before the alias of its union, and its name to the union."""
        if name in self._names() | TYPES.keys():
            raise AlreadyThere(f"{self.file.name} has the name {name} already.", "Choose another name.")
        body = [f"{field}: {kind}" for field, kind in fields.items()] or ['"""Say here what it means."""']
        alias = self._alias(union)
        last, end = (alias.value.end_lineno or 1) - 1, alias.value.end_col_offset  # type: ignore[union-attr]
        before = self._lines[last].encode()[:end].decode()  # the offset counts bytes
        self._lines[last] = f"{before} | {name}{self._lines[last].removeprefix(before)}"
        self._lines[alias.lineno - 1 : alias.lineno - 1] = [
            "@fact",
            f"class {name}:",
            *(f"    {one}" for one in body),
            "",
            "",
        ]

    def add_case(self, function: str, pattern: str, body: str) -> None:
        """Add a case to the function's last `match`, before `case _`. Raises NoPlace."""
        functions = [node for node in self._tree().body if isinstance(node, ast.FunctionDef) and node.name == function]
        matches = [node for found in functions for node in found.body if isinstance(node, ast.Match)]
        if not matches:
            raise self._no_place(
                f"no `match` in a function `{function}`",
                "Nothing was written. Give the function a `match`, or write the class, its case and its test by hand.",
            )
        last = matches[-1].cases[-1]
        is_wildcard = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        place = last.pattern.lineno - 1 if is_wildcard else last.body[-1].end_lineno or 0
        indent = " " * (matches[-1].col_offset + 4)
        self._lines[place:place] = [f"{indent}{pattern}", f"{indent}    {body}"]

    def append(self, text: str) -> None:
        self._lines += ["", "", *text.splitlines()]

    def check(self) -> None:
        """Raises NoPlace if the file has a syntax error."""
        self._tree()

    def save(self) -> None:
        """Write the file, its imports sorted and merged."""
        place = 0
        for node in self._tree().body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                break
            place = node.end_lineno or 0
        known = self._names()  # perhaps from where an older Samefold had it
        new = [one for one in self.imports if not {*re.split(" as |, ", one.partition(" import ")[2])} <= known]
        self._lines[place:place] = ["", *new] if new else []
        self.file.write_text("\n".join(self._lines) + "\n")
        tidy(self.file)

    def parse_fields(self, fields: Sequence[str]) -> dict[str, str]:
        """Fields such as `guest:Text`, by name; their types get imported. Raises BadName."""
        found: dict[str, str] = {}
        for one in fields:
            name, _, kind = one.partition(":")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in found or not kind:
                raise BadName(f"{one!r} is not a field.", "Write NAME:TYPE, such as `guest:Text`, each name once.")
            if kind not in TYPES and self._class(kind) is None:
                raise BadName(f"{kind!r} is not a type that can be written here.", f"Use one of {', '.join(TYPES)}.")
            if TYPES.get(kind):
                self.imports.append(f"from {TYPES[kind]} import {kind}")
            found[name] = kind
        return found

    def _names(self) -> set[str]:
        """The names that the file's top level defines or imports."""
        self._tree()
        names = symtable("\n".join(self._lines), self.file.name, "exec").get_symbols()
        return {name.get_name() for name in names if name.is_local()}

    def _tree(self) -> ast.Module:
        try:
            return ast.parse("\n".join(self._lines))
        except SyntaxError as error:
            raise self._no_place(f"a syntax error in line {error.lineno}: {error.msg}", "Correct it first.") from None

    def _class(self, name: str) -> ast.ClassDef | None:
        return next((node for node in self._tree().body if isinstance(node, ast.ClassDef) and node.name == name), None)

    def _alias(self, name: str) -> ast.AnnAssign | ast.Assign:
        for node in self._tree().body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and any(
                isinstance(one, ast.Name) and one.id == name for one in _targets(node)
            ):
                return node
        raise self._no_place(
            f"no `{name}: TypeAlias = …`", "Write it as the other contexts have it, or add the class by hand."
        )

    def _no_place(self, what: str, hint: str) -> NoPlace:
        return NoPlace(f"{self.file.name} has {what}.", hint)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def tidy(file: Path, rules: str = "I") -> None:
    """Sort and merge imports, and format, if the formatter is installed. `rules` are ruff's."""
    if find_spec("ruff") is not None:
        for arguments in (["check", f"--select={rules}", "--fix"], ["format"]):
            subprocess.run([sys.executable, "-m", "ruff", *arguments, "--quiet", "--no-cache", str(file)], check=False)


def _skeleton(name: str) -> str:
    return (SKELETON / f"{name}.txt").read_text()


def _filled(skeleton: str, names: Names | None, words: Mapping[str, str]) -> str:
    """A skeleton with these words. Its docstring begins with the first of them, as a sentence."""
    first, name = next(iter(words.items()))
    text = names.apply(_skeleton(skeleton)) if names else _skeleton(skeleton)
    text = text.replace(f'"""{first}:', f'"""{name.replace("_", " ").capitalize()}:')
    return re.sub("|".join(words), lambda word: words[word[0]], text)


def _new_table(what: str, of: str = "Its table") -> list[str]:
    return [
        f"{of}: `make run` makes it and folds the log into it, and so does `samefold sync` where nothing runs.",
        f'Elsewhere: `samefold db revision -m "{what}"`, `samefold db upgrade`, the new processes, `samefold rebuild`.',
    ]
