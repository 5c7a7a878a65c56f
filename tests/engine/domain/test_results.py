"""make test: pure. What views and policies make of released bodies: the same everywhere, and other digits for another thing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from trace import Trace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from domain.engine.contexts import contexts
from domain.engine.released import read
from policies.engine import At, Post, Send, outbox, policy
from policies.engine.policy import Policy
from policies.engine.public_schema import NothingPublic
from projections.engine.views.core_views import snapshot_view
from projections.engine.views.view import View
from tests.engine.projections.viewkit import view
from tests.engine.purse import PURSE, Fill, Filled, Spend, Spent
from tools import golden_results as results_module
from tools.golden_results import released_views, results
from tools.testing.fixtures import ROOT

NOTES = "abcdef"
FILLED: list[dict[str, Any]] = [{"cents": 1, "note": NOTES}, {"cents": 2}, {"cents": 3, "note": ""}]
RECORD = {
    "Filled": {"1": {"golden": [{"body": body} for body in FILLED]}},
    "Spent": {"1": {"golden": [{"body": {"cents": 1}}]}},
}
VIEWS = {
    "lines": """
class Row(NamedTuple):
    purse: Key[str]
    line: Key[int]
    letter: Key[str]

def rows(event: Filled, after: State, at: At) -> Iterable[Row]:
    for letter in frozenset(event.note):
        yield Row(at.id, at.version, letter)
""",
    "sums": """
class Row(NamedTuple):
    letter: Key[str]
    times: Sum[int]

def delta(event: Filled, at: At) -> Iterable[Row]:
    for letter in frozenset(event.note):
        yield Row(letter, 1)
""",
}


def digits(of: View) -> str:
    return "".join(one.digit for one in results(of, PURSE, RECORD))


def everything() -> str:
    return " ".join([*(digits(view(source))[:30] for source in VIEWS.values()), digits(snapshot_view(PURSE))[:30]])


def test_they_are_the_same_in_every_process_and_in_whatever_order_a_set_is() -> None:
    script = f"from {__name__} import everything; print(everything())"
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in "1234"]
    made = {
        subprocess.check_output([sys.executable, "-c", script], env=one, cwd=ROOT, text=True) for one in environments
    }
    assert made == {"p...........X.....z...6.le.... 7... 6El88cwFxcwFwFxcwFwF86E6ElJBbl\n"}, (
        "whatever the version of Python"
    )


def test_the_result_of_a_latest_is_its_value_without_the_place_that_it_comes_from() -> None:
    """A type of event that is recorded later moves the places of others."""
    source = """
class Row(NamedTuple):
    all: Key[str]
    last: Latest[int]
    noted: First[str | None]

def delta(event: Filled, at: At) -> Iterable[Row]:
    yield Row("all", 1, None)
"""
    assert len({*digits(view(source))} - {"."}) == 1


def test_an_event_that_can_not_be_folded_has_a_result_and_the_next_go_on_without_it() -> None:
    source = """
class Row(NamedTuple):
    purse: Key[str]
    cents: int

def evolve(row: Row | None, event: Filled | Spent, at: At) -> Row | None:
    if isinstance(event, Spent):
        return row._replace(cents=row.cents - event.cents)
    return Row(at.id, event.cents)
"""
    found = results(view(source), PURSE, RECORD)
    assert [one.digit == "!" for one in found[:4]] == [False, False, False, True], "each as the first of its stream"
    later = [one.digit for one in found[4:] if one.event == "Spent"]
    assert len({*later} - {"!", "."}) > 3, "after others, too"


@dataclass(frozen=True)
class Told:
    how: str


@dataclass(frozen=True)
class ToldByName:
    """The same, later."""

    stored_as: ClassVar[str] = "Told"
    how: str
    by: str = ""
    about: tuple[str, ...] = field(default_factory=tuple)


def sent(*wishes: Callable[[At], Any]) -> Callable[[Any, At], list[Any]]:
    return lambda _event, at: [wish(at) for wish in wishes]


def fill(at: At, **more: Any) -> Send:
    return Send(at.stream, Fill(cents=1), **more)


def raises(_event: Any, _at: At) -> list[Any]:
    raise KeyError


FIRST = sent(fill, lambda _: Post("till", Told("full")))
SAME = sent(
    lambda at: Send(at.stream, Fill(cents=1, note=""), None, due=None), lambda _: Post("till", body=ToldByName("full"))
)
OTHERS = {
    "another class with the same body": sent(
        lambda at: Send(at.stream, Spend(cents=1)), lambda _: Post("till", Told("full"))
    ),
    "another stream": sent(lambda _: Send("purse/1", Fill(cents=1)), lambda _: Post("till", Told("full"))),
    "later": sent(lambda at: fill(at, due=at.time + timedelta(1)), lambda _: Post("till", Told("full"))),
    "with a follow-up": sent(lambda at: fill(at, then=Spend(cents=1)), lambda _: Post("till", Told("full"))),
    "another post": sent(fill, lambda _: Post("till", Told("empty"))),
    "in another order": sent(lambda _: Post("till", Told("full")), fill),
    "fewer": sent(fill),
    "none": sent(),
    "an error": raises,
}


@pytest.fixture
def wished(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any, At], Any]], str]:
    monkeypatch.setattr(outbox, "contexts", lambda: {"purse": PURSE})
    monkeypatch.setattr(results_module, "publication", Mock(side_effect=NothingPublic("", "")))

    def of(react: Callable[[Any, At], Any]) -> str:
        monkeypatch.setattr(
            policy, "discover", lambda: {"tills": Policy("tills", 1, react, frozenset({Filled, Spent}))}
        )
        return digits(released_views()[-1])

    return of


@pytest.mark.parametrize("what", OTHERS)
def test_other_wishes_are_other_results(wished: Callable[[Callable[[Any, At], Any]], str], what: str) -> None:
    assert wished(FIRST) == wished(SAME), "fields that have their defaults count as left out: a new one changes nothing"
    assert wished(OTHERS[what]) != wished(FIRST)


def test_the_sample_s_record_reaches_each_case_of_its_views_and_policies() -> None:
    tracer, outer = Trace(trace=False), sys.gettrace()
    for one in released_views():
        for name in one.contexts:
            tracer.runfunc(results, one, contexts()[name], read(name)["events"])
    sys.settrace(outer)
    reached, wanted = tracer.results().counts.keys(), dict[tuple[str, int], str]()
    for file in (*Path(ROOT, "projections").glob("*.py"), *Path(ROOT, "policies").glob("*.py")):
        for case in ast.walk(ast.parse(file.read_text())):
            if isinstance(case, ast.match_case) and "assert_never" not in ast.unparse(case.body[0]):
                wanted[str(file), case.body[0].lineno] = ast.unparse(case.pattern)
    assert len(wanted) > 10
    assert [what for place, what in wanted.items() if place not in reached] == []
