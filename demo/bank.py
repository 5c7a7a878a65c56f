"""Whose transactions the demo loads: a file's, the real ones beside the project, or generated ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from demo import generate
from demo.data import Transaction, read, real_data
from demo.orders import orders
from infra.log.records import Command

OVERDRAFT_LIMIT = 5_000_00
GENERATED = "transactions.csv.gz"


@dataclass(frozen=True, slots=True)
class Bank:
    """What is to be loaded. `expected` is what it comes to, None where nobody promises that all can be accepted."""

    file: Path
    origin: str
    transactions: list[Transaction]
    commands: list[Command]
    expected: generate.Totals | None


def bank(folder: Path, data: Path | None, *, overdraft_limit: int, seed: int | None) -> Bank:
    """`data`, else the real transactions unless a `seed` asks for generated ones, which are written into `folder`.

    Money in cents. Raises BadTransactions.
    """
    real = real_data() if seed is None else None
    file = data or real or folder / GENERATED
    generated = not (data or real)
    seed = generate.SEED if seed is None else seed
    if generated:
        generate.write(file, generate.generate(seed))
    origin = f"generated from seed {seed}" if generated else str(file) if data else f"a Czech bank, 1993-94 ({file})"
    transactions = read(file)
    commands = [
        Command(line["id"], line["stream"], line["type"], msgspec.Raw(msgspec.json.encode(line["data"])))
        for line in orders(transactions, overdraft_limit)
    ]
    all_fit = generated and overdraft_limit >= OVERDRAFT_LIMIT
    return Bank(file, origin, transactions, commands, generate.totals(transactions) if all_fit else None)
