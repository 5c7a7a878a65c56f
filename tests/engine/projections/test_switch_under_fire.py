"""make prove: minutes of kills, each of which `test_switch.py` and `proofs/model_read` have alone.

Rebuild and switch at full write load, while agents are killed and frozen exactly then.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest

from commands.client import wait_for
from demo import traffic as load
from demo.crew import Crew, thaw
from demo.proof import counted_in
from demo.traffic import Traffic
from demo.watch import Watch
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
from infra.testing.waiting import DEADLINE_S
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.projections.bankviews import live_table
from tests.engine.service.test_end_to_end import place, until, work
from tests.engine.spine import open_account, scalar, send

__all__ = ["place"]

ACCOUNTS = [str(number) for number in range(60)]
NAMES = ["balances", "statement"]

pytestmark = pytest.mark.prove(part="chaos")


class Fire:
    """What happens to agents at a point of the switch, once."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.happened = 0

    @contextmanager
    def at(self, point: Point, strike: Callable[[], None]) -> Iterator[None]:
        def hook(reached: Point) -> None:
            if reached == point and faultpoints.hook is not None:
                faultpoints.hook = None
                strike()
                self.happened += 1

        faultpoints.hook = hook
        try:
            yield
        finally:
            faultpoints.hook = None

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self.crew.kill(self.crew.agents[number])

    @contextmanager
    def frozen(self, *numbers: int) -> Iterator[Callable[[], None]]:
        """Agents that are frozen when the function is called, and awake again afterwards."""
        processes: list[subprocess.Popen[bytes]] = []

        def freeze() -> None:
            found = [self.crew.freeze(self.crew.agents[number]) for number in numbers]
            processes.extend(filter(None, found))

        try:
            yield freeze
        finally:
            for process in processes:
                thaw(process)


def test_agents_killed_and_frozen_during_switches_at_full_load(
    place: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "RATE", 1_000)
    views = all_views()
    # agents freeze here; the one who rebuilds only ever waits for its turn on a busy machine
    patient = place.model_copy(update={"idle_in_transaction_timeout_ms": 30_000})

    def goes_on(crew: Crew, watch: Watch) -> None:
        seen = answers()
        until(crew, watch, lambda: answers() > seen)

    def answers() -> int:
        return int(scalar(place, "select count(*) from command_outcomes"))

    with work(place, tmp_path) as (crew, watch):
        send(place, *(open_account(name, 100_000) for name in ACCOUNTS))
        until(crew, watch, lambda: answers() == len(ACCOUNTS))
        fire = Fire(crew)
        with Traffic(place, ACCOUNTS, date(2026, 1, 2)) as traffic:
            goes_on(crew, watch)
            with fire.at("switch locked", lambda: fire.kill(0)):
                rebuild(patient, NAMES, views, processes=1)
            goes_on(crew, watch)
            with fire.frozen(1) as freeze, fire.at("switch locked", freeze):
                rebuild(patient, NAMES, views, processes=1)
            goes_on(crew, watch)
            with fire.frozen(0, 1) as freeze, fire.at("switch written", freeze):
                go_to(patient, NAMES, views)
            goes_on(crew, watch)
            with fire.frozen(0) as freeze:
                freeze()  # wherever it is, perhaps with the locks of its positions
                rebuild(patient, NAMES, views, processes=1)
            with fire.at("switch written", lambda: fire.kill(0, 1)):
                rebuild(patient, NAMES, views, processes=1)
            goes_on(crew, watch)
            traffic.stop()
        wait_for(place, traffic.commands, lambda _: None, timeout_s=DEADLINE_S)
    assert fire.happened == 4
    assert live_table(place, "balances") == "balances_v2_r5"
    counted = counted_in(place)
    assert {counted[command.stream, command.id] for command in traffic.commands} == {1}
    assert scalar(place, "select sum(cents) from balances") == traffic.deposited - traffic.withdrawn
    assert verify(place, views).differences == 0
