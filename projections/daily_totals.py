"""How much moved through the bank on a day, and how? One row per day and operation, over all accounts."""

from collections.abc import Iterable
from datetime import date
from typing import NamedTuple

from domain.accounts import Movement, change, kind
from projections.engine import At, Key, Max, Sum

VERSION = 1


class DailyTotal(NamedTuple):
    day: Key[date]
    operation: Key[str]  # as the books name it, else the kind of movement
    count: Sum[int]  # type: ignore[assignment]  # hides tuple's method, which is not needed here
    cents: Sum[int]  # in less out
    largest: Max[int]  # the largest single movement, either way


def delta(event: Movement, at: At) -> Iterable[DailyTotal]:
    yield DailyTotal(event.on, event.details.operation or kind(event), 1, change(event), event.cents)
