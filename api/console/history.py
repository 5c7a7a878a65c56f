"""Reads a stream's history from the log and folds it: a process of its own, which writes an entry a line.

`python -m api.console.history STREAM VERSION` begins at that version. A line is an entry as JSON, `null` after each batch of
records, or `[message, hint]` where it can't go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from infra.archive.whole_log import commits_of
from infra.errors import SamefoldError
from infra.log.records import Commit, Record, time_of
from infra.log.rule import Counted
from infra.processes.time_limit import limit_calls
from infra.settings import Settings
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.fold import NOTHING_BLOCKED, Changes, RowCache, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View

SHOWN = 100
"""Versions on one page."""
MOST_ENTRIES = 1_000
"""On one page, with rejections."""
MOST_CHANGES = 40
LARGE = 100_000
"""Bytes of a state or row beyond which its parts are not compared one by one."""


class LongHistory(SamefoldError):
    """A page can't show all refusals between two events."""


class Change(NamedTuple):
    """A part of a state or a row, before and after an event; None where it was not there, or is there no more."""

    part: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """An event of the history, or a rejection, which has no event."""

    version: int
    partition: int
    offset: int
    at: datetime
    command_id: str
    by: str
    type: str
    data: Any
    code: str
    message: str
    is_void: str
    """Why the record has no effect; "" where it has one."""
    state: Any = None
    changes: tuple[Change, ...] = ()
    rows: tuple[tuple[str, tuple[Change, ...]], ...] = ()
    """By view and key, as this code folds it."""
    problem: str = ""
    """Why this code can't fold it."""


def history(settings: Settings, name: str, first: int) -> Iterator[Entry | None]:
    """The entries from a version on, each folded as agents fold it, and None after each batch of records.

    Reads the stream's partition from its beginning.
    """
    context = name.partition("/")[0]
    views = {view.name: view for view in all_views().values() if context in view.contexts}
    fold_on = _Fold(Plan(views))
    shown = 0
    for found in commits_of(settings, name):
        for record, commit, void in found:
            if commit.events and not void and commit.version - len(commit.events) >= first + SHOWN - 1:
                return  # refusals may come after the last event that is shown
            if shown >= MOST_ENTRIES:
                raise LongHistory(
                    f"The first {MOST_ENTRIES:,} entries are shown.", f"`samefold history {name}` has all."
                )
            for entry in fold_on.entries(commit, record, void or "", first):
                yield entry
                shown += 1
        yield None


class _Fold:
    """Folds one stream's commits, event by event."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.held = RowCache(plan)
        self.blocked = NOTHING_BLOCKED
        self.problem = ""
        """Why the stream can't be folded further."""

    def entries(self, commit: Commit, record: Record, void: str, first: int) -> Iterator[Entry]:
        reason = commit.reason
        entry = Entry(
            version=commit.version,
            partition=record.partition,
            offset=record.offset,
            at=time_of(record.time_ms),
            command_id=commit.command_id,
            by=commit.by or "",
            type="",
            data=None,
            code=reason.code if reason else "",
            message=reason.message if reason else "",
            is_void=void,
        )
        if not commit.events and commit.version >= first:
            yield entry
        for version, event in enumerate(commit.events, commit.version - len(commit.events) + 1):
            one = replace(entry, version=version, type=event.type, data=msgspec.json.decode(event.data))
            alone = msgspec.structs.replace(commit, events=[event], version=version)
            if not void:
                one = self._folded(one, Counted(record.offset, record.time_ms, alone), is_shown=version >= first)
            if version >= first:
                yield one

    def _folded(self, entry: Entry, counted: Counted, *, is_shown: bool) -> Entry:
        if self.problem:
            return replace(entry, problem=self.problem)
        stopped: list[tuple[str, tuple[Change, ...]]] = []
        changes: Changes | None = None
        while changes is None:
            try:
                changes = fold(self.plan, decode(self.plan, entry.partition, [counted]), self.held, self.blocked)
            except SamefoldError as error:
                if not (isinstance(error, PoisonEvent) and self.plan.views[error.view].stops_alone):
                    self.problem = error.message
                    return replace(entry, problem=self.problem)
                stopped.append((f"{error.view} stops here", (Change("", None, json.dumps(error.cause)),)))
                self.plan = self.plan.only(*(self.plan.views.keys() - {error.view}))
        if is_shown:
            entry = self._compared(
                entry, counted.commit.stream, changes.states, changes.rows, changes.added, changes.sums
            )
            parked = (
                (f"{one.view} parks it here", (Change("", None, json.dumps(one.error)),)) for one in changes.parked
            )
            entry = replace(entry, rows=(*entry.rows, *parked, *stopped))
        self.blocked = self.blocked.and_parked(changes.parked)
        self.held.merge(changes)
        return entry

    def _compared(
        self,
        entry: Entry,
        stream: str,
        states: Mapping[str, Mapping[str, Any]],
        entities: Mapping[str, Mapping[Any, Any]],
        added: Mapping[str, list[Any]],
        sums: Mapping[str, Mapping[Any, Any]],
    ) -> Entry:
        state: Any = None
        changed: tuple[Change, ...] = ()
        for name, moved in states.items():
            if stream in moved:
                _, before = self.held.rows[name].get(stream) or (0, None)
                state = _plain(moved[stream][1])
                changed = _changes(_plain(before), state)
        rows: list[tuple[str, tuple[Change, ...]]] = []
        views = self.plan.views
        for name, by_key in entities.items():
            for key, row in by_key.items():
                before = self.held.rows[name].get(key)
                rows.append((f"{name} {key}", _changes(_row(views[name], before), _row(views[name], row))))
        rows += [
            (f"{name}, a new line", _changes(None, _row(views[name], row)))
            for name, lines in added.items()
            for row in lines
        ]
        for name, by_key in sums.items():
            columns = [column.name for column in views[name].columns if not column.is_key]
            for key, increments in by_key.items():
                told = dict(zip(columns, _plain(increments), strict=False))
                rows.append((f"{name} {', '.join(map(str, key))}, adds", _changes(None, told)))
        return replace(entry, state=state, changes=changed, rows=tuple(rows))


def _row(view: View, row: Any) -> Any:
    return None if row is None else dict(zip((column.name for column in view.columns), map(_plain, row), strict=False))


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    return None if value is None else msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def _changes(before: Any, after: Any) -> tuple[Change, ...]:
    """What differs, part by part."""
    if before == after:
        return ()
    if max(len(json.dumps(one)) for one in (before, after)) > LARGE:
        return (
            Change("", None if before is None else json.dumps(before), None if after is None else json.dumps(after)),
        )
    was, now = dict(_parts(before)), dict(_parts(after))
    found = [Change(part, was.get(part), now.get(part)) for part in {**was, **now} if was.get(part) != now.get(part)]
    more = len(found) - MOST_CHANGES
    return (*found[:MOST_CHANGES], *((Change(f"and {more} more", None, None),) if more > 0 else ()))


def _parts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Each value that has no parts, as JSON, with its place: `lines[2].cents`."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _parts(one, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from _parts(one, f"{place}[{number}]")
    elif value is not None or place:
        yield place, json.dumps(value, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m api.console.history")
    parser.add_argument("stream")
    parser.add_argument("first", type=int)
    arguments = parser.parse_args()
    settings = Settings()
    limit_calls(settings.decide_limit_s)
    with suppress(BrokenPipeError):  # its reader was killed
        try:
            for entry in history(settings, arguments.stream, arguments.first):
                _write(entry)
        except SamefoldError as error:
            _write([error.message, error.hint])


def _write(line: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
