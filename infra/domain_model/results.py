"""What views, states, policies and the publication make of the event bodies in the record of releases.

Each body is the first event of a stream; then some streams have many, in an order by chance that is the same everywhere. There an
event that can't be folded is left out, so a row is reached whatever event must come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from random import Random
from string import ascii_letters, digits
from typing import Any, TypeVar

from msgspec import Raw
from msgspec.json import encode
from pydantic.fields import FieldInfo

from infra.domain_model.contexts import Context, contexts
from infra.domain_model.released import golden_bodies
from infra.domain_model.versions import stored_name
from infra.log.records import Commit, EventRecord
from infra.log.rule import Counted
from policies.engine import policy
from policies.engine.public_schema import NothingPublic, publication
from projections.engine.fold.errors import EngineStop
from projections.engine.fold.fold import Changes, Held, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.views import core_views
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import Column, Role
from projections.engine.views.view import Kind, View

STREAMS, EVENTS = 10, 30
"""So many streams with so many events: with other numbers the results in records are not compared, until the next release."""
NOTHING, FAILS = ".", "!"
T = TypeVar("T")
_DIGITS = ascii_letters + digits + "-_"


def released_views() -> list[View]:
    """All whose results are recorded. A policy's is called `policy_…`, and the publication's `policy_public`."""
    found = [*core_views.all_views().values()]
    found += [_view(one.name, one.version, one.react, one.subscription) for one in policy.discover().values()]
    with suppress(NothingPublic):
        public = publication()
        found.append(_view(policy.PUBLIC, public.version, public.publish, public.subscription))
    return found


def results(view: View, context: Context, released: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The stored type of each event in turn, with a digit for what the view makes of it. `released`: the record's events."""
    known = ((stored, encode(one["body"])) for stored, one in golden_bodies(released) if stored in context.readers)
    bodies = sorted(known, key=itemgetter(0))  # of a type in their order
    streams = [[one] for one in bodies]
    if bodies and view.kind not in (Kind.SUMMARY, Kind.POLICY):  # which see each event alone
        by_type, chance = [[*of] for _, of in groupby(bodies, itemgetter(0))], Random(STREAMS)
        streams += [[_one_of(_one_of(by_type, chance), chance) for _ in range(EVENTS)] for _ in range(STREAMS)]
    plan = Plan({view.name: dataclasses.replace(view, on_poison="stop")}, {context.name: context})
    held, found = Held(plan), list[tuple[str, str]]()
    for number, stream in enumerate(streams):
        version = 1
        for stored, body in stream:
            made, offset = [EventRecord(stored, Raw(body))], len(found)
            commit = Commit(f"{context.name}/{number}", version, made, "c", 0, "", "accepted", None, epoch=0, seq=1)
            digit = FAILS
            with suppress(EngineStop):
                changes = fold(
                    plan, decode(plan, 0, [Counted(offset, 1_767_225_600_000 + 1000 * offset, commit)]), held
                )
                digit = _digit(view, context, changes, held)
                held.merge(changes)
                version += 1
            found.append((stored, digit))
    return found


def _one_of(some: Sequence[T], chance: Random) -> T:
    return some[int(chance.random() * len(some))]  # only `random` is the same in every version of Python


def _digit(view: View, context: Context, changes: Changes, held: Held) -> str:
    """Of what has changed: an event that the view does not subscribe to and one that changes nothing are the same."""
    rows: Iterable[Any]
    match view.kind:
        case Kind.SNAPSHOT:
            before = {stream: state for stream, (_, state) in held.rows[view.name].items()}
            states = changes.states[view.name].items()
            rows = [state for stream, (_, state) in states if state != before.get(stream, context.initial)]
        case Kind.ENTITY:
            rows = [item for item in changes.rows[view.name].items() if item[1] != held.rows[view.name].get(item[0])]
        case Kind.SUMMARY:
            rows = changes.sums[view.name].items()
        case _:
            rows = changes.added[view.name]
    encoded = [encode(row, order="deterministic") for row in rows]
    if view.kind is not Kind.POLICY:  # whose wishes are numbered; the order of rows may be that of a set
        encoded.sort()
    return _DIGITS[blake2b(b"\n".join(encoded), digest_size=1).digest()[0] % 64] if encoded else NOTHING


def _view(name: str, version: int, function: Callable[..., Iterable[Any]], subscription: frozenset[type]) -> View:
    of = [one.name for one in contexts().values() if not subscription.isdisjoint(one.events.values())]
    key = Column("key", Scalar.STR, role=Role.KEY)

    def wishes(event: Any, _after: Any, at: Any) -> Iterator[bytes]:
        for one in function(event, at):
            yield encode(_brief(one), order="deterministic")

    return View(f"policy_{name}", version, Kind.POLICY, tuple, (key,), wishes, subscription, tuple(of), "")


def _brief(value: Any) -> Any:
    """With names of classes, and without the fields that have their defaults: a new one changes nothing."""
    if isinstance(value, type):
        return stored_name(value)
    if dataclasses.is_dataclass(value):
        given = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        rest = {one.name for one in dataclasses.fields(value) if given[one.name] == _default(one)}
        return [stored_name(type(value)), {name: _brief(one) for name, one in given.items() if name not in rest}]
    return [*map(_brief, value)] if isinstance(value, list | tuple) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if isinstance(field.default, FieldInfo):
        return field.default.get_default(call_default_factory=True)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
