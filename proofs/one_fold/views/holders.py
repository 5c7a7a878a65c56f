"""An entity view without a key function, which parks; its rows go when the account is closed, and some are refused."""

from datetime import date
from typing import NamedTuple

from domain.accounts import AccountClosed, AccountOpened, FeeCharged, MoneyDeposited, MoneyWithdrawn, change
from projections.engine import At, Key
from proofs.one_fold.views import refuse

VERSION = 1
ON_POISON = "park"
TOO_LARGE = "weight:o"
"""A purpose that makes a row which no column takes, and all rows after it."""


class Holder(NamedTuple):
    account: Key[str]
    cents: int
    moves: int
    weight: int
    last_on: date | None


def evolve(
    row: Holder | None, event: AccountOpened | MoneyDeposited | MoneyWithdrawn | FeeCharged | AccountClosed, at: At
) -> Holder | None:
    match event:
        case AccountOpened():
            return Holder(at.id, 0, 0, 0, None)
        case AccountClosed():
            return None
        case (
            MoneyDeposited(on=on, details=details)
            | MoneyWithdrawn(on=on, details=details)
            | FeeCharged(on=on, details=details)
        ):
            refuse(details.purpose, "h")
            was = row or Holder(at.id, 0, 0, 0, None)
            weight = max(was.weight, 10**19 if details.purpose == TOO_LARGE else event.cents)
            return Holder(at.id, was.cents + change(event), was.moves + 1, weight, on)
