"""The demo's proof must be able to fail: whatever is lost, doubled or different shows."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from demo import generate
from demo.bank import Bank, bank
from demo.load import Loaded
from demo.proof import Balance, DailySums, Key, Line, Proof, Rows, prove
from demo.run import Options, Result, money
from demo.sending import Answer
from demo.transfers import Moved
from projections.engine.rebuild.rebuild import Rebuilt
from projections.engine.verify.verify import Difference, Verified

Found = tuple[Counter[Key], Rows]
NO_TRANSFERS = Moved()


@pytest.fixture
def small(tmp_path: Path) -> Bank:
    """400 transactions, none beyond the limit."""
    generate.write(tmp_path / "few.csv.gz", generate.generate(accounts=9, transactions=400))
    return bank(tmp_path, tmp_path / "few.csv.gz", overdraft_limit=5_000_00, seed=None)


def flawless(of: Bank) -> Found:
    """The log and the rows that a bank leaves when each command takes effect once."""
    versions: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
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
    keys = [(command.stream, command.id) for command in of.commands[19::20]]
    return {key: rows.outcomes[key] for key in keys}


def proof_of(of: Bank, found: Found, answers: dict[Key, Answer | None] | None = None) -> Proof:
    log, rows = found
    return prove(of.transactions, of.commands, log, rows, generate.totals(of.transactions), answers or {})


def test_a_flawless_load_is_proven(small: Bank) -> None:
    proof = proof_of(small, flawless(small))
    assert (proof.lost, proof.doubled, proof.disagreements) == (0, 0, ())
    assert (proof.accounts, proof.accepted, proof.rejected) == (9, 400, 0)
    assert proof.statement == {"within_0_50": 400, "within_1_00": 0, "beyond": 0}
    assert proof.balance == proof.credits - proof.debits == generate.totals(small.transactions).balance


def test_distances_from_the_banks_own_balance_are_sorted_to_the_cent(small: Bank) -> None:
    shifts = {0: 50, 1: -50, 2: 51, 3: -100, 4: 101}
    off = [replace(t, balance=t.balance + shifts.get(n, 0)) for n, t in enumerate(small.transactions)]
    proof = proof_of(replace(small, transactions=off), flawless(small))
    assert proof.statement == {"within_0_50": 397, "within_1_00": 2, "beyond": 1}


def last(rows: Rows) -> tuple[str, int]:
    return max(rows.lines)


def without_commit(log: Counter[Key], rows: Rows) -> None:
    del log[next(iter(log))]


def without_outcome(log: Counter[Key], rows: Rows) -> None:
    del rows.outcomes[next(iter(rows.outcomes))]


def without_line(log: Counter[Key], rows: Rows) -> None:
    del rows.lines[last(rows)]


@pytest.mark.parametrize("lose", [without_commit, without_outcome, without_line])
def test_what_is_lost_shows(small: Bank, lose: Callable[[Counter[Key], Rows], None]) -> None:
    found = flawless(small)
    lose(*found)
    assert proof_of(small, found).lost == 1


def one_command_lost_everywhere(log: Counter[Key], rows: Rows) -> None:
    key = next(
        key for key, answer in rows.outcomes.items() if (key[0].removeprefix("accounts/"), answer.version) == last(rows)
    )
    del log[key], rows.outcomes[key], rows.lines[last(rows)]


def test_a_command_lost_everywhere_is_lost_once_and_differs_from_the_bank(small: Bank) -> None:
    found = flawless(small)
    one_command_lost_everywhere(*found)
    proof = proof_of(small, found)
    assert proof.lost == 1
    assert proof.disagreements


def with_second_commit(log: Counter[Key], rows: Rows) -> None:
    log[next(iter(log))] += 1


def with_strange_commit(log: Counter[Key], rows: Rows) -> None:
    log["accounts/19", "never-sent"] = 1


def with_strange_outcome(log: Counter[Key], rows: Rows) -> None:
    rows.outcomes["accounts/19", "never-sent"] = Answer("accepted", 1)


def with_second_line(log: Counter[Key], rows: Rows) -> None:
    account, version = last(rows)
    rows.lines[account, version + 1] = rows.lines[account, version]


@pytest.mark.parametrize("double", [with_second_commit, with_strange_commit, with_strange_outcome, with_second_line])
def test_what_is_doubled_shows(small: Bank, double: Callable[[Counter[Key], Rows], None]) -> None:
    found = flawless(small)
    double(*found)
    assert proof_of(small, found).doubled == 1


def with_other_amount(rows: Rows) -> None:
    rows.lines[last(rows)] = rows.lines[last(rows)]._replace(change=1)


def with_other_running_balance(rows: Rows) -> None:
    rows.lines[last(rows)] = rows.lines[last(rows)]._replace(balance=1)


def with_other_balance(rows: Rows) -> None:
    account = last(rows)[0]
    rows.balances[account] = rows.balances[account]._replace(balance=1)


def with_other_count(rows: Rows) -> None:
    account = last(rows)[0]
    rows.balances[account] = rows.balances[account]._replace(transactions=1)


def without_account(rows: Rows) -> None:
    del rows.balances[last(rows)[0]]


def with_strange_account(rows: Rows) -> None:
    rows.balances["strange"] = Balance(0, 0)


@pytest.mark.parametrize(
    "change",
    [
        with_other_amount,
        with_other_running_balance,
        with_other_balance,
        with_other_count,
        without_account,
        with_strange_account,
    ],
)
def test_rows_that_differ_from_the_file_show(small: Bank, change: Callable[[Rows], None]) -> None:
    found = flawless(small)
    change(found[1])
    proof = proof_of(small, found)
    assert (proof.lost, proof.doubled) == (0, 0)
    assert proof.disagreements


@pytest.mark.parametrize("sums", [DailySums(399, 0), DailySums(400, 1)])
def test_daily_totals_that_differ_from_the_statement_show(small: Bank, sums: DailySums) -> None:
    log, rows = flawless(small)
    same = DailySums(sums.movements, rows.daily.change + sums.change)
    assert proof_of(small, (log, replace(rows, daily=same))).disagreements


def test_a_rejection_moves_nothing_and_is_no_loss(small: Bank) -> None:
    log, rows = flawless(small)
    account, version = last(rows)
    key = next(
        key for key, answer in rows.outcomes.items() if key[0] == f"accounts/{account}" and answer.version == version
    )
    gone = rows.lines.pop((account, version))
    rows.outcomes[key] = Answer("rejected", version - 1)
    before = rows.balances[account]
    rows.balances[account] = Balance(before.balance - gone.change, before.transactions - 1)
    daily = DailySums(rows.daily.movements - 1, rows.daily.change - gone.change)
    found = log, replace(rows, daily=daily)
    proof = prove(small.transactions, small.commands, *found, None, {})
    assert (proof.accepted, proof.rejected, proof.lost, proof.doubled, proof.disagreements) == (399, 1, 0, 0, ())
    assert proof_of(small, found).disagreements, "and a bank of which all can be accepted has none"


def test_answers_over_http_are_compared_with_what_is_recorded(small: Bank) -> None:
    found = flawless(small)
    assert proof_of(small, found, over_http(small)).over_http == {"accepted": 20, "rejected": 0}
    key = random.choice(list(over_http(small)))
    recorded = found[1].outcomes[key]
    for wrong in (recorded._replace(outcome="rejected"), recorded._replace(version=0), recorded._replace(code="no")):
        proof = proof_of(small, found, over_http(small) | {key: wrong})
        assert (proof.lost, proof.over_http["accepted"], len(proof.disagreements)) == (0, 19, 1)


def test_an_answer_that_never_came_is_lost(small: Bank) -> None:
    answers = over_http(small)
    proof = proof_of(small, flawless(small), answers | {random.choice(list(answers)): None})
    assert (proof.lost, proof.over_http) == (1, {"accepted": 19, "rejected": 0})


def result_of(
    of: Bank, found: Found, kills: int = 0, verified: Verified | None = None, moved: Moved = NO_TRANSFERS
) -> Result:
    proof = proof_of(of, found)
    return Result(Options(kills=kills), Path(), "", of, Loaded(), proof, moved, Rebuilt(), verified or Verified(), {})


def test_the_last_line_has_money_with_two_decimals(small: Bank) -> None:
    found = result_of(small, flawless(small)).as_dict()
    totals = generate.totals(small.transactions)
    assert found == {
        "accounts": 9,
        "accepted": 400,
        "rejected": 0,
        "credits": f"{totals.credits / 100:.2f}",
        "debits": f"{totals.debits / 100:.2f}",
        "balance": f"{totals.balance / 100:.2f}",
        "statement": {"within_0_50": 400, "within_1_00": 0, "beyond": 0},
        "over_http": {"accepted": 0, "rejected": 0},
        "transfers": {"requested": 0, "completed": 0, "failed": 0, "in_flight": 0},
        "kills": {"handler": 0, "agent": 0, "policies": 0, "api": 0},
        "lost": 0,
        "doubled": 0,
        "differences": 0,
        "seconds": 0.0,
        "release": None,
    }
    assert [money(cents) for cents in (0, 5, -5, 123_456_789_012_345_67)] == [
        "0.00",
        "0.05",
        "-0.05",
        "123456789012345.67",
    ]


def test_the_proof_holds_only_if_all_of_it_does(small: Bank) -> None:
    assert result_of(small, flawless(small)).holds
    assert not result_of(small, flawless(small), kills=1).holds, "a kill that was asked for"
    differing = Difference("balances", "extra", 0, {}, None, None)
    assert not result_of(small, flawless(small), verified=Verified(positions=[differing])).holds
    assert not result_of(small, flawless(small), moved=Moved(violations=("P: …",))).holds
    for change in (without_line, with_second_line, lambda _log, rows: with_other_amount(rows)):
        found = flawless(small)
        change(*found)
        assert not result_of(small, found).holds
