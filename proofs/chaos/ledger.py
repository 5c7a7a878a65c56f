"""The bank after the log, and what the log itself must never show, without a line of the product.

That is a command that counts twice (A), a decision that the state before it does not lead to, or a version that is not the number
of events (B), a command offset that goes back (G).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from proofs.bank_oracle import EPOCH, VIEWS, Account, Bank, Row

Lines = dict[str, dict[Row, str]]
"""By view and key, a row as `COLUMNS` asks PostgreSQL for it: values with tabs between them."""

COLUMNS = {
    "balances": "account, cents, overdraft_limit, opened_on, last_on, transactions, coalesce(closed_on::text, ''), _partition",
    "command_outcomes": "stream, command_id, outcome, coalesce(code, ''), coalesce(message, ''), version, fingerprint, "
    "(extract(epoch from at) * 1000)::bigint, _partition",
    "daily_totals": "day, operation, count, cents, largest, _partition",
    "statement": "account, line, day, kind, operation, purpose, counter_bank, counter_account, cents, balance, _partition",
    "streams_accounts": "stream, version, state->>'status', state->>'balance', state->>'overdraft_limit', _partition",
}


class Sent(NamedTuple):
    """A command as it was sent. `cents` is an opening's overdraft limit."""

    stream: str
    id: str
    type: str
    cents: int
    on: str


Key = tuple[str, str]
"""Stream and command id."""


class Ledger(Bank):
    """The bank after the log up to `places`. `sent` must hold a command before its commit is taken."""

    def __init__(self, partitions: int, sent: Mapping[Key, Sent]) -> None:
        super().__init__(partitions)
        self.sent = sent
        self.lines: Lines = {view: {} for view in VIEWS}
        self.violations: list[str] = []

    @property
    def answers(self) -> dict[Key, str]:
        """The outcome of each command that counts."""
        return {(row[0], row[1]): row[2] for row in self.rows["command_outcomes"].values() if row}

    def take(self, partition: int, offset: int, time_ms: int, value: bytes | None) -> None:
        before, commits = self.readers[partition].place.command_offset, self.commits
        super().take(partition, offset, time_ms, value)
        now = self.readers[partition].place.command_offset
        if self.commits > commits and now <= before:
            self.wrong("G", partition, offset, f"command {now} after {before}")

    def wrong(self, which: str, partition: int, offset: int, what: str) -> None:
        self.violations.append(f"{which}: events[{partition}] offset {offset}: {what}")

    def decided(self, partition: int, offset: int, commit: Mapping[str, Any], account: Account) -> None:
        key = (commit["stream"], commit["command_id"])
        is_so = (commit["reason"]["code"] if commit["reason"] else "", [event["type"] for event in commit["events"]])
        command = self.sent.get(key)
        if command is None:
            self.wrong("B", partition, offset, f"{key} was never sent")
        elif (right := _decide(command, account)) != is_so:
            self.wrong("B", partition, offset, f"{command} on {account} was to be {right}, and is {commit}")

    def put(self, view: str, key: Row, row: Row | None) -> None:
        super().put(view, key, row)
        assert row is not None, "the sample's views take no row away"
        self.lines[view][key] = "\t".join(map(_text, row))


def _decide(command: Sent, account: Account) -> tuple[str, list[str]]:
    """The right answer: the code of a refusal, the events."""
    match command.type:
        case "OpenAccount" if account.status == "new":
            return "", ["AccountOpened"]
        case "OpenAccount":
            return "account-already-open", []
        case _ if account.status == "new":
            return "account-not-open", []
        case "Deposit":
            return "", ["MoneyDeposited"]
        case "Withdraw" if account.balance - command.cents < -account.limit:
            return "insufficient-funds", []
        case "Withdraw":
            return "", ["MoneyWithdrawn"]
        case other:
            raise AssertionError(f"a {other} is never sent")


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case dict():
            return "\t".join(map(str, value.values()))
        case datetime():
            return str(round((value - EPOCH).total_seconds() * 1000))
        case _:
            return str(value)
