"""Brings the development stack to the saved code: migrations, tables, rows, policies.

A view, state or policy whose version was never released may change under it: its migration is rewritten, and its rows are folded
again. What was released keeps its version: a refusal says what to raise. What is to do is found by comparing the code with the
database, and with `synced.json` in the data folder: killed at any moment, run it again.
"""

import ast
import hashlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from domain.engine.contexts import contexts, untried
from domain.engine.released import FOLDER, read
from infra.access import access
from infra.database.connect import session
from infra.database.revisions import ROOT
from infra.errors import SamefoldError, in_words
from infra.log.topics import ensure
from infra.processes.time_limit import calls_limited
from infra.settings import Settings
from policies.engine import activations
from policies.engine.operate import policies_now
from policies.engine.policy import discover, has_public
from policies.engine.public_schema import publication
from projections.engine.queries import query
from projections.engine.rebuild.builds import BuildState, builds_of, drop_tables, exists
from projections.engine.rebuild.rebuild import go_to, needed, rebuild
from projections.engine.rebuild.switch import pointers
from projections.engine.store.command_types import drop_other_types, live_types, own_types, require_unwished
from projections.engine.store.event_types import drop_other_event_types
from projections.engine.views.core_views import OUTCOMES, all_views
from projections.engine.views.view import View
from tools import release_check
from tools.golden_results import released_views
from tools.migrations import migrate
from tools.migrations.unreleased import remake, rewrite

FOLDERS = ("domain", "projections", "projections/queries", "projections/migrations", "policies")
SYNCED = "synced.json"

Say = Callable[[str], None]


class NotSynced(SamefoldError):
    """The code has an error, or does not keep to what was released. Nothing was changed."""


class Synced(NamedTuple):
    """What the code needs to run: the agents that its views name, and by module of a process a digest of the files it uses."""

    agents: list[str]
    code: dict[str, str]


def own_files() -> list[Path]:
    """The service's own source files, of which an editor's temporary ones are none."""
    found = [file for folder in FOLDERS for file in (ROOT / folder).glob("*.py")]
    return sorted(
        file for file in [*found, ROOT / "access.py"] if file.stem.isidentifier() or file.parent.name == "migrations"
    )


def sync(settings: Settings, say: Say, before_switch: Callable[[Synced], None]) -> Synced:
    """Do what the saved code needs, and `say` each step. `before_switch` ends the processes that fold with other code.

    Raises NotSynced, and what migrations, folds and switches raise.
    """
    sources = Sources()
    views = _checked()
    done = Synced(sorted({view.agent for view in views.values()}), sources.processes())
    folds = {name: sources.fold_of(view) for name, view in views.items() if name != OUTCOMES}
    released = _released()

    def is_released(name: str, version: int) -> bool:
        return name == OUTCOMES or released.get(name, 0) >= version

    for file in rewrite(views, is_released):
        say(f"{file.relative_to(ROOT)} is rewritten")
    if new := migrate.revise_without_database("tables"):
        say(f"{new.relative_to(ROOT)} is new")
    ensure(settings)
    before, after, _ = migrate.upgrade(settings)
    if before != after:
        say(f"the database is at migration {' and '.join(after)}")
    activations.start_all(settings)
    unreleased = [view for view in views.values() if not is_released(view.name, view.version)]
    with session(settings, "samefold sync") as connection:
        remake(connection, unreleased)
        live = pointers(connection)
        shapes = {build.table: build.shape for build in builds_of(connection, live)}
        unknown = live_types(connection) - own_types()
        if unknown:
            require_unwished(connection)
    synced = _read_synced(settings)
    changed = [
        view.name
        for view in unreleased
        if (at := live.get(view.name)) is not None
        and at.version == view.version
        and (shapes[at.table] != view.shape or synced.get(view.name) != folds[view.name])
    ]
    names = sorted({*changed, *needed(live, views)}) if live else []
    gone = live.keys() - views.keys()
    rows = rebuild(settings, names, views, make_live=False).rows if names else {}
    if names or gone or unknown:
        before_switch(done)
    if names or gone:
        switched = go_to(settings, names, views)
        for name, table in switched.tables.items():
            say(f"{name} is folded anew into {table}, {rows.get(name, 0):,} rows")
        for name in switched.removed:
            say(f"{name} is gone")
    _write_synced(settings, folds)
    with session(settings, "samefold sync") as connection:
        if unknown:
            for one in drop_other_types(connection, settings.events_topic):
                say(f"command {one} is gone")
            drop_other_event_types(connection)
        old = [
            build
            for build in builds_of(connection)
            if build.state is BuildState.OLD
            and not is_released(build.view, build.version)
            and (build.view not in views or build.version == views[build.view].version)
            and exists(connection, build.table)
        ]
    for build in old:
        drop_tables(settings, [build], views.get(build.view))
    with session(settings, "samefold sync") as connection:
        remake(connection, unreleased)
    _switch_policies(settings, say)
    return done


def _checked() -> Mapping[str, View]:
    """All views of this code, when all of it can be imported and keeps to what was released. Raises NotSynced."""
    try:
        contexts()
        views = all_views()
        discover()
        query.discover()
        access()
        if has_public():
            publication()
    except SamefoldError:
        raise
    except SyntaxError as error:
        raise NotSynced(
            f"{_relative(error.filename)}:{error.lineno}: {error.msg}", (error.text or "").strip()
        ) from error
    except Exception as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename) in own_files()]
        where = f"{_relative(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""
        raise NotSynced(f"{where}{in_words(error)}", frames[-1].line or "" if frames else "") from error
    if any(FOLDER.glob("*.json")):
        untried.set(True)
        with calls_limited(Settings().decide_limit_s):
            refused = release_check.check(released_views()).refused
        if refused:
            why = "\n".join(f"{one.what}: {'; '.join(one.why)}" for one in refused)
            raise NotSynced(why, "\n".join(dict.fromkeys(one.hint for one in refused)))
    return views


def _released() -> dict[str, int]:
    """By view or state, the highest version in the record of releases."""
    found = dict[str, int]()
    for file in FOLDER.glob("*.json"):
        for name, was in read(file.stem)["views"].items():
            found[name] = max(found.get(name, 0), was["version"])
    return found


def _switch_policies(settings: Settings, say: Say) -> None:
    known = discover()
    for one in policies_now(settings):
        try:
            if one.state == "no-code":
                activations.remove(settings, one.name)
                say(f"policy {one.name} is gone")
            elif one.state in ("new", "removed", "other-version", "switching"):
                activations.switch(settings, known[one.name], lower=True)
                say(f"policy {one.name} reacts from now on as version {one.code}")
        except SamefoldError as error:  # it can be done later, and what runs is not wrong
            say(f"policy {one.name} is as it was: {error.message} {error.hint}")


def _read_synced(settings: Settings) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((settings.data_dir / SYNCED).read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write_synced(settings: Settings, folds: Mapping[str, str]) -> None:
    (new := settings.data_dir / f"{SYNCED}.new").write_text(json.dumps(folds, indent=1))
    new.replace(settings.data_dir / SYNCED)


def _relative(file: str | None) -> str:
    path = Path(file or "?")
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


class Sources:
    """The service's own modules as they were when this was made, before they are imported: an older digest only repeats work."""

    def __init__(self) -> None:
        self._texts = {_module(file): file.read_bytes() for file in own_files() if file.parent.name != "migrations"}

    def processes(self) -> dict[str, str]:
        """By a process's module, a digest of the files that it uses."""
        domain, views = self._in("domain"), self._in("projections")
        policies = domain | self._in("policies")
        return {
            "commands.handler": self._digest(domain),
            "projections.engine.live.agent": self._digest(domain | views),
            **({"policies.engine.process": self._digest(policies)} if discover() else {}),
            **({"policies.engine.publisher": self._digest(policies)} if has_public() else {}),
            "api": self._digest(domain | views | self._in("projections.queries") | {"access"}),
        }

    def fold_of(self, view: View) -> str:
        """A digest of what makes a view's rows or a context's states: its modules without comments, docstrings and `decide`."""
        of = view.contexts[0] if view.kind == "snapshot" else view.name
        root = f"domain.{of}" if view.kind == "snapshot" else f"projections.{of}"
        parts = []
        for name in sorted(self._closure({root})):
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
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            package = ".".join([*above, *filter(None, [node.module])])
            yield package
            yield from (f"{package}.{one.name}" for one in node.names)


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)
