"""Commands that keep coming while something is done to the system."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import date

import msgspec

from commands.client import Sender
from demo.background_thread import BackgroundThread
from domain.accounts import Deposit, Withdraw
from infra.log.records import Command
from infra.settings import Settings

RATE = 100
"""Commands per second."""
TICK_S = 0.02
IN, OUT = 2_00, 1_00
"""Cents of a deposit, and of the withdrawal from the same account that follows it: what was accepted once can't be refused."""


class Traffic(BackgroundThread):
    """`with Traffic(settings, ["1", "2"], day) as traffic:` sends from a thread until `stop`, or the block's end.

    `commands` are those handed over so far, in order; after `stop`, all of them are in the log.
    """

    def __init__(self, settings: Settings, accounts: Sequence[str], on: date) -> None:
        super().__init__("traffic")
        self.commands: list[Command] = []
        self._settings = settings
        self._accounts = accounts
        self._on = on

    @property
    def deposited(self) -> int:
        """Cents, if all are accepted."""
        return IN * ((len(self.commands) + 1) // 2)

    @property
    def withdrawn(self) -> int:
        """Cents, if all are accepted."""
        return OUT * (len(self.commands) // 2)

    def stop(self) -> None:
        """Send no more. Raises what kept the commands from the log: NotSent, KafkaUnavailable."""
        self._end()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        Sender(self._settings).send(self._due(), lambda _count: None)

    def _due(self) -> Iterator[Command]:
        began = time.monotonic()
        while not self._ended.wait(TICK_S):
            due = int((time.monotonic() - began) * RATE)
            while len(self.commands) < due:
                self.commands.append(self._command(len(self.commands)))
                yield self.commands[-1]

    def _command(self, number: int) -> Command:
        account = self._accounts[number // 2 % len(self._accounts)]
        order = Withdraw(cents=OUT, on=self._on) if number % 2 else Deposit(cents=IN, on=self._on)
        body = msgspec.Raw(msgspec.json.encode(order))
        return Command(f"meanwhile-{number}", f"accounts/{account}", type(order).__name__, body)
