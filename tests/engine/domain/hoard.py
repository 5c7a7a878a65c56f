"""A hoard: a bounded context with a field of each type that a state can hold, and an evolve that is careless about types."""

import sys
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, Literal
from uuid import UUID

from domain.engine.contexts import context_of
from domain.language import fact


class Mood(Enum):
    UP = "up"
    DOWN = "down"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Word(StrEnum):
    ONE = "one"


@fact
class Thing:
    name: str
    weight: float | None = None


@fact
class Kept:
    """All of what a state holds, and `careless`: whether evolve gives values of like types."""

    careless: bool = False
    count: int = 0
    weight: float = 0.0
    size: int | float | None = None
    name: str = ""
    raw: bytes = b""
    on: date | None = None
    at: datetime | None = None
    until: time | None = None
    took: timedelta = timedelta(0)
    amount: Decimal = Decimal(0)
    mark: UUID | None = None
    mood: Mood = Mood.UP
    side: Literal["left", "right", 3] = "left"
    things: tuple[Thing, ...] = ()
    pair: tuple[int, str] | None = None
    names: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)
    days: dict[date, tuple[float, ...]] = field(default_factory=dict)


Event = Kept


@fact
class Keep:
    kept: Kept


Command = Keep

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    last: Kept | None = None
    count: int = 0
    weight: float = 0
    name: str = ""
    at: datetime | None = None
    names: tuple[str, ...] = ()
    total: float | None = None


def decide(command: Command, state: State) -> list[Event]:
    return [command.kept]


def evolve(state: State, event: Event) -> State:
    if not event.careless:
        return replace(state, last=event, count=event.count, weight=event.weight, name=event.name, at=event.at)
    careless: Any = Size.LARGE
    return replace(
        state,
        last=replace(event, names=frozenset(sorted(event.names, reverse=True))),
        count=careless,
        weight=careless,
        name=Word.ONE,
        at=event.at and event.at.replace(fold=1),
        names=[*event.names],  # type: ignore[arg-type]
        total=event.weight * 1e300,
    )


HOARD = context_of(sys.modules[__name__])
