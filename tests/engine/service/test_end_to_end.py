"""make test: the main way, from commands in a topic to rows, by two handlers and two agents as processes.

Killed and frozen under fire they are in `proofs/chaos/test_under_fire.py`.
"""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from commands.client import answered, wait_for
from commands.outcomes import outcomes_of
from demo import generate
from demo.bank import bank
from demo.crew import Crew
from demo.proof import counted_in, prove, rows_of
from demo.watch import Watch
from infra.database.connect import connect
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.log.records import Command
from infra.settings import Settings
from projections.engine.operate.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.projections.bankviews import live_rows
from tests.engine.service.oracle import judge
from tests.engine.spine import open_account, send
from tools.testing.waiting import DEADLINE_S


def one_for_each_partition(world: Settings) -> list[Command]:
    """A new account in each partition."""
    found: dict[int, Command] = {}
    for number in range(1_000):
        opening = open_account(f"last-{number}")
        found.setdefault(partition_of(opening.stream, world.partitions), opening)
    return list(found.values())


def test_each_command_takes_effect_once_as_an_oracle_predicts_and_sending_all_again_changes_nothing(
    world: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = world.model_copy(update={"batch": 50})
    topics.ensure(place)
    monkeypatch.setattr("demo.watch.AT_WORK_WITHIN_S", DEADLINE_S)
    generate.write(tmp_path / "few.csv.gz", generate.generate(accounts=60, transactions=2_500))
    of = bank(tmp_path, tmp_path / "few.csv.gz", overdraft_limit=0, seed=None)
    with Crew(place, tmp_path / "logs") as crew, Watch(place) as watch:
        watch.wait_until(lambda: watch.is_ready(crew.handlers, crew.agents), crew)
        send(place, *of.commands)
        first = wait_for(place, of.commands, lambda _count: None, timeout_s=DEADLINE_S)
        assert first.rejected > 0, "a repeated rejection must get its first answer too"
        before, log = live_rows(place), counted_in(place)
        proof = prove(of.transactions, of.commands, log, rows_of(place, log), None, {})
        assert (proof.lost, proof.doubled, proof.disagreements) == (0, 0, ())
        assert answered(place, of.commands) == len(of.commands)

        send(place, *of.commands)
        last = one_for_each_partition(place)
        send(place, *last)
        # in each partition these come after the repeated ones, so those have been dealt with when these have an answer
        wait_for(place, last, lambda _count: None, timeout_s=DEADLINE_S)
        again = wait_for(place, of.commands, lambda _count: None, timeout_s=DEADLINE_S)

    assert again == first
    assert again.other_body == 0
    assert counted_in(place) == log + Counter((command.stream, command.id) for command in last)
    for view, rows in live_rows(place).items():
        assert set(before[view]) <= set(rows), view
        added = len(last) if view in ("balances", "command_outcomes", "streams_accounts") else 0
        assert len(rows) == len(before[view]) + added, view

    verdict = judge(tmp_path / "few.csv.gz", Decimal(0))
    expected = {f"open-{account}": ("accepted", None) for account in verdict.balances} | {
        f"berka-{name}": ("accepted", None) if accepted else ("rejected", "insufficient-funds")
        for name, accepted in verdict.accepted.items()
    }
    with connect(place, "test") as connection:
        found = outcomes_of(connection, list(log))
    assert {name: (outcome.outcome, outcome.code) for (_, name), outcome in found.items()} == expected
    assert verify(place, all_views()).differences == 0
