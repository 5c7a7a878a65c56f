"""What other teams may read: that accounts are opened and closed, what is paid in and out, and how transfers end.

Purposes stay private.
"""

from collections.abc import Iterable
from datetime import date
from typing import Literal

from domain.accounts import AccountClosed, AccountOpened, MoneyDeposited, MoneyWithdrawn
from domain.language import Cents, fact
from domain.transfers import TransferCompleted, TransferFailed, TransferRefunded
from policies.engine import At, Public

VERSION = 1


@fact
class Opened:
    """An account was opened."""

    account: str
    on: date


@fact
class Deposited:
    """Money was paid in."""

    account: str
    cents: Cents
    on: date


@fact
class Withdrawn:
    """Money was paid out."""

    account: str
    cents: Cents
    on: date


@fact
class Closed:
    """An account was closed for good."""

    account: str
    on: date


@fact
class TransferEnded:
    """A transfer ended: the target has the money, no money moved, or the source has it back."""

    transfer: str
    how: Literal["completed", "failed", "refunded"]


TYPES = {
    "account-opened.v1": Opened,
    "money-deposited.v1": Deposited,
    "money-withdrawn.v1": Withdrawn,
    "account-closed.v1": Closed,
    "transfer-ended.v1": TransferEnded,
}


Event = (
    AccountOpened
    | MoneyDeposited
    | MoneyWithdrawn
    | AccountClosed
    | TransferCompleted
    | TransferFailed
    | TransferRefunded
)


def publish(event: Event, at: At) -> Iterable[Public]:
    match event:
        case AccountOpened(on=on):
            yield Public("account-opened.v1", Opened(account=at.id, on=on))
        case MoneyDeposited(cents=cents, on=on):
            yield Public("money-deposited.v1", Deposited(account=at.id, cents=cents, on=on))
        case MoneyWithdrawn(cents=cents, on=on):
            yield Public("money-withdrawn.v1", Withdrawn(account=at.id, cents=cents, on=on))
        case AccountClosed(on=on):
            yield Public("account-closed.v1", Closed(account=at.id, on=on))
        case TransferCompleted():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="completed"))
        case TransferFailed():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="failed"))
        case TransferRefunded():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="refunded"))
