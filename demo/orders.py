"""Transactions as commands: what `samefold send` takes."""

from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

import msgspec

from demo.data import Transaction
from domain.accounts import ChargeFee, Command, CreditInterest, Deposit, Details, OpenAccount, Withdraw


class CommandLine(TypedDict):
    """One line of a file of commands, before it is JSON."""

    id: str
    stream: str
    type: str
    data: dict[str, Any]


def orders(transactions: Iterable[Transaction], overdraft_limit: int) -> Iterator[CommandLine]:
    """The commands that make these transactions, in their order, each account opened before its first one.

    `overdraft_limit` is in cents. The ids come from the transactions, so sending them again changes nothing.
    """
    opened: set[str] = set()
    for transaction in transactions:
        account = transaction.account
        if account not in opened:
            opened.add(account)
            yield _line(f"open-{account}", account, OpenAccount(overdraft_limit=overdraft_limit, on=transaction.on))
        yield _line(f"berka-{transaction.trans_id}", account, command_for(transaction))


def command_for(transaction: Transaction) -> Command:
    """The command that a transaction of the bank's was."""
    cents, on = transaction.cents, transaction.on
    details = Details(
        operation=transaction.operation,
        purpose=transaction.purpose,
        counter_bank=transaction.counter_bank,
        counter_account=transaction.counter_account,
    )
    match transaction.direction, transaction.purpose:
        case "credit", "interest":
            return CreditInterest(cents=cents, on=on, details=details)
        case "credit", _:
            return Deposit(cents=cents, on=on, details=details)
        case "debit", "statement fee" | "overdraft interest":
            return ChargeFee(cents=cents, on=on, details=details)
        case _:
            return Withdraw(cents=cents, on=on, details=details)


def _line(command_id: str, account: str, command: Command) -> CommandLine:
    return {
        "id": command_id,
        "stream": f"accounts/{account}",
        "type": type(command).__name__,
        "data": msgspec.to_builtins(command),
    }
