"""A bank's life out of a seed, where the real transactions are not at hand: same columns, same shape, same size.

Whole cents and `Random.random` alone, so that a seed means the same bank on every machine and every Python.
"""

import csv
import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, Literal

from demo.data import COLUMNS, Transaction

SEED = 19930101
ACCOUNTS = 591
TRANSACTIONS = 23_932

_FIRST_DAY = date(1993, 1, 1)
_OPENINGS = 400  # days in which the accounts are opened
_BANKS = ("AB", "CD", "EF", "GH", "IJ", "KL", "MN", "OP", "QR", "ST", "UV", "WX", "YZ")
_STATEMENT_FEE = 14_60
_DEEPEST = 3_000_00  # what is taken out beyond the balance, once in a while; a demo's overdraft limit covers it


@dataclass(frozen=True, slots=True)
class Totals:
    """What a bank comes to when every transaction is accepted. Money in cents."""

    accounts: int
    transactions: int
    credits: int
    debits: int

    @property
    def balance(self) -> int:
        return self.credits - self.debits


def generate(seed: int = SEED, accounts: int = ACCOUNTS, transactions: int = TRANSACTIONS) -> list[Transaction]:
    """The first so many transactions of a bank, day by day. The bank's own running balances are exact.

    With an overdraft limit of 5,000.00 every one can be accepted; with none, a few can't.
    """
    chance = _Chance(seed)
    customers = [_Customer(number, chance) for number in range(1, accounts + 1)]
    made: list[Transaction] = []
    day = _FIRST_DAY
    while customers and len(made) < transactions:
        for customer in customers:
            made.extend(customer.live(day))
        day += timedelta(days=1)
    return made[:transactions]


def totals(transactions: list[Transaction]) -> Totals:
    """What these transactions come to if all are accepted."""
    amounts = {"credit": 0, "debit": 0}
    for transaction in transactions:
        amounts[transaction.direction] += transaction.cents
    accounts = len({transaction.account for transaction in transactions})
    return Totals(accounts, len(transactions), amounts["credit"], amounts["debit"])


def write(path: Path, transactions: list[Transaction]) -> None:
    """Write a file that `data.read` reads: gzipped CSV, the same bytes each time."""
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for one in transactions:
        ends = (one.counter_bank, one.counter_account)
        what = (one.trans_id, one.account, one.on, one.direction, one.operation, one.purpose)
        lines.writerow((*what, _written(one.cents), _written(one.balance), *ends))
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _written(cents: int) -> str:
    return str(Decimal(cents).scaleb(-2))


class _Chance:
    """Draws that rest on `Random.random` alone: the only method whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def once_in(self, times: float) -> bool:
        return self._random() * times < 1

    def between(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def units(self, low: int, high: int) -> int:
        """Cents: a round amount between so many whole units, the smaller the likelier."""
        return 100 * (low + int(self._random() * self._random() * (high - low + 1)))

    def counterparty(self) -> tuple[str, str]:
        return _BANKS[self.between(0, len(_BANKS) - 1)], str(self.between(10_000_000, 99_999_999))


class _Customer:
    """One account, its habits, and the bank's own figure of what is on it."""

    def __init__(self, number: int, chance: _Chance) -> None:
        self._chance = chance
        self._account = str(number * 19 + chance.between(0, 18))
        self._lines = number * 100_000  # trans_ids: one range for each account
        self._opens = _FIRST_DAY + timedelta(days=chance.between(0, _OPENINGS))
        self._balance = 0
        self._payday = chance.between(1, 28)
        self._salary = chance.units(2_900, 40_000) if chance.once_in(3) else 0
        self._income = "pension" if chance.once_in(2) else ""
        self._payer = chance.counterparty()
        self._rent_day = chance.between(1, 28)
        self._rent = chance.units(500, 9_000) if chance.once_in(2) else 0
        self._landlord = chance.counterparty()

    def live(self, day: date) -> Iterator[Transaction]:
        """What happens on this day. Days are to be asked for in order, each once."""
        if day < self._opens:
            return
        if day == self._opens:
            yield self._book(day, "credit", self._chance.units(100, 2_000), "cash deposit")
        if self._salary and day.day == self._payday:
            yield self._book(day, "credit", self._salary, "transfer in", self._income, counterparty=self._payer)
        if not self._salary and self._chance.once_in(22):
            yield self._book(day, "credit", self._chance.units(100, 50_000), "cash deposit")
        if self._rent and day.day == self._rent_day and self._balance >= self._rent:
            yield self._book(day, "debit", self._rent, "transfer out", "household", counterparty=self._landlord)
        if self._chance.once_in(20):
            yield from self._cash(day)
        if (day + timedelta(days=1)).day == 1:
            yield from self._month_end(day)

    def _cash(self, day: date) -> Iterator[Transaction]:
        if self._balance > 0 and self._chance.once_in(500):
            yield self._book(day, "debit", self._balance + self._chance.between(1, _DEEPEST), "cash withdrawal")
        elif self._balance >= 200_00:
            most = min(self._balance // 100, 60_000)
            yield self._book(day, "debit", self._chance.units(100, most), "cash withdrawal")

    def _month_end(self, day: date) -> Iterator[Transaction]:
        if self._balance < 0:
            yield self._book(day, "debit", -self._balance // 100 + 10, "cash withdrawal", "overdraft interest")
        elif (interest := self._balance * 4 // 12_000 * 10) > 0:
            yield self._book(day, "credit", interest, "", "interest")
        if day > self._opens + timedelta(days=60):
            yield self._book(day, "debit", _STATEMENT_FEE, "cash withdrawal", "statement fee")

    def _book(
        self,
        day: date,
        direction: Literal["credit", "debit"],
        cents: int,
        operation: str,
        purpose: str = "",
        *,
        counterparty: tuple[str, str] = ("", ""),
    ) -> Transaction:
        self._balance += cents if direction == "credit" else -cents
        self._lines += 1
        bank, account = counterparty
        line: dict[str, Any] = {
            "trans_id": str(self._lines),
            "account": self._account,
            "on": day,
            "direction": direction,
        }
        line |= {"operation": operation, "purpose": purpose, "counter_bank": bank, "counter_account": account}
        return Transaction(**line, cents=cents, balance=self._balance)
