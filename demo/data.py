"""A bank's transactions in a CSV file, gzip or plain: one line each, in the order in which they happened."""

import csv
import gzip
import io
import re
import zlib
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from domain.language import Cents, Text, fact
from infra.errors import SamefoldError

HEADER = "trans_id,account_id,date,direction,operation,purpose,amount,balance,counter_bank,counter_account"
COLUMNS = tuple(HEADER.split(","))

_MONEY = re.compile(r"-?\d{1,15}(\.\d\d?)?", re.ASCII)
_GZIP = b"\x1f\x8b"

Id = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^\P{Cc}*$")]


class BadTransactions(SamefoldError):
    """A file of transactions can't be read, or one of its lines is not a transaction."""


@fact
class Transaction:
    """One line of the file, money in cents. `balance` is the bank's own running balance after it."""

    trans_id: Id
    account: Id
    on: date
    direction: Literal["credit", "debit"]
    operation: Text
    purpose: Text
    cents: Cents
    balance: int
    counter_bank: Text
    counter_account: Text


def real_data() -> Path | None:
    """The file with real transactions of a Czech bank, if it is there; it is not part of the repository."""
    path = Path(__file__).parents[2] / "shared" / "data" / "berka" / "transactions.csv.gz"
    return path if path.is_file() else None


def read(path: Path) -> list[Transaction]:
    """All transactions of a file, in its order. Raises BadTransactions naming file and line; then none are returned."""
    rows = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    found: dict[str, Transaction] = {}
    try:
        if tuple(next(rows, ())) != COLUMNS:
            raise ValueError("this is not the header")
        for row in rows:
            transaction = _parse(row)
            if transaction.trans_id in found:
                raise ValueError(f"trans_id {transaction.trans_id} was there before")
            found[transaction.trans_id] = transaction
    except (csv.Error, ValueError) as error:
        raise BadTransactions(
            f"{path}, line {rows.line_num or 1}: {_in_words(error)}.",
            f"Its first line should be {HEADER}, every other a transaction in these columns.",
        ) from error
    return list(found.values())


def to_cents(text: str) -> int:
    """An amount such as `-12.50` in cents, exactly. Raises ValueError."""
    if not _MONEY.fullmatch(text):
        raise ValueError(f"{text!r} is not an amount of money such as 1234.50")
    return int(Decimal(text).scaleb(2))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadTransactions(f"{path} can't be read: {error}.", "Give a CSV file in UTF-8, plain or gzip.") from error


def _parse(row: list[str]) -> Transaction:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{len(row)} columns instead of {len(COLUMNS)}")
    texts: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    on = date.fromisoformat(texts.pop("date"))
    amount, balance = to_cents(texts.pop("amount")), to_cents(texts.pop("balance"))
    return Transaction(account=texts.pop("account_id"), on=on, cents=amount, balance=balance, **texts)


def _in_words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r:.60}"
    return str(error)
