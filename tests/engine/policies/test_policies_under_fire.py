"""make prove: two faults that take minutes.

Policies as processes: frozen in a transaction, overtaken and woken; and on a database restored to an older copy.

The judge folds the log independently, to exactly each snapshot's positions.
"""

from __future__ import annotations

import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest

from demo.crew import Crew
from demo.transfers import Transfers
from infra.database.connect import connect
from infra.log import topics
from infra.settings import Settings
from policies.engine.policy import discover
from proofs.chaos import conftest, process_faults
from proofs.chaos.field import Field
from proofs.chaos.ground import Ground
from proofs.chaos.judge import Judge
from proofs.chaos.policy_judge import is_at_rest
from proofs.chaos.tail import Tail
from tests.engine.spine import scalar
from tools.migrations.migrate import upgrade
from tools.testing.fixtures import SEED
from tools.testing.waiting import until

pytestmark = pytest.mark.prove(part="chaos")

ground = conftest.ground

TRIES = 4
"""The other process may have all partitions just now."""
TRANSFERS = 800
AGO = 1_000
"""Records between the copy and the moment at which it is restored."""


def test_a_process_frozen_in_its_transaction_overtaken_and_woken_has_no_second_effect(
    ground: Ground, tmp_path: Path
) -> None:
    """It has sent all of a batch's rows but not COMMIT; it wakes when the other one has passed it."""
    with Field(ground, tmp_path, SEED, rate=200) as field:
        for child in field.crew.policies:
            assert any(process_faults.freeze(field, child, "rows sent") for _ in range(TRIES)), field.logs()
        field.finish()
        assert field.all_violations() == [], field.logs()
        assert field.judge.ledger.ends.total() > 0


def are_policies_live(world: Settings) -> bool:
    wanted = [policy.agent for policy in discover().values()]
    found: int = scalar(world, "select count(distinct agent) from positions where agent = any(%s)", wanted)
    return found == len(wanted)


def is_at_rest_in(world: Settings) -> bool:
    with connect(world, "test") as db:
        return is_at_rest(db)


def length(tail: Tail) -> int:
    """Records of the log."""
    return sum(map(len, tail.records))


def test_a_database_restored_to_an_older_copy_heals_while_transfers_run(ground: Ground, tmp_path: Path) -> None:
    bank, postgres = ground.world(), ground.stack.postgres
    upgrade(bank)
    topics.ensure(bank)
    moving, copy = Transfers(bank, 8 * TRANSFERS, date(2026, 1, 1)), tmp_path / "copy"

    def copied(source: Path, target: Path) -> None:
        postgres.stop()
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", source, target], check=True)
        postgres.start()

    with Crew(bank, tmp_path / "logs", handler_count=2, agent_count=2) as crew, moving.tail as tail:
        until(lambda: are_policies_live(bank), "policies are live")
        moving.open_accounts()
        moving.advance(0.2)
        until(lambda: length(tail) > 500, "transfers run")
        copied(postgres.data, copy)
        then = length(tail)
        moving.advance(0.6)
        until(lambda: length(tail) > then + AGO, "the log goes on")
        copied(copy, postgres.data)
        with Judge(bank, tail, None) as judge:
            moving.advance(1.0)
            until(lambda: is_at_rest_in(bank), "all transfers have ended")
            judge.look(at_rest=True)
        crew.check()
    assert judge.violations == []
    assert len(judge.ledger.ends) > TRANSFERS * 0.9
    logs = "".join(file.read_text() for file in (tmp_path / "logs").iterdir())
    assert "Traceback" not in logs
    assert judge.seen.snapshots > 1
