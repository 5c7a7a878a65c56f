"""The fold's plan: for each type of event, how to decode it and which views take it. Made once for a set of views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add
from typing import Any

import msgspec

from domain.engine.contexts import Context, contexts
from domain.engine.storable import decoder
from infra.log.records import typed_decoder
from projections.engine.fold.exact import Exact
from projections.engine.views.column_types import EXACT, Scalar
from projections.engine.views.columns import Column, Role
from projections.engine.views.core_views import snapshot_view_name
from projections.engine.views.event_context import At, place_of
from projections.engine.views.view import Kind, View, tuple_getter

ADDING = (Kind.JOURNAL, Kind.POLICY)
"""Kinds of views whose events only add rows."""


class Sums:
    """How a summary's rows add up: their key, their increments, and how these combine, exactly as PostgreSQL does it."""

    def __init__(self, view: View) -> None:
        self.key = tuple_getter(view.key_places)
        self.increments = tuple_getter([place for place, column in enumerate(view.columns) if not column.is_key])
        own = [column for column in view.columns if not column.is_key]
        self._combine = tuple(map(_combiner, own))
        placed = [(number, column.role is Role.LATEST) for number, column in enumerate(own) if column.place]
        self.placed = [(number, place, is_latest) for place, (number, is_latest) in enumerate(placed, len(own))]
        """Of each Latest and First: where its value and its place are among the increments, and whether it is a Latest."""

    def located(self, values: tuple[Any, ...], at: At) -> tuple[Any, ...]:
        """An event's increments with the places of its Latest and First values: None says nothing, so it has none."""
        place = place_of(at)
        return (*values, *[None if values[number] is None else place for number, _, _ in self.placed])

    def merge(self, before: Sequence[Any], more: Sequence[Any]) -> list[Any]:
        """Two parts' increments in one. Of the same place are values of one commit only, and `more` has the later ones."""
        merged = [one(a, b) for one, a, b in zip(self._combine, before, more, strict=False)]
        for number, place, is_latest in self.placed:
            was, now = before[place], more[place]
            stays = now is None or (was is not None and (was > now if is_latest else was <= now))
            merged[number] = (before if stays else more)[number]
            merged.append(was if stays else now)
        return merged


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One stored type of event: how to decode it, and the views that take it."""

    kind: type
    """Of the event, as `Plan.decode` gives it: its class, or `msgspec.Raw` where only `decode` can decode it."""
    decode: Callable[[Any], Any]
    states: str | None
    """The snapshot view whose states it changes; None where no view needs states."""
    evolve: Callable[[Any, Any], Any]
    initial: Any
    entities: tuple[View, ...]
    journals: tuple[View, ...]
    summaries: tuple[View, ...]


class Plan:
    """How to fold commits for a set of views: by context and stored type of event, its Step; None where no view takes the type."""

    def __init__(self, views: Mapping[str, View], known: Mapping[str, Context] | None = None) -> None:
        known = self.known = contexts() if known is None else known
        self.views = dict(sorted(views.items()))
        self.steps: dict[str, dict[str, Step | None]] = {}
        self.states: dict[str, Context] = {}
        """The contexts whose states are folded, by the name of their snapshot view."""
        self.entities = [view for view in self.views.values() if view.kind is Kind.ENTITY]
        self.journals = [view.name for view in self.views.values() if view.kind in ADDING]
        self.sums = {view.name: Sums(view) for view in self.views.values() if view.kind is Kind.SUMMARY}
        authors = (view for view in self.views.values() if not view.is_system and view.kind is not Kind.POLICY)
        self.exact = {view.name: Exact(view) for view in authors}
        """Of authors' views. A policy's wishes are checked where they are made."""
        self.inexact: frozenset[str] = frozenset()
        """Views that have made rows that are not exact. From then on, their rows are checked one by one."""
        for context in known.values():
            if any(view.needs_state and context.name in view.contexts for view in self.views.values()):
                self.states[snapshot_view_name(context.name)] = context
            self.steps[context.name] = {
                name: self._step(context, event, decode) for name, (event, decode) in context.readers.items()
            }
        self.reads_older = any(
            step is not None and step.kind is msgspec.Raw for of in self.steps.values() for step in of.values()
        )
        """Whether an author's upcasters decode some events."""
        self.decode = typed_decoder(_kinds(self.steps))
        """Decodes a record as `read` wants it, together with the events that views take."""

    def only(self, *views: str) -> Plan:
        """The plan for some of its views alone."""
        return Plan({view: self.views[view] for view in views}, self.known)

    def _step(self, context: Context, event: type, decode: Callable[[Any], Any]) -> Step | None:
        states = snapshot_view_name(context.name)
        wanted = [
            view
            for view in self.views.values()
            if event in view.subscription and context.name in view.contexts and not view.is_system
        ]
        if not wanted and states not in self.states:
            return None
        return Step(
            kind=event if decode is decoder(event) else msgspec.Raw,
            decode=decode,
            states=states if states in self.states else None,
            evolve=context.fold,
            initial=context.initial,
            entities=tuple(view for view in wanted if view.kind is Kind.ENTITY),
            journals=tuple(view for view in wanted if view.kind in ADDING),
            summaries=tuple(view for view in wanted if view.kind is Kind.SUMMARY),
        )


def _kinds(steps: Mapping[str, Mapping[str, Step | None]]) -> dict[str, type]:
    """By stored type, what `Plan.decode` makes of an event; a type that several contexts have is left to their steps."""
    found: dict[str, type] = {}
    for name, step in chain.from_iterable(of.items() for of in steps.values()):
        found[name] = step.kind if step and name not in found else msgspec.Raw
    return found


def _combiner(column: Column) -> Callable[[Any, Any], Any]:
    if column.place:
        return lambda _before, more: more  # until `merge` has looked at the places
    if column.role is Role.SUM:
        return EXACT.add if column.scalar is Scalar.DECIMAL else add
    return min if column.role is Role.MIN else max
