"""make test: nothing but functions. What `make check` finds in a service's views and policies before production does.

A clinic, views written as their authors write them, and the mistakes that would each stop a view or make its rows differ.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TypeAlias

import pytest

from domain.language import Refusal, Text, fact
from infra.domain_model.contexts import context_of
from infra.testing.histories import check, histories, unreached
from policies.engine import At, Send, outbox
from policies.engine.policy import Policy
from projections.engine.views.core_views import snapshot_view
from projections.engine.views.view import View, view_of
from tests.engine.domain.customers import CUSTOMERS
from tests.engine.projections.viewkit import view


@fact
class Booked:
    doctor: Text
    day: date
    ticket: str


@fact
class Moved:
    day: date


@fact
class Closed:
    pass


Event: TypeAlias = Booked | Moved | Closed


@fact
class Book:
    doctor: Text
    day: date


@fact
class Move:
    """Only who has the ticket may move it."""

    ticket: Text
    day: date


@fact
class Close:
    pass


Command: TypeAlias = Book | Move | Close


class NoTicket(Refusal):
    """This is not the appointment's ticket."""


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    ticket: str = ""


def decide(command: Command, state: State) -> list[Event]:
    match command:
        case Book(doctor=doctor, day=day):
            return [] if state.ticket else [Booked(doctor=doctor, day=day, ticket=f"{doctor} on {day}")]
        case Move(ticket=ticket, day=day):
            if not state.ticket or ticket != state.ticket:
                raise NoTicket
            return [Moved(day=day)]
        case Close():
            raise ZeroDivisionError


def evolve(state: State, event: Event) -> State:
    return State(event.ticket) if isinstance(event, Booked) else state


CLINIC = replace(context_of(sys.modules[__name__]), name="clinic")
KNOWN = {"clinic": CLINIC}
MADE = histories(KNOWN)

HEAD = f"from {__name__} import Booked, Moved, State as After\nfrom datetime import time\n"
ROW = """
class Row(NamedTuple):
    doctor: Key[str]
    start: {}
"""
EVOLVE = """
def evolve(row: Row | None, event: Booked | Moved, at: At) -> Row | None:
    match event:
        case Booked(doctor=doctor):
            return Row({}, {})
        case Moved(day=day):
            return row and row._replace(start={})
"""
LINES = """
def rows(event: Booked | Moved, after: After, at: At) -> Iterable[Row]:
    yield Row(at.id, {})
"""
DAY, KEYED = ROW.format("date"), ROW.format("Key[date]")


def clinic_view(source: str) -> View:
    return view(HEAD + source, "appointments", [CLINIC])


RIGHT = {
    "an entity": DAY + EVOLVE.format("at.id", "event.day", "day"),
    "its key more than the id": "def key(event: Booked | Moved, at: At) -> tuple[str, int]: return at.id, at.version\n"
    + ROW.format("Key[int]")
    + EVOLVE.format("at.id", "at.version", "at.version"),
    "a journal": ROW.format("Key[int]") + LINES.format("at.version"),
    "all appointments of a doctor": DAY.replace(
        "start: date", "start: Key[date]\n    id: Key[str]\n    times: Sum[int]"
    )
    + "def delta(event: Booked, at: At) -> Iterable[Row]: yield Row(event.doctor, event.day, at.id, 1)\n",
}
WRONG = {
    "a key without the stream's id": (
        KEYED
        + "def key(event: Booked, at: At) -> tuple[str, date]: return event.doctor, event.day\n"
        + EVOLVE.format("event.doctor", "event.day", "day"),
        r"'appointments' can't take .* must begin with `at\.id`.* Booked: \{\"doctor.*new-view\.md",
    ),
    "a time without its zone": (
        ROW.format("datetime") + EVOLVE.format("at.id", "datetime.combine(event.day, time(9))", "row.start"),
        r"'appointments' can't take .* column 'start' .* has no time zone.* Booked: \{\"doctor",
    ),
    "an exception at an event": (
        DAY + EVOLVE.format("at.id", "event.day", "1 / 0"),
        r"'appointments' can't take .*ZeroDivisionError.* Moved: \{\"day",
    ),
    "an exception, where the view parks": (
        'ON_POISON = "park"\n' + DAY + EVOLVE.format("at.id", "event.day", "1 / 0"),
        "ZeroDivisionError",
    ),
    "two lines with one key": (
        KEYED + LINES.format("event.day"),
        r"'appointments' has several lines with the key \(.*at\.version",
    ),
    "a memory of its own": (
        "SEEN: list[str] = []\n" + ROW.format("int") + EVOLVE.format("at.id", "len(SEEN.append('') or SEEN)", "0"),
        "'appointments' makes other rows in other batches",
    ),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_passes(what: str) -> None:
    check(clinic_view(RIGHT[what]), KNOWN, MADE)


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_found_with_view_event_and_column(what: str) -> None:
    source, found = WRONG[what]
    with pytest.raises(AssertionError, match=found):
        check(clinic_view(source), KNOWN, MADE)


def test_a_policy_that_raises_is_found() -> None:
    def react(event: Moved, at: At) -> list[Send]:
        raise LookupError(at.id)

    policy = outbox.view_of(Policy("reminders", 1, react, frozenset({Moved})))
    with pytest.raises(AssertionError, match=r"Policy 'reminders' can't take .*LookupError.* Moved: "):
        check(replace(policy, contexts=("clinic",)), KNOWN, MADE)


def test_states_are_folded_and_personal_values_are_sealed() -> None:
    known = KNOWN | {"customers": CUSTOMERS}
    made = histories(known)
    for context in known.values():
        check(snapshot_view(context), known, made)
    assert {what for what in unreached(known, [], [], made) if what.startswith("the event")} == {
        "the event Closed of clinic"
    }


def test_what_no_command_leads_to_is_named(tmp_path: Path) -> None:
    """The event of a command that always fails, and a rare case; what needs a value of earlier commands is reached."""
    file = tmp_path / "appointments.py"
    rare = EVOLVE.replace("case Booked(", "case Booked(doctor='Who'):\n            return row\n        case Booked(")
    file.write_text(
        "from datetime import date\nfrom typing import NamedTuple\nfrom projections.engine import At, Key\n"
        f"{HEAD}VERSION = 1\n{DAY}{rare.format('at.id', 'event.day', 'day')}"
    )
    spec = importlib.util.spec_from_file_location("clinic.appointments", file)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    line = file.read_text()[: file.read_text().index("case Booked(doctor='Who')")].count("\n") + 1
    assert unreached(KNOWN, [view_of(module, [CLINIC])], [str(file)], MADE) == [
        "the event Closed of clinic",
        f"`case Booked(doctor='Who')` (appointments.py, line {line})",
        "what Close leads to, which failed: ZeroDivisionError",
    ]
