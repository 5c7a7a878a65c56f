"""make test: functions without a store.

The sample bank: given these events, when this command, then those events or that refusal."""

from dataclasses import replace
from datetime import date
from functools import reduce
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import ValidationError

from domain import accounts
from domain.accounts import (
    LARGEST_BALANCE,
    MOST_HOLDS,
    AccountAlreadyOpen,
    AccountClosed,
    AccountIsClosed,
    AccountNotOpen,
    AccountOpened,
    BalanceNotZero,
    BalanceTooLarge,
    ChargeFee,
    CloseAccount,
    Command,
    CreditInterest,
    Deposit,
    Details,
    Event,
    FeeCharged,
    HoldExists,
    HoldReleased,
    InsufficientFunds,
    InterestCredited,
    MoneyDeposited,
    MoneyOnHold,
    MoneyReturned,
    MoneyWithdrawn,
    NoSuchHold,
    OpenAccount,
    ReleaseHold,
    ReturnMoney,
    State,
    TooManyHolds,
    Withdraw,
    decide,
    evolve,
)
from domain.language import Refusal
from tools.testing.facts import facts, members

TODAY = date(1993, 1, 31)
RENT = Details(operation="transfer out", purpose="household", counter_bank="YZ", counter_account="87144583")

OPENED = AccountOpened(overdraft_limit=200, on=TODAY, owner="ada")
CLOSED = AccountClosed(on=TODAY)


def given(*events: Event) -> State:
    return reduce(evolve, events, State())


def deposited(cents: int) -> MoneyDeposited:
    return MoneyDeposited(cents=cents, on=TODAY)


# Open


def test_opening_opens() -> None:
    assert decide(OpenAccount(overdraft_limit=200, on=TODAY, owner="ada"), given()) == [OPENED]
    assert given(OPENED) == State("open", 0, 200, owner="ada")


def test_an_open_account_is_not_opened_again() -> None:
    with pytest.raises(AccountAlreadyOpen):
        decide(OpenAccount(overdraft_limit=200, on=TODAY), given(OPENED))


# Deposit


def test_a_deposit_keeps_what_the_books_say() -> None:
    command = Deposit(cents=300, on=TODAY, details=RENT)
    assert decide(command, given(OPENED)) == [MoneyDeposited(cents=300, on=TODAY, details=RENT)]
    assert given(OPENED, deposited(300), deposited(4)).balance == 304


# Withdraw


def test_a_withdrawal_may_use_the_overdraft_limit_to_the_last_cent() -> None:
    command = Withdraw(cents=700, on=TODAY, details=RENT)
    withdrawn = MoneyWithdrawn(cents=700, on=TODAY, details=RENT)
    assert decide(command, given(OPENED, deposited(500))) == [withdrawn]
    assert given(OPENED, deposited(500), withdrawn).balance == -200


def test_a_withdrawal_beyond_the_limit_is_refused() -> None:
    with pytest.raises(InsufficientFunds):
        decide(Withdraw(cents=701, on=TODAY), given(OPENED, deposited(500)))


# Interest


def test_interest_is_credited() -> None:
    credited = InterestCredited(cents=7, on=TODAY, details=Details(purpose="interest"))
    command = CreditInterest(cents=7, on=TODAY, details=Details(purpose="interest"))
    assert decide(command, given(OPENED)) == [credited]
    assert given(OPENED, credited).balance == 7


# Fee


def test_a_fee_may_pass_the_overdraft_limit() -> None:
    charged = FeeCharged(cents=201, on=TODAY, details=Details(purpose="statement fee"))
    command = ChargeFee(cents=201, on=TODAY, details=Details(purpose="statement fee"))
    assert decide(command, given(OPENED)) == [charged]
    assert given(OPENED, charged).balance == -201


# As much as the bank can keep


@pytest.mark.parametrize(
    ("command", "event", "balance"),
    [
        (Deposit(cents=1, on=TODAY), deposited(1), LARGEST_BALANCE),
        (CreditInterest(cents=1, on=TODAY), InterestCredited(cents=1, on=TODAY), LARGEST_BALANCE),
        (ChargeFee(cents=1, on=TODAY), FeeCharged(cents=1, on=TODAY), -LARGEST_BALANCE),
    ],
)
def test_a_balance_goes_as_far_as_the_bank_can_keep_and_no_further(
    command: Command, event: Event, balance: int
) -> None:
    nearly = State("open", balance - 1 if balance > 0 else balance + 1, 0)
    assert decide(command, nearly) == [event]
    with pytest.raises(BalanceTooLarge):
        decide(command, State("open", balance, 0))


# Holds

HELD = MoneyWithdrawn(cents=60, on=TODAY, hold="t1")


def test_a_withdrawal_with_a_hold_remembers_what_may_come_back() -> None:
    command = Withdraw(cents=60, on=TODAY, hold="t1")
    assert decide(command, given(OPENED)) == [HELD]
    assert given(OPENED, HELD) == State("open", -60, 200, {"t1": 60}, "ada")


def test_a_withdrawal_without_a_hold_remembers_nothing() -> None:
    assert given(OPENED, MoneyWithdrawn(cents=60, on=TODAY)) == State("open", -60, 200, owner="ada")


def test_a_reference_holds_once_at_a_time() -> None:
    command = Withdraw(cents=1, on=TODAY, hold="t1")
    with pytest.raises(HoldExists):
        decide(command, given(OPENED, HELD))
    assert decide(command, given(OPENED, HELD, HoldReleased(hold="t1")))


def test_an_account_has_a_bounded_number_of_holds() -> None:
    full_of_holds = State("open", 500, 0, {str(number): 1 for number in range(MOST_HOLDS)})
    with pytest.raises(TooManyHolds):
        decide(Withdraw(cents=1, on=TODAY, hold="one more"), full_of_holds)
    assert decide(Withdraw(cents=1, on=TODAY), full_of_holds)


def test_what_is_on_hold_comes_back_as_it_went() -> None:
    returned = MoneyReturned(hold="t1", cents=60, on=TODAY)
    assert decide(ReturnMoney(hold="t1", on=TODAY), given(OPENED, HELD)) == [returned]
    assert given(OPENED, HELD, returned) == given(OPENED)


def test_a_released_hold_is_gone_and_the_money_too() -> None:
    assert decide(ReleaseHold(hold="t1"), given(OPENED, HELD)) == [HoldReleased(hold="t1")]
    assert given(OPENED, HELD, HoldReleased(hold="t1")) == State("open", -60, 200, owner="ada")


@pytest.mark.parametrize("command", [ReturnMoney(hold="t2", on=TODAY), ReleaseHold(hold="t2"), ReleaseHold(hold="")])
def test_without_a_hold_nothing_comes_back_or_is_released(command: Command) -> None:
    with pytest.raises(NoSuchHold):
        decide(command, given(OPENED, HELD))


@pytest.mark.parametrize("credit", [Deposit(cents=1, on=TODAY), CreditInterest(cents=1, on=TODAY)])
def test_what_may_come_back_has_its_room_in_the_balance(credit: Command) -> None:
    state = State("open", LARGEST_BALANCE - 60, 0, {"t1": 60})
    with pytest.raises(BalanceTooLarge):
        decide(credit, state)
    [returned] = decide(ReturnMoney(hold="t1", on=TODAY), state)
    assert evolve(state, returned).balance == LARGEST_BALANCE


# Close


@pytest.mark.parametrize("events", [[deposited(60), HELD], [HELD]], ids=["empty", "overdrawn"])
def test_an_account_is_not_closed_while_money_may_come_back(events: list[Event]) -> None:
    with pytest.raises(MoneyOnHold):
        decide(CloseAccount(on=TODAY), given(OPENED, *events))


def test_an_empty_account_is_closed() -> None:
    assert decide(CloseAccount(on=TODAY), given(OPENED)) == [CLOSED]
    assert given(OPENED, CLOSED).status == "closed"


@pytest.mark.parametrize("movement", [deposited(1), FeeCharged(cents=1, on=TODAY)])
def test_an_account_with_money_or_debt_on_it_is_not_closed(movement: Event) -> None:
    with pytest.raises(BalanceNotZero):
        decide(CloseAccount(on=TODAY), given(OPENED, movement))


# Every command and every event, present and future


EVERY_COMMAND = pytest.mark.parametrize("cls", members(Command), ids=lambda cls: cls.__name__)

references = st.sampled_from(["", "t1", "t2", "t3"])


def of_few_holds(union: Any) -> st.SearchStrategy[Any]:
    """Facts of a union, whose holds meet."""
    return st.one_of(
        [
            st.builds(replace, facts(cls), **({"hold": references} if hasattr(cls, "hold") else {}))
            for cls in members(union)
        ]
    )


def sound(status: str, balance: int, limit: int, holds: dict[str, int]) -> State:
    """A closed account has no holds, and there is always room for what may come back."""
    if status != "open":
        return State(status, balance, limit)  # type: ignore[arg-type]
    return State("open", min(balance, LARGEST_BALANCE - sum(holds.values())), limit, holds)


any_command = of_few_holds(Command)
any_event = of_few_holds(Event)
any_state = st.builds(
    sound,
    st.sampled_from(["new", "open", "closed"]),
    st.integers(-LARGEST_BALANCE, LARGEST_BALANCE),
    st.integers(0, 10**14),
    st.dictionaries(st.sampled_from(["t1", "t2", "t3"]), st.integers(1, 10**14)),
)


@EVERY_COMMAND
@settings(deadline=None)
@for_all(data=st.data())
def test_nothing_happens_on_an_account_that_is_not_open(cls: type, data: st.DataObject) -> None:
    command = data.draw(facts(cls))
    with pytest.raises(AccountIsClosed):
        decide(command, given(OPENED, CLOSED))
    if cls is not OpenAccount:
        with pytest.raises(AccountNotOpen):
            decide(command, given())


@settings(deadline=None)
@for_all(state=any_state, commands=st.lists(any_command, max_size=20))
def test_whatever_is_asked_for_the_account_stays_sound(state: State, commands: list[Command]) -> None:
    for command in commands:
        try:
            events = decide(command, state)
        except Refusal:
            assert not (isinstance(command, ReturnMoney) and command.hold in state.holds), "money can always come back"
            continue
        for event in events:
            state = evolve(state, event)
            if isinstance(event, MoneyWithdrawn):
                assert state.balance >= -state.overdraft_limit
            if isinstance(event, AccountClosed):
                assert state.balance == 0
                assert not state.holds
        assert abs(state.balance) <= LARGEST_BALANCE


@settings(deadline=None)
@for_all(event=any_event, history=st.lists(any_event, max_size=10))
def test_evolve_takes_every_event_after_every_history(event: Event, history: list[Event]) -> None:
    assert isinstance(evolve(given(*history), event), State)


# What is no fact


@pytest.mark.parametrize("cents", ["5", True, 5.0, None, 0, 10**14 + 1])
def test_code_can_not_make_what_json_may_not_say(cents: object) -> None:
    with pytest.raises(ValidationError):
        Deposit(cents=cents, on=TODAY)  # type: ignore[arg-type]


def test_a_line_of_text_does_not_end_with_a_line_break() -> None:
    with pytest.raises(ValidationError):
        Details(purpose="rent\n")


# Refusals


REFUSALS = [cls for cls in vars(accounts).values() if isinstance(cls, type) and issubclass(cls, Refusal)]


def test_refusals_have_a_code_and_a_sentence() -> None:
    assert InsufficientFunds.code == "insufficient-funds"
    assert str(InsufficientFunds()) == "The balance and the overdraft limit do not cover the amount."
    codes = {cls.code for cls in REFUSALS if cls is not Refusal}
    assert len(codes) == len(REFUSALS) - 1, "two refusals of one context can't be told apart"


def test_a_refusal_without_a_sentence_can_not_be_declared() -> None:
    with pytest.raises(TypeError, match="Silent"):
        type("Silent", (Refusal,), {})
