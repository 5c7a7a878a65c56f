"""make test + test-all + prove: what a decision that never ends, or ends its handler, does to others; some handlers die of it.

Handlers run as processes, with a copy of the sample whose `decide` or views do it for certain amounts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo import tree
from demo.crew import Crew
from infra.log.records import Command
from infra.settings import Settings
from tests.engine.service.test_two_releases import write_tree
from tests.engine.spine import command, commits, deposit, open_account, send, set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

LOOP, PATTERN, IN_C, KILL, CHECK_LOOP, CHECK_KILL = 601, 602, 603, 604, 605, 606
"""Cents of a deposit."""
FAULTS = f"""\
    match getattr(command, "cents", 0):
        case {LOOP}:
            while True:
                try:
                    while True:
                        pass
                except Exception:
                    continue
        case {PATTERN}:
            __import__("re").match(r"(a+)+$", "a" * 60 + "b")
        case {IN_C}:
            sum(range(10**15))
        case {KILL}:
            __import__("os").kill(__import__("os").getpid(), 9)
"""
DEPOSIT = """\
class Deposit:
    cents: Cents
    on: date
    details: Details = NO_DETAILS
"""
CHECKS = f"""
    def __post_init__(self) -> None:
        while self.cents == {CHECK_LOOP}:
            pass
        if self.cents == {CHECK_KILL}:
            __import__("os").kill(__import__("os").getpid(), 9)
"""
NO_CLOCK = (
    '    """Raises Refusal. No clock, no random numbers, nothing but the arguments: a retry must decide the same."""\n'
)


@contextmanager
def handlers(world: Settings, folder: Path, *sent: Command) -> Iterator[Crew]:
    """A supervised handler, whose `decide` and `Deposit` have the faults. These commands were sent before it starts."""
    set_up(world)
    send(world, *sent)
    edits = [(NO_CLOCK, NO_CLOCK + FAULTS), (DEPOSIT, DEPOSIT + CHECKS)]
    code = write_tree(folder / "code", ROOT, {"domain/accounts.py": edits})
    limited = world.model_copy(update={"decide_limit_s": 2})
    environment = tree.environment(code)
    with Crew(limited, folder, handler_count=1, agent_count=0, policies_count=0, environment=environment) as crew:
        yield crew


def decided(world: Settings, count: int) -> list[tuple[str, str]]:
    """Ids, and how their messages begin, of the first `count` commits."""
    until(lambda: len(commits(world)) >= count, f"{count} commits")
    return [(c.command_id, c.reason.message.partition(":")[0] if c.reason else "") for c in commits(world)[:count]]


def test_a_decision_that_does_not_end_is_recorded_as_failed_and_the_partition_goes_on(
    world: Settings, tmp_path: Path
) -> None:
    private = command("accounts/ada", "loop", "Deposit", cents=LOOP, on="2026-01-01", details={"purpose": "private"})
    with handlers(world, tmp_path) as crew:
        send(world, open_account("ada"), private, deposit("ada", "pattern", PATTERN), deposit("ada", "next", 1))
        assert decided(world, 4) == [("open-ada", ""), ("loop", "too-slow"), ("pattern", "too-slow"), ("next", "")]
        send(world, private, deposit("ada", "last", 1))
        assert decided(world, 5)[4:] == [("last", "")]
        assert [(c.version, c.reason and c.reason.code) for c in commits(world)[1:4]] == [(1, "failed")] * 2 + [
            (2, None)
        ]
    assert crew.handlers[0].starts == 1
    log = (tmp_path / f"{crew.handlers[0].name}.log").read_text()
    assert "command Deposit loop of accounts/ada takes longer than 0.2 s: decide (accounts.py:" in log
    assert "private" not in log


@pytest.mark.slow
@pytest.mark.parametrize("is_attempt", [True, pytest.param(False, marks=pytest.mark.prove(part="chaos"))])
def test_checks_that_do_not_end_are_made_one_by_one(world: Settings, tmp_path: Path, is_attempt: bool) -> None:
    """Many of them at once would cost the handler its place in the group."""
    slow = [deposit("ada", f"slow{n}", CHECK_LOOP) for n in range(5)]
    with handlers(world, tmp_path, open_account("ada"), *(slow if is_attempt else ())) as crew:
        decided(world, 1)
        if not is_attempt:
            send(world, *slow)
        until(lambda: len(commits(world)) > 1, "the first one has its outcome")
        assert len(commits(world)) < 6
        assert decided(world, 6)[1:] == [(f"slow{n}", "too-slow") for n in range(5)]
    log = (tmp_path / f"{crew.handlers[0].name}.log").read_text()
    assert [log.count(f"a check of command slow{n} of accounts/ada takes longer") for n in range(5)] == [1] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [KILL, *(pytest.param(one, marks=pytest.mark.prove(part="chaos")) for one in (IN_C, CHECK_KILL))]
)
def test_a_command_that_ends_its_handler_each_time_is_recorded_as_failed_and_the_partition_goes_on(
    world: Settings, tmp_path: Path, fault: int
) -> None:
    before, after = (deposit("ada", "before", 1), deposit("bob", "beside", 1)), deposit("ada", "after", 1)
    with handlers(world, tmp_path) as crew:
        send(world, open_account("ada"), open_account("bob"))
        decided(world, 2)
        send(world, *before, deposit("ada", "fatal", fault), after, *(deposit("bob", f"d{n}", 1) for n in range(9)))
        until(lambda: len(commits(world)) == 15, "all have their outcome")
    by_id = {c.command_id: c for c in commits(world)}
    assert [name for name, c in by_id.items() if c.reason] == ["fatal"]
    assert by_id["fatal"].reason is not None
    assert by_id["fatal"].reason.code == "failed"
    assert by_id["fatal"].reason.message.startswith("ended-the-handler: ")
    assert crew.handlers[0].starts <= 7
