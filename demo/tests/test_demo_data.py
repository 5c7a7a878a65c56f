"""make test-all: whole files. The demo's data is read exactly, refused clearly, and judged by the domain as by an oracle."""

import gzip
from collections import defaultdict
from dataclasses import replace
from datetime import date
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from demo.bank import command_for, commands_of
from demo.data import COLUMNS, BadTransactions, Transaction, read, real_data, to_cents
from demo.generate import ACCOUNTS, TRANSACTIONS, Totals, generate, totals, write
from domain.accounts import ChargeFee, CreditInterest, Deposit, Details, State, Withdraw, decide, evolve
from domain.engine.contexts import contexts
from domain.engine.versions import stored_type
from domain.language import Refusal
from tests.engine.service.oracle import judge

pytestmark = pytest.mark.slow

REAL = real_data()


class Figures(NamedTuple):
    """What a bank comes to with an overdraft limit of 5,000.00, as the demo's proof prints it."""

    credits: str
    debits: str
    balance: str
    statement: dict[str, int]
    rejected_without_overdraft: int


KNOWN = {
    "generated": Figures("84899541.05", "70541294.93", "14358246.12", {"within 0.50": 23_932}, 31),
    "real": Figures(
        "87119745.30", "68062431.60", "19057313.70", {"within 0.50": 23_881, "within 1.00": 35, "beyond": 16}, 12
    ),
}
Bank = tuple[Path, Figures]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bank") / "transactions.csv.gz"
    write(path, generate())
    return path


@pytest.fixture(params=["generated", *(["real"] if REAL else [])])
def bank(request: pytest.FixtureRequest, generated: Path) -> Bank:
    """A bank's file and what it comes to; on a machine that has the real one, that too."""
    return (REAL if REAL and request.param == "real" else generated), KNOWN[request.param]


@pytest.mark.parametrize("limit", [5_000, 0], ids=lambda limit: f"limit-{limit}")
def test_domain_and_oracle_judge_alike_command_by_command(bank: Bank, limit: int) -> None:
    door = {stored_type(command): TypeAdapter[Any](command) for command in contexts()["accounts"].commands.values()}
    accepted: dict[str, bool] = {}
    states: dict[str, State] = defaultdict(State)
    for order in commands_of(read(bank[0]), limit * 100):
        state = states[order.stream]
        try:
            for event in decide(door[order.type].validate_json(bytes(order.data)), state):
                state = evolve(state, event)
        except Refusal:
            pass
        accepted[order.id] = state is not states[order.stream]
        states[order.stream] = state

    verdict = judge(bank[0], Decimal(limit))
    opened = {f"open-{account}": True for account in verdict.balances}
    assert accepted == opened | {f"berka-{trans_id}": may for trans_id, may in verdict.accepted.items()}
    assert {stream: Decimal(state.balance) / 100 for stream, state in states.items()} == {
        f"accounts/{account}": balance for account, balance in verdict.balances.items()
    }


def test_the_oracle_finds_the_known_figures(bank: Bank) -> None:
    file, known = bank
    verdict = judge(file, Decimal(5_000))
    assert all(verdict.accepted.values())
    assert known == Figures(
        credits=str(verdict.credits),
        debits=str(verdict.debits),
        balance=str(sum(verdict.balances.values())),
        statement=dict(verdict.statement),
        rejected_without_overdraft=list(judge(file, Decimal(0)).accepted.values()).count(False),
    )
    assert len(verdict.balances) == ACCOUNTS
    assert totals(read(file)) == Totals(ACCOUNTS, TRANSACTIONS, to_cents(known.credits), to_cents(known.debits))


# Transactions as commands


FIRST = Transaction(
    trans_id="171812",
    account="576",
    on=date(1993, 1, 1),
    direction="credit",
    operation="transfer in",
    purpose="",
    cents=900_00,
    balance=900_00,
    counter_bank="YZ",
    counter_account="30300313",
)


@pytest.mark.parametrize(
    ("direction", "purpose", "command"),
    [
        ("credit", "interest", CreditInterest),
        ("credit", "", Deposit),
        ("credit", "statement fee", Deposit),
        ("debit", "statement fee", ChargeFee),
        ("debit", "overdraft interest", ChargeFee),
        ("debit", "household", Withdraw),
        ("debit", "interest", Withdraw),
    ],
)
def test_purpose_and_direction_say_which_command(direction: Any, purpose: str, command: type) -> None:
    details = Details(operation="transfer in", purpose=purpose, counter_bank="YZ", counter_account="30300313")
    expected = command(cents=900_00, on=date(1993, 1, 1), details=details)
    assert command_for(replace(FIRST, direction=direction, purpose=purpose)) == expected


def test_an_account_is_opened_once_before_its_first_transaction() -> None:
    opening, *others = commands_of([FIRST, replace(FIRST, trans_id="171813")], overdraft_limit=5_000_00)
    assert (opening.id, opening.stream, opening.type) == ("open-576", "accounts/576", "OpenAccount/2")
    assert msgspec.json.decode(opening.data) == {"overdraft_limit": 5_000_00, "on": "1993-01-01", "owner": ""}
    assert [one.id for one in others] == ["berka-171812", "berka-171813"]
    assert {(one.stream, one.type) for one in others} == {("accounts/576", "Deposit")}


# A bank out of a seed


def test_a_file_reads_back_as_it_was_written(generated: Path, tmp_path: Path) -> None:
    plain = tmp_path / "transactions.csv"
    plain.write_bytes(gzip.decompress(generated.read_bytes()))
    assert read(plain) == read(generated) == generate()


def test_every_seed_makes_another_bank_for_the_demo() -> None:
    banks = [generate(seed) for seed in range(2)]
    assert banks[0] != banks[1]
    for made in banks:
        said = totals(made)
        assert (said.accounts, said.transactions) == (ACCOUNTS, TRANSACTIONS)
        assert all(before.on <= after.on for before, after in pairwise(made))
        assert len({transaction.trans_id for transaction in made}) == TRANSACTIONS
        assert min(transaction.balance for transaction in made) >= -5_000_00, "the demo's overdraft limit covers all"
        purposes = {transaction.purpose for transaction in made}
        assert purposes == {"", "interest", "statement fee", "overdraft interest", "household", "pension"}


# A hostile world in a file


HEADER = ",".join(COLUMNS)
GOOD = "171812,576,1993-01-01,credit,cash deposit,,900.00,900.00,,"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (HEADER, "", "line 1: this is not the header"),
        (HEADER, "trans_id,account_id", "line 1: this is not the header"),
        (GOOD, f"{GOOD}\n{GOOD}", "line 3: trans_id 171812 was there before"),
        (GOOD, f"{GOOD},more", "line 2: 11 columns instead of 10"),
        ("1993-01-01", "1993-02-31", "line 2: day is out of range"),
        ("credit,", "kredit,", "line 2: direction"),
        *(("900.00,900", f"{amount},900", f"'{amount}' is not an amount") for amount in ("900.005", "NaN", "9e2", "٩")),
        *(("900.00,900", f"{amount},900", "line 2: cents") for amount in ("0.00", "-900.00", "999999999999999")),
        *(("cash", operation, "line 2: operation") for operation in ("x" * 201, "\0")),
        ("576", "", "line 2: account"),
        ("171812", '"', "line 2: unexpected end of data"),
        ("cash", "\udcff", "can't be read"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, old: str, new: str, why: str) -> None:
    path = tmp_path / "transactions.csv"
    path.write_bytes(f"{HEADER}\n{GOOD}\n".replace(old, new).encode("utf-8", "surrogateescape"))
    with pytest.raises(BadTransactions) as refused:
        read(path)
    assert refused.value.message.startswith(str(path))
    assert why in refused.value.message


@pytest.mark.parametrize("content", [None, b"\x1f\x8b not gzip", gzip.compress(HEADER.encode(), mtime=0)[:-9]])
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "transactions.csv.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadTransactions, match=r"transactions\.csv\.gz can't be read"):
        read(path)


@given(cents=st.integers(-(10**15), 10**15))
def test_money_is_read_exactly(cents: int) -> None:
    sign = "-" if cents < 0 else ""
    assert to_cents(f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02}") == cents
