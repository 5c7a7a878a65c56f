"""make test: nothing but functions. What `make check` finds in a service's views and policies before production does.

Mistakes as authors make them, each of which would stop a view or policy there, or make its rows differ.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from domain.accounts import AccountOpened
from domain.engine.contexts import contexts
from domain.language import fact
from policies.engine import At, Post, Public, Send, outbox
from policies.engine.policy import Policy
from policies.engine.public_schema import Publication
from projections.engine.views.core_views import snapshot_view
from projections.engine.views.view import View, view_of
from tests.engine.domain.customers import CUSTOMERS
from tests.engine.projections.viewkit import HEAD, view
from tests.engine.purse import PURSE, Fill, Filled, Spend, Spent, State, TooLittle
from tools.testing.golden import NoExample
from tools.testing.histories import check, check_publication, histories, time_limit, unreached


@fact
class Lost:
    """No command leads to it."""


def decide(command: Fill | Spend, state: State) -> list[Filled | Spent]:
    """Only who knows what is in the purse can spend it: that can't be guessed. A note of one character is a defect."""
    match command:
        case Fill(cents=cents, note=note):
            return [Filled(cents=min(cents, 10**9) + 54_321 // (len(note) != 1), note=note)]
        case Spend(cents=cents):
            if state.cents == 0 or cents != state.cents:
                raise TooLittle
            return [Spent(cents=cents)]


KNOWN = {"purse": replace(PURSE, decide=decide, events=PURSE.events | {"Lost": Lost})}
MADE = histories(KNOWN)

ROW = """
class Row(NamedTuple):
    note: Key[str]
    cents: {}
"""
EVOLVE = """
def evolve(row: Row | None, event: Filled | Spent, at: At) -> Row | None:
    match event:
        case Filled(note=note, cents=cents):
            return Row({}, {})
        case Spent():
            return {}
"""
LINES = """
def rows(event: Filled | Spent, after: State, at: At) -> Iterable[Row]:
    yield Row(at.id, {})
"""
KEY = "\ndef key(event: Filled | Spent, at: At) -> tuple[Any, ...]: return {}\n"
ENTITY = ROW.format("int") + EVOLVE.format("at.id", "cents", "None")
RIGHT = {
    "an entity": ENTITY,
    "a key that is more than the id": ROW.format("Key[int]")
    + KEY.format("at.id, at.version")
    + EVOLVE.format("at.id", "at.version", "None"),
    "a journal": ROW.format("Key[int]") + LINES.format("at.version"),
    "a summary, which works like an index": ROW.format("Key[int]\n    id: Key[str]\n    times: Sum[int]")
    + "def delta(event: Filled, at: At) -> Iterable[Row]: yield Row(event.note, event.cents, at.id, 1)\n",
}
WRONG = {
    "a key without the stream's id": (
        ROW.format("Key[int]")
        + KEY.format("getattr(event, 'note', ''), event.cents")
        + EVOLVE.format("note", "cents", "None"),
        r"'purses' can't fold .* must begin with `at\.id`.* Filled: \{\"cents.*new-view\.md",
    ),
    "a time without its zone": (
        ROW.format("datetime") + EVOLVE.format("at.id", "datetime(2026, 1, 1)", "None"),
        r"'purses' can't fold .* column 'cents' .* has no time zone.* Filled: \{\"cents",
    ),
    "an exception at an event": (
        ROW.format("int") + EVOLVE.format("at.id", "cents", "1 / 0"),
        r"'purses' can't fold .*ZeroDivisionError.* Spent: \{\"cents",
    ),
    "an exception, where the view parks": (
        'ON_POISON = "park"\n' + ROW.format("int") + EVOLVE.format("at.id", "cents", "1 / 0"),
        "ZeroDivisionError",
    ),
    "two lines with one key": (
        ROW.format("Key[bool]") + LINES.format("True"),
        r"'purses' has several lines with the key \(.*at\.version",
    ),
    "a fold that never ends": (
        ROW.format("int") + EVOLVE.format("at.id", "all(True for _ in iter(int, 1))", "None"),
        r"'purses' can't fold .*too-slow.* Filled: \{\"cents",
    ),
    "a memory of its own": (
        "SEEN: list[str] = []\n" + ROW.format("int") + EVOLVE.format("at.id", "len(SEEN.append('') or SEEN)", "None"),
        "'purses' makes other rows in other batches",
    ),
}


def purses(source: str) -> View:
    return view(source, known=[*KNOWN.values()])


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_passes(what: str) -> None:
    check(purses(RIGHT[what]), KNOWN, MADE)


@pytest.fixture
def _limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SAMEFOLD_DECIDE_LIMIT_S", "0.5")
    with time_limit():
        yield


@pytest.mark.usefixtures("_limit")
@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_found_with_view_event_and_column(what: str) -> None:
    source, found = WRONG[what]
    with pytest.raises(AssertionError, match=found):
        check(purses(source), KNOWN, MADE)


@fact
class Endless:
    cents: int

    def __post_init__(self) -> None:
        while self.cents < 0:
            pass


@pytest.mark.usefixtures("_limit")
def test_a_command_that_is_never_decided_is_found() -> None:
    calls = count()

    def never(command: Spend, state: State) -> list[Spent]:
        is_first = next(calls) == 0
        while is_first:
            pass
        raise TooLittle

    with pytest.raises(AssertionError, match=r'Spend {"cents":\d+} is not decided: too-slow'):
        histories({"purse": replace(PURSE, decide=never, commands={"Spend": Spend})})
    with pytest.raises(NoExample, match=r"Endless .*too-slow"):
        histories({"purse": replace(PURSE, commands={"Endless": Endless})})


def test_a_command_that_always_fails_is_found() -> None:
    def defect(_command: Spend, _state: State) -> list[Spent]:
        raise KeyError("cents")

    with pytest.raises(AssertionError, match="every generated Spend fails: KeyError: 'cents'"):
        histories({"purse": replace(PURSE, decide=defect, commands={"Spend": Spend})})


def test_what_can_not_be_published_is_found() -> None:
    def publish(event: AccountOpened, at: At) -> list[Public]:
        return [Public("opened.v2", event)]

    public = Publication(1, publish, frozenset({AccountOpened}), {"opened.v1": AccountOpened})
    with pytest.raises(AssertionError, match=r"Event 1 of accounts/\S+ can't be published .*: .*not in TYPES"):
        check_publication(public, histories({"accounts": contexts()["accounts"]}))


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        (7, r"Policy 'reminders' can't react to .* neither a Send nor a Post.* Spent: \{"),
        (
            Post("no name", {}),
            r"policy_reminders makes a wish that can't be sent, at event \d+ of purse/\S+ "
            r".*invalid-wish: .* this Spent: \{.*Bound the values",
        ),
    ],
)
def test_a_policy_that_would_stop_or_bury_its_wishes_is_found(wish: Any, found: str) -> None:
    def react(_event: Spent, _at: At) -> list[Send]:
        return [wish]

    policy = outbox.view_of(Policy("reminders", 1, react, frozenset({Spent})))
    with pytest.raises(AssertionError, match=found):
        check(replace(policy, contexts=("purse",)), KNOWN, MADE)


def test_states_are_folded_and_personal_values_are_sealed() -> None:
    known = KNOWN | {"customers": CUSTOMERS}
    made = histories(known)
    for context in known.values():
        check(snapshot_view(context), known, made)
    assert {what for what in unreached(known, [], [], made) if "event" in what} == {"the event Lost of purse"}


def test_what_no_command_leads_to_is_named(tmp_path: Path) -> None:
    """An event, a case that is too rare, and why a command failed. What only earlier events tell is reached."""
    file = tmp_path / "purses.py"
    rare = ENTITY.replace("case Filled(", "case Filled(note='Who?'):\n            return row\n        case Filled(", 1)
    file.write_text(f"{HEAD}{rare}")
    spec = importlib.util.spec_from_file_location("clinic.purses", file)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    line = file.read_text().partition("case Filled(note='Who?')")[0].count("\n") + 1
    assert unreached(KNOWN, [view_of(module, [*KNOWN.values()])], [str(file)], MADE) == [
        "the event Lost of purse",
        f"`case Filled(note='Who?')` (purses.py, line {line})",
        "what Fill leads to, which failed: ZeroDivisionError: integer division or modulo by zero",
    ]
