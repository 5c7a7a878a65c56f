"""Accounts of a bank: deposits and withdrawals, down to an agreed overdraft limit.

Money is in minor units (cents). Days come with the command.
"""

from dataclasses import dataclass, replace
from datetime import date
from typing import Literal, TypeAlias, assert_never

from domain.language import Cents, CentsOrZero, Refusal, Text, fact

# Events: what happened. Names of classes and fields are stored for ever; a field added later needs a default.


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


@fact
class MoneyDeposited:
    cents: Cents
    on: date
    details: Details = NO_DETAILS


@fact
class MoneyWithdrawn:
    cents: Cents
    on: date
    details: Details = NO_DETAILS


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
class AccountClosed:
    on: date


Movement: TypeAlias = MoneyDeposited | MoneyWithdrawn | InterestCredited | FeeCharged
Event: TypeAlias = AccountOpened | Movement | AccountClosed


# Commands: what a client asks for.


@fact
class OpenAccount:
    overdraft_limit: CentsOrZero
    on: date


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
class CloseAccount:
    on: date


Command: TypeAlias = OpenAccount | Deposit | Withdraw | CreditInterest | ChargeFee | CloseAccount


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


# State: what decisions need, and no more. Its defaults are an account that was never opened.

STATE_VERSION = 1  # raised when State changes, or what evolve makes of an event

LARGEST_BALANCE = 10**17  # cents, either side of zero: a balance always fits into 64 bits


@dataclass(frozen=True, slots=True)
class State:
    status: Literal["new", "open", "closed"] = "new"
    balance: int = 0
    overdraft_limit: int = 0


# Decide: the events a command leads to, or a refusal.


def decide(command: Command, state: State) -> list[Event]:
    """Raises Refusal. No clock, no random numbers, nothing but the arguments: a retry must decide the same."""
    if state.status == "closed":
        raise AccountIsClosed
    if state.status == "new" and not isinstance(command, OpenAccount):
        raise AccountNotOpen
    match command:
        case OpenAccount(overdraft_limit=limit, on=on):
            if state.status == "open":
                raise AccountAlreadyOpen
            return [AccountOpened(overdraft_limit=limit, on=on)]
        case Deposit(cents=cents, on=on, details=details):
            if state.balance + cents > LARGEST_BALANCE:
                raise BalanceTooLarge
            return [MoneyDeposited(cents=cents, on=on, details=details)]
        case Withdraw(cents=cents, on=on, details=details):
            if state.balance - cents < -state.overdraft_limit:
                raise InsufficientFunds
            return [MoneyWithdrawn(cents=cents, on=on, details=details)]
        case CreditInterest(cents=cents, on=on, details=details):
            if state.balance + cents > LARGEST_BALANCE:
                raise BalanceTooLarge
            return [InterestCredited(cents=cents, on=on, details=details)]
        case ChargeFee(cents=cents, on=on, details=details):
            if state.balance - cents < -LARGEST_BALANCE:
                raise BalanceTooLarge
            return [FeeCharged(cents=cents, on=on, details=details)]
        case CloseAccount(on=on):
            if state.balance != 0:
                raise BalanceNotZero
            return [AccountClosed(on=on)]
        case _:
            assert_never(command)


# Evolve: what an event makes of the state. It never refuses: what is in the log has happened.


def evolve(state: State, event: Event) -> State:
    match event:
        case AccountOpened(overdraft_limit=limit):
            return replace(state, status="open", overdraft_limit=limit)
        case MoneyDeposited() | MoneyWithdrawn() | InterestCredited() | FeeCharged():
            # Not `replace`, which takes twice as long: every fold of the log spends its time here.
            return State(state.status, state.balance + change(event), state.overdraft_limit)
        case AccountClosed():
            return replace(state, status="closed")
        case _:
            assert_never(event)


def change(event: Movement) -> int:
    """What a movement adds to the balance, in cents; negative where money goes out."""
    match event:
        case MoneyDeposited(cents=cents) | InterestCredited(cents=cents):
            return cents
        case MoneyWithdrawn(cents=cents) | FeeCharged(cents=cents):
            return -cents
        case _:
            assert_never(event)


def kind(event: Movement) -> Literal["deposit", "withdrawal", "interest", "fee"]:
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
        case _:
            assert_never(event)
