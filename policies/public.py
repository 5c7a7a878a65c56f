"""What other teams may read: that accounts are opened and closed, each movement of their money, and the way of transfers.

The sum of an account's movements is its balance. Purposes stay private.
"""

from collections.abc import Iterable
from datetime import date
from typing import Literal, assert_never

from domain.accounts import (
    AccountClosed,
    AccountOpened,
    FeeCharged,
    InterestCredited,
    MoneyDeposited,
    MoneyReturned,
    MoneyWithdrawn,
    Movement,
)
from domain.language import Cents, fact
from domain.transfers import TransferCompleted, TransferFailed, TransferRefunded, TransferRequested
from policies.engine import At, Public

VERSION = 2


@fact
class Opened:
    """An account was opened."""

    account: str
    on: date


@fact
class Moved:
    """Money came to an account (`deposited`, `interest`, `returned`) or left it (`withdrawn`, `fee`), as the event's type says.

    What was withdrawn with a hold, which is the id of a transfer, may be returned with that hold.
    """

    account: str
    cents: Cents
    on: date
    hold: str = ""


@fact
class Closed:
    """An account was closed for good."""

    account: str
    on: date


@fact
class Requested:
    """A transfer was requested: no money has moved yet."""

    transfer: str
    source: str
    target: str
    cents: Cents
    on: date


@fact
class TransferEnded:
    """A transfer ended: the target has the money, no money moved, or the source has it back."""

    transfer: str
    how: Literal["completed", "failed", "refunded"]


TYPES = {
    "account-opened.v1": Opened,
    "money-deposited.v1": Moved,
    "money-withdrawn.v1": Moved,
    "money-returned.v1": Moved,
    "interest-credited.v1": Moved,
    "fee-charged.v1": Moved,
    "account-closed.v1": Closed,
    "transfer-requested.v1": Requested,
    "transfer-ended.v1": TransferEnded,
}


Event = (
    AccountOpened | Movement | AccountClosed | TransferRequested | TransferCompleted | TransferFailed | TransferRefunded
)


def publish(event: Event, at: At) -> Iterable[Public]:
    match event:
        case AccountOpened(on=on):
            yield Public("account-opened.v1", Opened(account=at.id, on=on))
        case MoneyDeposited(cents=cents, on=on):
            yield Public("money-deposited.v1", Moved(account=at.id, cents=cents, on=on))
        case MoneyWithdrawn(cents=cents, on=on, hold=hold):
            yield Public("money-withdrawn.v1", Moved(account=at.id, cents=cents, on=on, hold=hold))
        case MoneyReturned(cents=cents, on=on, hold=hold):
            yield Public("money-returned.v1", Moved(account=at.id, cents=cents, on=on, hold=hold))
        case InterestCredited(cents=cents, on=on):
            yield Public("interest-credited.v1", Moved(account=at.id, cents=cents, on=on))
        case FeeCharged(cents=cents, on=on):
            yield Public("fee-charged.v1", Moved(account=at.id, cents=cents, on=on))
        case AccountClosed(on=on):
            yield Public("account-closed.v1", Closed(account=at.id, on=on))
        case TransferRequested(source=source, target=target, cents=cents, on=on):
            yield Public(
                "transfer-requested.v1", Requested(transfer=at.id, source=source, target=target, cents=cents, on=on)
            )
        case TransferCompleted():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="completed"))
        case TransferFailed():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="failed"))
        case TransferRefunded():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="refunded"))
        case _:
            assert_never(event)
