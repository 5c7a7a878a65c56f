"""A bank's orders out of a seed, and what must become of them, computed without any of the product's code."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

OVERDRAFT_LIMIT = 100_000
"""Cents, of every account."""
LARGEST_AMOUNT = 10_000
OPEN = 0


class Order(NamedTuple):
    """A command for an account: `cents` is OPEN, or positive for a deposit, or negative for a withdrawal."""

    account: int
    cents: int
    id: str


class Expected(NamedTuple):
    """What must become of an order."""

    accepted: bool
    version: int


class Ledger:
    """The end state that a run must reach: an independent fold, plain sums in plain Python.

    `version` counts the events of an account, `balance` is in cents; an unopened account has version 0.
    """

    def __init__(self, accounts: int) -> None:
        self.balance = [0] * accounts
        self.version = [0] * accounts

    def enter(self, order: Order) -> Expected:
        account, cents, _ = order
        is_open = self.version[account] > 0
        accepted = not is_open if cents == OPEN else is_open and self.balance[account] + cents >= -OVERDRAFT_LIMIT
        if accepted:
            self.balance[account] += cents
            self.version[account] += 1
        return Expected(accepted, self.version[account])

    def enter_all(self, orders: Iterable[Order]) -> dict[str, Expected]:
        """By order id."""
        return {order.id: self.enter(order) for order in orders}

    def rows(self) -> dict[str, tuple[int, int]]:
        """(version, balance) by account name, of those that were opened."""
        pairs = zip(self.version, self.balance, strict=True)
        return {name_of(n): (version, balance) for n, (version, balance) in enumerate(pairs) if version}


def name_of(account: int) -> str:
    return f"{account:06d}"


def stream_of(account: int) -> str:
    return f"accounts/{account:06d}"


def opening_orders(accounts: int, chance: random.Random) -> list[Order]:
    """Each account opened once, in random order."""
    numbers = list(range(accounts))
    chance.shuffle(numbers)
    return [Order(number, OPEN, order_id(chance)) for number in numbers]


def movements(accounts: int, count: int, chance: random.Random) -> Iterator[Order]:
    """Deposits and withdrawals, half and half, spread evenly over the accounts."""
    for _ in range(count):
        cents = int(chance.random() * LARGEST_AMOUNT) + 1
        sign = 1 if chance.random() < 0.5 else -1
        yield Order(int(chance.random() * accounts), sign * cents, order_id(chance))


def deposits(first: int, accounts: int, count: int | None, seed: int) -> Iterator[Order]:
    """Deposits of one cent on so many accounts from the first on, out of a seed; endless without a count."""
    chance = random.Random(seed)
    for _ in repeat(None) if count is None else range(count):
        yield Order(first + chance.randrange(accounts), 1, order_id(chance))


def history(accounts: int, count: int, chance: random.Random, *, opened: bool = False) -> Iterator[Order]:
    """Orders that are all accepted: each account is opened when it is first met, and only as much is taken as there is."""
    balance: list[int | None] = [0 if opened else None] * accounts
    for account, cents, order_id in movements(accounts, count, chance):
        there = balance[account]
        amount = OPEN if there is None else cents if there + cents >= -OVERDRAFT_LIMIT else -cents
        balance[account] = (there or 0) + amount
        yield Order(account, amount, order_id)


def order_id(chance: random.Random) -> str:
    """As long as a uuid."""
    return f"{chance.getrandbits(128):032x}"
