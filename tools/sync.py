"""Brings the development stack to the saved code: migrations, tables, rows, policies.

A view, state or policy whose version was never released may change under it: its migration is rewritten, and its rows are folded
again. What was released keeps its version: a refusal says what to raise. What is to do is found by comparing the code with the
database, and with `synced.json` in the data folder: killed at any moment, run it again.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import httpx

from domain.engine.contexts import contexts, untried
from domain.engine.released import FOLDER
from infra.access import access
from infra.database.connect import session
from infra.database.revisions import ROOT, DatabaseAhead
from infra.errors import SamefoldError, in_words
from infra.log.topics import ensure
from infra.processes.time_limit import calls_limited
from infra.settings import Settings
from policies.engine import activations
from policies.engine.inbox import hooks_of
from policies.engine.operate import policies_now
from policies.engine.policy import discover, has_public
from policies.engine.public_schema import publication
from projections.engine.queries import query
from projections.engine.rebuild.builds import LEFT, BuildState, builds_of, drop_tables, exists
from projections.engine.rebuild.rebuild import go_to, needed, rebuild
from projections.engine.rebuild.switch import pointers
from projections.engine.store.command_types import drop_other_types, live_types, own_types, require_unwished
from projections.engine.store.event_types import drop_other_event_types
from projections.engine.store.positions import read_positions
from projections.engine.views.core_views import OUTCOMES, all_views
from projections.engine.views.view import CORE, Kind, View
from tools import release_check
from tools.golden_results import released_views
from tools.migrations import migrate
from tools.migrations.unreleased import in_releases, remake, rewrite
from tools.saved import Sources, Synced, own_files

SYNCED = "synced.json"


class Say(Protocol):
    """Takes a step that is done, and the file that it wrote."""

    def __call__(self, step: str, file: Path | None = None, /) -> None: ...


class NotSynced(SamefoldError):
    """The code has an error, or does not keep to what was released. Nothing was changed."""


def sync(settings: Settings, say: Say, before_switch: Callable[[Synced], None]) -> Synced:
    """Do what the saved code needs, and `say` each step. `before_switch` ends the processes that fold with other code.

    Raises NotSynced, and the named errors of migrations, folds and switches.
    """
    try:
        return _sync(settings, say, before_switch)
    except DatabaseAhead as error:
        hint = "Check out the branch that has its file, or remove the data on this machine: `samefold dev reset`."
        raise DatabaseAhead(error.message, hint) from error
    except SamefoldError:
        raise
    except SyntaxError as error:
        where = f"{_relative(error.filename)}:{error.lineno}: "
        raise NotSynced(f"{where}{error.msg}", (error.text or "").strip()) from error
    except (Exception, SystemExit) as error:
        own = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename) in own_files()]
        where = f"{_relative(own[-1].filename)}:{own[-1].lineno}: " if own else ""
        raise NotSynced(f"{where}{in_words(error)}", own[-1].line or "" if own else "") from error


def _sync(settings: Settings, say: Say, before_switch: Callable[[Synced], None]) -> Synced:
    sources = Sources()
    views = _checked()
    with_hooks = bool(hooks_of(settings))
    code = sources.processes(with_policies=bool(discover()), with_public=has_public(), with_hooks=with_hooks)
    done = Synced(sorted({view.agent for view in views.values()}), code)
    folds = {name: sources.fold_of(_module(view)) for name, view in views.items() if name != OUTCOMES}
    is_released = in_releases()
    for file in rewrite(views, is_released):
        say(f"{file.relative_to(ROOT)} is rewritten", file)
    if new := migrate.revise_without_database("tables"):
        say(f"{new.relative_to(ROOT)} is new", new)
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
    with calls_limited(settings.decide_limit_s):
        rows = rebuild(settings, names, views, make_live=False).rows if names else {}
    if names or gone or unknown:
        # should this be killed beside the switch, no fold is taken for the live one
        _write_synced(settings, {name: fold for name, fold in synced.items() if name not in names})
        before_switch(done)
    if names or gone:
        with calls_limited(settings.decide_limit_s):
            switched = go_to(settings, names, views)
        for name, table in switched.tables.items():
            say(f"{name} is folded into {table}, {rows.get(name, 0):,} rows")
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
            if not is_released(build.view, build.version)
            and (
                build.state in LEFT
                if build.view not in views
                else build.state is BuildState.OLD and build.version == views[build.view].version
            )
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
    contexts()
    views = all_views()
    discover()
    query.discover()
    access()
    if has_public():
        publication()
    if any(FOLDER.glob("*.json")):
        untried.set(True)
        with calls_limited(Settings().decide_limit_s):
            refused = release_check.check(released_views()).refused
        if refused:
            why = "\n".join(f"{one.what}: {'; '.join(one.why)}" for one in refused)
            raise NotSynced(why, "\n".join(dict.fromkeys(one.hint for one in refused)))
    return views


def _module(view: View) -> str:
    return f"domain.{view.contexts[0]}" if view.kind is Kind.SNAPSHOT else f"projections.{view.name}"


def _switch_policies(settings: Settings, say: Say) -> None:
    known, is_renamed = discover(), False
    for one in sorted(policies_now(settings), key=lambda one: one.state == "no-code"):
        try:
            if one.state == "no-code" and not is_renamed:
                activations.remove(settings, one.name)
                say(f"policy {one.name} is gone")
            elif one.state in ("new", "removed", "other-version", "switching"):
                made = activations.switch(settings, known[one.name], lower=True)
                where = " ".join(f"{number}:{offset}" for number, offset in made.begin.items())
                does = f"receives messages from {where} on" if made.messages else "reacts from now on"
                say(f"policy {one.name} {does} as version {one.code}")
        except SamefoldError as error:  # it can be done later, and what runs is not wrong
            is_renamed |= isinstance(error, activations.SourceRenamed)
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


def wait_until_serving(settings: Settings, epochs: Mapping[int, int] | None) -> None:
    """Wait until the API is ready and, with the epochs of before, until handlers decide again and agents have read that they do."""
    url = f"http://{settings.api_host}:{settings.api_port}/health/ready"
    while settings.api_port and not _is_ready(url):
        time.sleep(0.05)
    while epochs is not None and any(
        epoch <= epochs.get(partition, -1) for partition, epoch in epochs_now(settings).items()
    ):
        time.sleep(0.05)


def epochs_now(settings: Settings) -> dict[int, int]:
    """By partition, the epoch that agents have read: each start of a handler begins one."""
    with session(settings, "samefold sync") as connection:
        found = read_positions(connection, CORE, settings.events_topic)
    return {partition: at.epoch for partition, at in found.readings.items()} if found else {}


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).is_success
    except httpx.TransportError:
        return False
