"""Money goes from one account to another, or stays where it was.

Each `Send` is a command for a stream; `then` and `otherwise` come back to the transfer when it was accepted or refused, and
`later` some time after that. What has no `otherwise` is never refused: if it is, an operator sees a dead letter.
"""

from collections.abc import Iterable
from datetime import timedelta

from domain.accounts import Deposit, Details, ReleaseHold, ReturnMoney, Withdraw
from domain.transfers import (
    CompleteTransfer,
    CreditRefused,
    FailTransfer,
    GiveUp,
    RecordDebit,
    RecordRefund,
    RefundTransfer,
    SourceDebited,
    SourceDebitedTooLate,
    TransferCompleted,
    TransferRequested,
)
from policies.engine import At, Send

VERSION = 2

PATIENCE = timedelta(minutes=5)


def react(
    event: TransferRequested | SourceDebited | SourceDebitedTooLate | CreditRefused | TransferCompleted, at: At
) -> Iterable[Send]:
    match event:
        case TransferRequested(source=source, target=target, cents=cents, on=on):
            # The hold keeps the source open for a refund.
            withdraw = Withdraw(cents=cents, on=on, details=Details(counter_account=target), hold=at.id)
            then, otherwise, later = RecordDebit(), FailTransfer(), GiveUp()
            yield Send(f"accounts/{source}", withdraw, then, otherwise, later=later, after=PATIENCE)
        case SourceDebited(source=source, target=target, cents=cents, on=on):
            deposit = Deposit(cents=cents, on=on, details=Details(counter_account=source))
            yield Send(f"accounts/{target}", deposit, then=CompleteTransfer(), otherwise=RefundTransfer())
        case SourceDebitedTooLate(source=source, on=on) | CreditRefused(source=source, on=on):
            yield Send(f"accounts/{source}", ReturnMoney(hold=at.id, on=on), then=RecordRefund())
        case TransferCompleted(source=source):
            yield Send(f"accounts/{source}", ReleaseHold(hold=at.id))
