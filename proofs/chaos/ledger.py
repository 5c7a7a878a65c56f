"""The fold of the log, written a second time from the protocol and the sample bank's rules, without a line of the product.

It keeps what each read model must hold, row by row as text, and says what the log itself must never show: a command that counts
twice (A), a decision that the state before it does not lead to, or a version that is not the number of events (B), a command
offset that goes back (G).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

ENVELOPE = b'{"samefold":"'
_decode = msgspec.json.Decoder().decode

Rows = dict[str, dict[tuple[Any, ...], str]]
"""By view and key, a row as `COLUMNS` asks PostgreSQL for it: values with tabs between them."""

COLUMNS = {
    "balances": "account, cents, overdraft_limit, opened_on, last_on, transactions, coalesce(closed_on::text, ''), _partition",
    "command_outcomes": "stream, command_id, outcome, coalesce(code, ''), version, fingerprint, "
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


class Place(NamedTuple):
    """As a positions row has it."""

    next_offset: int = 0
    epoch: int = -1
    seq: int = 0
    command_offset: int = -1


START = Place()


@dataclass(slots=True)
class Reader:
    """The reading rule over one partition."""

    place: Place = START
    writers: dict[int, str] = field(default_factory=dict)
    """Who opened each epoch."""
    void: int = 0

    def read(self, offset: int, value: bytes | None) -> dict[str, Any] | None:
        """The commit in the record at `offset`, which is the next one, if it counts."""
        _, epoch, seq, command = self.place
        if offset != self.place.next_offset:
            raise AssertionError(f"the log has a hole: {self.place.next_offset} is followed by {offset}")
        entry = _decode(value) if value is not None and value.startswith(ENVELOPE) else None
        counted = None
        if entry is None:
            self.void += 1
        elif entry["samefold"] == "opening/1":
            epoch, seq = offset, 0
            self.writers[offset] = entry["writer"]
        elif entry["epoch"] == epoch and epoch >= 0 and entry["seq"] == seq + 1:
            seq, command, counted = seq + 1, entry["command_offset"], entry
        else:
            self.void += 1
        self.place = Place(offset + 1, epoch, seq, command)
        return counted


@dataclass(slots=True)
class _Account:
    version: int = 0
    status: str = "new"
    balance: int = 0
    limit: int = 0
    opened: str = ""
    last: str = ""
    movements: int = 0


@dataclass(slots=True)
class _Day:
    count: int = 0
    cents: int = 0
    largest: int = 0


class Ledger:
    """The bank after the log up to `places`. `sent` must hold a command before its commit is taken."""

    def __init__(self, partitions: int, sent: Mapping[Key, Sent]) -> None:
        self.readers = [Reader() for _ in range(partitions)]
        self.sent = sent
        self.rows: Rows = {view: {} for view in COLUMNS}
        self.answers: dict[Key, str] = {}
        self.violations: list[str] = []
        self._accounts: dict[str, _Account] = {}
        self._days: dict[tuple[str, str, int], _Day] = {}

    @property
    def places(self) -> list[Place]:
        return [reader.place for reader in self.readers]

    def take(self, partition: int, offset: int, time_ms: int, value: bytes | None) -> None:
        """The partition's next record."""
        before = self.readers[partition].place.command_offset
        commit = self.readers[partition].read(offset, value)
        if commit is not None:
            if commit["command_offset"] <= before:
                self._wrong("G", partition, offset, f"command {commit['command_offset']} after {before}")
            self._count(partition, offset, time_ms, commit)

    def _count(self, partition: int, offset: int, time_ms: int, commit: dict[str, Any]) -> None:
        stream, command_id, outcome = commit["stream"], commit["command_id"], commit["outcome"]
        key = (stream, command_id)
        code = commit["reason"]["code"] if commit["reason"] else ""
        if key in self.answers:
            self._wrong("A", partition, offset, f"{key} counts a second time")
        self.answers[key] = outcome
        account = self._accounts.setdefault(stream, _Account())
        if commit["version"] != account.version + len(commit["events"]):
            self._wrong(
                "B", partition, offset, f"{stream} is at version {account.version}, the commit says {commit['version']}"
            )
        command = self.sent.get(key)
        if command is None:
            self._wrong("B", partition, offset, f"{key} was never sent")
        elif (right := _decide(command, account)) != (code, [event["type"] for event in commit["events"]]):
            self._wrong("B", partition, offset, f"{command} on {account} was to be {right}, and is {commit}")
        for event in commit["events"]:
            account.version += 1
            self._apply(partition, stream, account, event["type"], event["data"])
        values = (stream, command_id, outcome, code, commit["version"], commit["fingerprint"], time_ms, partition)
        self.rows["command_outcomes"][key] = _line(values)

    def _apply(self, partition: int, stream: str, account: _Account, kind: str, data: dict[str, Any]) -> None:
        name = stream.partition("/")[2]
        on = data["on"]
        account.last = on
        if kind == "AccountOpened":
            account.status, account.limit, account.opened = "open", data["overdraft_limit"], on
        else:
            cents = data["cents"]
            change, called = (cents, "deposit") if kind == "MoneyDeposited" else (-cents, "withdrawal")
            account.balance += change
            account.movements += 1
            day = self._days.setdefault((on, called, partition), _Day())
            day.count, day.cents, day.largest = day.count + 1, day.cents + change, max(day.largest, cents)
            self._row("daily_totals", 2, on, called, day.count, day.cents, day.largest, partition, also=(partition,))
            line = (name, account.version, on, called, "", "", "", "", change, account.balance, partition)
            self._row("statement", 2, *line)
        row = (name, account.balance, account.limit, account.opened, account.last, account.movements, "", partition)
        self._row("balances", 1, *row)
        state = (stream, account.version, account.status, account.balance, account.limit, partition)
        self._row("streams_accounts", 1, *state)

    def _row(self, view: str, key: int, *values: Any, also: tuple[Any, ...] = ()) -> None:
        self.rows[view][*values[:key], *also] = _line(values)

    def _wrong(self, which: str, partition: int, offset: int, what: str) -> None:
        self.violations.append(f"{which}: events[{partition}] offset {offset}: {what}")


def _decide(command: Sent, account: _Account) -> tuple[str, list[str]]:
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
            raise AssertionError(f"nobody sends a {other}")


def _line(values: tuple[Any, ...]) -> str:
    return "\t".join(map(str, values))
