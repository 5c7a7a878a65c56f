"""An entity view with a key function and a column of every type, which parks; a row goes when its sum comes to nothing."""

from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from domain.accounts import MoneyDeposited, MoneyWithdrawn, change
from projections.engine import At, Key
from proofs.one_fold.views import refuse

VERSION = 1
ON_POISON = "park"


class Mood(Enum):
    UP = "above nothing"
    DOWN = "below nothing"


class Purpose(NamedTuple):
    account: Key[str]
    purpose: Key[str]
    cents: int
    amount: Decimal
    mood: Mood
    even: bool
    last_at: datetime
    raw: bytes
    mark: UUID
    note: str | None


def key(event: MoneyDeposited | MoneyWithdrawn, at: At) -> tuple[str, str]:
    return (at.id, event.details.purpose)


def evolve(row: Purpose | None, event: MoneyDeposited | MoneyWithdrawn, at: At) -> Purpose | None:
    purpose = event.details.purpose
    refuse(purpose, "p")
    cents = (row.cents if row else 0) + change(event)
    if cents == 0:
        return None
    return Purpose(
        account=at.id,
        purpose=purpose,
        cents=cents,
        amount=Decimal(cents) / 100,
        mood=Mood.UP if cents > 0 else Mood.DOWN,
        even=at.version % 2 == 0,
        last_at=at.time,
        raw=purpose.encode(),
        mark=UUID(int=(at.version << 64) + at.offset),
        note=event.details.operation or None,
    )
