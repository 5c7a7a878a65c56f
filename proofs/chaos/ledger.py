"""The bank after the log, and what the log itself must never show, without a line of the product.

That is a command that counts twice (A), a decision that the state before it does not lead to, or a version that is not the number
of events (B), a command offset that goes back (G).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from proofs.bank_oracle import EPOCH, VIEWS, Account, Bank, Row

Lines = dict[str, dict[Row, str]]
"""By view and key, a row as `COLUMNS` asks PostgreSQL for it: values with tabs between them."""

COLUMNS = {
    "balances": "account, cents, overdraft_limit, opened_on, last_on, transactions, coalesce(closed_on::text, ''), "
    "owner, _partition",
    "command_outcomes": "command, fingerprint, version, (extract(epoch from at) * 1000)::bigint, coalesce(code, ''), "
    "coalesce(message, ''), coalesce(by, ''), _partition",
    "daily_totals": "day, operation, count, cents, largest, _partition",
    "statement": "account, line, day, kind, operation, purpose, counter_bank, counter_account, cents, balance, owner, "
    "_partition",
    "streams_accounts": "stream, version, state->>'status', state->>'balance', state->>'overdraft_limit', state->>'holds', "
    "state->>'owner', _partition",
    "streams_standing_orders": "stream, version, state->>'status', state->>'source', state->>'target', state->>'cents', "
    "state->>'day', state->>'following', _partition",
    "streams_transfers": "stream, version, state->>'step', state->>'source', state->>'target', state->>'cents', state->>'on', "
    "_partition",
    "transfers": "transfer, state, source, target, cents, day, refusal, (extract(epoch from requested_at) * 1000)::bigint, "
    "(extract(epoch from changed_at) * 1000)::bigint, _partition",
}


class Sent(NamedTuple):
    """A command as it was sent. `cents` is an opening's overdraft limit."""

    stream: str
    id: str
    type: str
    cents: int
    on: str
    source: str = ""
    target: str = ""
    """Of a transfer."""
    hold: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """A client's."""
        match self.type:
            case "RequestTransfer":
                return {"source": self.source, "target": self.target, "cents": self.cents, "on": self.on}
            case "CloseAccount":
                return {"on": self.on}
            case _:
                return {"overdraft_limit" if self.type == "OpenAccount" else "cents": self.cents, "on": self.on}


Key = tuple[str, str]
"""Stream and command id."""


class Ledger(Bank):
    """The bank after the log up to `places`. `sent` must hold a command before its commit is taken, `wished` a policy's by id.

    Without `sent` decisions are not judged.
    """

    def __init__(self, partitions: int, sent: Mapping[Key, Sent] | None) -> None:
        super().__init__(partitions)
        self.sent = sent
        self.wished: Mapping[str, tuple[str, str, str]] = {}
        self.lines: Lines = {view: {} for view in VIEWS}
        self.violations: list[str] = []

    @property
    def answers(self) -> dict[Key, str]:
        """The outcome of each command that counts."""
        found = self.rows["command_outcomes"].items()
        return {(stream, ident): "rejected" if row and row[4] else "accepted" for (stream, ident), row in found}

    def take(self, partition: int, offset: int, time_ms: int, value: bytes | None) -> None:
        before, commits = self.readers[partition].place.command_offset, self.commits
        super().take(partition, offset, time_ms, value)
        now = self.readers[partition].place.command_offset
        if self.commits > commits and now <= before:
            self.wrong("G", partition, offset, f"command {now} after {before}")

    def wrong(self, which: str, partition: int, offset: int, what: str) -> None:
        self.violations.append(f"{which}: events[{partition}] offset {offset}: {what}")

    def decided(self, partition: int, offset: int, commit: Mapping[str, Any], account: Account) -> None:
        if self.sent is None:
            return
        key = (commit["stream"], commit["command_id"])
        is_so = (commit["reason"]["code"] if commit["reason"] else "", [event["type"] for event in commit["events"]])
        command = self.sent.get(key) or self._wish(*key)
        transfer = self.rows["streams_transfers"].get((commit["stream"],))
        if command is None:
            self.wrong("B", partition, offset, f"{key} was never sent")
        elif (right := _decide(command, account, transfer[2]["step"] if transfer else "")) != is_so:
            self.wrong("B", partition, offset, f"{command} on {account} was to be {right}, and is {commit}")

    def _wish(self, stream: str, ident: str) -> Sent | None:
        target, kind, body = self.wished.get(ident, ("", "", "{}"))
        data = json.loads(body)
        found = Sent(stream, ident, kind, data.get("cents", 0), data.get("on", ""), hold=data.get("hold", ""))
        return found if target == stream else None

    def put(self, view: str, key: Row, row: Row | None) -> None:
        super().put(view, key, row)
        assert row is not None, "the sample's views take no row away"
        self.lines[view][key] = "\t".join(map(_text, row))


MOVES = {
    ("RecordDebit", "requested"): "SourceDebited",
    ("RecordDebit", "timed-out"): "SourceDebitedTooLate",
    ("FailTransfer", "requested"): "TransferFailed",
    ("FailTransfer", "timed-out"): "TransferFailed",
    ("GiveUp", "requested"): "TransferTimedOut",
    ("CompleteTransfer", "debited"): "TransferCompleted",
    ("RefundTransfer", "debited"): "CreditRefused",
    ("RecordRefund", "refunding"): "TransferRefunded",
}
"""What a policy's command makes of a transfer at a step; elsewhere it is refused, and GiveUp makes nothing."""


def _decide(command: Sent, account: Account, step: str) -> tuple[str, list[str]]:
    """The right answer: the code of a refusal, the events. `step` is a transfer's."""
    if command.stream.startswith("transfers/"):
        if command.type == "RequestTransfer":
            refusal = "transfer-already-requested" if step else "same-account" * (command.source == command.target)
            return (refusal, []) if refusal else ("", ["TransferRequested"])
        happens = MOVES.get((command.type, step))
        if command.type == "GiveUp" and step and not happens:
            return "", []
        return ("", [happens]) if happens else ("transfer-moved-on", [])
    match command.type:
        case _ if account.status == "closed":
            return "account-is-closed", []
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
        case "ReturnMoney" | "ReleaseHold" if command.hold not in account.holds:
            return "no-such-hold", []
        case "ReturnMoney" | "ReleaseHold":
            return "", ["MoneyReturned" if command.type == "ReturnMoney" else "HoldReleased"]
        case "CloseAccount" if account.holds:
            return "money-on-hold", []
        case "CloseAccount" if account.balance:
            return "balance-not-zero", []
        case "CloseAccount":
            return "", ["AccountClosed"]
        case other:
            raise AssertionError(f"a {other} is never sent")


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case dict():
            return "\t".join(
                json.dumps(one, separators=(",", ":")) if isinstance(one, dict) else str(one) for one in value.values()
            )
        case datetime():
            return str(round((value - EPOCH).total_seconds() * 1000))
        case _:
            return str(value)
