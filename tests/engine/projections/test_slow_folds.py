"""make test-all: a view whose fold never ends at one event stops there alone; what reads events stops the readers by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import tree
from domain.accounts import AccountOpened
from infra.settings import Settings
from tests.engine.bookkeeper import DAY
from tests.engine.projections.test_agent import Log, agent, rows, transactions
from tests.engine.service.test_two_releases import write_tree
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

EVOLVE = "def evolve(row: Balance | None, event: AccountOpened | Movement | AccountClosed, at: At) -> Balance | None:\n"
FAULT = '    if at.version == 3:\n        __import__("re").match(r"(a+)+$", "a" * 60 + "b")\n'


@pytest.mark.slow
def test_a_view_that_does_not_end_at_an_event_stops_there_alone_and_never_parks(
    world: Settings, tmp_path: Path
) -> None:
    log = Log(world)
    edits = [("VERSION = 2\n", 'VERSION = 2\nON_POISON = "park"\n'), (EVOLVE, EVOLVE + FAULT)]
    code = write_tree(tmp_path / "code", ROOT, {"projections/balances.py": edits})
    log.deposit("a", 4)
    with agent(world.model_copy(update={"decide_limit_s": 2}), tmp_path, code=code) as one:
        until(lambda: rows(world, "select count(*) from statement_v2") == [(3,)], "the other views go on")
        until(lambda: transactions(world) == {"a": 1}, "it has what was before")
        assert one.says("event 3 of accounts/a takes longer than 0.2 s: match (__init__.py:")
    assert rows(world, "select view, code, stream_version from stopped_views") == [("balances", "too-slow", 3)]
    assert rows(world, "select count(*) from parked") == [(0,)]
    resume = [sys.executable, "-c", "from tools.cli import main; main()", "views", "resume", "balances"]
    environment = {**os.environ, **tree.environment(code), **world.environment(), "SAMEFOLD_DECIDE_LIMIT_S": "1"}
    again = subprocess.run(resume, env=environment, capture_output=True, text=True, check=False)
    assert (again.returncode, "too-slow: View 'balances' can't fold event 3" in again.stderr) == (1, True), again


@pytest.mark.slow
def test_a_view_that_is_slow_at_many_events_delays_the_others_and_they_go_on(world: Settings, tmp_path: Path) -> None:
    """Together they take longer than the database lets a transaction be idle."""
    Log(world).deposit("a", 16)
    code = write_tree(
        tmp_path / "code",
        ROOT,
        {"projections/balances.py": [(EVOLVE, EVOLVE + '    __import__("time").sleep(0.2)\n')]},
    )
    short = world.model_copy(update={"decide_limit_s": 2, "idle_in_transaction_timeout_ms": 1_000})
    with agent(short, tmp_path, code=code):
        until(lambda: transactions(world) == {"a": 15}, "all is folded")
    assert rows(world, "select * from stopped_views") == []


OPENED = "@fact\nclass AccountOpened:\n"
UPCASTER = """
@upcaster(AccountOpened, 1)
def account_opened_1(body: Body) -> Body:
    while body["overdraft_limit"] == 606:
        pass
    return body


@fact
class MoneyDeposited:
"""


@pytest.mark.slow
def test_an_upcaster_that_does_not_end_stops_the_readers_by_name(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    version = (OPENED, OPENED + "    VERSION: ClassVar[int] = 2\n")
    edits = [version, ("\n@fact\nclass MoneyDeposited:\n", UPCASTER)]
    code = write_tree(tmp_path / "code", ROOT, {"domain/accounts.py": edits})
    log.deposit("a", 2)
    log.commit("b", AccountOpened(overdraft_limit=606, on=DAY))
    log.flush()
    with agent(world.model_copy(update={"decide_limit_s": 2}), tmp_path, code=code) as one:
        assert one.ends() == 1
    assert one.says(
        "an upcaster of AccountOpened from version 1 on takes longer than 0.2 s: account_opened_1 (accounts.py:"
    )
    assert one.says("unreadable-event: AccountOpened of accounts/b can't be read")
    assert one.says("too-slow: it takes longer than 2 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [("while True: pass", "too-slow: it takes longer than 1 s"), ("raise KeyError(self.overdraft_limit)", "606")],
)
def test_an_own_check_of_an_event_that_fails_stops_the_readers_by_name(
    world: Settings, tmp_path: Path, fault: str, said: str
) -> None:
    """It runs whenever an event is read."""
    log = Log(world)
    check = f"    def __post_init__(self) -> None:\n        if self.overdraft_limit == 606:\n            {fault}\n\n"
    code = write_tree(tmp_path / "code", ROOT, {"domain/accounts.py": [(OPENED, OPENED + check)]})
    log.deposit("a", 2)
    log.commit("b", AccountOpened(overdraft_limit=606, on=DAY))
    log.flush()
    with agent(world.model_copy(update={"decide_limit_s": 1}), tmp_path, code=code) as one:
        assert one.ends() == 1
    assert one.says("unreadable-event: AccountOpened of accounts/b can't be read")
    assert one.says(said)
