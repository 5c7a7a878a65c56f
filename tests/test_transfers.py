"""make test: functions without a store.

Transfers: what each command means at each step, and that no order of answers, timers and repeats loses or makes money."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import Any, NamedTuple

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import ValidationError

from domain.accounts import (
    LARGEST_BALANCE,
    ChargeFee,
    CloseAccount,
    Deposit,
    Details,
    OpenAccount,
    ReleaseHold,
    ReturnMoney,
    Withdraw,
    change,
)
from domain.engine.contexts import contexts
from domain.language import Refusal
from domain.transfers import (
    Command,
    CompleteTransfer,
    CreditRefused,
    Event,
    FailTransfer,
    GiveUp,
    RecordDebit,
    RecordRefund,
    RefundTransfer,
    RequestTransfer,
    SameAccount,
    SourceDebited,
    SourceDebitedTooLate,
    State,
    TransferAlreadyRequested,
    TransferCompleted,
    TransferFailed,
    TransferMovedOn,
    TransferNotRequested,
    TransferRefunded,
    TransferRequested,
    TransferTimedOut,
    decide,
    evolve,
)
from policies.engine import At, Post, Send
from policies.engine.policy import discover
from policies.transfers import react
from tools.testing.facts import facts, members

TODAY = date(2026, 11, 23)

REQUEST = RequestTransfer(source="ada", target="bob", cents=500, on=TODAY)
REQUESTED = TransferRequested(source="ada", target="bob", cents=500, on=TODAY)
DEBITED = SourceDebited(source="ada", target="bob", cents=500, on=TODAY)
TIMED_OUT = TransferTimedOut()
TOO_LATE = SourceDebitedTooLate(source="ada", on=TODAY)
REFUSED = CreditRefused(source="ada", on=TODAY, refusal="account-is-closed")
COMPLETED = TransferCompleted(source="ada")
FAILED = TransferFailed(refusal="insufficient-funds")
REFUNDED = TransferRefunded()

STEPS: dict[str, list[Event]] = {
    "new": [],
    "requested": [REQUESTED],
    "timed-out": [REQUESTED, TIMED_OUT],
    "debited": [REQUESTED, DEBITED],
    "refunding": [REQUESTED, DEBITED, REFUSED],
    "completed": [REQUESTED, DEBITED, COMPLETED],
    "failed": [REQUESTED, FAILED],
    "refunded": [REQUESTED, DEBITED, REFUSED, REFUNDED],
}
MEANS: dict[tuple[Command, str], Event] = {
    (REQUEST, "new"): REQUESTED,
    (RecordDebit(), "requested"): DEBITED,
    (RecordDebit(), "timed-out"): TOO_LATE,
    (FailTransfer(refusal="insufficient-funds"), "requested"): FAILED,
    (FailTransfer(refusal="insufficient-funds"), "timed-out"): FAILED,
    (GiveUp(), "requested"): TIMED_OUT,
    (CompleteTransfer(), "debited"): COMPLETED,
    (RefundTransfer(refusal="account-is-closed"), "debited"): REFUSED,
    (RecordRefund(), "refunding"): REFUNDED,
}
ENDS = (TransferCompleted, TransferFailed, TransferRefunded)


def given(*events: Event) -> State:
    return reduce(evolve, events, State())


# Each command at each step


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("command", dict.fromkeys(command for command, _ in MEANS), ids=lambda one: type(one).__name__)
def test_a_command_means_something_at_its_steps_and_is_refused_by_name_at_all_others(
    command: Command, step: str
) -> None:
    state = given(*STEPS[step])
    assert state.step == step
    if (command, step) in MEANS:
        assert decide(command, state) == [MEANS[command, step]]
        return
    if isinstance(command, GiveUp) and step != "new":
        assert decide(command, state) == [], "a timer that is pointless"
        return
    expected = TransferNotRequested if step == "new" else TransferMovedOn
    with pytest.raises(TransferAlreadyRequested if command is REQUEST else expected):
        decide(command, state)


def test_every_command_is_in_the_table() -> None:
    assert {type(command) for command, _ in MEANS} == set(members(Command))


def test_a_transfer_to_the_same_account_is_refused() -> None:
    with pytest.raises(SameAccount):
        decide(replace(REQUEST, target="ada"), State())


@pytest.mark.parametrize("name", ["", "x" * 46, "a\nb", "a\x00b"])
def test_what_can_not_be_an_account_is_no_request(name: str) -> None:
    with pytest.raises(ValidationError):
        RequestTransfer(source=name, target="bob", cents=1, on=TODAY)


@settings(deadline=None)
@for_all(event=st.one_of([facts(cls) for cls in members(Event)]), step=st.sampled_from(sorted(STEPS)))
def test_evolve_takes_every_event_at_every_step(event: Event, step: str) -> None:
    assert isinstance(evolve(given(*STEPS[step]), event), State)


# The policy

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
AT = At("transfers/7", 1, int(NOON.timestamp() * 1000))


def wishes(event: Any) -> list[Send]:
    return list(react(event, AT))


def test_a_request_is_a_withdrawal_with_a_hold_and_a_timer() -> None:
    withdraw = Withdraw(cents=500, on=TODAY, details=Details(counter_account="bob"), hold="7")
    assert wishes(REQUESTED) == [
        Send(
            "accounts/ada",
            withdraw,
            then=RecordDebit(),
            otherwise=FailTransfer(),
            later=GiveUp(),
            after=timedelta(minutes=5),
        )
    ]


def test_a_debit_is_followed_by_the_credit() -> None:
    deposit = Deposit(cents=500, on=TODAY, details=Details(counter_account="ada"))
    assert wishes(DEBITED) == [Send("accounts/bob", deposit, then=CompleteTransfer(), otherwise=RefundTransfer())]


@pytest.mark.parametrize("event", [TOO_LATE, REFUSED])
def test_money_that_can_not_arrive_goes_back(event: Event) -> None:
    assert wishes(event) == [Send("accounts/ada", ReturnMoney(hold="7", on=TODAY), then=RecordRefund())]


def test_a_completed_transfer_releases_the_hold() -> None:
    assert wishes(COMPLETED) == [Send("accounts/ada", ReleaseHold(hold="7"))]


@pytest.mark.parametrize("letter", ["x", "é", "€", "🦉"])
def test_the_longest_names_still_make_valid_commands(letter: str) -> None:
    """The engine refuses names of streams beyond 200 bytes."""
    longest = "t" * (200 - len("transfers/"))
    event = TransferRequested(source=letter * 45, target=letter * 44, cents=1, on=TODAY)
    for wish in react(event, At(f"transfers/{longest}")):
        assert len(wish.stream.encode()) <= 200


# All orders of what may happen


class Message(NamedTuple):
    """A command under way. `source` is the stream whose policy wished it; a client's has none."""

    id: str
    stream: str
    command: Any
    source: str = ""
    then: Any = None
    otherwise: Any = None
    later: Any = None


class World:
    """Streams in memory. Commands arrive in any order, some twice; a stream takes each id once. Timers go off at any time.

    Clients give transfers up at any time, too.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.under_way: list[Message] = []
        self.histories: dict[str, list[Any]] = {}
        self.states: dict[str, Any] = {}
        self.outcomes: dict[tuple[str, str], str] = {}
        self.moves: dict[str, Counter[str]] = {}
        """Of each transfer: what it made happen on accounts."""
        self.refusals: Counter[str] = Counter()
        self.put_in = 0
        """By clients, less what they took out."""

    def client(self, stream: str, command: Any) -> None:
        self.under_way.append(Message(f"client-{len(self.under_way)}-{self.chance.random()}", stream, command))

    def run(self) -> None:
        while self.under_way:
            message = self.under_way.pop(self.chance.randrange(len(self.under_way)))
            if self.chance.random() < 0.2:
                self.under_way.append(message)  # it will arrive once more
            self._arrives(message)

    def _arrives(self, message: Message) -> None:
        key = (message.stream, message.id)
        if key not in self.outcomes:
            self.outcomes[key] = self._decided(message)
        code = self.outcomes[key]
        follow_up, end = (message.otherwise, "otherwise") if code else (message.then, "then")
        if follow_up is not None:
            if code and any(field.name == "refusal" for field in fields(follow_up)):
                follow_up = replace(follow_up, refusal=code)
            self.under_way.append(
                message._replace(
                    id=f"{message.id}~{end}", stream=message.source, command=follow_up, then=None, otherwise=None
                )
            )
        elif message.later is not None:
            self.under_way.append(Message(f"{message.id}~later", message.source, message.later))

    def _decided(self, message: Message) -> str:
        """The code of the refusal, or an empty text."""
        context = contexts()[message.stream.partition("/")[0]]
        state = self.states.get(message.stream, context.initial)
        try:
            events = context.decide(message.command, state)
        except Refusal as refusal:
            self.refusals[f"{type(message.command).__name__} {refusal.code}"] += 1
            return refusal.code
        history = self.histories.setdefault(message.stream, [])
        for event in events:
            state = context.fold(state, event)
            history.append(event)
            if context.name == "accounts":
                if message.source.startswith("transfers/"):
                    self.moves.setdefault(message.source, Counter())[type(event).__name__] += 1
                elif hasattr(event, "cents"):
                    self.put_in += change(event)
            self._react(event, At(message.stream, len(history)))
        self.states[message.stream] = state
        return ""

    def _react(self, event: Any, at: At) -> None:
        for policy in discover().values():
            if type(event) in policy.subscription:
                for number, wish in enumerate(policy.react(event, at)):
                    assert not isinstance(wish, Post)
                    key = f"{policy.name}~{at.stream}~{at.version}~{number}"
                    then, otherwise = wish.then, wish.otherwise
                    message = Message(key, wish.stream, wish.command, at.stream, then, otherwise, wish.later)
                    self.under_way.append(message)

    def of(self, context: str) -> dict[str, Any]:
        return {stream: state for stream, state in self.states.items() if stream.startswith(f"{context}/")}


def life(seed: int) -> World:
    """Some accounts, most of them poor, one too full, one never opened; transfers between them, while they change and close."""
    chance = random.Random(seed)
    world = World(chance)
    names = [str(number) for number in range(chance.randint(2, 5))]
    for name in names:
        world.client(f"accounts/{name}", OpenAccount(overdraft_limit=chance.choice([0, 0, 300]), on=TODAY))
        world.run()
        for cents in [10**14] * (1_000 if name == "0" and chance.random() < 0.2 else 0):
            world.client(f"accounts/{name}", Deposit(cents=cents, on=TODAY))
        if chance.random() < 0.7:
            world.client(f"accounts/{name}", Deposit(cents=chance.randint(1, 1_000), on=TODAY))
        if world.under_way:
            world.run()
    names.append("never opened")
    for number in range(chance.randint(1, 12)):
        source, target = chance.choice(names), chance.choice(names)
        cents = chance.choice([1, 5, 200, 900, 10**14])
        world.client(f"transfers/{number}", RequestTransfer(source=source, target=target, cents=cents, on=TODAY))
        if chance.random() < 0.5:
            world.client(f"transfers/{number}", GiveUp())
    for name in names:
        asked = [
            *chance.choices(
                [Deposit(cents=7, on=TODAY), Withdraw(cents=90, on=TODAY), ChargeFee(cents=11, on=TODAY)], k=3
            ),
            *[CloseAccount(on=TODAY)] * chance.randint(0, 4),
        ]
        for command in asked:
            world.client(f"accounts/{name}", command)
    world.run()
    return world


def check(world: World) -> None:
    accounts = world.of("accounts")
    assert sum(state.balance for state in accounts.values()) == world.put_in
    assert {stream: state.holds for stream, state in accounts.items() if state.holds} == {}
    assert all(abs(state.balance) <= LARGEST_BALANCE for state in accounts.values())
    for stream, state in world.of("transfers").items():
        history = world.histories[stream]
        assert [isinstance(event, ENDS) for event in history].count(True) == 1, history
        assert isinstance(history[-1], ENDS)
        moved = world.moves.get(stream, Counter())
        debit, credit, refund = (moved[name] for name in ("MoneyWithdrawn", "MoneyDeposited", "MoneyReturned"))
        expected = {"completed": (1, 1, 0), "failed": (0, 0, 0), "refunded": (1, 0, 1)}
        assert (debit, credit, refund) == expected[state.step]


@settings(deadline=None)
@for_all(seed=st.integers(0, 2**32))
def test_in_every_order_of_things_no_money_is_lost_or_made_and_each_transfer_ends_once(seed: int) -> None:
    check(life(seed))


def test_these_lives_have_seen_every_end_and_every_refusal() -> None:
    lives = [life(seed) for seed in range(300)]
    for world in lives:
        check(world)
    ends = {
        (state.step, *_kinds(world.histories[stream]))
        for world in lives
        for stream, state in world.of("transfers").items()
    }
    assert ends == {
        ("completed", "SourceDebited"),
        ("failed",),
        ("failed", "TransferTimedOut"),
        ("refunded", "SourceDebited", "CreditRefused"),
        ("refunded", "TransferTimedOut", "SourceDebitedTooLate"),
    }
    refused = {code for world in lives for code in world.refusals}
    assert {
        "CloseAccount money-on-hold",
        "Deposit account-is-closed",
        "Deposit account-not-open",
        "Deposit balance-too-large",
        "RequestTransfer same-account",
        "Withdraw insufficient-funds",
    } <= refused
    assert {code for code in refused if code.startswith(("ReturnMoney", "ReleaseHold", "Record", "Complete"))} == set()


def _kinds(history: Sequence[Any]) -> list[str]:
    """What happened between the request and the end."""
    return [type(event).__name__ for event in history[1:-1]]
