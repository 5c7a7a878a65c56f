"""Whether the code keeps to what was released, and the writing of the record of a release (`released.py`).

Each refusal has the lines to write. What is allowed comes with what a deployment of it needs.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from domain.engine import storable
from domain.engine.contexts import Context, contexts, decode_event, read_released
from domain.engine.released import FOLDER, KINDS, Kind, golden_bodies, read
from domain.engine.schemas import changes, schema_of
from domain.engine.value_limits import plain_times
from domain.engine.versions import UPCASTER_IMPORT, stored_name, stored_type, type_of, version_of
from domain.language import kebab
from infra.errors import SamefoldError, in_words
from policies.engine.policy import PUBLIC
from projections.engine.views.view import POLICY, View
from projections.engine.views.view import Kind as ViewKind
from tools.golden_results import results


class NotReleasable(SamefoldError):
    """The code does not keep to what was released."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A part of the code that does not keep to the record, why, and the lines to write."""

    what: str
    why: tuple[str, ...]
    hint: str


@dataclass(slots=True)
class Report:
    """What has changed since the release. `news` is by context and part, as sentences."""

    refused: list[Refusal] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    new_types: bool = False
    """Events that the released code can't read."""
    new_commands: bool = False
    views: list[str] = field(default_factory=list)
    """Views and states to rebuild."""
    policies: list[str] = field(default_factory=list)
    """Policies to switch."""
    gone: list[str] = field(default_factory=list)
    """Views that the code no longer has."""

    def refuse(self, refusal: Refusal) -> None:
        """Once, though several bodies or contexts show the same."""
        if refusal not in self.refused:
            self.refused.append(refusal)

    def tell(self, news: str) -> None:
        if news not in self.news:
            self.news.append(news)

    @property
    def steps(self) -> list[str]:
        """What a deployment needs, in order."""
        found = []
        switches = bool(self.views or self.gone)
        if self.views:
            found.append(f'samefold db revision -m "{self.views[0]}"; samefold db upgrade')
        found.append("samefold events release; commit domain/released with the rest")
        if self.new_types or switches:
            found.append("agents of this release, beside the old ones")
        if switches:
            found.append("samefold rebuild")
        if self.new_types or self.new_commands or switches:
            found.append("handlers of this release")
            found.append("policies, publisher and API of this release; stop the old processes")
        else:
            found.append("the processes of this release, in any order")
        return found + [f"samefold policies switch {name.removeprefix(POLICY)}" for name in self.policies]


def check(views: Collection[View], known: Mapping[str, Context] | None = None, folder: Path = FOLDER) -> Report:
    """Compare the code with the record. Raises UnreadableRelease, BadContext."""
    known = contexts() if known is None else known
    report = Report()
    for one in known.values():
        _check_times(one, read(one.name, folder), report)
    if not any(folder.glob("*.json")):
        report.news.append("nothing was released yet")
        return report
    records = {name: read(name, folder) for name in sorted({*known, *(file.stem for file in folder.glob("*.json"))})}
    released = {view: was["version"] for record in records.values() for view, was in record["views"].items()}
    for name, record in records.items():
        context = known.get(name)
        if context is None:
            if record["events"]:
                why = (f"its events were released: {', '.join(sorted(record['events']))}",)
                unless = f"Or, if they were never stored, delete domain/released/{name}.json."
                hint = f"Restore the file: the log may hold them. {unless}"
                report.refused.append(Refusal(f"domain/{name}.py", why, hint))
            continue
        refused = len(report.refused)
        mine = [view for view in views if name in view.contexts or view.name in record["views"]]
        _check_context(context, record, report)
        # refused bodies can't be read
        _check_views(context, mine, record, released, report, has_results=len(report.refused) == refused)
        for gone in sorted(record["views"].keys() - {view.name for view in views} - set(report.gone)):
            if not gone.startswith(POLICY):
                report.gone.append(gone)
                report.news.append(f"view {gone} is gone")
    return report


def release(
    views: Collection[View],
    golden: Callable[[type], list[Any]],
    known: Mapping[str, Context] | None = None,
    folder: Path = FOLDER,
) -> list[Path]:
    """Write the record of this code; the files that changed. `golden` makes bodies of a class. Raises NotReleasable."""
    known = contexts() if known is None else known
    if refused := check(views, known, folder).refused:
        raise NotReleasable(
            f"This code does not keep to what was released: {', '.join(one.what for one in refused)}.",
            "`samefold events check` says why, and what to write.",
        )
    written = []
    for name, context in sorted(known.items()):
        record = read(name, folder)
        for kind in KINDS:
            for fact_name, fact in sorted(getattr(context, kind).items()):
                versions = record[kind].setdefault(fact_name, {})
                entry = versions.setdefault(str(version_of(fact)), {"schema": None, "golden": []})
                if entry["schema"] != (schema := _schema(kind, fact)):
                    entry["schema"] = schema
                    known_bodies = [one["body"] for one in entry["golden"]]
                    entry["golden"] += [{"body": body} for body in golden(fact) if body not in known_bodies]
        for _, one in golden_bodies(record["events"]):
            one.pop("state", None)  # which older releases wrote
        record["views"] = {}
        for view in (view for view in views if name in view.contexts):
            made = "".join(one.digit for one in results(view, context, record["events"]))
            record["views"][view.name] = {"version": view.version, "shape": view.shape, "results": made}
        text = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        file = folder / f"{name}.json"
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            folder.mkdir(exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(file)
            written.append(file)
    return written


def _schema(kind: Kind, fact: type) -> dict[str, Any]:
    """Clients' commands have the aliases of fields, events in the log their names."""
    return schema_of(fact, by_alias=kind == "commands")


def _check_context(context: Context, record: Mapping[str, Any], report: Report) -> None:
    for kind in KINDS:
        facts: Mapping[str, type] = getattr(context, kind)
        released: Mapping[str, Any] = record[kind]
        for name, versions in released.items():
            if (fact := facts.get(name)) is None:
                report.refused.append(
                    _gone(context, kind, name, versions, [f for n, f in facts.items() if n not in released])
                )
            else:
                _check_fact(context, kind, fact, versions, report)
        for name, fact in facts.items():
            if name not in released:
                _new_type(report, kind)
                report.news.append(f"{kind[:-1]} {context.name}.{stored_type(fact)} is new")


def _check_times(context: Context, record: Mapping[str, Any], report: Report) -> None:
    """Refuse a plain `datetime`, unless one was released in the same event or command."""
    for kind in KINDS:
        for name, fact in getattr(context, kind).items():
            times = [] if '"date-time"' in json.dumps(record[kind].get(name)) else plain_times(fact)
            for of, _, one in (time.partition(".") for time in times):
                why = (f"field '{one}' is a `datetime`, which may have no time zone, and then is refused",)
                hint = f"With `from domain.language import Moment`, write `Moment` for `datetime` in `{one}` of {of}."
                report.refuse(Refusal(f"{context.name}.{stored_type(fact)}", why, hint))


def _gone(context: Context, kind: Kind, name: str, versions: Mapping[str, Any], new: list[type]) -> Refusal:
    schema = versions[max(versions, key=int)]["schema"]
    heirs = [fact for fact in new if not any(change.breaks for change in changes(schema, _schema(kind, fact)))]
    union = "Event" if kind == "events" else "Command"
    holds, unless = {
        "events": ("the log may hold it", "it was never stored"),
        "commands": ("one may be on its way", "no client sends it any more"),
    }[kind]
    heir = heirs[0].__name__ if len(heirs) == 1 else "the new class"
    return Refusal(
        f"{context.name}.{name}",
        (f"it was released and is not in `{union}` any more, but {holds}",),
        f'Restore the class. Or, if it was renamed, write `stored_as: ClassVar[str] = "{name}"` into {heir}. '
        f"Or, if {unless}, remove it from domain/released/{context.name}.json.",
    )


def _check_fact(context: Context, kind: Kind, fact: type, versions: Mapping[str, Any], report: Report) -> None:
    name, version, last = stored_name(fact), version_of(fact), max(map(int, versions))
    what, schema = f"{context.name}.{type_of(name, version)}", _schema(kind, fact)
    if version < last:
        why = f"version {last} of it was released"
        report.refused.append(
            Refusal(what, (why,), f"Write `VERSION: ClassVar[int] = {last}` into {fact.__name__}, or a higher one.")
        )
        return
    found = [] if version > last else list(changes(versions[str(last)]["schema"], schema))
    broken = [change.what for change in found if change.breaks or change.widens or kind == "commands"]
    if broken:
        if not any(change.breaks for change in found):
            who = "agents" if kind == "events" else "handlers"
            broken.append(f"{who} of the release before could not read it under this name")
        report.refused.append(_changed(what, fact, kind, version, versions[str(last)]["schema"], schema, broken))
        return
    if version > last:
        _new_type(report, kind)
        report.news.append(f"{kind[:-1]} {context.name}.{name} is at version {version}, after {last}")
    report.news += [f"{what}: {change.what}" for change in found]
    for stored, one in golden_bodies({name: versions}):
        try:
            first, second = (read_released(context, kind, stored, storable.encode(one["body"])) for _ in "12")
            why = "" if first == second else "its upcasters return a different body each time"
        except Exception as error:
            if isinstance(error, ValidationError) and all("no time zone" in one["msg"] for one in error.errors()):
                continue  # a command that the handlers of the release before refuse, too
            why = f"a body of it can't be read: {in_words(error)}"
        if why:
            report.refuse(Refusal(f"{context.name}.{stored}", (why,), "Correct its upcasters."))


def _changed(what: str, fact: type, kind: Kind, version: int, was: Any, now: Any, broken: list[str]) -> Refusal:
    fields = was.get("properties", {}), now.get("properties", {})
    new = [name for name in sorted(set(fields[1]) - set(fields[0])) if name in now.get("required", [])]
    first = f"Give {', '.join(new)} a default" if kind == "events" and len(new) == len(broken) else "Change it back"
    if fields[0] and fields[1] and not set(fields[0]) & set(fields[1]):
        broken = [
            f"the name was released for another {kind[:-1]}, with the fields {', '.join(sorted(fields[0]))}",
            *broken,
        ]
    step = kebab(fact.__name__).replace("-", "_")
    return Refusal(
        what,
        tuple(broken),
        f"{first}. Or write `VERSION: ClassVar[int] = {version + 1}` into {fact.__name__}, and below it, "
        f"with `{UPCASTER_IMPORT}`,\n"
        f"@upcaster({fact.__name__}, {version})\n"
        f"def {step}_{version}(body: Body) -> Body:\n"
        f"    return body  # change it to version {version + 1}",
    )


def _check_views(
    context: Context,
    views: list[View],
    record: Mapping[str, Any],
    released: Mapping[str, int],
    report: Report,
    *,
    has_results: bool,
) -> None:
    """`released` has the version of each view, whichever contexts it was released with."""
    for view in views:
        was, why = record["views"].get(view.name), ""
        last = was["version"] if was else released.get(view.name, 0)
        is_policy, name = view.kind is ViewKind.POLICY, view.name.removeprefix(POLICY)
        what = f"view {name}" if not is_policy else "the publication" if name == PUBLIC else f"policy {name}"
        if view.version > last:
            new = "not in the record yet" if is_policy else "new"
            report.tell(f"{what} is {f'at version {view.version}' if last else new}")
            switched = report.policies if last and name != PUBLIC else []
            raised = switched if is_policy else report.views
            if view.name not in raised:
                raised.append(view.name)
        elif view.version < last:
            why = f"version {last} of it was released"
        elif context.name not in view.contexts:
            why = f"it does not take the events of {context.name} any more"
        elif was is None:
            why = f"it did not take the events of {context.name}" if record["events"] else ""
        elif view.shape != was["shape"]:
            why = "State has other fields" if view.kind is ViewKind.SNAPSHOT else "it has other columns"
        elif has_results:
            made, recorded = results(view, context, record["events"]), was.get("results", "")
            older = _other_states(context, record["events"]) if view.kind is ViewKind.SNAPSHOT and not recorded else []
            if older:
                why = f"its result for {older[0]} differs from the release's"
            elif len(made) != len(recorded):
                report.tell("the results of states, views and policies are not in the record yet")
            elif differs := [one for one, old in zip(made, recorded, strict=True) if one.digit != old]:
                why = f"its result for {differs[0].event} differs from the release's"
                why += f": it fails with {differs[0].why}" if differs[0].why else ""
        if why:
            report.refuse(Refusal(what, (why,), _raise(view, context.name, last + 1)))


def _other_states(context: Context, released: Mapping[str, Any]) -> list[str]:
    """Events that lead to another state than a release of before 2026-11-28 recorded, for each alone."""
    read = storable.decoder(context.state)
    found = []
    for stored, one in golden_bodies(released):
        if one.get("state") is not None and stored in context.readers:
            try:
                now = context.fold(context.initial, decode_event(context, stored, storable.encode(one["body"])))
                was = read(storable.encode(one["state"]))
                if storable.comparable(was) != storable.comparable(read(storable.encode(now))):
                    found.append(stored)
            except Exception:  # whatever the author's `evolve` raises: it had a state
                found.append(stored)
    return found


def _raise(view: View, context: str, version: int) -> str:
    name, then = (
        view.name.removeprefix(POLICY),
        f"`samefold db revision`, `samefold db upgrade`, `samefold rebuild {view.name}`",
    )
    if view.kind is ViewKind.SNAPSHOT:
        return f"Raise STATE_VERSION in domain/{context}.py to {version}; then {then}."
    if view.kind is ViewKind.POLICY:
        then = "start the publisher" if name == PUBLIC else f"`samefold policies switch {name}`"
        return f"Raise VERSION in policies/{name}.py to {version}; then {then}."
    return f"Raise VERSION in projections/{name}.py to {version}; then {then}."


def _new_type(report: Report, kind: Kind) -> None:
    if kind == "events":
        report.new_types = True
    else:
        report.new_commands = True
