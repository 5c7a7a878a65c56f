"""What other teams may read: that accounts are opened and closed, each movement of their money, and how transfers begin and end.

The sum of an account's movements is its balance. Purposes stay private.
"""

from collections.abc import Iterable
from datetime import date
from typing import Literal

from domain.accounts import AccountClosed, AccountOpened, MoneyReturned, MoneyWithdrawn, Movement, kind
from domain.language import Cents, fact
from domain.transfers import TransferCompleted, TransferFailed, TransferRefunded, TransferRequested
from policies.engine import At, Public

VERSION = 2

MOVED = {
    "deposit": "money-deposited.v1",
    "withdrawal": "money-withdrawn.v1",
    "return": "money-returned.v1",
    "interest": "interest-credited.v1",
    "fee": "fee-charged.v1",
}
"""The types of movements."""


@fact
class Opened:
    """An account was opened."""

    account: str
    on: date


@fact
class Moved:
    """Money came to an account (deposited, returned, interest) or left it (withdrawn, fee). With a hold it is a transfer's."""

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
    """A transfer was requested."""

    transfer: str
    source: str
    target: str
    cents: Cents


@fact
class TransferEnded:
    """A transfer ended: the target has the money, no money moved, or the source has it back."""

    transfer: str
    how: Literal["completed", "failed", "refunded"]


TYPES = {
    "account-opened.v1": Opened,
    **dict.fromkeys(MOVED.values(), Moved),
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
        case AccountClosed(on=on):
            yield Public("account-closed.v1", Closed(account=at.id, on=on))
        case TransferRequested(source=source, target=target, cents=cents):
            yield Public("transfer-requested.v1", Requested(transfer=at.id, source=source, target=target, cents=cents))
        case TransferCompleted():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="completed"))
        case TransferFailed():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="failed"))
        case TransferRefunded():
            yield Public("transfer-ended.v1", TransferEnded(transfer=at.id, how="refunded"))
        case _:
            hold = event.hold if isinstance(event, MoneyWithdrawn | MoneyReturned) else ""
            yield Public(MOVED[kind(event)], Moved(account=at.id, cents=event.cents, on=event.on, hold=hold))
