"""Valid histories: generated commands, checked and decided as a handler does it, and folded without Kafka or a database."""

import ast
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from trace import Trace
from typing import Any, NamedTuple

import msgspec

from commands.decision import Versioned, decide, is_slow
from commands.intake import Intake, receive
from commands.sealing import Unsealed
from domain.engine.contexts import Context
from domain.engine.personal.fields import is_personal
from domain.engine.personal.keys import DataKey
from domain.engine.versions import stored_type
from infra.log.records import Command, Record, encode
from infra.log.rule import START, Counted
from infra.processes.time_limit import calls_limited
from infra.settings import Settings
from policies.engine.public_schema import Publication, Writer
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.fold import NOTHING_BLOCKED
from projections.engine.fold.plan import ADDING, Plan
from projections.engine.rebuild.folded import Folded, added_rows
from projections.engine.store.commit import Batch
from projections.engine.views.view import Kind, View, tuple_getter
from tools.testing.golden import golden
from tools.testing.waiting import SLOWNESS

SEED, HISTORIES, COMMANDS = 32, 50, 30
"""So many, each with so many commands of each class. (Hypothesis also takes values from the modules that are loaded.)"""
IDS = ("1", "2", "007", "ä-b")
"""Streams of each context: few, so that ids within commands meet them. Clients may choose ids like the last two."""


class Histories(NamedTuple):
    found: list[list[Counted]]
    events: set[tuple[str, object]]
    """Those in them, as context and stored type."""
    failed: dict[str, str]
    """Commands that failed, with the error of `decide` or `evolve`."""


def time_limit() -> AbstractContextManager[None]:
    """Within it, authors' functions are ended as in production."""
    return calls_limited(Settings().decide_limit_s * SLOWNESS)


def histories(known: Mapping[str, Context]) -> Histories:
    """Raises NoExample, and AssertionError where a command is never checked or decided to the end, or always fails."""
    chance, intake, made = Random(SEED), Intake("", 1, contexts=known), Histories([], set(), {})
    decided_kinds: set[str] = set()
    kinds = [(context, kind, golden(kind)) for context in known.values() for kind in context.commands.values()]
    for _ in range(HISTORIES):
        history, states = list[Counted](), dict[str, Versioned]()
        lately: defaultdict[type, deque[Any]] = defaultdict(lambda: deque(maxlen=16))
        for offset in range(COMMANDS * len(kinds)):
            (context, kind, bodies), ident = chance.choice(kinds), chance.choice(IDS)
            stream, time_ms = f"{context.name}/{ident}", 1_767_225_600_000 + 1000 * offset
            body = {  # with values that were there before: ids of other streams, a day that a state waits for
                name: chance.choice(lately[type(value)] or [value]) if chance.random() < 0.3 else value
                for name, value in chance.choice(bodies).items()
            }
            sent = Command(f"c{offset}", stream, stored_type(kind), msgspec.Raw(msgspec.json.encode(body)))
            if is_personal(kind):
                with suppress(ValueError):  # then it is malformed
                    sent = Unsealed(sent, kind).sealed(DataKey("0" * 16, bytes(32)))
            received = receive(Record(0, offset, time_ms, stream.encode(), encode(sent)), intake)
            before = states.get(stream, Versioned(0, context.initial))
            decided = decide(received, before, epoch=0, seq=offset, max_bytes=intake.max_bytes)
            if (why := decided.commit.reason) and why.code == "failed":
                assert not is_slow(why), f"{kind.__name__} {bytes(sent.data).decode()} is not decided: {why.message}"
                made.failed[kind.__name__] = why.message
            elif why is None or why.code != "malformed":
                decided_kinds.add(kind.__name__)
            if events := decided.commit.events:
                states[stream] = decided.after
                history.append(Counted(offset, time_ms, decided.commit))
                made.events.update((context.name, event.type) for event in events)
                for fact in ({"id": ident}, body, *(msgspec.json.decode(event.data) for event in events)):
                    for value in fact.values():
                        lately[type(value)].append(value)
        made.found.append(history)
    for name, error in made.failed.items():
        assert name in decided_kinds, f"every generated {name} fails: {error}"
    return made


def check(view: View, known: Mapping[str, Context], made: Histories) -> None:
    """Fold them in one batch, commit by commit, and stream by stream, as a rebuild's parts are.

    Raises AssertionError where the view or policy would stop or its table refuse a row, or where the rows differ.
    """
    plan = Plan({view.name: replace(view, on_poison="stop")}, known)
    for history in made.found:
        by_stream = sorted(history, key=lambda one: one.commit.stream)
        try:
            rows, *others = [_rows(plan, one) for one in ([history], [[one] for one in history], [by_stream])]
        except PoisonEvent as poison:
            raise AssertionError(
                f"{poison.message} {_led_to(history, poison.stream, poison.version)} "
                "In production it would stop there: correct it. docs/new-view.md says what a key and a column may be."
            ) from poison
        if view.kind is Kind.POLICY and (dead := [(at, why) for _, _, _, at, *_, why, _ in rows if why]):
            at, why = dead[0]
            raise AssertionError(
                f"{view.name} makes a wish that can't be sent, at event {at.version} of {at.stream}. {why}. "
                f"{_led_to(history, at.stream, at.version)} Bound the values that it comes from."
            )
        if view.kind is Kind.JOURNAL:
            [(key, times)] = Counter(map(tuple_getter(view.key_places), rows.elements())).most_common(1) or [((), 0)]
            assert times < 2, f"'{view.name}' has several lines with the key {key}: write one like (at.id, at.version)."
        for other in others:
            assert other == rows, (
                f"'{view.name}' makes other rows in other batches: {[*(rows - other), *(other - rows)][:2]}. "
                "Use the arguments alone: no module's variable, no clock, no random numbers."
            )


def check_publication(public: Publication, made: Histories) -> None:
    """Publish what is public of them. Raises AssertionError where a partition would stop."""
    writer = Writer(Settings(), public, "", most_bytes=2**20)
    for history in made.found:
        *_, stop = writer.outgoing(0, history)
        assert stop is None, stop.message


def _led_to(history: Sequence[Counted], stream: str, version: int) -> str:
    """The event, and how it came about."""
    commit = next(one.commit for one in history if one.commit.stream == stream and one.commit.version >= version)
    event = commit.events[version - commit.version - 1]
    return f"Generated commands (seed {SEED}) led to this {event.type}: {bytes(event.data).decode()}."


def unreached(
    known: Mapping[str, Context], views: Collection[View], files: Collection[str], made: Histories
) -> list[str]:
    """The events, and the `case`s in these files of views and policies, that they don't have; and the commands that failed."""
    wanted: dict[tuple[str, object], str] = {}
    for context in known.values():
        wanted |= {(context.name, kind): f"the event {kind} of {context.name}" for kind, _ in context.stored.values()}
    for file in files:
        for case in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(case, ast.match_case) and "assert_never" not in ast.unparse(case.body[0]):
                what = f"`case {ast.unparse(case.pattern)}` ({Path(file).name}, line {case.pattern.lineno})"
                wanted[file, case.body[0].lineno] = what
    tracer, outer = Trace(trace=False), sys.gettrace()
    for plan in [Plan({view.name: view}, known) for view in views]:
        for history in made.found:
            tracer.runfunc(_rows, plan, [history])
    sys.settrace(outer)
    reached = made.events | tracer.results().counts.keys()
    failed = [f"what {command} leads to, which failed: {why}" for command, why in made.failed.items()]
    return [*(what for place, what in wanted.items() if place not in reached), *failed]


def _rows(plan: Plan, batches: Sequence[Sequence[Counted]]) -> Counter[tuple[Any, ...]]:
    """The rows of the plan's only view."""
    [view] = plan.views.values()
    folded, added = Folded(plan, NOTHING_BLOCKED), list[tuple[Any, ...]]()
    for batch in batches:
        changes = folded.fold(Batch(0, START, START, batch))
        added += added_rows(view, changes) if view.kind in ADDING else ()
    return Counter(added if view.kind in ADDING else folded.kept_rows(view, 0))
