"""One fold, any view: generated contexts and views, folded in every way there is (`python -m proofs.one_fold`: more)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from infra.dev.stack import Stack
from infra.domain_model.contexts import Context, context_of
from projections.engine.views.columns import BadView
from projections.engine.views.view import View, view_of
from proofs.one_fold.__main__ import fold, smaller
from proofs.one_fold.expect import Found
from proofs.one_fold.generate import ACTS, Column, HistorySpec, ViewSpec, context_source, histories, view_source
from proofs.one_fold.values import COLUMNS, REFUSED_COLUMNS, SUMS

NUMBER = 314159
HISTORIES = 32


@pytest.fixture(scope="module")
def found(stack: Stack) -> Found:
    """All is folded once, and looked at by several tests."""
    return fold(stack.folder, dict(enumerate(histories(HISTORIES, NUMBER))), str(NUMBER), spark=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_way_to_fold_gives_the_same(found: Found) -> None:
    assert found.differences == []
    assert found.histories == HISTORIES


@pytest.mark.slow
def test_it_says_what_all_was_folded(found: Found) -> None:
    """Nothing hides behind what is refused, and the edges are there."""
    assert found.folded >= HISTORIES / 2
    reached = found.reached
    kept = {what.rsplit(" ", 1)[0] for what in reached if not what.startswith(("refused", "kept"))}
    assert {f"{letter} {act}" for letter in "ekjs" for act in ACTS[:4]} <= reached.keys()
    assert {*COLUMNS} <= {what.removesuffix(" | None") for what in kept}
    assert {f"Sum[{kind}]" for kind in SUMS} <= kept
    for what, least in LEAST.items():
        assert reached[what] >= least, what


LEAST = {"parked: value refused": 5, "parked: ValueError": 1, "stopped: value refused": 1, "deleted": 3, "skipped": 1}


# ── declarations ──


def declared(number: int, spec: HistorySpec) -> list[View]:
    """The history's views, as they would be found. Raises BadView, BadContext."""
    context = context_of(_module(f"domain.h{number}", context_source(number, spec)))
    return [_view(number, view, context) for view in spec.views]


def _view(number: int, spec: ViewSpec, context: Context) -> View:
    return view_of(_module(f"projections.h{number}_{spec.letter}", view_source(number, spec)), [context])


def _module(name: str, text: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)  # where annotations are looked up
    exec(text, module.__dict__)
    return module


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


PLAIN = HistorySpec((ViewSpec("j", (), (Column("c0", "int"),), parks=True, noted=True),), (), long_ids=False, events=())


@pytest.mark.slow
def test_what_is_generated_is_accepted() -> None:
    for number, spec in enumerate(histories(100, NUMBER)):
        assert len(declared(number, spec)) == len(spec.views)


@pytest.mark.parametrize("kind", REFUSED_COLUMNS)
@pytest.mark.parametrize("letter", "ekjd")
def test_a_column_that_no_table_can_have_is_refused(letter: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, kind, COLUMNS["int"])
    context = context_of(_module("domain.h0", context_source(0, PLAIN)))
    for optional in (False, True):
        spec = ViewSpec(letter, (), (Column("c0", kind, optional=optional),), parks=True, noted=True)
        with pytest.raises(BadView, match="column 'c0' has the type") as refused:
            _view(0, spec, context)
        assert refused.value.hint


@pytest.mark.slow
def test_a_history_gets_smaller() -> None:
    spec = histories(5, NUMBER)[-1]
    some: list[Any] = list(smaller(spec))
    assert len({len(one.events) for one in some}) > 3
    assert all(one != spec for one in some)
