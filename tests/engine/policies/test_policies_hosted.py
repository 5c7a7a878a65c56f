"""make test + prove: one process; its kills take longer.

A policy's agent is started again for as long as its process runs, and no end of it goes unnoticed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest

from infra.errors import PartEnded
from infra.processes.gathering import Window
from infra.settings import Settings
from policies.engine import process
from policies.engine.policy import Policy
from policies.engine.process import Policies
from projections.engine.fold.errors import PoisonEvent
from projections.engine.live.reader import Reader

NOWHERE = Settings(kafka_bootstrap="127.0.0.1:1", database_url="postgresql://nobody@127.0.0.1:1/none")
POLICY = Policy("greetings", 1, lambda _event, _at: (), frozenset())


class Failing:
    """An agent that fails at once. It is in cycles, as a real one."""

    reader = Reader({}, batch=1, window=Window(1))

    def __init__(self, before: Callable[[], None]) -> None:
        self.itself, self.before = self, before

    async def run(self) -> None:
        self.before()
        raise PoisonEvent("policy_greetings", "accounts/1", 1, partition=0, offset=1, cause="it is poisonous")

    def stop(self) -> None:
        pass


def host(monkeypatch: pytest.MonkeyPatch, policy_agent: Callable[[Policies], Any]) -> None:
    """Run a policy's process with these agents, which are started again without a pause, until it is stopped or ends."""

    async def run() -> None:
        hosting = Policies(NOWHERE, [POLICY], "test")
        monkeypatch.setattr(process, "policy_agent", lambda *_: policy_agent(hosting))
        asyncio.get_running_loop().call_later(240, hosting.stop)
        await hosting.run()

    monkeypatch.setattr(process, "RESTART_S", (0.0, 0.0))
    asyncio.run(run())


@pytest.mark.prove(part="chaos")
def test_a_policy_that_fails_all_night_is_still_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = 0

    def failing(hosting: Policies) -> Failing:
        def count_one() -> None:
            nonlocal starts
            starts += 1
            if starts == 1_030:
                hosting.stop()

        return Failing(count_one)

    host(monkeypatch, failing)
    assert starts == 1_030


def test_agents_that_failed_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is in cycles, and has a Kafka client that can't be closed. These processes collect garbage seldom."""
    made, most, number = WeakSet[Any](), 0, 0

    def failing(hosting: Policies) -> Failing:
        def look() -> None:
            nonlocal most, number
            most, number = max(most, len(made)), number + 1
            if number > 4 * process.COLLECTED:
                hosting.stop()

        made.add(one := Failing(look))
        return one

    gc.disable()
    try:
        host(monkeypatch, failing)
    finally:
        gc.enable()
    assert 0 < most <= process.COLLECTED + 1


def test_a_policy_whose_agent_can_not_even_be_made_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Policies) -> None:
        raise ZeroDivisionError("no agent")

    with pytest.raises(PartEnded, match="policy greetings"):
        host(monkeypatch, broken)
