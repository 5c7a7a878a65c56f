"""make test: functions without a store.

Standing orders: an instalment a month, whatever the month's length, until the order is cancelled."""

from datetime import UTC, date, datetime
from functools import reduce

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from domain.standing_orders import (
    AlreadyPlaced,
    CancelStandingOrder,
    Command,
    Event,
    FirstOutOfRange,
    InstalmentDue,
    NotTheNextInstalment,
    OrderNotActive,
    PayInstalment,
    PlaceStandingOrder,
    StandingOrderCancelled,
    StandingOrderPlaced,
    State,
    decide,
    evolve,
)
from domain.transfers import RequestTransfer, SameAccount
from policies.engine import At, Send
from policies.standing_orders import react
from tools.testing.facts import facts, members

LAST_OF_JANUARY, LAST_OF_FEBRUARY = date(2027, 1, 31), date(2027, 2, 28)
PLACED = StandingOrderPlaced(source="ada", target="bob", cents=900, first=LAST_OF_JANUARY)
DUE = InstalmentDue(source="ada", target="bob", cents=900, on=LAST_OF_JANUARY, following=LAST_OF_FEBRUARY)
CANCELLED = StandingOrderCancelled()


def given(*events: Event) -> State:
    return reduce(evolve, events, State())


def place(first: date = LAST_OF_JANUARY, target: str = "bob") -> PlaceStandingOrder:
    return PlaceStandingOrder(source="ada", target=target, cents=900, first=first)


def test_an_order_is_placed_once() -> None:
    assert decide(place(), State()) == [PLACED]
    for state in (given(PLACED), given(PLACED, CANCELLED)):
        with pytest.raises(AlreadyPlaced):
            decide(place(), state)


def test_an_order_to_the_same_account_is_refused() -> None:
    with pytest.raises(SameAccount):
        decide(place(target="ada"), State())


@pytest.mark.parametrize("first", [date(1999, 12, 31), date(3000, 1, 1), date.min, date.max])
def test_a_first_day_far_away_is_refused(first: date) -> None:
    with pytest.raises(FirstOutOfRange):
        decide(place(first), State())


def test_an_instalment_names_the_following_one() -> None:
    assert decide(PayInstalment(on=LAST_OF_JANUARY), given(PLACED)) == [DUE]


@pytest.mark.parametrize("on", [LAST_OF_JANUARY, date(2027, 2, 27), date(2027, 3, 28)])
def test_only_the_next_instalment_is_paid(on: date) -> None:
    with pytest.raises(NotTheNextInstalment):
        decide(PayInstalment(on=on), given(PLACED, DUE))


@pytest.mark.parametrize("events", [[], [PLACED, CANCELLED]], ids=["never placed", "cancelled"])
@pytest.mark.parametrize("command", [PayInstalment(on=LAST_OF_JANUARY), CancelStandingOrder()])
def test_without_an_active_order_nothing_is_paid_or_cancelled(command: Command, events: list[Event]) -> None:
    with pytest.raises(OrderNotActive):
        decide(command, given(*events))


def test_a_timer_after_the_cancellation_is_refused() -> None:
    assert decide(CancelStandingOrder(), given(PLACED, DUE)) == [CANCELLED]
    with pytest.raises(OrderNotActive):
        decide(PayInstalment(on=LAST_OF_FEBRUARY), given(PLACED, DUE, CANCELLED))


@settings(deadline=None)
@for_all(
    event=st.one_of([facts(cls) for cls in members(Event)]), history=st.sampled_from([[], [PLACED], [PLACED, DUE]])
)
def test_evolve_takes_every_event_after_every_history(event: Event, history: list[Event]) -> None:
    assert isinstance(evolve(given(*history), event), State)


# The policy: a timer pays an instalment, which sets the next timer


def played(first: date, instalments: int, order: str = "rent") -> list[Send]:
    """The transfers of an order whose timers go off one after the other."""
    at, state = At(f"standing_orders/{order}"), State()
    transfers, commands = list[Send](), list[Command]([place(first)])
    while len(transfers) < instalments:
        for event in decide(commands.pop(), state):
            state = evolve(state, event)
            assert isinstance(event, StandingOrderPlaced | InstalmentDue)
            *requested, timer = react(event, at)
            assert isinstance(timer.command, PayInstalment)
            on = timer.command.on
            assert (timer.stream, timer.due) == (at.stream, datetime(on.year, on.month, on.day, tzinfo=UTC))
            transfers += requested
            commands.append(timer.command)
    return transfers


def test_instalments_of_the_past_follow_one_another_a_second_apart() -> None:
    """The engine ends a chain of timers that are due at once as one that is too deep."""
    at = At("standing_orders/rent", 1, int(datetime(2027, 3, 1, 12, tzinfo=UTC).timestamp() * 1000))
    [first] = react(PLACED, at)
    [_, second] = react(DUE, at)
    assert first.due == second.due == datetime(2027, 3, 1, 12, 0, 1, tzinfo=UTC)
    assert first.ignore == second.ignore == (OrderNotActive,)


def test_an_instalment_is_a_transfer_of_its_month() -> None:
    transfer = RequestTransfer(source="ada", target="bob", cents=900, on=LAST_OF_JANUARY)
    assert played(LAST_OF_JANUARY, 1) == [Send("transfers/rent202701", transfer)]


def test_shorter_months_pay_on_their_last_day_and_longer_ones_again_on_the_31st() -> None:
    days = [transfer.command.on for transfer in played(date(2027, 12, 31), 6)]
    assert [(day.month, day.day) for day in days] == [(12, 31), (1, 31), (2, 29), (3, 31), (4, 30), (5, 31)]


@settings(deadline=None)
@for_all(first=st.dates(date(2000, 1, 1), date(2999, 12, 31)), months=st.integers(1, 40))
def test_each_month_has_one_instalment(first: date, months: int) -> None:
    transfers = played(first, months)
    days = [transfer.command.on for transfer in transfers]
    assert days[0] == first
    assert [12 * day.year + day.month for day in days] == [
        12 * first.year + first.month + later for later in range(months)
    ]
    assert {day.day for day in days} <= {first.day, *range(28, first.day)}
    assert len({transfer.stream for transfer in transfers}) == months


def test_the_longest_name_of_an_order_still_makes_a_valid_transfer() -> None:
    """The engine refuses names of streams beyond 200 bytes."""
    [transfer] = played(LAST_OF_JANUARY, 1, order="x" * (200 - len("standing_orders/")))
    assert len(transfer.stream) <= 200
