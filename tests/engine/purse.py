"""A purse: the smallest bounded context whose decisions depend on state. In tests it stands for whatever the domain is."""

import sys
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from domain.engine.contexts import context_of
from domain.language import Cents, Refusal, Text, fact


@fact
class Filled:
    cents: Cents
    note: Text = ""


@fact
class Spent:
    cents: Cents


Event: TypeAlias = Filled | Spent


@fact
class Fill:
    cents: Cents
    note: Text = ""


@fact
class Spend:
    cents: Cents


Command: TypeAlias = Fill | Spend


class TooLittle(Refusal):
    """There is less in the purse."""


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    cents: int = 0


def decide(command: Command, state: State) -> list[Event]:
    match command:
        case Fill(cents=cents, note=note):
            return [Filled(cents=cents, note=note)]
        case Spend(cents=cents):
            if cents > state.cents:
                raise TooLittle
            return [Spent(cents=cents)]
        case _:
            assert_never(command)


def evolve(state: State, event: Event) -> State:
    match event:
        case Filled(cents=cents):
            return State(state.cents + cents)
        case Spent(cents=cents):
            return State(state.cents - cents)
        case _:
            assert_never(event)


PURSE = context_of(sys.modules[__name__])
