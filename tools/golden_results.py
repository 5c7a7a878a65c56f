"""What views, states, policies and the publication make of the event bodies in the record of releases.

Each body is the first event of a stream; then some streams have many, in an order by chance that is the same everywhere. There an
event that can't be folded is left out, so a row is reached whatever event must come first.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from random import Random
from string import ascii_letters, digits
from typing import Any, NamedTuple, TypeVar

from msgspec import Raw
from msgspec.json import encode

from domain.engine.contexts import Context
from domain.engine.released import golden_bodies
from domain.engine.versions import stored_name
from infra.log.records import Commit, EventRecord
from infra.log.rule import Counted
from policies.engine import outbox, policy
from policies.engine.policy import PUBLIC, Policy
from policies.engine.public_schema import NothingPublic, publication
from projections.engine.fold.errors import EngineStop, PoisonEvent
from projections.engine.fold.fold import Changes, RowCache, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.views import core_views
from projections.engine.views.event_context import At
from projections.engine.views.view import Kind, View

STREAMS, EVENTS = 10, 30
"""So many streams with so many events: with other numbers the results in records are not compared, until the next release."""
NOTHING, FAILS = ".", "!"
T = TypeVar("T")


class Result(NamedTuple):
    """What a view makes of an event, as a digit, and why it can't fold it; "" where it can."""

    event: str
    digit: str
    why: str


_DIGITS = ascii_letters + digits + "-_"


def released_views() -> list[View]:
    """All whose results are recorded. Policies and the publication are called POLICY and their module's name."""
    views, policies = [*core_views.all_views().values()], [*policy.discover().values()]
    with suppress(NothingPublic):
        public = publication()
        react: Any = public.publish
        policies.append(Policy(PUBLIC, public.version, react, public.subscription))
    return views + [dataclasses.replace(outbox.view_of(one), function=partial(_wishes, one.react)) for one in policies]


def results(view: View, context: Context, released: Mapping[str, Any]) -> list[Result]:
    """Of each event in turn, by its stored type. `released`: the record's events."""
    known = ((stored, encode(one["body"])) for stored, one in golden_bodies(released) if stored in context.readers)
    bodies = sorted(known, key=itemgetter(0))  # of a type in their order
    streams = [[one] for one in bodies]
    if bodies and view.kind not in (Kind.SUMMARY, Kind.POLICY):  # which see each event alone
        by_type, chance = [[*of] for _, of in groupby(bodies, itemgetter(0))], Random(STREAMS)
        streams += [[_one_of(_one_of(by_type, chance), chance) for _ in range(EVENTS)] for _ in range(STREAMS)]
    plan = Plan({view.name: dataclasses.replace(view, on_poison="stop")}, {context.name: context})
    held, found = RowCache(plan), list[Result]()
    for number, stream in enumerate(streams):
        version = 1
        for stored, body in stream:
            made, offset = [EventRecord(stored, Raw(body))], len(found)
            commit = Commit(f"{context.name}/{number}", version, made, "c", 0, "", "accepted", None, epoch=0, seq=1)
            try:
                changes = fold(
                    plan, decode(plan, 0, [Counted(offset, 1_767_225_600_000 + 1000 * offset, commit)]), held
                )
                found.append(Result(stored, _digit(view, context, changes, held), ""))
                held.merge(changes)
                version += 1
            except EngineStop as stop:
                found.append(Result(stored, FAILS, stop.cause if isinstance(stop, PoisonEvent) else stop.message))
    return found


def _one_of(some: Sequence[T], chance: Random) -> T:
    return some[int(chance.random() * len(some))]  # only `random` is the same in every version of Python


def _digit(view: View, context: Context, changes: Changes, held: RowCache) -> str:
    """Of what has changed: an event that the view does not subscribe to and one that changes nothing are the same."""
    name, before = view.name, held.rows.get(view.name, {})
    rows: Iterable[Any]
    match view.kind:
        case Kind.SNAPSHOT:
            states = changes.states[name].items()
            rows = [state for stream, (_, state) in states if state != before.get(stream, (0, context.initial))[1]]
        case Kind.ENTITY:
            rows = [(key, row) for key, row in changes.rows[name].items() if row != before.get(key)]
        case Kind.SUMMARY:
            shown = sum(not column.is_key for column in view.columns)  # places differ with the number of events before
            rows = [(key, values[:shown]) for key, values in changes.sums[name].items()]
        case _:
            rows = changes.added[name]
    encoded = [encode(row, order="deterministic") for row in rows]
    if view.kind is not Kind.POLICY:  # whose wishes are numbered; the order of rows may be that of a set
        encoded.sort()
    return _DIGITS[blake2b(b"\n".join(encoded), digest_size=1).digest()[0] % 64] if encoded else NOTHING


def _wishes(function: Callable[..., Iterable[Any]], event: Any, _after: Any, at: At) -> Iterator[bytes]:
    for one in function(event, at):
        yield encode(_brief(one), order="deterministic")


def _brief(value: Any) -> Any:
    """With names of classes, and without the fields that have their defaults: a new one changes nothing."""
    if isinstance(value, type):
        return stored_name(value)
    if dataclasses.is_dataclass(value):
        fields = {one.name: (getattr(value, one.name), _default(one)) for one in dataclasses.fields(value)}
        return [stored_name(type(value)), {name: _brief(one) for name, (one, usual) in fields.items() if one != usual}]
    return [*map(_brief, value)] if isinstance(value, list | tuple) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
