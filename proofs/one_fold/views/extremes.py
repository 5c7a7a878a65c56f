"""A summary with sums, least and largest of every type that has them, which parks; an event counts under two keys."""

from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from typing import NamedTuple

from domain.accounts import Movement, change
from projections.engine import At, Key, Max, Min, Sum
from proofs.one_fold.views import refuse

VERSION = 1
ON_POISON = "park"


class Extreme(NamedTuple):
    kind: Key[str]
    times: Sum[int]
    amount: Sum[Decimal]
    smallest: Min[int]
    largest: Max[Decimal]
    first_on: Min[date]
    last_on: Max[date]
    first_at: Min[datetime]
    last_at: Max[datetime]


def delta(event: Movement, at: At) -> Iterable[Extreme]:
    amount = Decimal(change(event)) / 100
    for kind in (type(event).__name__, "all"):
        yield Extreme(kind, 1, amount, event.cents, amount, event.on, event.on, at.time, at.time)
        refuse(event.details.purpose, "e")
