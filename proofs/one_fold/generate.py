"""Generated histories: a context of its own, views over it, and what happens in it. `sources` gives their modules' text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from textwrap import indent

from proofs.one_fold.values import COLUMNS, KEYS, PLACED, STATES, TYPES, WHOLE, Type

KINDS = {"e": "entity", "k": "entity with keys", "j": "journal", "d": "journal with keys", "s": "summary"}
ACTS = ("set", "fold", "keep", "gone", "word", "raise", "stray", "alien")
WEIGHTS = (80, 50, 16, 18, 3, 2, 2, 1)
PICKS = 6


@dataclass(frozen=True, slots=True)
class Column:
    """`kind` is a type's name; `role` is Key, Sum, Min, Max, Latest, First or nothing."""

    name: str
    kind: str
    role: str = ""
    optional: bool = False

    @property
    def annotation(self) -> str:
        kind = f"{self.kind} | None" if self.optional else self.kind
        return f"{self.role}[{kind}]" if self.role else kind

    @property
    def type(self) -> Type:
        return TYPES[self.role][self.kind]


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """`keys` are those that `event.keys` picks; an id or a number may be added to them."""

    letter: str
    keys: tuple[Column, ...]
    columns: tuple[Column, ...]
    parks: bool
    noted: bool
    """Whether it takes both of the context's events."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event. `stream` is a number; with `ends`, its commit ends with it."""

    stream: int
    act: str
    keys: tuple[int, ...]
    picks: tuple[int, ...]
    noted: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class HistorySpec:
    views: tuple[ViewSpec, ...]
    state: tuple[tuple[str, str], ...]
    """Fields of the context's state and their types."""
    long_ids: bool
    events: tuple[Happened, ...]
    skips: tuple[tuple[int, int, int], ...] = ()
    """(view, stream, version) that the view leaves out on record."""


Turn = tuple[Iterator[str], Iterator[str]]
"""The next type of a column, and of a key."""


def histories(count: int, seed: int) -> list[HistorySpec]:
    """So many of a seed, the same each time: even a few of them have all kinds of views and all types of columns."""
    turn = cycle(sorted(COLUMNS)), cycle(sorted(KEYS))
    return [_history(random.Random(f"{seed} {number}"), number, turn) for number in range(count)]


def _history(chance: random.Random, number: int, turn: Turn) -> HistorySpec:
    letters = {"kejsd"[number % 5], *chance.choices("ekjs", k=2)}
    views = tuple(_view(chance, letter, turn) for letter in sorted(letters)[: chance.choice((1, 2, 2, 3))])
    state = chance.sample(sorted(STATES), chance.randrange(4))
    skips = {(chance.randrange(2), chance.randrange(3), chance.randrange(1, 6)) for _ in range(3)}
    return HistorySpec(
        views,
        tuple((f"f{n}", kind) for n, kind in enumerate(state)),
        chance.random() < 0.3,
        tuple(_event(chance) for _ in range(chance.randrange(8, 26))),
        tuple(sorted(skips)) if chance.random() < 0.2 else (),
    )


def _view(chance: random.Random, letter: str, turn: Turn) -> ViewSpec:
    types, keys = turn
    if letter == "s":
        roles = chance.choices(("Sum", "Min", "Max"), k=chance.randrange(1, 5))
        columns = [Column(f"c{n}", chance.choice(sorted(TYPES[role])), role) for n, role in enumerate(roles)]
        more = random.Random(repr(columns))
        columns += [
            Column(f"p{n}", more.choice(sorted(WHOLE)), more.choice(PLACED), more.random() < 0.6)
            for n in range(more.randrange(3))
        ]
    else:
        columns = [Column(f"c{n}", next(types), "", chance.random() < 0.4) for n in range(chance.randrange(1, 5))]
    return ViewSpec(
        letter,
        tuple(Column(f"k{n}", next(keys), "Key") for n in range(chance.choice((1, 2)) if letter in "kds" else 0)),
        tuple(columns),
        parks=letter in "jd" or chance.random() < 0.8,
        noted=chance.random() < 0.5,
    )


def _event(chance: random.Random) -> Happened:
    keys, picks = [chance.randrange(10), chance.randrange(3)], [chance.randrange(11) for _ in range(PICKS)]
    match chance.randrange(120):
        case 0:
            keys[0] = -1 - chance.randrange(4)
        case 1 | 2:
            picks[chance.randrange(4)] = -1 - chance.randrange(6)
        case _:
            pass
    return Happened(
        stream=chance.randrange(3),
        act=chance.choices(ACTS, WEIGHTS)[0],
        keys=tuple(keys),
        picks=tuple(picks),
        noted=chance.random() < 0.3,
        ends=chance.random() < 0.6,
    )


# ── their source ──

_HEAD = """\
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Literal, NamedTuple
from uuid import UUID

from domain.language import fact
from projections.engine import At, First, Key, Latest, Max, Min, Sum
from proofs.one_fold import made
from proofs.one_fold.values import STATES, TYPES, Inner, Level, Line, Mood, Parcel, Tone
"""

_CONTEXT = """
@fact
class Happened:
    act: str
    keys: tuple[int, ...]
    picks: tuple[int, ...]

@fact
class Noted:
    act: str
    keys: tuple[int, ...]
    picks: tuple[int, ...]

@fact
class Do:
    act: str

Event = Happened | Noted
Command = Do
STATE_VERSION = 1
FIELDS = made.Fields({{{kinds}}})

@dataclass(frozen=True, slots=True)
class State:
{fields}
    seen: str = ""

def decide(command: Do, state: State) -> list[Event]:
    return []

def evolve(state: State, event: Event) -> State:
    return made.state(FIELDS, state, event)
"""

_FUNCTIONS = {
    "e": """
def evolve(row: Row | None, event: {event}, at: At) -> Row | None:
    return made.entity(Row, FIELDS, (made.owner(at.id, event),), row, event)
""",
    "k": """
def key(event: {event}, at: At) -> tuple:
    return (made.owner(at.id, event), *made.keys(KINDS, event))

def evolve(row: Row | None, event: {event}, at: At) -> Row | None:
    return made.entity(Row, FIELDS, key(event, at), row, event)
""",
    "j": """
def rows(event: {event}, after: State, at: At) -> Iterable[Row]:
    return made.rows(Row, FIELDS, (at.id, at.version), event, after)
""",
    "d": """
def rows(event: {event}, after: State, at: At) -> Iterable[Row]:
    return made.rows(Row, FIELDS, (at.id, *made.keys(KINDS, event)), event, after)
""",
    "s": """
def delta(event: {event}, at: At) -> Iterable[Row]:
    return made.increments(Row, FIELDS, made.keys(KINDS, event), event)
""",
}


def context_name(number: int) -> str:
    return f"h{number}"


def view_name(number: int, view: ViewSpec) -> str:
    return f"h{number}_{view.letter}"


def all_columns(view: ViewSpec) -> list[Column]:
    """In the order of the row."""
    keys = [Column("id", "str", "Key")] if view.letter != "s" else []
    if view.letter == "j":
        keys.append(Column("version", "int", "Key"))
    keys += view.keys
    if view.letter in "jd":
        keys.append(Column("n", "int", "Key"))
    return [*keys, *view.columns, *([Column("seen", "str")] if view.letter != "s" else [])]


def context_source(number: int, spec: HistorySpec) -> str:
    kinds = ", ".join(f"{name!r}: STATES[{kind!r}]" for name, kind in spec.state)
    fields = "".join(
        f"    {name}: {kind} = field(default_factory=lambda: STATES[{kind!r}].good[0])\n" for name, kind in spec.state
    )
    return _HEAD + _CONTEXT.format(kinds=kinds, fields=fields)


def view_source(number: int, view: ViewSpec) -> str:
    stops = "" if view.parks else f'AGENT = "a{number}_{view.letter}"\n'
    columns = "".join(f"{column.name}: {column.annotation}\n" for column in all_columns(view))
    keys = ", ".join(f"TYPES['Key'][{column.kind!r}]" for column in view.keys)
    kinds = ", ".join(f"{c.name!r}: TYPES[{c.role!r}][{c.kind!r}]" for c in view.columns)
    optional = ", ".join(repr(column.name) for column in view.columns if column.optional)
    return (
        f'"""A generated {KINDS[view.letter]} view."""\n{_HEAD}from domain.{context_name(number)} import Happened, Noted, State\n\n'
        f'VERSION = 1\nON_POISON = "{"park" if view.parks else "stop-agent"}"\n{stops}'
        f"KINDS = [{keys}]\n"
        f"FIELDS = made.Fields({{{kinds}}}, [{optional}])\n\nclass Row(NamedTuple):\n{indent(columns, '    ')}"
        + _FUNCTIONS[view.letter].format(event="Happened | Noted" if view.noted else "Happened")
    )


def sources(number: int, spec: HistorySpec) -> Iterator[tuple[str, str]]:
    """The files of a history: where, and what they say."""
    yield f"domain/{context_name(number)}.py", context_source(number, spec)
    for view in spec.views:
        yield f"projections/{view_name(number, view)}.py", view_source(number, view)
