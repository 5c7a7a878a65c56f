"""Two banks, each with a log, a database and processes of its own: one pays, the other takes the money in and answers.

Each has the policy of `other_service/` beside its own, and hears what the other one publishes. `python -m proofs.chaos.two_services
MODULE --name NAME` runs one of the product's modules with that policy.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Self

import msgspec

import policies
from commands.client import NotSent, Sender
from demo.background_thread import BackgroundThread
from domain.accounts import Command as Body
from domain.accounts import Deposit, OpenAccount, Withdraw
from domain.engine.versions import stored_type
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log import topics
from infra.log.records import Command
from infra.processes.supervisor import Child
from infra.settings import Settings
from policies.engine.policy import discover
from proofs.chaos.judge import Judge
from proofs.chaos.policy_judge import is_at_rest
from proofs.chaos.tail import Tail
from proofs.kit import Supervised
from tools.migrations.migrate import upgrade

OTHER = Path(__file__).parent / "other_service"
SOURCES = "CHAOS_SOURCES"
"""As a supervisor gives the setting `sources` to the product's own modules only."""
MODULES = {
    **{f"handler-{n}": "commands.handler" for n in (1, 2)},
    **{f"agent-{n}": "projections.engine.live.agent" for n in (1, 2)},
    **{f"policies-{n}": "policies.engine.process" for n in (1, 2)},
    "publisher-1": "policies.engine.publisher",
}
ACCOUNTS = 20
AHEAD = 300
"""So many payments are on their way at most, so that all processes are at work for as long as there are payments."""
DAY = date(2026, 1, 1)
POLICY = "from_other"


class Bank(Supervised):
    """One of them, judged for as long as the `with` lasts. Its children are not started before `__enter__`."""

    def __init__(self, world: Settings, other: Settings, folder: Path) -> None:
        self.world = world
        self.tail = Tail(world)
        self.judge = Judge(world, self.tail, None, ("balances", "transfers"))
        children = [
            Child(name, "proofs.chaos.two_services", (module, "--name", f"{world.group_prefix}-{name}"))
            for name, module in MODULES.items()
        ]
        sources = msgspec.json.encode({"other": {"topic": other.public_topic}}).decode()
        super().__init__(children, world.environment() | {SOURCES: sources}, folder)

    def __enter__(self) -> Self:
        upgrade(self.world)
        topics.ensure_public(self.world, topics.ensure(self.world)[1])
        self.tail.__enter__()
        self.judge.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.judge.__exit__(*error)
        self.tail.__exit__(*error)

    def are_policies_live(self) -> bool:
        with connect(self.world, "chaos") as connection:
            [(live,)] = connection.execute("select count(distinct agent) from positions where agent like 'policy_%'")
        return bool(live == len(discover()) + 1)

    def is_at_rest(self) -> bool:
        with connect(self.world, "chaos") as connection:
            return is_at_rest(connection)

    def balances(self) -> Counter[str]:
        with connect(self.world, "chaos") as connection:
            return Counter(dict(connection.execute("select account, cents from balances where cents > 0").fetchall()))

    def received(self) -> Counter[str]:
        """How often each command that a message led to counts in the log."""
        found: Counter[str] = Counter()
        for records in self.tail.records:
            for _, value in [*records]:
                if value is not None and f'"{POLICY}~'.encode() in value:
                    found[msgspec.json.decode(value)["command_id"]] += 1
        return found


class Payments(BackgroundThread):
    """The first bank's clients pay, in a thread, past any fault. `made` is how many payments are in the topic of commands."""

    def __init__(self, bank: Bank, other: Bank, count: int) -> None:
        super().__init__("payments")
        self.bank, self.other, self.count, self.made = bank, other, count, 0
        self.sums = Counter({str(n): 0 for n in range(ACCOUNTS)})

    def open_accounts(self) -> None:
        for bank, roles in ((self.bank, ("payer", "answer")), (self.other, ("payee",))):
            opened: list[Command] = []
            for role in roles:
                for n in range(ACCOUNTS):
                    opened.append(_command(f"open-{role}-{n}", f"{role}-{n}", OpenAccount(overdraft_limit=0, on=DAY)))
                    if role == "payer":
                        money = Deposit(cents=100 * self.count, on=DAY)
                        opened.append(_command(f"money-{n}", f"{role}-{n}", money))
            Sender(bank.world).send(opened, lambda _count: None)

    def _work(self) -> None:
        while self.made < self.count and not self._ended.wait(0.05):
            if self.made - sum(map(len, self.other.tail.records)) < AHEAD:
                some = range(self.made, min(self.made + 50, self.count))
                self._send([_command(f"pay-{n}", f"payer-{n % ACCOUNTS}", _payment(n)) for n in some])
                for n in some:
                    self.sums[str(n % ACCOUNTS)] += _payment(n).cents
                self.made = some.stop

    def _send(self, commands: Sequence[Command]) -> None:
        while not self._ended.is_set():
            try:
                Sender(self.bank.world).send(commands, lambda _count: None)
                return
            except (NotSent, SamefoldError):
                self._ended.wait(0.5)


def _payment(number: int) -> Withdraw:
    return Withdraw(cents=1 + number % 97, on=DAY)


def _command(ident: str, account: str, body: Body) -> Command:
    return Command(ident, f"accounts/{account}", stored_type(type(body)), msgspec.Raw(msgspec.json.encode(body)))


def main() -> None:
    module, *rest = sys.argv[1:]
    os.environ["SAMEFOLD_SOURCES"] = os.environ[SOURCES]
    policies.__path__.append(str(OTHER))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
