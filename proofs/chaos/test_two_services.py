"""make prove: some minutes, and the long run many. Two services hear each other, and are killed: nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from proofs.chaos.ground import Ground
from proofs.chaos.two_services import Bank, Payments
from tools.testing.fixtures import SEED
from tools.testing.waiting import until

pytestmark = pytest.mark.prove(part="chaos")

STORES = 4
"""Of so many faults one is a restart of Kafka or of PostgreSQL, in turn."""


def strike(ground: Ground, banks: tuple[Bank, Bank], number: int, random: Random) -> str:
    """A fault that took effect: what was killed or restarted."""
    if number % STORES == 0:
        store = (ground.stack.kafka, ground.stack.postgres)[number // STORES % 2]
        store.stop()
        store.start()
        return store.name
    while True:
        bank = random.choice(banks)
        child = random.choice(bank.children)
        if bank.kill(child):
            return child.name


@pytest.mark.parametrize(("payments", "faults"), [(1_000, 6), (20_000, 40)])
def test_payments_from_one_service_to_the_other_and_back(
    ground: Ground, tmp_path: Path, payments: int, faults: int
) -> None:
    first, second = ground.world(), ground.world()
    struck, random = Counter[str](), Random(SEED)
    with Bank(first, second, tmp_path / "first") as one, Bank(second, first, tmp_path / "second") as two:
        until(lambda: one.are_policies_live() and two.are_policies_live(), "policies are live")
        paying = Payments(one, two, payments)
        paying.open_accounts()
        with paying:
            for number in range(faults):
                due = payments * (number + 1) // (faults + 1)
                until(lambda due=due: paying.error or paying.made >= due, "payments go on")  # type: ignore[misc]
                assert paying.error is None
                struck[strike(ground, (one, two), number, random)] += 1
            until(lambda: paying.error or paying.made == payments, "all is paid")
        total = paying.sums.total()
        until(lambda: sum(one.balances()[f"answer-{n}"] for n in paying.sums) >= total, "all is answered")
        until(lambda: one.is_at_rest() and two.is_at_rest(), "nothing is under way")
        for bank in (one, two):
            bank.judge.look()
            assert bank.judge.violations == []
            assert bank.judge.seen.snapshots > faults
            received = bank.received()
            assert (len(received), max(received.values())) == (payments, 1)
        balances = one.balances() + two.balances()
        for name, cents in paying.sums.items():
            assert balances[f"payee-{name}"] == balances[f"answer-{name}"] == cents
        print(
            f"{payments} payments, {struck.total()} faults: {dict(struck)}; snapshots {one.judge.seen}, {two.judge.seen}"
        )
    assert struck.total() == faults
