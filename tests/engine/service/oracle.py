"""What a bank's file of transactions comes to, worked out without a line of the program: what the demo's proof must show."""

import csv
import gzip
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

CHARGES = ("statement fee", "overdraft interest")


class Verdict(NamedTuple):
    """Money in whole units. `statement` counts the lines by their distance from the bank's own running balance.

    `answers` are those to all commands in the file's order, an account's opening before its first transaction.
    """

    accepted: dict[str, bool]
    credits: Decimal
    debits: Decimal
    balances: dict[str, Decimal]
    statement: Counter[str]
    answers: list[bool]


def judge(file: Path, overdraft_limit: Decimal) -> Verdict:
    accepted: dict[str, bool] = {}
    balances: dict[str, Decimal] = defaultdict(Decimal)
    moved = {"credit": Decimal(0), "debit": Decimal(0)}
    statement: Counter[str] = Counter()
    answers: list[bool] = []
    with gzip.open(file, "rt", encoding="utf-8", newline="") as text:
        for row in csv.DictReader(text):
            account, amount = row["account_id"], Decimal(row["amount"])
            answers += [True] * (account not in balances)
            after = balances[account] + (amount if row["direction"] == "credit" else -amount)
            may = row["direction"] == "credit" or row["purpose"] in CHARGES or after >= -overdraft_limit
            accepted[row["trans_id"]] = may
            answers.append(may)
            if may:
                moved[row["direction"]] += amount
                balances[account] = after
                off = abs(after - Decimal(row["balance"]))
                statement["within 0.50" if off <= Decimal("0.50") else "within 1.00" if off <= 1 else "beyond"] += 1
    return Verdict(accepted, moved["credit"], moved["debit"], dict(balances), statement, answers)
