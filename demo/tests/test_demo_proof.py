"""make test: without a process. The demo's proof must be able to fail: whatever is lost, doubled or different shows."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import generate
from demo.bank import Bank, bank
from demo.load import Loaded
from demo.proof import Balance, DailySums, Key, Line, Proof, Rows, prove
from demo.run import Options, Result
from demo.sending import Answer
from demo.transfers import Moved
from projections.engine.operate.verify import Difference, Verified
from projections.engine.rebuild.rebuild import Rebuilt

Log = Counter[Key]
Found = tuple[Log, Rows]
Change = Callable[[Log, Rows], object]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """400 transactions, none beyond the limit."""
    folder = tmp_path_factory.mktemp("bank")
    generate.write(folder / "few.csv.gz", generate.generate(accounts=9, transactions=400))
    return bank(folder, folder / "few.csv.gz", overdraft_limit=5_000_00, seed=None)


def flawless(of: Bank) -> Found:
    """The log and the rows that a bank leaves when each command takes effect once."""
    versions, sums, counts = Counter[str](), Counter[str](), Counter[str]()
    outcomes: dict[Key, Answer] = {}
    lines: dict[tuple[str, int], Line] = {}
    transactions = iter(of.transactions)
    for command in of.commands:
        account = command.stream.removeprefix("accounts/")
        versions[account] += 1
        outcomes[command.stream, command.id] = Answer("accepted", versions[account])
        if command.type != "OpenAccount/2":
            transaction = next(transactions)
            change = transaction.cents if transaction.direction == "credit" else -transaction.cents
            sums[account] += change
            counts[account] += 1
            lines[account, versions[account]] = Line(change, sums[account])
    balances = {account: Balance(sums[account], counts[account]) for account in versions}
    return Counter(outcomes.keys()), Rows(outcomes, lines, balances, DailySums(len(lines), sums.total()))


def over_http(of: Bank) -> dict[Key, Answer | None]:
    """Every 20th command, answered with what is recorded in a flawless load."""
    _, rows = flawless(of)
    return {(one.stream, one.id): rows.outcomes[one.stream, one.id] for one in of.commands[19::20]}


def proof_of(of: Bank, found: Found, answers: dict[Key, Answer | None] | None = None) -> Proof:
    return prove(of.transactions, of.commands, *found, generate.totals(of.transactions), answers or {})


def test_a_flawless_load_is_proven(small: Bank) -> None:
    proof = proof_of(small, flawless(small), over_http(small))
    assert (proof.lost, proof.doubled, proof.disagreements) == (0, 0, ())
    assert (proof.accounts, proof.accepted, proof.rejected) == (9, 400, 0)
    assert proof.over_http == {"accepted": 20, "rejected": 0}
    assert proof.balance == proof.credits - proof.debits == generate.totals(small.transactions).balance


def test_distances_from_the_banks_own_balance_are_sorted_to_the_cent(small: Bank) -> None:
    shifts = {0: 50, 1: -50, 2: 51, 3: -100, 4: 101}
    off = [replace(t, balance=t.balance + shifts.get(n, 0)) for n, t in enumerate(small.transactions)]
    proof = proof_of(replace(small, transactions=off), flawless(small))
    assert proof.statement == {"within_0_50": 397, "within_1_00": 2, "beyond": 1}


def last(rows: Rows) -> tuple[str, int]:
    return max(rows.lines)


def command_of(rows: Rows, account: str, version: int) -> Key:
    """The command that led to a line."""
    return next(key for key, one in rows.outcomes.items() if (key[0], one.version) == (f"accounts/{account}", version))


def first_of(some: dict[Any, Any]) -> Any:
    return next(iter(some))


def lost_everywhere(log: Log, rows: Rows) -> None:
    key = command_of(rows, *last(rows))
    del log[key], rows.outcomes[key], rows.lines[last(rows)]


def other_line(**values: int) -> Change:
    return lambda _log, rows: rows.lines.update({last(rows): rows.lines[last(rows)]._replace(**values)})


def other_balance(**values: int) -> Change:
    return lambda _log, rows: rows.balances.update({last(rows)[0]: rows.balances[last(rows)[0]]._replace(**values)})


NEVER_SENT = ("accounts/19", "never-sent")
WRONG: dict[str, tuple[Change, tuple[int, int, bool]]] = {
    "no commit": (lambda log, _rows: log.pop(first_of(log)), (1, 0, False)),
    "no outcome": (lambda _log, rows: rows.outcomes.pop(first_of(rows.outcomes)), (1, 0, False)),
    "no line": (lambda _log, rows: rows.lines.pop(last(rows)), (1, 0, True)),
    "nothing of a command": (lost_everywhere, (1, 0, True)),
    "a second commit": (lambda log, _rows: log.update([first_of(log)]), (0, 1, False)),
    "a strange commit": (lambda log, _rows: log.update([NEVER_SENT]), (0, 1, False)),
    "a strange outcome": (lambda _log, rows: rows.outcomes.update({NEVER_SENT: Answer("accepted", 1)}), (0, 1, False)),
    "a second line": (
        lambda _log, rows: rows.lines.update({(last(rows)[0], 10_000): rows.lines[last(rows)]}),
        (0, 1, True),
    ),
    "another amount": (other_line(change=1), (0, 0, True)),
    "another running balance": (other_line(balance=1), (0, 0, True)),
    "another balance": (other_balance(balance=1), (0, 0, True)),
    "another count": (other_balance(transactions=1), (0, 0, True)),
    "no account": (lambda _log, rows: rows.balances.pop(last(rows)[0]), (0, 0, True)),
    "a strange account": (lambda _log, rows: rows.balances.update({"strange": Balance(0, 0)}), (0, 0, True)),
}
"""A change, and how many commands are lost and doubled then, and whether sums disagree."""


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_lost_or_doubled_or_different_shows(small: Bank, wrong: str) -> None:
    found = flawless(small)
    change, expected = WRONG[wrong]
    change(*found)
    proof = proof_of(small, found)
    assert (proof.lost, proof.doubled, bool(proof.disagreements)) == expected
    assert not result_of(small, found).holds


@pytest.mark.parametrize("off", [DailySums(-1, 0), DailySums(0, 1)])
def test_daily_totals_that_differ_from_the_statement_show(small: Bank, off: DailySums) -> None:
    log, rows = flawless(small)
    daily = DailySums(rows.daily.movements + off.movements, rows.daily.change + off.change)
    assert proof_of(small, (log, replace(rows, daily=daily))).disagreements


def test_a_rejection_moves_nothing_and_is_no_loss(small: Bank) -> None:
    log, rows = flawless(small)
    account, version = last(rows)
    key = command_of(rows, account, version)
    gone = rows.lines.pop((account, version))
    rows.outcomes[key] = Answer("rejected", version - 1)
    before = rows.balances[account]
    rows.balances[account] = Balance(before.balance - gone.change, before.transactions - 1)
    daily = DailySums(rows.daily.movements - 1, rows.daily.change - gone.change)
    found = log, replace(rows, daily=daily)
    proof = prove(small.transactions, small.commands, *found, None, {})
    assert (proof.accepted, proof.rejected, proof.lost, proof.doubled, proof.disagreements) == (399, 1, 0, 0, ())
    assert proof_of(small, found).disagreements, "and a bank of which all can be accepted has none"


@pytest.mark.parametrize("wrong", [{"outcome": "rejected"}, {"version": 0}, {"code": "no"}, None])
def test_answers_over_http_are_compared_with_what_is_recorded(small: Bank, wrong: dict[str, Any] | None) -> None:
    """Without an answer a command is lost."""
    found, answers = flawless(small), over_http(small)
    key = first_of(answers)
    proof = proof_of(small, found, answers | {key: None if wrong is None else found[1].outcomes[key]._replace(**wrong)})
    assert (proof.lost, proof.over_http["accepted"], len(proof.disagreements)) == (
        (1, 19, 0) if wrong is None else (0, 19, 1)
    )


def result_of(of: Bank, found: Found, **but: Any) -> Result:
    given: dict[str, Any] = {"kills": 0, "moved": Moved(), "verified": Verified()} | but
    options, proof = Options(kills=given["kills"]), proof_of(of, found)
    return Result(options, Path(), "", of, Loaded(), proof, given["moved"], Rebuilt(), given["verified"], {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"kills": 1},
        {"verified": Verified(positions=[Difference("balances", "extra", 0, {}, None, None)])},
        {"moved": Moved(violations=("P: …",))},
    ],
    ids=["a kill that was asked for", "a difference", "a transfer's violation"],
)
def test_the_proof_holds_only_if_all_of_it_does(small: Bank, wrong: dict[str, Any]) -> None:
    assert result_of(small, flawless(small)).holds
    assert not result_of(small, flawless(small), **wrong).holds
