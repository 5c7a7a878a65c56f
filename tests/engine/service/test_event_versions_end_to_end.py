"""make test-all + prove: a small bank folded live and locally shows it; a whole one and Spark take minutes.

A bank's transactions that the old code stored, read by code whose events have changed: all ways to fold them agree.

`MoneyDeposited` gets a currency in version 2, in version 3 its `cents` become its `amount`; `AccountOpened` is renamed, and has a
new field with a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from commands.client import wait_for
from demo import generate, release, tree
from demo.bank import OVERDRAFT_LIMIT
from demo.bank import bank as bank_of
from demo.crew import Crew
from demo.proof import counted_in
from demo.release import SPARK, CommandLine
from infra.log import topics
from infra.log.records import Command
from infra.settings import Settings
from projections.engine.views.core_views import all_views
from tests.engine.projections.bankviews import live_rows
from tests.engine.service.test_two_releases import Edits, write_tree
from tests.engine.spine import commits, deposit, open_account, scalar, send
from tools.dev.stack import Stack
from tools.testing.fixtures import ROOT, world_of
from tools.testing.waiting import DEADLINE_S

LOCAL = ("--engine", "local")
UPCASTERS = """@upcaster(MoneyDeposited, 1)
def with_currency(body: Body) -> Body:
    return {**body, "currency": "CZK"}


@upcaster(MoneyDeposited, 2)
def with_amount(body: Body) -> Body:
    return {"amount": body.pop("cents"), **body}


"""
CHANGED: Edits = {
    tree.ACCOUNTS: [
        (
            "class AccountOpened:\n",
            'class AccountCreated:\n    stored_as: ClassVar[str] = "AccountOpened"\n    branch: Text = "Prague"\n',
        ),
        ("Event: TypeAlias = AccountOpened", "Event: TypeAlias = AccountCreated"),
        ("[AccountOpened(", '[AccountCreated(branch="Brno", '),
        ("case AccountOpened(", "case AccountCreated("),
        (
            "class MoneyDeposited:\n    cents: Cents\n",
            "class MoneyDeposited:\n    VERSION: ClassVar[int] = 3\n    amount: Cents\n    currency: Text\n",
        ),
        ("@fact\nclass MoneyWithdrawn:\n", f"{UPCASTERS}@fact\nclass MoneyWithdrawn:\n"),
        ("[MoneyDeposited(cents=cents,", '[MoneyDeposited(amount=cents, currency="EUR",'),
        ("case MoneyDeposited(cents=cents) | Interest", "case MoneyDeposited(amount=cents) | Interest"),
    ],
    tree.BALANCES: [
        ("import AccountClosed, AccountOpened,", "import AccountClosed, AccountCreated,"),
        ("event: AccountOpened |", "event: AccountCreated |"),
        ("isinstance(event, AccountOpened)", "isinstance(event, AccountCreated)"),
    ],
    "projections/daily_totals.py": [("change(event), event.cents)", "change(event), abs(change(event)))")],
    "policies/public.py": [
        ("AccountClosed, AccountOpened,", "AccountClosed, AccountCreated,"),
        ("    AccountOpened |", "    AccountCreated |"),
        ("case AccountOpened(", "case AccountCreated("),
        ("Movement, kind", "Movement, change, kind"),
        ("cents=event.cents", "cents=abs(change(event))"),
    ],
}


@pytest.mark.parametrize(
    ("bank", "engines"),
    [
        pytest.param((40, 1_200), [LOCAL], marks=pytest.mark.slow, id="small-local"),
        pytest.param((), [LOCAL, SPARK], marks=pytest.mark.prove(part="chaos"), id="whole-local-spark"),
    ],
)
def test_all_that_was_stored_is_folded_to_the_same_rows_live_local_and_by_spark(
    bank: Sequence[int],
    engines: Sequence[tuple[str, ...]],
    world: Settings,
    stack: Stack,
    migrated: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "COMMAND_S", DEADLINE_S)
    generate.write(tmp_path / "bank.csv.gz", generate.generate(generate.SEED, *bank))
    of = bank_of(tmp_path, tmp_path / "bank.csv.gz", overdraft_limit=OVERDRAFT_LIMIT, seed=None)
    topics.ensure(world)
    with Crew(world, tmp_path / "old", handler_count=1, agent_count=1, policies_count=0):
        send(world, *of.commands)
        wait_for(world, of.commands, lambda _count: None, timeout_s=DEADLINE_S)
    before, counted = live_rows(world), counted_in(world)
    assert len(before["statement"]) == len(of.transactions)

    code = tree.environment(write_tree(tmp_path / "changed", ROOT, CHANGED))
    samefold = CommandLine(tmp_path, world.environment() | code)
    assert "accounts.MoneyDeposited is at version 3, after 1" in samefold.run("events", "check")
    samefold.run("events", "release")

    with world_of(stack, migrated) as other:
        empty = world.model_copy(update={"database_url": other.database_url, "group_prefix": other.group_prefix})
        one_agent = Crew(empty, tmp_path / "live", handler_count=0, agent_count=1, policies_count=0, environment=code)
        with one_agent:
            wait_for(empty, of.commands, lambda _count: None, timeout_s=DEADLINE_S)
        assert live_rows(empty) == before, "folded live, from the beginning"

    for engine in engines:
        rebuilt = samefold.told("rebuild", *all_views(), *engine)
        assert rebuilt["engine"] == engine[1]
        assert rebuilt["tables"].keys() == all_views().keys()
        assert live_rows(world) == before, f"rebuilt by {engine[1]}"
        assert samefold.told("verify", *engine)["differences"] == 0

    old, new = of.transactions[0].account, "opened-later"
    cents = balance(world, old)
    more = [open_account(new), deposit(new, "first", 3), deposit(old, "another", 5)]
    with Crew(world, tmp_path / "new", handler_count=1, agent_count=1, policies_count=0, environment=code):
        send(world, *of.commands[:500], *more)
        wait_for(world, more, lambda _count: None, timeout_s=DEADLINE_S)
    assert counted_in(world) - counted == {(one.stream, one.id): 1 for one in more}, (
        "repeated commands were decided before"
    )
    assert (balance(world, old), balance(world, new)) == (cents + 5, 3)
    assert [stored(world, one) for one in more] == [
        ("AccountOpened", {"branch": "Brno", "overdraft_limit": 0, "on": "2026-01-01", "owner": ""}),
        *(
            ("MoneyDeposited/3", {"amount": amount, "currency": "EUR", "on": "2026-01-02", "details": NO_DETAILS})
            for amount in (3, 5)
        ),
    ]
    for engine in engines:
        assert samefold.told("verify", *engine)["differences"] == 0


NO_DETAILS = {"operation": "", "purpose": "", "counter_bank": "", "counter_account": ""}


def balance(world: Settings, account: str) -> int:
    found: int = scalar(world, "select cents from balances where account = %s", account)
    return found


def stored(world: Settings, command: Command) -> tuple[str, object]:
    """The event that a command led to, as the log has it."""
    [event] = [event for commit in commits(world) if commit.command_id == command.id for event in commit.events]
    return event.type, msgspec.json.decode(event.data)
