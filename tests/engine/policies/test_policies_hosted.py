"""make test + prove: one process; its kills take longer.

A policy's agent is started again for as long as its process runs, and no end of it goes unnoticed."""

from __future__ import annotations

import asyncio
import gc
from itertools import count
from typing import Any
from weakref import WeakSet

import pytest

from infra.processes.process_end import PartEnded
from infra.settings import Settings
from policies.engine import process
from policies.engine.policy import Policy
from policies.engine.process import Policies
from projections.engine.fold.errors import PoisonEvent
from projections.engine.live.reader import Reader

NOWHERE = Settings(kafka_bootstrap="127.0.0.1:1", database_url="postgresql://nobody@127.0.0.1:1/none")
POLICY = Policy("greetings", 1, lambda _event, _at: (), frozenset())


@pytest.mark.prove(part="chaos")
def test_a_policy_that_fails_all_night_is_still_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, hosted = 0, list[Policies]()

    class Failing:
        reader = Reader({}, batch=1, max_age=1)

        async def run(self) -> None:
            nonlocal starts
            starts += 1
            if starts == 1_030:
                hosted[0].stop()
            raise PoisonEvent("policy_greetings", "accounts/1", 1, partition=0, offset=1, cause="it is poisonous")

        def stop(self) -> None:
            pass

    def failing(*_: Any) -> Failing:
        return Failing()

    async def run() -> None:
        hosting = Policies(NOWHERE, [POLICY], "test")
        hosted.append(hosting)
        asyncio.get_running_loop().call_later(240, hosting.stop)
        await hosting.run()

    monkeypatch.setattr(process, "RESTART_S", (0.0, 0.0))
    monkeypatch.setattr(process, "agent_of", failing)
    asyncio.run(run())
    assert starts == 1_030


def test_agents_that_failed_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is in cycles, and has a Kafka client that can't be closed. These processes collect garbage seldom."""
    made, most = WeakSet[Any](), 0

    class Failing:
        reader = Reader({}, batch=1, max_age=1)

        def __init__(self, hosting: Policies, number: int) -> None:
            self.itself, self.hosting, self.number = self, hosting, number

        async def run(self) -> None:
            nonlocal most
            most = max(most, len(made))
            if self.number == 4 * process.COLLECTED:
                self.hosting.stop()
            raise PoisonEvent("policy_greetings", "accounts/1", 1, partition=0, offset=1, cause="it is poisonous")

        def stop(self) -> None:
            pass

    async def run() -> None:
        hosting, number = Policies(NOWHERE, [POLICY], "test"), count()

        def failing(*_: Any) -> Failing:
            made.add(one := Failing(hosting, next(number)))
            return one

        monkeypatch.setattr(process, "agent_of", failing)
        asyncio.get_running_loop().call_later(60, hosting.stop)
        await hosting.run()

    monkeypatch.setattr(process, "RESTART_S", (0.0, 0.0))
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
    assert 0 < most <= process.COLLECTED + 1


def test_a_policy_whose_agent_can_not_even_be_made_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("no agent")

    async def run() -> None:
        hosting = Policies(NOWHERE, [POLICY], "test")
        asyncio.get_running_loop().call_later(60, hosting.stop)
        await hosting.run()

    monkeypatch.setattr(process, "agent_of", broken)
    with pytest.raises(PartEnded, match="policy greetings"):
        asyncio.run(run())
