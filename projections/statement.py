"""What happened on an account, line by line? One line per movement, with the balance after it."""

from collections.abc import Iterable
from datetime import date
from typing import NamedTuple

from domain.accounts import Movement, State, change, kind
from projections.engine import At, Key

VERSION = 2


class Line(NamedTuple):
    account: Key[str]
    line: Key[int]  # the event's version in its stream: rising, with gaps where no money moved
    day: date
    kind: str
    operation: str
    purpose: str
    counter_bank: str
    counter_account: str
    cents: int
    balance: int
    owner: str


def rows(event: Movement, after: State, at: At) -> Iterable[Line]:
    yield Line(
        account=at.id,
        line=at.version,
        day=event.on,
        kind=kind(event),
        operation=event.details.operation,
        purpose=event.details.purpose,
        counter_bank=event.details.counter_bank,
        counter_account=event.details.counter_account,
        cents=change(event),
        balance=after.balance,
        owner=after.owner,
    )
