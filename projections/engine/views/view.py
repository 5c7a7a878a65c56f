"""A view, read from its module: what it subscribes to, how it folds, what its table looks like.

Nothing is registered. The module's name is the view's name, the annotations say the rest, and whatever does not fit is
refused when the views are found, with the line to change, not when the first event arrives.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import itemgetter
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import projections
from infra.domain_model.contexts import Context, contexts
from projections.engine.views.columns import BadView, Column, Role, columns_of
from projections.engine.views.event_context import At

NOT_VIEWS = {"agent"}
"""Modules of `projections/` that are no views."""

RESERVED = re.compile(
    r"streams_.*|command_outcomes|positions|live|builds|build_positions|build_parts|parked|skips|topics|command_types|alembic_version"
    r"|.*_v\d+(_(r|asof_)\d+)?"
)
CORE = "core"
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
MOST_COLUMNS = 250
"""So many values of any type fit a row of PostgreSQL's."""
MOST_KEYS = 31
"""An index has 32 columns, and a summary's needs one more."""


class Kind(StrEnum):
    ENTITY = "entity"
    """One row per key within one stream; folded from the row before."""
    JOURNAL = "journal"
    """Rows only ever added."""
    SUMMARY = "summary"
    """Increments by key, one share per partition."""
    SNAPSHOT = "snapshot"
    """The write model's states of one context, one row per stream."""
    OUTCOMES = "outcomes"
    """One row per command."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One version of one view. `function` is evolve, rows or delta (for a snapshot the domain's evolve)."""

    name: str
    version: int
    kind: Kind
    row: type
    columns: tuple[Column, ...]
    function: Callable[..., Any]
    subscription: frozenset[type]
    contexts: tuple[str, ...]
    shape: str
    """Fingerprint of columns and key; of the state's fields for a snapshot. Under one version it never changes."""
    key_function: Callable[[Any, At], tuple[Any, ...]] | None = None
    on_poison: Literal["stop", "park"] = "stop"
    agent: str = CORE
    question: str = ""
    """The module's docstring."""

    @property
    def table_name(self) -> str:
        """The table that migrations make for this version; another build of it has `_r2`, `_r3`, … behind."""
        return f"{self.name}_v{self.version}"

    @property
    def key(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.is_key)

    @property
    def key_places(self) -> tuple[int, ...]:
        """Where the key's columns stand in a row."""
        return tuple(place for place, column in enumerate(self.columns) if column.is_key)

    @property
    def needs_state(self) -> bool:
        """Whether folding it needs the domain's state after each event."""
        return self.kind in (Kind.JOURNAL, Kind.SNAPSHOT)

    @property
    def is_system(self) -> bool:
        return self.kind in (Kind.SNAPSHOT, Kind.OUTCOMES)


def tuple_getter(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads what stands at these places of a row as a tuple, also when it is only one."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1))


_PARAMETERS = {
    "evolve": (Kind.ENTITY, ("row", "event", "at"), "evolve(row: Row | None, event: …, at: At) -> Row | None"),
    "rows": (Kind.JOURNAL, ("event", "after", "at"), "rows(event: …, after: State, at: At) -> Iterable[Row]"),
    "delta": (Kind.SUMMARY, ("event", "at"), "delta(event: …, at: At) -> Iterable[Row]"),
}


@cache
def discover() -> dict[str, View]:
    """All views of `projections/` by name. Raises BadView."""
    names = sorted(info.name for info in pkgutil.iter_modules(projections.__path__) if not info.ispkg)
    return {name: view_of(importlib.import_module(f"projections.{name}")) for name in names if name not in NOT_VIEWS}


def view_of(module: ModuleType, known: Collection[Context] | None = None) -> View:
    """The view a module declares; it may subscribe to events of `known` (by default `domain/`). Raises BadView."""
    name = module.__name__.rpartition(".")[2]
    known = contexts().values() if known is None else known
    _check_name(name)
    kind, function = _function(name, module)
    version = getattr(module, "VERSION", None)
    if type(version) is not int or not 1 <= version < 10_000:
        raise BadView(f"View '{name}' has no VERSION.", f"Write `VERSION = 1` in projections/{name}.py.")
    hints = _hints(name, function)
    row = _row(name, kind, function, hints)
    columns = columns_of(row, name)
    subscription = _events(name, hints.get("event"))
    of = _contexts(name, subscription, known)
    key_function = module.__dict__.get("key")
    agent = getattr(module, "AGENT", CORE)
    on_poison: Literal["stop", "park"] = getattr(module, "ON_POISON", "stop")
    _check_columns(name, kind, columns)
    _check_key(name, kind, columns, key_function, of)
    if kind is Kind.JOURNAL:
        _check_after(name, hints.get("after"), of)
        if agent != CORE:
            raise BadView(
                f"Journal '{name}' is in the agent '{agent}', but only '{CORE}' keeps the states it is told.",
                "Leave out AGENT, or write an entity or summary view.",
            )
    if not (isinstance(agent, str) and NAME.fullmatch(agent)):
        raise BadView(
            f"View '{name}' has AGENT = {agent!r}.", "An agent's name is lower case letters, digits and underscores."
        )
    if on_poison not in ("stop", "park"):
        raise BadView(f"View '{name}' has ON_POISON = {on_poison!r}.", 'It is "stop" (the default) or "park".')
    return View(
        name=name,
        version=version,
        kind=kind,
        row=row,
        columns=columns,
        function=function,
        subscription=subscription,
        contexts=tuple(sorted(context.name for context in of)),
        shape=fingerprint(kind, *(column.shape for column in columns)),
        key_function=key_function,
        on_poison=on_poison,
        agent=agent,
        question=(module.__doc__ or "").strip(),
    )


def fingerprint(*parts: str) -> str:
    """A short name for a shape: equal parts, equal name."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name) or RESERVED.fullmatch(name):
        raise BadView(
            f"projections/{name}.py can't be a view: its name is reserved or no name for a table.",
            "Rename the file: lower case letters, digits and underscores, at most 40, not ending in _v1 or the like.",
        )


def _function(name: str, module: ModuleType) -> tuple[Kind, Callable[..., Any]]:
    own = {
        candidate: function
        for candidate in _PARAMETERS
        if inspect.isfunction(function := module.__dict__.get(candidate)) and function.__module__ == module.__name__
    }
    if len(own) != 1:
        found = f"has {' and '.join(own)}" if own else "has none"
        raise BadView(
            f"View '{name}' must have exactly one of evolve, rows and delta; it {found}.",
            "Pick by question: what is it now (evolve), what happened (rows), how much in total (delta).",
        )
    ((function_name, function),) = own.items()
    kind, parameters, signature = _PARAMETERS[function_name]
    if tuple(inspect.signature(function).parameters) != parameters:
        raise BadView(
            f"View '{name}': {function_name} has other parameters than the engine gives.", f"Write {signature}"
        )
    return kind, function


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError as error:
        raise BadView(
            f"View '{name}': an annotation of {function.__name__} can't be resolved: {error}.",
            "Import what the annotations name at the top of the module (not under TYPE_CHECKING).",
        ) from error


def _row(name: str, kind: Kind, function: Callable[..., Any], hints: dict[str, Any]) -> type:
    returned = hints.get("return")
    if kind is Kind.ENTITY:
        members = [member for member in _members(returned) if member is not NoneType]
    else:
        origin = get_origin(returned)
        is_iterable = origin in (Iterable, Iterator, Generator, list, tuple)
        members = [member for member in get_args(returned)[:1] if is_iterable]
    if len(members) != 1 or not isinstance(members[0], type):
        wanted = "Row | None" if kind is Kind.ENTITY else "Iterable[Row]"
        raise BadView(
            f"View '{name}': {function.__name__} does not say which row it makes.",
            f"Annotate what it returns: `-> {wanted}`, with your row class for Row.",
        )
    return members[0]


def _events(name: str, annotation: Any) -> frozenset[type]:
    members = _members(annotation)
    if not members or not all(isinstance(member, type) and member is not NoneType for member in members):
        raise BadView(
            f"View '{name}': its parameter `event` has no annotation to read the subscription from.",
            "Name the events it wants: `event: RoomBooked | RoomFreed`.",
        )
    return frozenset(members)


def _members(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, TypeVar) or annotation is None or annotation is Any:
        return ()
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _contexts(name: str, subscription: frozenset[type], known: Collection[Context]) -> list[Context]:
    owners: dict[type, Context] = {event: context for context in known for event in context.events.values()}
    strangers = sorted(event.__name__ for event in subscription if event not in owners)
    if strangers:
        raise BadView(
            f"View '{name}' subscribes to {', '.join(strangers)}, which no context's `Event` names.",
            "Add it to the union `Event` of its module in domain/, or take it out of the annotation.",
        )
    return list({owners[event].name: owners[event] for event in subscription}.values())


def _check_columns(name: str, kind: Kind, columns: tuple[Column, ...]) -> None:
    if not any(column.is_key for column in columns):
        raise BadView(f"View '{name}' has no key.", "Mark the columns that name a row: `account: Key[str]`.")
    if len(columns) > MOST_COLUMNS or sum(column.is_key for column in columns) > MOST_KEYS:
        raise BadView(
            f"View '{name}' has too many columns for a table or its key.",
            f"Use at most {MOST_COLUMNS} columns, of which at most {MOST_KEYS} are `Key[…]`.",
        )
    for column in columns:
        combines = column.role in (Role.SUM, Role.MIN, Role.MAX)
        if kind is Kind.SUMMARY and not (column.is_key or combines):
            raise BadView(
                f"Summary '{name}': column '{column.name}' says neither that it is a key nor how it combines.",
                f"Write `{column.name}: Key[…]`, or Sum[…], Min[…] or Max[…].",
            )
        if kind is not Kind.SUMMARY and combines:
            raise BadView(
                f"View '{name}': column '{column.name}' is a {column.role}, which only a summary (delta) has.",
                "Leave out the mark, or write the view with `delta`.",
            )
    if kind is Kind.SUMMARY and all(column.is_key for column in columns):
        raise BadView(f"Summary '{name}' sums up nothing.", "Add a column `times: Sum[int]`.")


def _check_key(name: str, kind: Kind, columns: tuple[Column, ...], key_function: Any, of: list[Context]) -> None:
    if kind is not Kind.ENTITY:
        if key_function is not None:
            raise BadView(
                f"View '{name}' has a function `key`.", "Only entity views need one; rows carry their own key."
            )
        return
    if key_function is not None:
        if not inspect.isfunction(key_function) or tuple(inspect.signature(key_function).parameters) != ("event", "at"):
            raise BadView(f"View '{name}': `key` has other parameters.", "Write key(event: …, at: At) -> tuple[…]")
        return
    keys = [column for column in columns if column.is_key]
    example = f"def key(event, at): return ({', '.join('…' for _ in keys)},)"
    if len(of) > 1:
        raise BadView(f"View '{name}' is of several contexts, whose ids may be the same.", f"Add `{example}`.")
    if len(keys) != 1 or keys[0].shape.split(":", 1)[1] != "str:key" or keys[0].enum is not None:
        raise BadView(
            f"View '{name}': its key is not one text column, so it can't be the stream's id.",
            f"Write `Key[str]` on one column only, or add `{example}`.",
        )


def _check_after(name: str, annotation: Any, of: list[Context]) -> None:
    states = {context.state for context in of}
    if set(_members(annotation)) != states:
        wanted = " | ".join(sorted(f"{state.__module__}.{state.__name__}" for state in states))
        raise BadView(
            f"Journal '{name}': `after` is not the state of its events' context.", f"Annotate `after: {wanted}`."
        )
