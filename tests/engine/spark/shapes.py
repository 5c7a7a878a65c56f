"""Event classes of generated shapes: fields of every type that an event can have, nested at random, with stored bodies; and what a
column holds of a decoded value. Some of them are a bounded context, `shapes`, which Spark's processes know as well."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NewType, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from pydantic import Field

from domain.engine.contexts import context_of, contexts
from domain.engine.storable import encode
from domain.language import Body, Cents, Moment, Personal, Text, fact, upcaster
from proofs.one_fold.values import Level, Mood, Tone
from spark_jobs.engine.source import Batch, Samefold

Account = NewType("Account", str)
Share = NewType("Share", Decimal)


@fact
class Nothing:
    """A part without fields."""


@fact
class Inner:
    at: Moment
    moods: frozenset[Mood] = frozenset()
    share: Share | None = None


class Pair(NamedTuple):
    name: str
    weights: tuple[float, ...] = ()


Make = Callable[[Random], Any]
_DAYS = (date(1, 1, 1), date(1969, 12, 31), date(2026, 2, 28), date(9999, 12, 31))
_TIMES = tuple(map(datetime.fromisoformat, ("1582-10-04T01:00", "1969-12-31T23:59:59.999999", "2026-10-25T02:30")))
KEYS: Mapping[Any, Make] = {
    int: lambda of: of.choice((0, -1, 2**63 - 1, -(2**63), of.randrange(10**6))),
    float: lambda of: of.choice((0.0, -0.0, 1e300, 5e-324, of.random())),
    str: lambda of: of.choice(("", "a", "Zürich 🏦", '"\\\n', "x" * 300, str(of.random()))),
    bytes: lambda of: of.randbytes(of.randrange(5)),
    date: lambda of: of.choice(_DAYS),
    datetime: lambda of: of.choice((*_TIMES, of.choice(_TIMES).replace(tzinfo=UTC))),
    Moment: lambda of: of.choice(_TIMES).replace(tzinfo=UTC),
    time: lambda of: of.choice((time(0), time(23, 59, 59, 1), time(12, tzinfo=UTC))),
    timedelta: lambda of: timedelta(of.randrange(-9, 9), of.randrange(9), of.randrange(9)),
    Decimal: lambda of: of.choice((Decimal(0), Decimal("-1.10"), Decimal("1E+2"), Decimal("99999999999999999999.5"))),
    Share: lambda of: Decimal(of.randrange(100)) / 100,
    UUID: lambda of: UUID(int=of.getrandbits(128)),
    Mood: lambda of: of.choice(list(Mood)),
    Tone: lambda of: of.choice(list(Tone)),
    Level: lambda of: of.choice(list(Level)),
    Account: lambda of: str(of.randrange(9)),
    Literal["a", "b"]: lambda of: of.choice("ab"),
    Literal[1, 2]: lambda of: of.choice((1, 2)),
}
"""Types of a dict's keys, and how to make values."""
PLAIN: Mapping[Any, Make] = {
    **KEYS,
    bool: lambda of: of.random() < 0.5,
    Cents: lambda of: of.randrange(1, 10**9),
    Text: lambda _: "a line",
    Personal[Text]: lambda _: "~Personal~1~0123456789abcdef~c2VhbGVk~",
    Annotated[int, Field(ge=-5)]: lambda of: of.randrange(-5, 5),
    Literal["a", None]: lambda of: of.choice(("a", None)),
    Literal["a", 1]: lambda of: of.choice(("a", 1)),
    int | str: lambda of: of.choice((1, "a")),
    int | float | None: lambda of: of.choice((1, 1.5, None)),
    Mood | int: lambda of: of.choice((Mood.UP, 5)),
    tuple[int, ...] | Inner | None: lambda of: of.choice(((1, 2), Inner(at=_TIMES[0].replace(tzinfo=UTC)), None)),
    Nothing: lambda _: Nothing(),
    Inner: lambda of: Inner(
        at=_TIMES[2].replace(tzinfo=UTC),
        moods=frozenset(of.sample(list(Mood), 2)),
        share=of.choice((None, Share(Decimal(1)))),
    ),
    Pair: lambda of: Pair(str(of.random()), tuple(of.random() for _ in range(of.randrange(3)))),
    tuple[()]: lambda _: (),
}


def a_type(of: Random, depth: int = 0) -> tuple[Any, Make]:
    """A type, and how to make its values."""
    shape = of.randrange(10) if depth < 3 else 0
    if shape < 4:
        return of.choice(list(PLAIN.items()))
    one, make = a_type(of, depth + 1)
    key, make_key = of.choice(list(KEYS.items()))
    match shape:
        case 4 | 5 if NoneType not in get_args(one):
            return one | None, lambda of: None if of.random() < 0.3 else make(of)
        case 6:
            return of.choice((list, Sequence))[one], lambda of: [make(of) for _ in range(of.randrange(4))]
        case 7:
            return of.choice((dict, Mapping))[key, one], lambda of: {
                make_key(of): make(of) for _ in range(of.randrange(4))
            }
        case 8:
            return of.choice((set, frozenset))[key], lambda of: {make_key(of) for _ in range(of.randrange(4))}
        case 9:
            other, make_other = a_type(of, depth + 1)
            return tuple[one, other], lambda of: (make(of), make_other(of))  # type: ignore[valid-type]
        case _:
            return tuple[one, ...], lambda of: tuple(make(of) for _ in range(of.randrange(4)))  # type: ignore[valid-type]


def an_event(name: str, of: Random, types: Sequence[tuple[Any, Make]]) -> tuple[type, list[bytes]]:
    """A class with fields of these types, and bodies of it; now and then a field is a part that has the next ones."""
    hints, makes = {}, dict[str, Make]()
    for n, (kind, make) in enumerate(types):
        field = f"{name.lower()}_{n}"
        hints[field], makes[field] = kind, make
        if n % 4 == 3:
            part, inner = _class(f"{name}Part{n}", hints), makes
            hints, makes = {f"{field}_part": part}, {f"{field}_part": partial(_made, makes=inner)}
    return _class(name, hints), [encode(_made(of, makes)) for _ in range(6)]


def _made(of: Random, makes: Mapping[str, Make]) -> dict[str, Any]:
    return {name: make(of) for name, make in makes.items()}


def _class(name: str, hints: Mapping[str, Any]) -> type:
    made: type = fact(type(name, (), {"__annotations__": dict(hints), "__module__": __name__}))
    setattr(sys.modules[__name__], name, made)  # where a pickle finds it
    return made


def shapes(count: int, seed: int) -> Iterator[tuple[type, list[bytes]]]:
    for number in range(count):
        of = Random(f"{seed} {number}")
        yield an_event(f"Shape{number}", of, [a_type(of) for _ in range(of.randrange(1, 7))])


# ── what a column holds ──


def in_column(kind: Any, value: Any) -> Any:
    """What a column of that type holds for a value, as `pyarrow.Array.to_pylist` gives it."""
    while hasattr(kind, "__supertype__") or get_origin(kind) is Annotated:
        kind = kind.__supertype__ if hasattr(kind, "__supertype__") else get_args(kind)[0]
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin in (Union, UnionType):
        some = [one for one in arguments if one is not NoneType]
        return in_column(some[0], value) if len(some) == 1 else encode(value).decode()
    if origin is Literal:
        return value if len({type(one) for one in arguments if one is not None}) == 1 else encode(value).decode()
    if kind in (tuple[()], Nothing):
        return encode(value).decode()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID | time):
        return json.loads(encode(value))
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, dict):
        return [(in_column(arguments[0], key), in_column(arguments[1], one)) for key, one in value.items()]
    if isinstance(value, set | frozenset):
        return [in_column(arguments[0], one) for one in sorted(value, key=repr)]
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        return {name: in_column(hint, getattr(value, name)) for name, hint in hints.items()}
    if origin is tuple and arguments[1:] != (...,):
        return {f"_{n}": in_column(arguments[n - 1], one) for n, one in enumerate(value, 1)}
    return [in_column(arguments[0], one) for one in value] if isinstance(value, list | tuple) else value


# ── the context ──


@fact
class Do:
    pass


@fact
class Wide:
    """What a body may hold, but no column can."""

    whole: int = 0
    wholes: tuple[int, ...] = ()
    amount: Decimal = Decimal(0)
    took: timedelta = timedelta(0)
    body: str = ""
    offset: int = 0


@fact
class Grown:
    VERSION: ClassVar[int] = 2

    height: int
    on: date


@upcaster(Grown, 1)
def grown_1(body: Body) -> Body:
    return {"height": body["size"], "on": "2026-01-01"}


EVERY = [an_event(f"Every{n}", Random(n), list(PLAIN.items())[n::3]) for n in range(3)]
"""All plain types once."""
GENERATED = list(shapes(3, 36))
Event: Any = Union[(Wide, Grown, *(event for event, _ in [*EVERY, *GENERATED]))]
Command = Do
STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    pass


def decide(_command: Do, _state: State) -> list[Any]:
    return []


def evolve(state: State, _event: Any) -> State:
    return state


SHAPES = context_of(sys.modules[__name__])


class WithShapes(Samefold):
    """The source in processes whose `domain/` has this context, too."""

    def schema(self) -> Any:
        contexts()[SHAPES.name] = SHAPES
        return super().schema()

    def reader(self, schema: Any) -> Any:
        contexts()[SHAPES.name] = SHAPES
        return BatchWithShapes(self.options, self._table.only(schema.fieldNames()))


class BatchWithShapes(Batch):
    def read(self, partition: Any) -> Any:
        contexts()[SHAPES.name] = SHAPES
        return super().read(partition)
