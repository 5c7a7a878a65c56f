"""What to do with each type of event, worked out once for a set of views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from infra.domain_model.contexts import Context, contexts
from projections.engine.fold.exact import Exact
from projections.engine.views.column_types import EXACT, Scalar
from projections.engine.views.columns import Column, Role
from projections.engine.views.core_views import snapshot_view_name
from projections.engine.views.event_context import At
from projections.engine.views.view import Kind, View, tuple_getter

Evolve = Callable[[Any, Any, At], Any]
Rows = Callable[[Any, Any, At], Iterable[Any]]
Delta = Callable[[Any, At], Iterable[Any]]
KeyOf = Callable[[Any, At], tuple[Any, ...]]


class Entity(NamedTuple):
    name: str
    view: View
    evolve: Evolve
    key: KeyOf | None
    exact: Exact


class Journal(NamedTuple):
    name: str
    view: View
    rows: Rows
    exact: Exact


class Summary(NamedTuple):
    name: str
    view: View
    delta: Delta
    exact: Exact
    key: Callable[[Any], Any]
    increments: Callable[[Any], tuple[Any, ...]]
    combine: tuple[Callable[[Any, Any], Any], ...]


class Step(NamedTuple):
    """One type of event: how to decode it and who wants it."""

    decode: Callable[[Any], Any]
    states: str | None
    """Name of the snapshot view whose states it changes; None where nobody needs states."""
    evolve: Callable[[Any, Any], Any]
    initial: Any
    entities: tuple[Entity, ...]
    journals: tuple[Journal, ...]
    summaries: tuple[Summary, ...]


class Plan:
    """How to fold commits for a set of views: for each context, each type of event's Step; None for types nobody wants."""

    def __init__(self, views: Mapping[str, View], known: Mapping[str, Context] | None = None) -> None:
        known = self.known = contexts() if known is None else known
        self.views = dict(sorted(views.items()))
        self.steps: dict[str, dict[str, Step | None]] = {}
        self.states: dict[str, Context] = {}
        """The contexts whose states are folded, by the name of their snapshot view."""
        self.entities = [view for view in self.views.values() if view.kind is Kind.ENTITY]
        self.exact = {view.name: Exact(view) for view in self.views.values() if not view.is_system}
        self.inexact: frozenset[str] = frozenset()
        """Views whose functions were seen to make rows that are not exact: theirs are checked one by one from then on."""
        self.outcomes = next((view for view in self.views.values() if view.kind is Kind.OUTCOMES), None)
        for context in known.values():
            if any(view.needs_state and context.name in view.contexts for view in self.views.values()):
                self.states[snapshot_view_name(context.name)] = context
            self.steps[context.name] = {name: self._step(context, event) for name, event in context.events.items()}

    def only(self, view: str) -> Plan:
        """The plan for one of its views alone."""
        return Plan({view: self.views[view]}, self.known)

    def _step(self, context: Context, event: type) -> Step | None:
        states = snapshot_view_name(context.name)
        wanted = [
            view
            for view in self.views.values()
            if event in view.subscription and context.name in view.contexts and not view.is_system
        ]
        if not wanted and states not in self.states:
            return None
        told = [view.name for view in wanted if view.needs_state]
        assert not told or states in self.states, f"{told} would be told no state"
        return Step(
            decode=context.stored[event][1],
            states=states if states in self.states else None,
            evolve=context.fold,
            initial=context.initial,
            entities=tuple(
                Entity(v.name, v, v.function, v.key_function, self.exact[v.name])
                for v in wanted
                if v.kind is Kind.ENTITY
            ),
            journals=tuple(
                Journal(v.name, v, v.function, self.exact[v.name]) for v in wanted if v.kind is Kind.JOURNAL
            ),
            summaries=tuple(_summary(v, self.exact[v.name]) for v in wanted if v.kind is Kind.SUMMARY),
        )


def _summary(view: View, exact: Exact) -> Summary:
    increments = tuple_getter([place for place, column in enumerate(view.columns) if not column.is_key])
    key_of = tuple_getter(view.key_places)
    return Summary(view.name, view, view.function, exact, key_of, increments, combiners(view))


def combiners(view: View) -> tuple[Callable[[Any, Any], Any], ...]:
    """How each of a summary's columns that is no key combines, in order, exactly as PostgreSQL does it."""
    return tuple(_combiner(column) for column in view.columns if not column.is_key)


def _add(a: Any, b: Any) -> Any:
    return a + b


def _combiner(column: Column) -> Callable[[Any, Any], Any]:
    if column.role is Role.SUM:
        return EXACT.add if column.scalar is Scalar.DECIMAL else _add
    return min if column.role is Role.MIN else max
