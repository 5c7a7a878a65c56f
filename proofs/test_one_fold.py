"""make test + test-all + prove: in memory it takes seconds, on databases and Spark a minute; chance finds more with the time.

One fold, any view: generated contexts, views and histories, folded in every way there is, end with the rows of a plain reading of
their functions (`python -m proofs.one_fold` looks for longer); and that reading catches each of the mistakes a fold could make.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest

from domain.engine.contexts import Context, context_of
from projections.engine.fold.errors import EngineStop
from projections.engine.views.core_views import outcomes_view, snapshot_view
from projections.engine.views.view import View, view_of
from proofs.bank_oracle import Entry
from proofs.one_fold.__main__ import fold
from proofs.one_fold.expect import Found, differences, expect, found_rows
from proofs.one_fold.folding import in_memory
from proofs.one_fold.generate import (
    ACTS,
    HistorySpec,
    ViewSpec,
    context_name,
    context_source,
    histories,
    view_name,
    view_source,
)
from proofs.one_fold.histories import history
from proofs.one_fold.run import mixed, skips_of
from proofs.one_fold.values import COLUMNS, SUMS
from proofs.patches import Edit, edited
from tools.dev.stack import Stack
from tools.testing.fixtures import SEED

NUMBER = 314159
HISTORIES = 12


# ── in every way, on databases and on Spark ──


@pytest.fixture(scope="module")
def found(stack: Stack) -> Found:
    """All is folded once, and looked at by several tests."""
    return fold(stack.folder, dict(enumerate(histories(HISTORIES, NUMBER))), str(NUMBER))


@pytest.mark.slow
def test_every_way_to_fold_gives_the_same(found: Found) -> None:
    assert found.differences == []
    assert found.histories == HISTORIES


@pytest.mark.slow
def test_it_says_what_all_was_folded(found: Found) -> None:
    """Nothing hides behind what is refused, and the edges are there."""
    assert found.folded >= HISTORIES / 2
    reached = found.reached
    kept = {what.removeprefix("kept ").removesuffix(" | None") for what in reached if what.startswith("kept ")}
    assert {f"{letter} {act}" for letter in "ekjs" for act in ACTS[:4]} <= reached.keys()
    assert {*COLUMNS} <= kept
    assert {f"Sum[{kind}]" for kind in SUMS} <= kept
    assert {"Latest", "First"} <= {what.partition("[")[0] for what in kept}
    assert {what: reached[what] for what, least in LEAST.items() if reached[what] < least} == {}


LEAST = {
    "parked: value refused": 5,
    "parked: ValueError": 1,
    "stopped: value refused": 1,
    "deleted": 3,
    "skipped": 1,
    **dict.fromkeys(("outrun", "put right", "of 0 events", "of 1 events", "of 3 events"), 1),
    **dict.fromkeys(("commit", "open", "fenced", "reopen", "hold", "swap", "repeat", "garbage", "impostor"), 1),
}
"""How often each happens, at least, of what views do and of what a log may hold."""


# ── in memory ──


def declared(number: int, spec: HistorySpec) -> tuple[Context, list[View]]:
    """The history's context and views, as they would be found. Raises BadView, BadContext."""
    context = context_of(_module(f"domain.{context_name(number)}", context_source(number, spec)))
    return context, [_view(number, view, context) for view in spec.views]


def _view(number: int, spec: ViewSpec, context: Context) -> View:
    return view_of(_module(f"projections.{view_name(number, spec)}", view_source(number, spec)), [context])


def _module(name: str, text: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)  # where annotations are looked up
    exec(text, module.__dict__)
    return module


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def without_a_database(spec: HistorySpec) -> HistorySpec:
    """What a fold alone can judge: only a table knows that a line is there already. All park, or nothing would follow poison."""
    views = tuple(replace(view, parks=True) for view in spec.views if view.letter != "d")
    return replace(spec, views=views)


def memory_differences(specs: Mapping[int, HistorySpec], chance: random.Random) -> list[str]:
    specs = {number: without_a_database(spec) for number, spec in specs.items()}
    views, contexts = {"command_outcomes": outcomes_view()}, {}
    of_view: dict[str, HistorySpec] = {}
    for number, spec in specs.items():
        contexts[context_name(number)], own = declared(number, spec)
        for view in (snapshot_view(contexts[context_name(number)]), *own):
            views[view.name], of_view[view.name] = view, spec
    made = history(chance, chance.randint(1, 4), mixed(chance, specs))
    # several records have one time, in one partition and in others, and clocks go back
    logs = [
        [Entry(1_767_225_600_000 + (n - chance.randrange(60)) // 3, value) for n, value in enumerate(log)]
        for log in made.logs
    ]
    skips = skips_of(specs)
    expected = expect(logs, specs, skips)
    places, rows, parked = in_memory(logs, views, contexts, skips, chance)
    return [
        *(["positions"] if places != expected.places else []),
        *(f"parked, or not: {one}" for one in parked ^ expected.parked),
        *(
            line
            for view in views
            for line in differences(view, expected.rows[view], found_rows(of_view.get(view), view, rows[view]))
        ),
    ]


@pytest.mark.parametrize(
    ("count", "seed"),
    [(60, NUMBER), pytest.param(1_000, SEED, marks=pytest.mark.prove(part="histories"))],
    ids=["some", "others"],
)
def test_in_memory_it_gives_the_same(count: int, seed: int) -> None:
    specs = histories(count, seed)
    for first in range(0, count, 10):
        some = {number: specs[number] for number in range(first, first + 10)}
        assert memory_differences(some, random.Random(f"{seed} {first}")) == []


# ── mutants: what the comparison would be worth if it could not fail ──


FOLD, FOLDED = "projections/engine/fold/fold.py", "projections/engine/rebuild/folded.py"
ADD = "changes.sums.items():"
KEPT = "{key: self.rows[name].get(key) if row is None else row for key, row in changed.items()}"
MUTANTS = {
    "nothing void": [
        Edit("infra/log/rule.py", f"elif {when}:", "elif False:")
        for when in ("entry.seq != seq + 1", "entry.epoch != epoch or epoch < 0")
    ],
    "a journal is told the state before": [
        Edit(FOLD, "journal.function(event, after, at)", "journal.function(event, before if context else after, at)")
    ],
    "sums added twice": [Edit(FOLDED, ADD, "(*changes.sums.items(), *changes.sums.items()):")],
    "the latest to arrive": [
        Edit("projections/engine/fold/plan.py", "(was > now if is_latest else was <= now)", "not is_latest")
    ],
    "parked streams forgotten": [Edit(FOLDED, "self.blocked = self.blocked.and_parked(changes.parked)", "pass")],
    "skips unread": [
        Edit(FOLD, "any(first <= at.version <= last for first, last in self.skips.get(key, ()))", "False")
    ],
    "deletions kept": [Edit(FOLD, "self.rows[name].update(changed)", f"self.rows[name].update({KEPT})")],
}


@pytest.mark.parametrize("edits", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_of_the_fold_is_caught(edits: list[Edit]) -> None:
    with edited(*edits):
        assert any(map(_is_caught, range(5)))


def _is_caught(number: int) -> bool:
    try:
        return bool(memory_differences(dict(enumerate(histories(10, NUMBER))), random.Random(f"{NUMBER} {number}")))
    except EngineStop:  # the engine itself noticed
        return True
