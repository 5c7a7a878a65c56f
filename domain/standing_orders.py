"""Standing orders: the same transfer every month, on the day of the first one or on a shorter month's last."""

from calendar import monthrange
from dataclasses import dataclass, replace
from datetime import date
from typing import Literal, TypeAlias, assert_never

from domain.language import Cents, Refusal, fact
from domain.transfers import AccountId, SameAccount

# Events


@fact
class StandingOrderPlaced:
    source: AccountId
    target: AccountId
    cents: Cents
    first: date


@fact
class InstalmentDue:
    source: AccountId
    target: AccountId
    cents: Cents
    on: date
    following: date
    """The next one's day."""


@fact
class StandingOrderCancelled:
    pass


Event: TypeAlias = StandingOrderPlaced | InstalmentDue | StandingOrderCancelled


# Commands


@fact
class PlaceStandingOrder:
    """Instalments whose day has passed are paid at once."""

    source: AccountId
    target: AccountId
    cents: Cents
    first: date


@fact
class PayInstalment:
    """The timer."""

    on: date


@fact
class CancelStandingOrder:
    pass


Command: TypeAlias = PlaceStandingOrder | PayInstalment | CancelStandingOrder


# Errors


class AlreadyPlaced(Refusal):
    """The standing order has been placed already."""


class FirstOutOfRange(Refusal):
    """The first instalment must be in the years 2000 to 2999."""


class OrderNotActive(Refusal):
    """The standing order was cancelled, or never placed."""


class NotTheNextInstalment(Refusal):
    """Another day's instalment is the next one."""


# State

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    status: Literal["new", "active", "cancelled"] = "new"
    source: str = ""
    target: str = ""
    cents: int = 0
    day: int = 1
    """Of the month."""
    following: date = date.min


# Decide


def decide(command: Command, state: State) -> list[Event]:
    """Raises Refusal."""
    match command:
        case PlaceStandingOrder(source=source, target=target, cents=cents, first=first):
            if state.status != "new":
                raise AlreadyPlaced
            if source == target:
                raise SameAccount
            if not 2000 <= first.year < 3000:
                raise FirstOutOfRange
            return [StandingOrderPlaced(source=source, target=target, cents=cents, first=first)]
        case _ if state.status != "active":
            raise OrderNotActive
        case PayInstalment(on=on):
            if on != state.following:
                raise NotTheNextInstalment
            following = a_month_after(on, state.day)
            return [
                InstalmentDue(source=state.source, target=state.target, cents=state.cents, on=on, following=following)
            ]
        case CancelStandingOrder():
            return [StandingOrderCancelled()]
        case _:
            assert_never(command)


def a_month_after(on: date, day: int) -> date:
    """That day of the next month, or its last."""
    year, month = on.year + on.month // 12, on.month % 12 + 1
    return date(year, month, min(day, monthrange(year, month)[1]))


# Evolve


def evolve(state: State, event: Event) -> State:
    match event:
        case StandingOrderPlaced(source=source, target=target, cents=cents, first=first):
            return State("active", source, target, cents, first.day, first)
        case InstalmentDue(following=following):
            return replace(state, following=following)
        case StandingOrderCancelled():
            return replace(state, status="cancelled")
        case _:
            assert_never(event)
