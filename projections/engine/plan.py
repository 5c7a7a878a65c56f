"""What to do with each type of event, worked out once for a set of views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from infra.contexts import Context, contexts
from projections.engine.at import At
from projections.engine.columns import Role
from projections.engine.system import snapshot_view_name
from projections.engine.view import Kind, View

Evolve = Callable[[Any, Any, At], Any]
Rows = Callable[[Any, Any, At], Iterable[Any]]
Delta = Callable[[Any, At], Iterable[Any]]
KeyOf = Callable[[Any, At], tuple[Any, ...]]


class Entity(NamedTuple):
    name: str
    view: View
    evolve: Evolve
    key: KeyOf | None


class Summary(NamedTuple):
    view: View
    delta: Delta
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
    journals: tuple[tuple[View, Rows], ...]
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
        wanted = [view for view in self.views.values() if event in view.subscription and not view.is_system]
        if not wanted and states not in self.states:
            return None
        return Step(
            decode=msgspec.json.Decoder(event).decode,
            states=states if states in self.states else None,
            evolve=context.evolve,
            initial=context.state(),
            entities=tuple(Entity(v.name, v, v.function, v.key_function) for v in wanted if v.kind is Kind.ENTITY),
            journals=tuple((view, view.function) for view in wanted if view.kind is Kind.JOURNAL),
            summaries=tuple(_summary(view) for view in wanted if view.kind is Kind.SUMMARY),
        )


def _add(a: Any, b: Any) -> Any:
    return a + b


_COMBINE: dict[Role, Callable[[Any, Any], Any]] = {Role.SUM: _add, Role.MIN: min, Role.MAX: max}


def _summary(view: View) -> Summary:
    increments = [place for place, column in enumerate(view.columns) if not column.is_key]
    return Summary(view, view.function, tuple_getter(view.key_places), tuple_getter(increments), combiners(view))


def combiners(view: View) -> tuple[Callable[[Any, Any], Any], ...]:
    """How each of a summary's columns that is no key combines, in order."""
    return tuple(_COMBINE[column.role] for column in view.columns if not column.is_key)


def tuple_getter(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads what stands at these places of a row as a tuple, also when it is only one."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1))
