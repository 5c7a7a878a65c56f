"""A view, read from its module: what it subscribes to, how it folds, what its table looks like.

Nothing is registered. The module's name is the view's name, and the annotations declare the rest. An invalid view is
refused when views are discovered, with the line to change, not when the first event arrives.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from operator import itemgetter
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import projections
from domain.engine.contexts import Context, contexts
from infra.database.own_tables import OWN_TABLES
from infra.errors import SamefoldError
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import AGGREGATES, BadView, Column, columns_of, hints_of
from projections.engine.views.event_context import At
from projections.engine.views.indexes import Order, orders_of
from projections.engine.views.nested_types import on_copies

NOT_VIEWS: set[str] = set()
"""Modules of `projections/` that `discover` leaves out: none, except in measurements of other releases."""

POLICY = "policy_"
"""What the view name of a policy begins with."""
RESERVED = re.compile(
    rf"{'|'.join(OWN_TABLES)}|alembic_version|command_outcomes|streams_.*|{POLICY}.*|.*_v\d+(_(r|asof_)\d+)?"
)
CORE = "core"
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
MOST_COLUMNS = 250
"""That many values of any type fit into a row of PostgreSQL."""
MOST_KEYS = 31
"""An index may have 32 columns, and a summary's has one more than its key."""


class Kind(StrEnum):
    ENTITY = "entity"
    """One row per key within one stream, folded from the row before."""
    JOURNAL = "journal"
    """Rows only ever added."""
    SUMMARY = "summary"
    """Increments by key, one subtotal per partition."""
    SNAPSHOT = "snapshot"
    """The write model's states of one context, one row per stream."""
    OUTCOMES = "outcomes"
    """One row per command."""
    POLICY = "policy"
    """Wishes, and outcomes of earlier ones: the outbox. Folded by the policy's own agent only, never rebuilt."""


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
    """Fingerprint of columns and key, or of a snapshot's state. It never changes under one version."""
    key_function: Callable[[Any, At], tuple[Any, ...]] | None = None
    on_poison: Literal["stop", "stop-agent", "park"] = "stop"
    agent: str = CORE
    indexes: tuple[Order, ...] = ()
    """Each with the key behind its own columns."""
    question: str = ""
    """The module's docstring."""
    write: Callable[[Sequence[Any]], list[Any]] | None = None
    """Of a policy: the statements that write a batch's `Changes`, instead of rows into a table of the view's own."""
    evolve: Callable[[Any, Any, Any], Any] = field(init=False)
    """An entity's function, as the fold calls it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "evolve", on_copies(self.function, self.columns))

    @property
    def table_name(self) -> str:
        """The table that migrations create for this version. Later builds of it add `_r2`, `_r3`, …"""
        return f"{self.name}_v{self.version}"

    @property
    def comment(self) -> str:
        """Its tables' comment. It shows Alembic's autogenerate a changed key or state, which it would not see."""
        key = ", ".join(column.name for column in self.key)
        return f"view {self.name}, version {self.version}, {self.kind} by ({key}), shape {self.shape}"

    @property
    def key(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.is_key)

    @property
    def key_places(self) -> tuple[int, ...]:
        """Where the key's columns stand in a row."""
        return tuple(place for place, column in enumerate(self.columns) if column.is_key)

    @property
    def key_of(self) -> Callable[[Any], Any]:
        """Reads a row's key as the fold has it: a tuple, or the value of the only column where there is no `key`."""
        return itemgetter(*self.key_places) if self.key_function is None else tuple_getter(self.key_places)

    @property
    def stored(self) -> tuple[Column, ...]:
        """The columns of its tables, but `_partition`: the row's, then the places of Latest and First values."""
        return (*self.columns, *(place for column in self.columns if (place := column.place)))

    @property
    def values(self) -> tuple[Column, ...]:
        """The stored columns beside the key: a summary's increments."""
        return tuple(column for column in self.stored if not column.is_key)

    @property
    def needs_state(self) -> bool:
        """Whether the fold needs the domain's state after each event."""
        return self.kind in (Kind.JOURNAL, Kind.SNAPSHOT)

    @property
    def tells_stream(self) -> bool:
        """Whether a row's key is its stream's id."""
        return self.kind is Kind.ENTITY and self.key_function is None

    @property
    def is_system(self) -> bool:
        return self.kind in (Kind.SNAPSHOT, Kind.OUTCOMES)

    @property
    def stops_alone(self) -> bool:
        """Whether its agent goes on without it where it can't fold an event, nor park it. Commands are decided on the others."""
        return self.on_poison != "stop-agent" and self.kind in (Kind.ENTITY, Kind.JOURNAL, Kind.SUMMARY)


def tuple_getter(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Like `itemgetter`, but returns a tuple for a single place too."""
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
    """All views of `projections/` by name. A module whose name begins with `_` is none, but views may import it. Raises BadView."""
    names = {info.name for info in pkgutil.iter_modules(projections.__path__) if not info.ispkg} - NOT_VIEWS
    views = sorted(name for name in names if not name.startswith("_"))
    return {name: view_of(importlib.import_module(f"projections.{name}")) for name in views}


def view_of(module: ModuleType, known: Collection[Context] | None = None) -> View:
    """The view that a module declares. It may subscribe to events of `known`, by default of `domain/`. Raises BadView."""
    name = module.__name__.rpartition(".")[2]
    known = contexts().values() if known is None else known
    if not NAME.fullmatch(name) or RESERVED.fullmatch(name):
        raise BadView(
            f"projections/{name}.py can't be a view: its name is reserved or not valid for a table.",
            "Rename the file: at most 40 lower case letters, digits and underscores, without _v1 or the like at the end.",
        )
    kind, function = _function(name, module)
    file = f"projections/{name}.py"
    version = version_of(module, file, BadView)
    hints = hints_of(function, f"View '{name}'", BadView)
    row = _row(name, kind, function, hints)
    columns = columns_of(row, name)
    subscription = events_of(hints.get("event"), file, known, BadView)
    of = [context for context in known if subscription & {*context.events.values()}]
    key_function = module.__dict__.get("key")
    agent = getattr(module, "AGENT", CORE)
    on_poison: Literal["stop", "stop-agent", "park"] = getattr(module, "ON_POISON", "stop")
    _check_columns(name, kind, columns)
    _check_key(name, kind, columns, key_function, of)
    if kind is Kind.JOURNAL:
        _check_after(name, hints.get("after"), of)
        if agent != CORE:
            raise BadView(
                f"Journal '{name}' is in the agent '{agent}', but only '{CORE}' keeps the states that it needs.",
                "Remove AGENT, or write an entity or summary view.",
            )
    if not (isinstance(agent, str) and NAME.fullmatch(agent)):
        raise BadView(
            f"View '{name}' has AGENT = {agent!r}.", "An agent's name is lower case letters, digits and underscores."
        )
    if on_poison not in ("stop", "stop-agent", "park"):
        raise BadView(
            f"View '{name}' has ON_POISON = {on_poison!r}.", 'It is "stop" (the default), "stop-agent" or "park".'
        )
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
        indexes=orders_of(getattr(module, "INDEXES", ()), name, columns, is_summary=kind is Kind.SUMMARY),
        question=(module.__doc__ or "").strip(),
    )


def fingerprint(*parts: str) -> str:
    """A short hash of a shape."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


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
            "Choose by the question: what is it now (evolve), what happened (rows), how much in total (delta).",
        )
    ((function_name, function),) = own.items()
    kind, parameters, signature = _PARAMETERS[function_name]
    if tuple(inspect.signature(function).parameters) != parameters:
        raise BadView(
            f"View '{name}': {function_name} has other parameters than the engine passes.", f"Write {signature}"
        )
    return kind, function


def _row(name: str, kind: Kind, function: Callable[..., Any], hints: dict[str, Any]) -> type:
    returned = hints.get("return")
    if kind is Kind.ENTITY:
        members = [member for member in members_of(returned) if member is not NoneType]
    else:
        origin = get_origin(returned)
        is_iterable = origin in (Iterable, Iterator, Generator, list, tuple)
        members = [member for member in get_args(returned)[:1] if is_iterable]
    if len(members) != 1 or not isinstance(members[0], type):
        wanted = "Row | None" if kind is Kind.ENTITY else "Iterable[Row]"
        raise BadView(
            f"View '{name}': {function.__name__} does not declare which row it makes.",
            f"Annotate its result: `-> {wanted}`, with your row class for Row.",
        )
    return members[0]


def version_of(module: ModuleType, file: str, bad: type[SamefoldError]) -> int:
    """The VERSION that a module of a view or policy declares. Raises `bad`."""
    version = getattr(module, "VERSION", None)
    if type(version) is not int or not 1 <= version < 10_000:
        what = "has no VERSION" if version is None else f"has VERSION = {version!r}"
        raise bad(f"{file} {what}.", f"Write `VERSION = 1` in {file}, or a larger whole number.")
    return version


def events_of(annotation: Any, file: str, known: Collection[Context], bad: type[SamefoldError]) -> frozenset[type]:
    """The events of these contexts to which the annotation of a parameter `event` subscribes. Raises `bad`."""
    members = members_of(annotation)
    strange = [
        "None" if member is NoneType else repr(member)
        for member in members
        if member is NoneType or not isinstance(member, type)
    ]
    if not members or strange:
        what = (
            f"the annotation of `event` has {', '.join(strange)}"
            if strange
            else "the parameter `event` has no annotation"
        )
        raise bad(
            f"{file}: {what}. It is the subscription and names events.",
            "Name the events: `event: RoomBooked | RoomFreed`.",
        )
    unknown = set(members).difference(*(context.events.values() for context in known))
    if unknown:
        raise bad(
            f"{file} subscribes to {', '.join(sorted(event.__name__ for event in unknown))}, which no context's `Event` names.",
            "Add it to the union `Event` of its module in domain/, or remove it from the annotation.",
        )
    return frozenset(members)


def members_of(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, TypeVar) or annotation is None or annotation is Any:
        return ()
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _check_columns(name: str, kind: Kind, columns: tuple[Column, ...]) -> None:
    if not any(column.is_key for column in columns):
        raise BadView(f"View '{name}' has no key.", "Mark the columns that identify a row: `room: Key[str]`.")
    stored = len(columns) + sum(column.place is not None for column in columns)
    if stored > MOST_COLUMNS or sum(column.is_key for column in columns) > MOST_KEYS:
        raise BadView(
            f"View '{name}' has too many columns for a table or its key.",
            f"Use at most {MOST_COLUMNS} columns (Latest and First count twice), of which at most {MOST_KEYS} are `Key[…]`.",
        )
    for column in columns:
        combines = column.role in AGGREGATES
        if kind is Kind.SUMMARY and not (column.is_key or combines):
            raise BadView(
                f"Summary '{name}': column '{column.name}' is neither a key, nor does it declare how it combines.",
                f"Write `{column.name}: Key[…]`, or Sum[…], Min[…], Max[…], Latest[…] or First[…].",
            )
        if kind is not Kind.SUMMARY and combines:
            raise BadView(
                f"View '{name}': column '{column.name}' is a {column.role}, which only a summary (delta) has.",
                "Remove the mark, or write the view with `delta`.",
            )
    if kind is Kind.SUMMARY and all(column.is_key for column in columns):
        raise BadView(f"Summary '{name}' sums up nothing.", "Add a column `times: Sum[int]`.")


def _check_key(name: str, kind: Kind, columns: tuple[Column, ...], key_function: Any, of: list[Context]) -> None:
    if kind is not Kind.ENTITY:
        if key_function is not None:
            raise BadView(
                f"View '{name}' has a function `key`, which only entity views have.",
                "Remove it: rows carry their own key.",
            )
        return
    if key_function is not None:
        if not inspect.isfunction(key_function) or tuple(inspect.signature(key_function).parameters) != ("event", "at"):
            raise BadView(
                f"View '{name}': `key` has other parameters than the engine passes.",
                "Write key(event: …, at: At) -> tuple[…]",
            )
        return
    keys = [column for column in columns if column.is_key]
    first = "at.id" if len(of) == 1 else "at.stream"  # as `Exact.require_own` wants it
    example = f"def key(event, at): return ({', '.join([first, *('…' for _ in keys[1:])])},)"
    if len(of) > 1:
        raise BadView(f"View '{name}' has events of several contexts, whose ids may be equal.", f"Add `{example}`.")
    if len(keys) != 1 or keys[0].scalar is not Scalar.STR or keys[0].enum is not None:
        raise BadView(
            f"View '{name}': its key is not one text column, so it can't be the stream's id.",
            f"Write `Key[str]` on one column only, or add `{example}`: a key begins with its stream's id (docs/new-view.md).",
        )


def _check_after(name: str, annotation: Any, of: list[Context]) -> None:
    states = {context.state for context in of}
    if set(members_of(annotation)) != states:
        wanted = " | ".join(sorted(f"{state.__module__}.{state.__name__}" for state in states))
        raise BadView(
            f"Journal '{name}': `after` is not the state of its events' context.", f"Annotate it: `after: {wanted}`."
        )
