"""The sample views: given these events of one account, those rows."""

from collections.abc import Sequence
from datetime import date

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from domain.accounts import (
    AccountClosed,
    AccountOpened,
    Command,
    Details,
    Event,
    FeeCharged,
    InterestCredited,
    MoneyDeposited,
    MoneyWithdrawn,
    Movement,
    OpenAccount,
    State,
    decide,
    evolve,
)
from domain.language import Refusal
from infra.testing.facts import facts, members
from projections import balances, daily_totals, statement
from projections.balances import Balance
from projections.daily_totals import DailyTotal
from projections.engine import At
from projections.statement import Line

MONDAY, TUESDAY, FRIDAY, SUNDAY = (date(1993, 2, day) for day in (1, 2, 5, 7))
RENT = Details(operation="transfer out", purpose="household", counter_bank="YZ", counter_account="87144583")

LIFE: list[Event] = [
    AccountOpened(overdraft_limit=500, on=MONDAY),
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
        (LIFE[:1], Balance("576", 0, 500, MONDAY, MONDAY, 0, None)),
        (LIFE[:2], Balance("576", 900, 500, MONDAY, MONDAY, 1, None)),
        (LIFE[:3], Balance("576", -100, 500, MONDAY, TUESDAY, 2, None)),
        (LIFE[:6], Balance("576", 0, 500, MONDAY, FRIDAY, 5, None)),
        (LIFE, Balance("576", 0, 500, MONDAY, SUNDAY, 5, SUNDAY)),
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
        Line("576", 2, MONDAY, "deposit", "cash deposit", "", "", "", 900, 900),
        Line("576", 3, TUESDAY, "withdrawal", "transfer out", "household", "YZ", "87144583", -1_000, -100),
        Line("576", 4, TUESDAY, "interest", "", "", "", "", 7, -93),
        Line("576", 5, TUESDAY, "fee", "cash withdrawal", "statement fee", "", "", -30, -123),
        Line("576", 6, FRIDAY, "deposit", "", "", "", "", 123, 0),
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


# All three


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
