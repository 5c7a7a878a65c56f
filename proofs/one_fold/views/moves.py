"""A journal, which parks: no row, one or two for an event, with the state after it."""

from collections.abc import Iterable
from typing import NamedTuple

from domain.accounts import AccountClosed, FeeCharged, MoneyDeposited, MoneyWithdrawn, State
from projections.engine import At, Key
from proofs.one_fold.views import refuse

VERSION = 1
ON_POISON = "park"


class Move(NamedTuple):
    account: Key[str]
    version: Key[int]
    side: Key[int]
    cents: int
    balance: int
    status: str


def rows(event: MoneyDeposited | MoneyWithdrawn | FeeCharged | AccountClosed, after: State, at: At) -> Iterable[Move]:
    if isinstance(event, AccountClosed):
        yield Move(at.id, at.version, 0, 0, after.balance, after.status)
        return
    if isinstance(event, FeeCharged) and event.cents % 2:
        return
    yield Move(at.id, at.version, 1, event.cents, after.balance, after.status)
    refuse(event.details.purpose, "m")
    if isinstance(event, MoneyWithdrawn):
        yield Move(at.id, at.version, 2, -event.cents, after.balance, after.status)
