"""Accounts of a bank: deposits and withdrawals, down to an agreed overdraft limit.

Money is in minor units (cents). Days come with the command.
"""

from dataclasses import dataclass, field, replace
from datetime import date
from typing import ClassVar, Literal, TypeAlias, assert_never

from domain.language import Body, Cents, CentsOrZero, Refusal, Text, fact, upcaster

# Events: what happened, stored for ever. A new field needs a default, any other change a version: docs/change-an-event.md.


@fact
class Details:
    """What the bank's books record about a movement: how, what for, and with whom. Empty where unknown."""

    operation: Text = ""
    purpose: Text = ""
    counter_bank: Text = ""
    counter_account: Text = ""


NO_DETAILS = Details()


@fact
class AccountOpened:
    overdraft_limit: CentsOrZero
    on: date
    owner: Text = ""


@fact
class MoneyDeposited:
    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class MoneyWithdrawn:
    """With a hold, which is a reference, the money may come back until the hold is released."""

    cents: Cents
    on: date
    details: Details = NO_DETAILS
    hold: Text = ""


@fact
class InterestCredited:
    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class FeeCharged:
    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class MoneyReturned:
    """What a hold kept is back on the account."""

    hold: Text
    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class HoldReleased:
    """The money has arrived elsewhere and will not come back."""

    hold: Text


@fact
class AccountClosed:
    on: date


Movement: TypeAlias = MoneyDeposited | MoneyWithdrawn | InterestCredited | FeeCharged | MoneyReturned
Event: TypeAlias = AccountOpened | Movement | HoldReleased | AccountClosed


# Commands: what a client asks for.


@fact
class OpenAccount:
    """`owner` is the subject of the holder's tokens; an account without one is the bank's alone."""

    VERSION: ClassVar[int] = 2
    overdraft_limit: CentsOrZero
    on: date
    owner: Text = ""


@upcaster(OpenAccount, 1)
def open_account_1(body: Body) -> Body:
    return body


@fact
class Deposit:
    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class Withdraw:
    cents: Cents
    on: date
    details: Details = NO_DETAILS
    hold: Text = ""


@fact
class CreditInterest:
    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class ChargeFee:
    """The bank's own charges may pass the overdraft limit."""

    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class ReturnMoney:
    """Never refused while there is the hold: deposits leave room for the money."""

    hold: Text
    on: date
    details: Details = NO_DETAILS


@fact
class ReleaseHold:
    hold: Text


@fact
class CloseAccount:
    on: date


Command: TypeAlias = (
    OpenAccount | Deposit | Withdraw | CreditInterest | ChargeFee | ReturnMoney | ReleaseHold | CloseAccount
)


# Errors: why a command is refused.


class AccountNotOpen(Refusal):
    """The account has not been opened."""


class AccountAlreadyOpen(Refusal):
    """The account is open already."""


class AccountIsClosed(Refusal):
    """The account is closed."""


class InsufficientFunds(Refusal):
    """The balance and the overdraft limit do not cover the amount."""


class BalanceNotZero(Refusal):
    """Only an account with a balance of zero can be closed."""


class BalanceTooLarge(Refusal):
    """The balance would become larger than the bank can keep."""


class HoldExists(Refusal):
    """The account has a hold with this reference already."""


class TooManyHolds(Refusal):
    """The account has as many holds as it can have at a time."""


class NoSuchHold(Refusal):
    """The account has no hold with this reference: its money came back, or the hold was released."""


class MoneyOnHold(Refusal):
    """Money that was withdrawn may still come back: an account can be closed when it has no holds."""


# State: what decisions need, and no more. Its defaults are an account that was never opened.

STATE_VERSION = 3  # raised when State changes, or what evolve makes of an event

LARGEST_BALANCE = 10**17  # cents, either side of zero: a balance always fits into 64 bits
MOST_HOLDS = 1_000  # at a time: each state and each fold carries them


@dataclass(frozen=True, slots=True)
class State:
    status: Literal["new", "open", "closed"] = "new"
    balance: int = 0
    overdraft_limit: int = 0
    holds: dict[str, int] = field(default_factory=dict)
    """Cents by reference. Never changed in place: states share it."""
    owner: str = ""


# Decide: the events a command leads to, or a refusal.


def decide(command: Command, state: State) -> list[Event]:
    """Raises Refusal. No clock, no random numbers, nothing but the arguments: a retry must decide the same."""
    if state.status == "closed":
        raise AccountIsClosed
    if state.status == "new" and not isinstance(command, OpenAccount):
        raise AccountNotOpen
    match command:
        case OpenAccount(overdraft_limit=limit, on=on, owner=owner):
            if state.status == "open":
                raise AccountAlreadyOpen
            return [AccountOpened(overdraft_limit=limit, on=on, owner=owner)]
        case Deposit(cents=cents, on=on, details=details):
            if cents > room(state):
                raise BalanceTooLarge
            return [MoneyDeposited(cents=cents, on=on, details=details)]
        case Withdraw(cents=cents, on=on, details=details, hold=hold):
            if state.balance - cents < -state.overdraft_limit:
                raise InsufficientFunds
            if hold in state.holds:
                raise HoldExists
            if hold and len(state.holds) >= MOST_HOLDS:
                raise TooManyHolds
            return [MoneyWithdrawn(cents=cents, on=on, details=details, hold=hold)]
        case CreditInterest(cents=cents, on=on, details=details):
            if cents > room(state):
                raise BalanceTooLarge
            return [InterestCredited(cents=cents, on=on, details=details)]
        case ChargeFee(cents=cents, on=on, details=details):
            if state.balance - cents < -LARGEST_BALANCE:
                raise BalanceTooLarge
            return [FeeCharged(cents=cents, on=on, details=details)]
        case ReturnMoney(hold=hold, on=on, details=details):
            if hold not in state.holds:
                raise NoSuchHold
            return [MoneyReturned(hold=hold, cents=state.holds[hold], on=on, details=details)]
        case ReleaseHold(hold=hold):
            if hold not in state.holds:
                raise NoSuchHold
            return [HoldReleased(hold=hold)]
        case CloseAccount(on=on):
            if state.holds:
                raise MoneyOnHold
            if state.balance != 0:
                raise BalanceNotZero
            return [AccountClosed(on=on)]
        case _:
            assert_never(command)


def room(state: State) -> int:
    """What can still be credited, in cents. Money on hold has its place kept: it may come back."""
    return LARGEST_BALANCE - state.balance - sum(state.holds.values())


# Evolve: what an event makes of the state. It never refuses: what is in the log has happened.


def evolve(state: State, event: Event) -> State:
    # Mostly not `replace`, which takes twice as long: every fold of the log spends its time here.
    match event:
        case AccountOpened(overdraft_limit=limit, owner=owner):
            return State("open", state.balance, limit, state.holds, owner)
        case MoneyDeposited() | InterestCredited() | FeeCharged():
            return State(state.status, state.balance + change(event), state.overdraft_limit, state.holds, state.owner)
        case MoneyWithdrawn(cents=cents, hold=hold):
            holds = {**state.holds, hold: cents} if hold else state.holds
            return State(state.status, state.balance - cents, state.overdraft_limit, holds, state.owner)
        case MoneyReturned(hold=hold, cents=cents):
            return replace(state, balance=state.balance + cents, holds=without(state.holds, hold))
        case HoldReleased(hold=hold):
            return replace(state, holds=without(state.holds, hold))
        case AccountClosed():
            return replace(state, status="closed")
        case _:
            assert_never(event)


def without(holds: dict[str, int], hold: str) -> dict[str, int]:
    return {reference: cents for reference, cents in holds.items() if reference != hold}


def change(event: Movement) -> int:
    """What a movement adds to the balance, in cents; negative where money goes out."""
    match event:
        case MoneyDeposited(cents=cents) | InterestCredited(cents=cents) | MoneyReturned(cents=cents):
            return cents
        case MoneyWithdrawn(cents=cents) | FeeCharged(cents=cents):
            return -cents
        case _:
            assert_never(event)


def kind(event: Movement) -> Literal["deposit", "withdrawal", "interest", "fee", "return"]:
    """The kind of a movement without an operation in the books."""
    match event:
        case MoneyDeposited():
            return "deposit"
        case MoneyWithdrawn():
            return "withdrawal"
        case InterestCredited():
            return "interest"
        case FeeCharged():
            return "fee"
        case MoneyReturned():
            return "return"
        case _:
            assert_never(event)
