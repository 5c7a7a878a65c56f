"""make prove: chance decides when a process that lacks a rule does wrong; up to three tries each.

Processes that lack a rule do wrong under fire, and the judge sees it; what the tables' keys would refuse is let in for that.

Sometimes a process sees it first, and stops with a named error: that too is a violation, which begins with `a process ended`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from infra.database.connect import connect
from proofs.chaos import process_faults, wire_faults
from proofs.chaos.field import Field, NotReached
from proofs.chaos.ground import Ground
from proofs.chaos.ledger import Ledger
from tools.testing.fixtures import SEED

TABLES = ("command_outcomes_v3", "statement_v2")
AGENT, HANDLER = "projections.engine.live.agent", "commands.handler"

pytestmark = pytest.mark.prove(part="chaos")


def kill_handlers_while_agents_stand_still(field: Field) -> None:
    """So that there is something between the database and the next opening."""
    agents = [field.crew.process(child) for child in field.crew.agents]
    for agent in agents:
        agent.send_signal(signal.SIGSTOP)
    try:
        decided = field.tail.mark()
        field.until_decided(decided)
        for child in field.crew.handlers:
            process_faults.kill(field, child)
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGCONT)


def let_an_agent_wake_up(field: Field) -> None:
    process_faults.freeze(field, field.crew.agents[0], "batch read")


@pytest.mark.parametrize(
    ("rule", "module", "fault", "letters"),
    [
        ("a handler reads up to its opening", HANDLER, kill_handlers_while_agents_stand_still, "AB"),
        ("a commit counts in its epoch and in line", AGENT, wire_faults.produce_request_held, "CIa"),
        # B: a handler may decide on the rows that went back before the judge sees them
        ("a batch moves positions from where it was read", AGENT, let_an_agent_wake_up, "BCIa"),
    ],
)
def test_the_judge_finds_it(
    rule: str, module: str, fault: Callable[[Field], object], letters: str, ground: Ground, tmp_path: Path
) -> None:
    with Field(ground, tmp_path, SEED, rate=200, lacking={module: rule}) as field:
        with connect(field.world, "test") as db:
            for table in TABLES:
                db.execute(f"alter table {table} drop constraint {table}_pkey".encode())
        tries = 0
        while not field.all_violations() and tries < 3:
            tries += 1
            with suppress(NotReached):
                fault(field)
                field.until(lambda: bool(field.all_violations()), "it is found", 10)
        found = [*field.all_violations(), *in_the_log(field)]
        # a named error is a finding, a defect of the process that lacks the rule is none
        assert [one for one in found if one[0] in letters and "Traceback" not in one], found


def in_the_log(field: Field) -> list[str]:
    """What a ledger finds in all of it, also where the agents have stopped before."""
    ledger = Ledger(field.world.partitions, field.load.sent)
    for partition, records in enumerate(field.tail.records):
        for offset, record in enumerate(list(records)):
            ledger.take(partition, offset, *record)
    return ledger.violations
