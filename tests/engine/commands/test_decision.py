"""make test: functions without a store.

From a command and a state to the commit that records the answer, whatever the answer is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import repeat
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from commands.decision import Decided, Versioned, decide
from commands.intake import MAX_MESSAGE, Received, reason
from domain.engine.contexts import Context
from domain.language import fact
from infra.log.records import Commit, EventRecord, Reason, Record, decode_event
from tests.engine.purse import PURSE, Fill, Filled, Spend, Spent, State

FULL = Versioned(3, State(100))


def received(command: Any, context: Context | None = PURSE, **more: Any) -> Received:
    return msgspec.structs.replace(
        Received(offset=41, stream="purse/1", id="a", fingerprint="f", context=context, command=lambda: command), **more
    )


def decided(command: Received, before: Versioned = FULL, max_bytes: int = 10_000) -> Decided:
    return decide(command, before, epoch=17, seq=5, max_bytes=max_bytes)


def rejection(answer: Decided, before: Versioned = FULL) -> Reason:
    """The reason of a rejection that changed nothing."""
    commit = answer.commit
    assert (commit.outcome, commit.events, commit.version) == ("rejected", [], before.version)
    assert answer.after == before
    assert decode_event(Record(0, 0, 0, None, answer.value)) == commit
    assert commit.reason is not None
    assert len(commit.reason.message) <= MAX_MESSAGE
    return commit.reason


def purse(decide: Callable[[Any, Any], Any], evolve: Callable[[Any, Any], Any] = PURSE.evolve) -> Received:
    """A command for a purse that decides, or evolves, in another way."""
    return received(Fill(cents=5), replace(PURSE, decide=decide, evolve=evolve))


# Accepted.


def test_an_accepted_command_is_one_commit_with_all_that_readers_need() -> None:
    answer = decided(received(Fill(cents=5, note="found"), expected_version=3))
    assert answer.commit == Commit(
        stream="purse/1",
        version=4,
        events=[EventRecord("Filled", msgspec.Raw(b'{"cents":5,"note":"found"}'))],
        command_id="a",
        command_offset=41,
        fingerprint="f",
        outcome="accepted",
        reason=None,
        epoch=17,
        seq=5,
    )
    assert answer.after == Versioned(4, State(105))
    assert decode_event(Record(0, 0, 0, None, answer.value)) == answer.commit


@pytest.mark.parametrize("events", [[Filled(cents=1), Spent(cents=2)], []], ids=["two", "none"])
def test_the_version_rises_by_the_number_of_events(events: list[Any]) -> None:
    answer = decided(purse(lambda command, state: events))
    assert (answer.commit.outcome, answer.commit.version) == ("accepted", 3 + len(events))
    assert [event.type for event in answer.commit.events] == [type(event).__name__ for event in events]
    assert answer.after == (Versioned(5, State(99)) if events else FULL)


# Rejected.


def test_a_refusal_is_recorded_with_its_code_its_sentence_and_what_tells_the_command_and_its_place() -> None:
    answer = decided(received(Spend(cents=101)))
    assert rejection(answer) == Reason("too-little", "There is less in the purse.")
    commit = answer.commit
    assert (commit.stream, commit.command_id, commit.command_offset) == ("purse/1", "a", 41)
    assert (commit.fingerprint, commit.epoch, commit.seq) == ("f", 17, 5)


@pytest.mark.parametrize("expected", [0, 2, 4, -1, 10**30])
def test_another_version_than_expected_is_a_conflict(expected: int) -> None:
    why = rejection(decided(received(Fill(cents=5), expected_version=expected)))
    assert why == Reason("version-conflict", f"the stream is at version 3, not {expected}")


def test_a_conflict_is_told_before_the_business_is_asked() -> None:
    assert rejection(decided(received(Spend(cents=101), expected_version=2))).code == "version-conflict"


def test_what_the_intake_rejected_stays_rejected() -> None:
    malformed = received(None, rejection=reason("malformed", "no amount"), expected_version=None)
    assert rejection(decided(malformed)) == Reason("malformed", "no amount")


def test_a_record_of_no_context_is_rejected_at_version_zero() -> None:
    nowhere = Versioned(0, None)
    answer = decided(received(None, None, stream="-/2", rejection=reason("malformed", "?")), nowhere)
    assert rejection(answer, nowhere).code == "malformed"


def test_a_commit_beyond_its_bound_is_too_large_and_its_rejection_is_not() -> None:
    size = len(decided(received(Fill(cents=5, note="x" * 200))).value)
    assert decided(received(Fill(cents=5, note="x" * 200)), max_bytes=size).commit.outcome == "accepted"
    answer = decided(received(Fill(cents=5, note="x" * 200)), max_bytes=size - 1)
    assert rejection(answer) == Reason("too-large", f"its events take more than {size - 1} bytes")
    assert len(answer.value) < size


def test_events_without_an_end_are_too_large() -> None:
    def decide(command: Any, state: Any) -> Any:
        return repeat(Filled(cents=1))

    assert rejection(decided(purse(decide), max_bytes=1_000)).code == "too-large"


# A defect of the domain's code repeats on every try: it is recorded, or it would stop the partition.


def raises(error: BaseException) -> Callable[[Any, Any], Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


class Speechless(Exception):
    """Its words can't be asked for, as where `__str__` has a defect of its own."""

    def __str__(self) -> str:
        raise IndexError


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("x"),
        RecursionError(),
        ZeroDivisionError(),
        AssertionError(),
        Speechless(),
        SystemExit(1),
        GeneratorExit(),
    ],
)
def test_a_defect_in_decide_or_evolve_is_recorded_as_failed(error: BaseException) -> None:
    for command in (purse(raises(error)), purse(PURSE.decide, raises(error))):
        why = rejection(decided(command))
        assert why.code == "failed"
        assert type(error).__name__ in why.message


def test_what_may_pass_is_not_recorded() -> None:
    with pytest.raises(MemoryError):
        decided(purse(raises(MemoryError())))


@fact
class Lost:
    cents: int


class FilledTwice(Filled):
    """Its stored name is in no union."""


def unchecked(**values: Any) -> Filled:
    filled = Filled(cents=5)
    for name, value in values.items():
        object.__setattr__(filled, name, value)
    return filled


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        Filled(cents=5),
        "Filled",
        [Lost(cents=5)],
        [Fill(cents=5)],
        [Filled(cents=5), None],
        [FilledTwice(cents=5)],
        (event for event in [Filled(cents=5)]),
        [unchecked(note="\ud800")],  # JSON can't hold it
        [unchecked(cents=True)],  # 1 to Python, but no number in JSON
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_what_is_not_a_list_of_the_contexts_events_is_failed(answer: Any) -> None:
    command = purse(lambda command, state: answer, lambda state, event: state)
    assert rejection(decided(command)).code == "failed"


@dataclass(frozen=True)
class Measured:
    """Which checks nothing when it is made."""

    grams: float | None = None
    at: datetime | None = None
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "event",
    [
        Measured(grams=float("inf")),
        Measured(grams=float("nan")),
        Measured(grams=2**63 + 1),
        Measured(at=datetime(1850, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))),
        Measured(at=date(2026, 1, 1)),  # type: ignore[arg-type]
        Measured(names="ab"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_an_event_that_json_would_make_another_one_of_is_failed(event: Measured) -> None:
    assert rejection(decided(measuring(event, lambda state, event: state))).code == "failed"


def measuring(event: Measured, evolve: Callable[[Any, Any], Any]) -> Received:
    context = replace(PURSE, events={"Measured": Measured}, decide=lambda command, state: [event], evolve=evolve)
    return received(Fill(cents=5), context)


@pytest.mark.parametrize(
    "event",
    [
        Measured(grams=3),
        Measured(at=datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)),
        Measured(names=["a", "b"]),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_an_event_is_what_every_reader_makes_of_it(event: Measured) -> None:
    seen: list[Any] = []

    def evolve(state: Any, event: Any) -> Any:
        seen.append(event)
        return state

    answer = decided(measuring(event, evolve))
    assert answer.commit.outcome == "accepted"
    assert seen == [msgspec.json.decode(answer.commit.events[0].data, type=Measured)]


@dataclass(frozen=True)
class Named:
    name: str = ""
    cents: int = 0


@pytest.mark.parametrize(
    "after", [Named(cents=10**4300), Named(name="\ud800"), None, State(5)], ids=["int", "str", "none", "other"]
)
def test_a_state_that_could_not_be_stored_is_failed_before_an_agent_meets_it(after: Any) -> None:
    naming = replace(PURSE, state=Named, evolve=lambda state, event: after)
    assert rejection(decided(received(Fill(cents=5), naming))).code == "failed"
