"""Where is a transfer's money? One row per transfer, with the step that it is at and since when.

In state `debited` or `refunding` the money is in flight: the source does not have it any more, the target not yet.
"""

from datetime import date, datetime
from typing import NamedTuple, assert_never

from domain.transfers import (
    CreditRefused,
    SourceDebited,
    SourceDebitedTooLate,
    TransferCompleted,
    TransferFailed,
    TransferRefunded,
    TransferRequested,
    TransferTimedOut,
)
from projections.engine import At, Key

VERSION = 1


class Transfer(NamedTuple):
    transfer: Key[str]
    state: str  # requested, timed-out, debited, refunding; in the end completed, failed or refunded
    source: str
    target: str
    cents: int
    day: date
    refusal: str  # why it did not complete; empty where it may still, or did
    requested_at: datetime
    changed_at: datetime


def evolve(
    row: Transfer | None,
    event: TransferRequested
    | SourceDebited
    | TransferTimedOut
    | SourceDebitedTooLate
    | CreditRefused
    | TransferCompleted
    | TransferFailed
    | TransferRefunded,
    at: At,
) -> Transfer:
    if isinstance(event, TransferRequested):
        return Transfer(
            at.id,
            "requested",
            event.source,
            event.target,
            event.cents,
            event.on,
            "",
            requested_at=at.time,
            changed_at=at.time,
        )
    if row is None:
        raise ValueError(f"{at.stream}: {type(event).__name__} of a transfer that was never requested.")
    refusal = row.refusal
    match event:
        case SourceDebited():
            state = "debited"
        case TransferTimedOut():
            state, refusal = "timed-out", "timed-out"
        case SourceDebitedTooLate():
            state = "refunding"
        case CreditRefused(refusal=refusal):
            state = "refunding"
        case TransferCompleted():
            state = "completed"
        case TransferFailed(refusal=refusal):
            state = "failed"
        case TransferRefunded():
            state = "refunded"
        case _:
            assert_never(event)
    return row._replace(state=state, refusal=refusal, changed_at=at.time)
