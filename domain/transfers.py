"""Transfers of money from one account to another: requested, debited, credited; or failed, or refunded.

A transfer knows only the names of its accounts, and accounts know nothing of transfers. `policies/transfers.py` connects them: each
event carries what the next step needs. A transfer ends exactly once: completed (the target has the money), failed (no money moved)
or refunded (the source has it back).
"""

from dataclasses import dataclass, replace
from datetime import date
from typing import Annotated, Literal, TypeAlias, assert_never

from pydantic import Field

from domain.language import Cents, Refusal, Text, fact

AccountId = Annotated[str, Field(min_length=1, max_length=45, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""So short that `accounts/<id>` is the name of a stream in every script: at most 200 bytes."""

# Events


@fact
class TransferRequested:
    source: AccountId
    target: AccountId
    cents: Cents
    on: date


@fact
class SourceDebited:
    """The money is in flight."""

    source: AccountId
    target: AccountId
    cents: Cents
    on: date


@fact
class TransferTimedOut:
    """Given up while it was not known whether the source would be debited. A debit that comes after it is refunded."""


@fact
class SourceDebitedTooLate:
    """After the transfer timed out: the money goes back."""

    source: AccountId
    on: date


@fact
class CreditRefused:
    """The target could not take the money: it goes back."""

    source: AccountId
    on: date
    refusal: Text


@fact
class TransferCompleted:
    source: AccountId


@fact
class TransferFailed:
    """No money moved."""

    refusal: Text


@fact
class TransferRefunded:
    pass


Event: TypeAlias = (
    TransferRequested
    | SourceDebited
    | TransferTimedOut
    | SourceDebitedTooLate
    | CreditRefused
    | TransferCompleted
    | TransferFailed
    | TransferRefunded
)


# Commands: a client requests; the others are sent by the policy.


@fact
class RequestTransfer:
    source: AccountId
    target: AccountId
    cents: Cents
    on: date


@fact
class RecordDebit:
    """The source was debited."""


@fact
class FailTransfer:
    """The source was not debited."""

    refusal: Text = ""


@fact
class GiveUp:
    """The timer. Of a transfer that has moved on it makes nothing."""


@fact
class CompleteTransfer:
    """The target was credited."""


@fact
class RefundTransfer:
    """The target was not credited."""

    refusal: Text = ""


@fact
class RecordRefund:
    """The source has its money back."""


Command: TypeAlias = (
    RequestTransfer | RecordDebit | FailTransfer | GiveUp | CompleteTransfer | RefundTransfer | RecordRefund
)


# Errors


class SameAccount(Refusal):
    """Source and target are the same account."""


class TransferAlreadyRequested(Refusal):
    """The transfer has been requested already."""


class TransferNotRequested(Refusal):
    """The transfer has not been requested."""


class TransferMovedOn(Refusal):
    """The transfer is at another step, at which this changes nothing."""


# State

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    step: Literal["new", "requested", "timed-out", "debited", "refunding", "completed", "failed", "refunded"] = "new"
    source: str = ""
    target: str = ""
    cents: int = 0
    on: date = date.min


# Decide


def decide(command: Command, state: State) -> list[Event]:
    """Raises Refusal. Each case is a command and the steps at which it means something."""
    match command, state.step:
        case RequestTransfer(source=source, target=target, cents=cents, on=on), "new":
            if source == target:
                raise SameAccount
            return [TransferRequested(source=source, target=target, cents=cents, on=on)]
        case RequestTransfer(), _:
            raise TransferAlreadyRequested
        case _, "new":
            raise TransferNotRequested
        case RecordDebit(), "requested":
            return [SourceDebited(source=state.source, target=state.target, cents=state.cents, on=state.on)]
        case RecordDebit(), "timed-out":
            return [SourceDebitedTooLate(source=state.source, on=state.on)]
        case FailTransfer(refusal=refusal), "requested" | "timed-out":
            return [TransferFailed(refusal=refusal)]
        case GiveUp(), "requested":
            return [TransferTimedOut()]
        case GiveUp(), _:
            return []
        case CompleteTransfer(), "debited":
            return [TransferCompleted(source=state.source)]
        case RefundTransfer(refusal=refusal), "debited":
            return [CreditRefused(source=state.source, on=state.on, refusal=refusal)]
        case RecordRefund(), "refunding":
            return [TransferRefunded()]
        case _:
            raise TransferMovedOn


# Evolve


def evolve(state: State, event: Event) -> State:
    match event:
        case TransferRequested(source=source, target=target, cents=cents, on=on):
            return State("requested", source, target, cents, on)
        case SourceDebited():
            return replace(state, step="debited")
        case TransferTimedOut():
            return replace(state, step="timed-out")
        case SourceDebitedTooLate() | CreditRefused():
            return replace(state, step="refunding")
        case TransferCompleted():
            return replace(state, step="completed")
        case TransferFailed():
            return replace(state, step="failed")
        case TransferRefunded():
            return replace(state, step="refunded")
        case _:
            assert_never(event)
