"""Transfers between accounts of their own, requested while the bank's transactions are loaded, and their judge."""

from __future__ import annotations

import time
from collections import Counter
from datetime import date
from random import Random
from typing import NamedTuple

import msgspec

from commands.client import Sender, wait_for
from demo.watch import Watch
from domain import accounts, transfers
from domain.engine.versions import stored_type
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log.records import Command
from infra.settings import Settings
from proofs.chaos.judge import Judge
from proofs.chaos.policy_judge import is_at_rest
from proofs.chaos.tail import Tail

MOST = 2_000
FOR_EACH = 8
"""Transactions of the bank's for one transfer, where there are too few for the most transfers."""
ACCOUNTS = 100
CLOSED = 5
"""So many of them are closed: they can't take the money, and give none."""
OURS = "transfer"
"""Who sends these commands, and what their ids, and the names of these accounts, begin with; a policy's ids do too."""
WITHIN_S = 120.0
STATES = {"completed": "completed", "failed": "failed", "refunded": "failed"}


class TransfersUnderWay(SamefoldError):
    """Transfers did not end in time."""


class Moved(NamedTuple):
    """What became of the transfers. One that was refused at once, or refunded, has failed. `violations` are the judge's."""

    requested: int = 0
    completed: int = 0
    failed: int = 0
    in_flight: int = 0
    snapshots: int = 0
    violations: tuple[str, ...] = ()


class Transfers:
    """`with Transfers(settings, transactions, day) as moving:` judges every snapshot, each second, in a thread.

    `advance` requests as large a share of the transfers as of the bank's commands is visible.
    """

    def __init__(self, settings: Settings, transactions: int, on: date, seed: int = 0) -> None:
        self.settings = settings
        self.requests = _requests(min(MOST, transactions // FOR_EACH), on, Random(seed))
        self.tail = Tail(settings)
        self.judge = Judge(settings, self.tail, None, ("balances", "transfers"))
        self._on = on
        self._sender = Sender(settings)
        self._sent = 0

    def __enter__(self) -> Transfers:
        self.tail.__enter__()
        self.judge.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.judge.__exit__(*error)
        self.tail.__exit__(*error)

    def open_accounts(self) -> None:
        """Returns when they have their money, and some are closed."""
        opening: list[Command] = []
        for number in range(ACCOUNTS if self.requests else 0):
            stream = f"accounts/{OURS}-{number}"
            last = (
                accounts.Deposit(cents=500_00, on=self._on) if number >= CLOSED else accounts.CloseAccount(on=self._on)
            )
            for step, body in enumerate((accounts.OpenAccount(overdraft_limit=0, on=self._on), last)):
                opening.append(_command(f"{OURS}-account-{number}-{step}", stream, body))
        self._sender.send(opening, lambda _count: None)
        wait_for(self.settings, opening, lambda _count: None, timeout_s=WITHIN_S)

    def advance(self, share: float) -> None:
        """Request as many as are due; returns when the requests are in the log."""
        due = round(len(self.requests) * share)
        self._sender.send(self.requests[self._sent : due], lambda _count: None)
        self._sent = max(self._sent, due)

    def finish(self, watch: Watch) -> None:
        """Returns when all have ended, and a last snapshot was judged. Raises TransfersUnderWay."""
        self.advance(1.0)
        wait_for(self.settings, self.requests, lambda _count: None, timeout_s=WITHIN_S)
        deadline = time.monotonic() + WITHIN_S
        while not self._have_ended():
            if time.monotonic() > deadline:
                raise TransfersUnderWay(
                    f"Transfers were still under way after {WITHIN_S:.0f} s.",
                    "Look into the logs of the processes, and at `samefold outbox list`.",
                )
            watch.wait(0.1)
        self.judge.look(at_rest=True)

    def moved(self) -> Moved:
        """As of the last snapshot."""
        became = Counter(STATES.get(row[1], "in_flight") for row in self.judge.ledger.rows["transfers"].values() if row)
        return Moved(
            requested=len(self.requests),
            completed=became["completed"],
            failed=became["failed"] + len(self.requests) - became.total(),
            in_flight=became["in_flight"],
            snapshots=self.judge.seen.snapshots,
            violations=tuple(self.judge.violations),
        )

    def _have_ended(self) -> bool:
        with connect(self.settings, "samefold demo") as connection:
            return is_at_rest(connection)


def _requests(count: int, on: date, random: Random) -> list[Command]:
    """Between any two accounts; some with themselves, some of more than there is."""
    return [
        _command(
            f"{OURS}-{number}",
            f"transfers/{number}",
            transfers.RequestTransfer(
                source=f"{OURS}-{int(random.random() * ACCOUNTS)}",
                target=f"{OURS}-{int(random.random() * ACCOUNTS)}",
                cents=1 + int(random.random() * 200_00),
                on=on,
            ),
        )
        for number in range(count)
    ]


def _command(command_id: str, stream: str, body: accounts.Command | transfers.Command) -> Command:
    return Command(command_id, stream, stored_type(type(body)), msgspec.Raw(msgspec.json.encode(body)), by=OURS)
