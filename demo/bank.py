"""The transactions that the demo loads (a file's, the real ones, or generated ones), and their commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from demo import generate
from demo.data import Transaction, read, real_data
from domain import accounts
from domain.engine.versions import stored_type
from infra.log.records import Command

OVERDRAFT_LIMIT = 5_000_00
GENERATED = "transactions.csv.gz"


@dataclass(frozen=True, slots=True)
class Bank:
    """The transactions to load. `expected` is their total, None if some may be rejected."""

    file: Path
    origin: str
    transactions: list[Transaction]
    commands: list[Command]
    expected: generate.Totals | None


def bank(
    folder: Path,
    data: Path | None,
    transactions: list[Transaction] | None = None,
    *,
    overdraft_limit: int,
    seed: int | None,
) -> Bank:
    """`data`, else the real transactions unless a `seed` asks for generated ones, which are written into `folder`.

    `transactions` are those of `data`, where it was read before. Money in cents. Raises BadTransactions.
    """
    real = real_data() if seed is None else None
    file = data or real or folder / GENERATED
    generated = not (data or real)
    seed = generate.SEED if seed is None else seed
    if generated:
        generate.write(file, generate.generate(seed))
    origin = f"generated from seed {seed}" if generated else str(file) if data else f"a Czech bank, 1993-94 ({file})"
    transactions = read(file) if transactions is None else transactions
    commands = list(commands_of(transactions, overdraft_limit))
    all_fit = generated and overdraft_limit >= OVERDRAFT_LIMIT
    return Bank(file, origin, transactions, commands, generate.totals(transactions) if all_fit else None)


def commands_of(transactions: Iterable[Transaction], overdraft_limit: int) -> Iterator[Command]:
    """The commands that make these transactions, in their order, each account opened before its first one.

    `overdraft_limit` is in cents. The ids come from the transactions, so sending them again changes nothing.
    """
    opened: set[str] = set()

    def command(command_id: str, account: str, body: accounts.Command) -> Command:
        return Command(
            command_id, f"accounts/{account}", stored_type(type(body)), msgspec.Raw(msgspec.json.encode(body))
        )

    for transaction in transactions:
        account = transaction.account
        if account not in opened:
            opened.add(account)
            opening = accounts.OpenAccount(overdraft_limit=overdraft_limit, on=transaction.on)
            yield command(f"open-{account}", account, opening)
        yield command(f"berka-{transaction.trans_id}", account, command_for(transaction))


def command_for(transaction: Transaction) -> accounts.Command:
    """The command that a transaction of the bank's was."""
    cents, on = transaction.cents, transaction.on
    details = accounts.Details(
        operation=transaction.operation,
        purpose=transaction.purpose,
        counter_bank=transaction.counter_bank,
        counter_account=transaction.counter_account,
    )
    match transaction.direction, transaction.purpose:
        case "credit", "interest":
            return accounts.CreditInterest(cents=cents, on=on, details=details)
        case "credit", _:
            return accounts.Deposit(cents=cents, on=on, details=details)
        case "debit", "statement fee" | "overdraft interest":
            return accounts.ChargeFee(cents=cents, on=on, details=details)
        case _:
            return accounts.Withdraw(cents=cents, on=on, details=details)
