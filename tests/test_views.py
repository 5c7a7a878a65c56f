"""make test: functions without a store. The sample views: given these events of one account, those rows."""

from collections.abc import Sequence
from datetime import UTC, date, datetime

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from domain import transfers
from domain.accounts import (
    AccountClosed,
    AccountOpened,
    Command,
    Details,
    Event,
    FeeCharged,
    HoldReleased,
    InterestCredited,
    MoneyDeposited,
    MoneyReturned,
    MoneyWithdrawn,
    Movement,
    OpenAccount,
    State,
    decide,
    evolve,
)
from domain.language import Refusal
from domain.transfers import (
    CreditRefused,
    SourceDebited,
    SourceDebitedTooLate,
    TransferCompleted,
    TransferFailed,
    TransferRefunded,
    TransferRequested,
    TransferTimedOut,
)
from projections import balances, daily_totals, statement
from projections import transfers as transfers_view
from projections.balances import Balance
from projections.daily_totals import DailyTotal
from projections.engine import At
from projections.statement import Line
from projections.transfers import Transfer
from tools.testing.facts import facts, members

MONDAY, TUESDAY, FRIDAY, SUNDAY = (date(1993, 2, day) for day in (1, 2, 5, 7))
RENT = Details(operation="transfer out", purpose="household", counter_bank="YZ", counter_account="87144583")

LIFE: list[Event] = [
    AccountOpened(overdraft_limit=500, on=MONDAY, owner="ada"),
    MoneyDeposited(cents=900, on=MONDAY, details=Details(operation="cash deposit")),
    MoneyWithdrawn(cents=1_000, on=TUESDAY, details=RENT),
    InterestCredited(cents=7, on=TUESDAY),
    FeeCharged(cents=30, on=TUESDAY, details=Details(operation="cash withdrawal", purpose="statement fee")),
    MoneyDeposited(cents=123, on=FRIDAY),
    AccountClosed(on=SUNDAY),
]


def balance_after(events: Sequence[Event]) -> Balance | None:
    row = None
    for version, event in enumerate(events, start=1):
        if isinstance(event, AccountOpened | Movement | AccountClosed):
            row = balances.evolve(row, event, At("accounts/576", version))
    return row


def lines_of(events: Sequence[Event]) -> list[Line]:
    state, lines = State(), list[Line]()
    for version, event in enumerate(events, start=1):
        state = evolve(state, event)
        if isinstance(event, Movement):
            lines += statement.rows(event, state, At("accounts/576", version))
    return lines


def increments_of(events: Sequence[Event]) -> list[DailyTotal]:
    movements = [event for event in events if isinstance(event, Movement)]
    return [row for event in movements for row in daily_totals.delta(event, At("accounts/576"))]


# Balances


@pytest.mark.parametrize(
    ("events", "row"),
    [
        (LIFE[:1], Balance("576", 0, 500, MONDAY, MONDAY, 0, None, "ada")),
        (LIFE[:2], Balance("576", 900, 500, MONDAY, MONDAY, 1, None, "ada")),
        (LIFE[:3], Balance("576", -100, 500, MONDAY, TUESDAY, 2, None, "ada")),
        (LIFE[:6], Balance("576", 0, 500, MONDAY, FRIDAY, 5, None, "ada")),
        (LIFE, Balance("576", 0, 500, MONDAY, SUNDAY, 5, SUNDAY, "ada")),
    ],
)
def test_a_balance_is_what_all_events_left(events: Sequence[Event], row: Balance) -> None:
    assert balance_after(events) == row


@pytest.mark.parametrize("event", LIFE[1:], ids=lambda event: type(event).__name__)
def test_a_log_that_does_not_begin_with_the_opening_is_noticed(event: Event) -> None:
    with pytest.raises(ValueError, match=r"accounts/576: .* never opened"):
        balance_after([event])


# Statement


def test_a_statement_has_a_line_for_each_movement_with_the_balance_after_it() -> None:
    assert lines_of(LIFE) == [
        Line("576", 2, MONDAY, "deposit", "cash deposit", "", "", "", 900, 900, "ada"),
        Line("576", 3, TUESDAY, "withdrawal", "transfer out", "household", "YZ", "87144583", -1_000, -100, "ada"),
        Line("576", 4, TUESDAY, "interest", "", "", "", "", 7, -93, "ada"),
        Line("576", 5, TUESDAY, "fee", "cash withdrawal", "statement fee", "", "", -30, -123, "ada"),
        Line("576", 6, FRIDAY, "deposit", "", "", "", "", 123, 0, "ada"),
    ]


# Daily totals


def test_a_movement_counts_for_its_day_and_operation() -> None:
    assert increments_of(LIFE) == [
        DailyTotal(MONDAY, "cash deposit", count=1, cents=900, largest=900),
        DailyTotal(TUESDAY, "transfer out", count=1, cents=-1_000, largest=1_000),
        DailyTotal(TUESDAY, "interest", count=1, cents=7, largest=7),
        DailyTotal(TUESDAY, "cash withdrawal", count=1, cents=-30, largest=30),
        DailyTotal(FRIDAY, "deposit", count=1, cents=123, largest=123),
    ]


# Money that was on hold


HELD: list[Event] = [
    AccountOpened(overdraft_limit=500, on=MONDAY, owner="ada"),
    MoneyWithdrawn(cents=300, on=MONDAY, hold="t1"),
    MoneyWithdrawn(cents=40, on=MONDAY, hold="t2"),
    MoneyReturned(hold="t1", cents=300, on=TUESDAY),
    HoldReleased(hold="t2"),
]


def test_money_that_comes_back_is_a_movement_and_a_released_hold_is_none() -> None:
    assert balance_after(HELD) == Balance("576", -40, 500, MONDAY, TUESDAY, 3, None, "ada")
    assert lines_of(HELD)[2:] == [Line("576", 4, TUESDAY, "return", "", "", "", "", 300, -40, "ada")]
    assert increments_of(HELD)[2:] == [DailyTotal(TUESDAY, "return", count=1, cents=300, largest=300)]


# Transfers

SECONDS = [datetime(2026, 11, 23, 12, 0, second, tzinfo=UTC) for second in range(4)]
REQUESTED = TransferRequested(source="ada", target="bob", cents=500, on=MONDAY)
DEBITED = SourceDebited(source="ada", target="bob", cents=500, on=MONDAY)
TOO_LATE = SourceDebitedTooLate(source="ada", on=MONDAY)
REFUSED = CreditRefused(source="ada", on=MONDAY, refusal="account-is-closed")


@pytest.mark.parametrize(
    ("events", "state", "refusal"),
    [
        ([], "requested", ""),
        ([DEBITED], "debited", ""),
        ([DEBITED, TransferCompleted(source="ada")], "completed", ""),
        ([TransferFailed(refusal="insufficient-funds")], "failed", "insufficient-funds"),
        ([TransferTimedOut()], "timed-out", "timed-out"),
        ([TransferTimedOut(), TransferFailed(refusal="account-not-open")], "failed", "account-not-open"),
        ([TransferTimedOut(), TOO_LATE], "refunding", "timed-out"),
        ([TransferTimedOut(), TOO_LATE, TransferRefunded()], "refunded", "timed-out"),
        ([DEBITED, REFUSED], "refunding", "account-is-closed"),
        ([DEBITED, REFUSED, TransferRefunded()], "refunded", "account-is-closed"),
    ],
)
def test_a_transfer_shows_its_state_since_when_and_why(events: list[transfers.Event], state: str, refusal: str) -> None:
    row = None
    for version, event in enumerate([REQUESTED, *events]):
        at = At("transfers/7", version + 1, int(SECONDS[version].timestamp() * 1000))
        row = transfers_view.evolve(row, event, at)
    assert row == Transfer("7", state, "ada", "bob", 500, MONDAY, refusal, SECONDS[0], SECONDS[len(events)])


def test_a_log_without_the_request_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"transfers/7: SourceDebited of a transfer that was never requested"):
        transfers_view.evolve(None, DEBITED, At("transfers/7"))


# All three views of an account


@settings(deadline=None)
@for_all(commands=st.lists(st.one_of([facts(cls) for cls in members(Command)]), max_size=20))
def test_the_views_agree_on_what_the_account_holds(commands: list[Command]) -> None:
    state, life = State(), list[Event]()
    for command in [OpenAccount(overdraft_limit=10**13, on=MONDAY), *commands]:
        try:
            decided = decide(command, state)
        except Refusal:
            continue
        for event in decided:
            state = evolve(state, event)
            life.append(event)
    balance, lines, totals = balance_after(life), lines_of(life), increments_of(life)
    assert balance is not None
    assert (balance.cents, balance.transactions) == (state.balance, len(lines))
    assert sum(line.cents for line in lines) == state.balance == (lines[-1].balance if lines else 0)
    assert sum(total.cents for total in totals) == state.balance
    assert sum(total.count for total in totals) == len(lines)
