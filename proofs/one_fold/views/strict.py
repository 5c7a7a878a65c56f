"""An entity view that stops the agent at what it can't take."""

from typing import NamedTuple

from domain.accounts import MoneyDeposited
from projections.engine import At, Key
from proofs.one_fold.views import refuse

VERSION = 1


class Strict(NamedTuple):
    account: Key[str]
    deposits: int


def evolve(row: Strict | None, event: MoneyDeposited, at: At) -> Strict | None:
    refuse(event.details.purpose, "s")
    return Strict(at.id, 1 + (row.deposits if row else 0))
