"""make test-all: a view that never ends at one event is poison there, and everything before it is folded."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import Settings
from infra.testing.fixtures import ROOT
from infra.testing.waiting import until
from tests.engine.projections.test_agent import Log, agent, rows, transactions
from tests.engine.service.test_two_releases import write_tree

EVOLVE = "def evolve(row: Balance | None, event: AccountOpened | Movement | AccountClosed, at: At) -> Balance | None:\n"
FAULT = '    if at.version == 3:\n        __import__("re").match(r"(a+)+$", "a" * 60 + "b")\n'


@pytest.mark.slow
def test_a_fold_that_does_not_end_is_poison_and_never_parks(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    edits = [("VERSION = 2\n", 'VERSION = 2\nON_POISON = "park"\n'), (EVOLVE, EVOLVE + FAULT)]
    code = write_tree(tmp_path / "code", ROOT, {"projections/balances.py": edits})
    log.deposit("a", 4)
    with agent(world.model_copy(update={"decide_limit_s": 0.5}), tmp_path, code=code) as one:
        until(lambda: one.says("too-slow: evolve takes longer than 0.5 s"), "it names the reason")
        until(lambda: transactions(world) == {"a": 1}, "what was before is folded")
        assert one.says("event 3 of accounts/a takes longer than 0.05 s: match (__init__.py:")
    assert rows(world, "select count(*) from parked") == [(0,)]
