"""Transactions generated from a seed, with the columns and the number of the real ones.

A seed gives the same bank on every machine and every Python: whole cents, and `Random.random` alone.
"""

import csv
import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Literal

from demo.data import COLUMNS, Transaction

SEED = 19930101
ACCOUNTS = 591
TRANSACTIONS = 23_932

_FIRST_DAY = date(1993, 1, 1)
_DAYS = 730
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
    """Generate the transactions of a bank, in the order of their days. The bank's own running balances are exact.

    With an overdraft limit of 5,000.00 all of them are accepted; without one, a few are not.
    """
    draw = Random(seed).random  # the only method whose sequence Python promises to keep
    names = [str(number * 19 + int(draw() * 19)) for number in range(accounts)]
    balances: list[int] = []
    made: list[Transaction] = []
    for number in range(transactions):
        # the accounts are opened in the first half
        if number * accounts * 2 >= transactions * len(balances) and len(balances) < accounts:
            account, balance = len(balances), 0
            balances.append(0)
        else:
            account = int(draw() * len(balances))
            balance = balances[account]
        direction, cents, operation, purpose = _movement(draw, balance)
        balances[account] += cents if direction == "credit" else -cents
        is_transfer = operation.startswith("transfer")
        made.append(
            Transaction(
                trans_id=str(number + 1),
                account=names[account],
                on=_FIRST_DAY + timedelta(days=number * _DAYS // transactions),
                direction=direction,
                operation=operation,
                purpose=purpose,
                cents=cents,
                balance=balances[account],
                counter_bank=_BANKS[int(draw() * len(_BANKS))] if is_transfer else "",
                counter_account=str(10_000_000 + int(draw() * 90_000_000)) if is_transfer else "",
            )
        )
    return made


def _movement(draw: Callable[[], float], balance: int) -> tuple[Literal["credit", "debit"], int, str, str]:
    """The next movement of an account with this balance: direction, cents, operation, purpose."""
    amount = 100 * (100 + int(draw() * draw() * 30_000))  # the smaller the likelier
    kind = draw()
    if balance < 0 and kind < 0.5:
        return "debit", -balance // 100 + 10, "cash withdrawal", "overdraft interest"
    if balance <= 0 or kind < 0.35:
        return "credit", amount + max(-balance, 0), "cash deposit", ""
    if kind < 0.45:
        return "credit", amount, "transfer in", "pension"
    if kind < 0.55:
        return "credit", balance // 300 + 1, "", "interest"
    if kind < 0.6 and balance >= _STATEMENT_FEE:
        return "debit", _STATEMENT_FEE, "cash withdrawal", "statement fee"
    if kind < 0.7 and balance >= amount:
        return "debit", amount, "transfer out", "household"
    if kind > 0.999:
        return "debit", balance + 1 + int(draw() * _DEEPEST), "cash withdrawal", ""
    return "debit", max(balance * int(draw() * 80) // 100, 1), "cash withdrawal", ""


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
