"""The demo's data: read exactly, refused clearly, and judged by the domain as by an oracle that knows nothing of it."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from demo.bank import command_for, commands_of
from demo.data import COLUMNS, BadTransactions, Transaction, read, real_data, to_cents
from demo.generate import ACCOUNTS, TRANSACTIONS, Totals, generate, totals, write
from domain.accounts import ChargeFee, CreditInterest, Deposit, Details, State, Withdraw, decide, evolve
from domain.language import Refusal
from infra.domain_model.contexts import contexts
from infra.domain_model.versions import stored_type
from infra.log.records import Command
from tests.engine.service.oracle import judge

pytestmark = pytest.mark.slow

REAL = real_data()


class Figures(NamedTuple):
    """What a bank comes to with an overdraft limit of 5,000.00, as the demo's proof prints it."""

    accounts: int
    transactions: int
    credits: str
    debits: str
    balance: str
    statement: dict[str, int]
    rejected_without_overdraft: int


KNOWN = {
    "generated": Figures(
        accounts=591,
        transactions=23_932,
        credits="84899541.05",
        debits="70541294.93",
        balance="14358246.12",
        statement={"within 0.50": 23_932},
        rejected_without_overdraft=31,
    ),
    "real": Figures(
        accounts=591,
        transactions=23_932,
        credits="87119745.30",
        debits="68062431.60",
        balance="19057313.70",
        statement={"within 0.50": 23_881, "within 1.00": 35, "beyond": 16},
        rejected_without_overdraft=12,
    ),
}

Bank = tuple[Path, Figures]

DOOR: dict[str, TypeAdapter[Any]] = {
    stored_type(command): TypeAdapter(command) for command in contexts()["accounts"].commands.values()
}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bank") / "transactions.csv.gz"
    write(path, generate())
    return path


@pytest.fixture(params=["generated", *(["real"] if REAL else [])])
def bank(request: pytest.FixtureRequest, generated: Path) -> Bank:
    """A bank's file and what it comes to; on a machine that has the real one, that too."""
    return (REAL if REAL and request.param == "real" else generated), KNOWN[request.param]


# Judged twice


@pytest.mark.parametrize("limit", [5_000, 0], ids=lambda limit: f"limit-{limit}")
def test_domain_and_oracle_judge_alike_command_by_command(bank: Bank, limit: int) -> None:
    file, _ = bank
    accepted: dict[str, bool] = {}
    states: dict[str, State] = defaultdict(State)
    for order in commands_of(read(file), limit * 100):
        state = states[order.stream]
        try:
            for event in decide(through_the_door(order), state):
                state = evolve(state, event)
        except Refusal:
            pass
        accepted[order.id] = state is not states[order.stream]
        states[order.stream] = state

    verdict = judge(file, Decimal(limit))
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
        accounts=len(verdict.balances),
        transactions=len(verdict.accepted),
        credits=str(verdict.credits),
        debits=str(verdict.debits),
        balance=str(sum(verdict.balances.values())),
        statement=dict(verdict.statement),
        rejected_without_overdraft=list(judge(file, Decimal(0)).accepted.values()).count(False),
    )


def test_totals_are_the_oracles(bank: Bank) -> None:
    file, known = bank
    assert totals(read(file)) == Totals(
        known.accounts, known.transactions, to_cents(known.credits), to_cents(known.debits)
    )


def through_the_door(order: Command) -> Any:
    """An order's command as the handler reads it."""
    return DOOR[order.type].validate_json(bytes(order.data))


# Transactions as commands


def transaction(direction: str = "credit", purpose: str = "", operation: str = "transfer in") -> Transaction:
    return Transaction(
        trans_id="171812",
        account="576",
        on=date(1993, 1, 1),
        direction=direction,  # type: ignore[arg-type]  # one of the two in every test
        operation=operation,
        purpose=purpose,
        cents=900_00,
        balance=900_00,
        counter_bank="YZ",
        counter_account="30300313",
    )


@pytest.mark.parametrize(
    ("direction", "purpose", "command"),
    [
        ("credit", "interest", CreditInterest),
        ("credit", "pension", Deposit),
        ("credit", "", Deposit),
        ("credit", "statement fee", Deposit),
        ("debit", "statement fee", ChargeFee),
        ("debit", "overdraft interest", ChargeFee),
        ("debit", "household", Withdraw),
        ("debit", "", Withdraw),
        ("debit", "interest", Withdraw),
    ],
)
def test_purpose_and_direction_say_which_command(direction: str, purpose: str, command: type) -> None:
    details = Details(operation="transfer in", purpose=purpose, counter_bank="YZ", counter_account="30300313")
    expected = command(cents=900_00, on=date(1993, 1, 1), details=details)
    assert command_for(transaction(direction, purpose)) == expected


def test_an_account_is_opened_once_before_its_first_transaction() -> None:
    first, second = transaction(), replace(transaction(), trans_id="171813")
    opening, *others = commands_of([first, second], overdraft_limit=5_000_00)
    assert (opening.id, opening.stream, opening.type) == ("open-576", "accounts/576", "OpenAccount/2")
    assert msgspec.json.decode(opening.data) == {"overdraft_limit": 5_000_00, "on": "1993-01-01", "owner": ""}
    assert [one.id for one in others] == ["berka-171812", "berka-171813"]
    assert {(one.stream, one.type) for one in others} == {("accounts/576", "Deposit")}
    details = {"operation": "transfer in", "purpose": "", "counter_bank": "YZ", "counter_account": "30300313"}
    assert msgspec.json.decode(others[0].data) == {"cents": 900_00, "on": "1993-01-01", "details": details}


# A bank out of a seed


def test_a_file_reads_back_as_it_was_written(generated: Path, tmp_path: Path) -> None:
    assert read(generated) == generate()
    plain = tmp_path / "transactions.csv"
    plain.write_bytes(gzip.decompress(generated.read_bytes()))
    assert read(plain) == generate()


@pytest.mark.parametrize("seed", range(5))
def test_every_seed_makes_a_bank_for_the_demo(seed: int) -> None:
    made = generate(seed)
    said = totals(made)
    assert (said.accounts, said.transactions) == (ACCOUNTS, TRANSACTIONS)
    assert all(before.on <= after.on for before, after in pairwise(made))
    assert len({transaction.trans_id for transaction in made}) == TRANSACTIONS
    assert min(transaction.balance for transaction in made) >= -5_000_00, "the demo's overdraft limit covers all"
    purposes = {transaction.purpose for transaction in made}
    assert purposes == {"", "interest", "statement fee", "overdraft interest", "household", "pension"}


def test_another_seed_is_another_bank() -> None:
    assert generate(1) != generate(2)


# A hostile world in a file


HEADER = ",".join(COLUMNS)
GOOD = "171812,576,1993-01-01,credit,cash deposit,,900.00,900.00,,"


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        ("", 1, "header"),
        ("trans_id,account_id\n1,2\n", 1, "header"),
        (f"{GOOD}\n", 1, "header"),
        (f"{HEADER}\n{GOOD}\n{GOOD}\n", 3, "171812 was there before"),
        (f"{HEADER}\n{GOOD},more\n", 2, "11 columns instead of 10"),
        (f"{HEADER}\n\n", 2, "0 columns instead of 10"),
        (f"{HEADER}\n{GOOD.replace('1993-01-01', '1993-02-31')}\n", 2, "day is out of range"),
        (f"{HEADER}\n{GOOD.replace('credit', 'kredit')}\n", 2, "direction"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', '900.005,900')}\n", 2, "'900.005' is not an amount"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', 'NaN,900')}\n", 2, "'NaN' is not an amount"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', '9e2,900')}\n", 2, "'9e2' is not an amount"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', '٩٠٠,900')}\n", 2, "is not an amount"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', ',900')}\n", 2, "'' is not an amount"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', '0.00,900')}\n", 2, "cents"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', '-900.00,900')}\n", 2, "cents"),
        (f"{HEADER}\n{GOOD.replace('900.00,900', '999999999999999,900')}\n", 2, "cents"),
        (f"{HEADER}\n{GOOD.replace('cash deposit', 'x' * 201)}\n", 2, "operation"),
        (f"{HEADER}\n{GOOD.replace('cash deposit', chr(0))}\n", 2, "operation"),
        (f"{HEADER}\n{GOOD.replace('576', '')}\n", 2, "account"),
        (f'{HEADER}\n"{GOOD}\n', 2, "unexpected end of data"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, content: str, line: int, why: str) -> None:
    path = tmp_path / "transactions.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadTransactions) as refused:
        read(path)
    assert refused.value.message.startswith(f"{path}, line {line}: ")
    assert why in refused.value.message


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8b not gzip", gzip.compress(HEADER.encode())[:-9], HEADER.encode() + b"\n\xff"],
    ids=["not gzip", "cut off", "not UTF-8"],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "transactions.csv.gz"
    path.write_bytes(content)
    with pytest.raises(BadTransactions):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTransactions, match="No such file"):
        read(tmp_path / "nowhere.csv")


@settings(deadline=None)
@given(cents=st.integers(-(10**15), 10**15))
def test_money_is_read_exactly(cents: int) -> None:
    sign = "-" if cents < 0 else ""
    assert to_cents(f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02}") == cents
