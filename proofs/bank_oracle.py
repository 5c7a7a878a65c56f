"""The fold of the bank's log in plain Python, written from the protocol and the views' own words: JSON in, rows out.

Without a line of the engine, the domain or the views. `proofs/chaos/ledger.py` judges decisions with it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import psycopg

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
VIEWS = (
    *("balances", "command_outcomes", "daily_totals", "statement", "transfers"),
    *("streams_accounts", "streams_standing_orders", "streams_transfers"),
)
SIGNS = {"MoneyDeposited": 1, "InterestCredited": 1, "MoneyWithdrawn": -1, "FeeCharged": -1, "MoneyReturned": 1}
CALLED = {
    "MoneyDeposited": "deposit",
    "InterestCredited": "interest",
    "MoneyWithdrawn": "withdrawal",
    "FeeCharged": "fee",
    "MoneyReturned": "return",
}
STEPS = {
    "TransferRequested": "requested",
    "SourceDebited": "debited",
    "TransferTimedOut": "timed-out",
    "SourceDebitedTooLate": "refunding",
    "CreditRefused": "refunding",
    "TransferCompleted": "completed",
    "TransferFailed": "failed",
    "TransferRefunded": "refunded",
}
"""Where a transfer is after an event."""
ENDED = ("completed", "failed", "refunded")
ENVELOPE = b'{"samefold":"'
_decode = msgspec.json.Decoder().decode

Row = tuple[Any, ...]
"""Its values in column order, the partition last."""


def digest(stream: str, command_id: str) -> UUID:
    """What the outcomes have in place of a command's names."""
    framed = stream.encode() + b"\0" + command_id.encode()
    return UUID(hashlib.blake2b(framed, digest_size=16).hexdigest())


def outcome_row(commit: Mapping[str, Any], time: datetime, partition: int) -> Row:
    key, reason = digest(commit["stream"], commit["command_id"]), commit["reason"] or {}
    why = reason.get("code"), reason.get("message")
    return (key, UUID(commit["fingerprint"]), commit["version"], time, *why, commit.get("by"), partition)


class Place(NamedTuple):
    """As a positions row has it."""

    next_offset: int = 0
    epoch: int = -1
    seq: int = 0
    command_offset: int = -1


START = Place()


class Entry(NamedTuple):
    """A record as the topic has it, at the offset that is its place in its partition's list."""

    time_ms: int
    value: bytes | None


def places_in(connection: psycopg.Connection[Any], agent: str = "core") -> list[Place]:
    """The agent's positions in the database, by partition."""
    query = "select next_offset, epoch, seq, command_offset from positions where agent = %s order by partition"
    return [Place(*row) for row in connection.execute(query, [agent])]


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


class At(NamedTuple):
    stream: str
    version: int
    partition: int
    offset: int
    time: datetime

    @property
    def context(self) -> str:
        return self.stream.partition("/")[0]

    @property
    def account(self) -> str:
        """The stream's name within its context."""
        return self.stream.partition("/")[2]


@dataclass(slots=True)
class Account:
    version: int = 0
    status: str = "new"
    balance: int = 0
    limit: int = 0
    holds: dict[str, int] = field(default_factory=dict)
    owner: str = ""


class Bank:
    """The sample's views after the records that were taken: rows by view and key, None where one was taken away."""

    def __init__(self, partitions: int) -> None:
        self.readers = [Reader() for _ in range(partitions)]
        self.accounts: dict[str, Account] = {}
        self.rows: dict[str, dict[Row, Row | None]] = {view: {} for view in VIEWS}
        self.commits = 0
        self.brought = 0
        """Cents that clients brought, less what they took: all that the accounts must hold when no transfer is under way."""
        self.debits: Counter[str] = Counter()
        """By the command that requested the transfer."""
        self.credits: Counter[str] = Counter()
        """And refunds."""
        self.ends: Counter[str] = Counter()
        """By transfer."""

    @property
    def places(self) -> list[Place]:
        return [reader.place for reader in self.readers]

    def take(self, partition: int, offset: int, time_ms: int, value: bytes | None) -> None:
        """The partition's next record."""
        commit = self.readers[partition].read(offset, value)
        if commit is None:
            return
        self.commits += 1
        time = EPOCH + timedelta(milliseconds=time_ms)
        stream, command = commit["stream"], commit["command_id"]
        account = self.accounts.setdefault(stream, Account())
        if (stream, command) in self.rows["command_outcomes"]:
            self.wrong("A", partition, offset, f"{(stream, command)} counts a second time")
        if commit["version"] != account.version + len(commit["events"]):
            what = f"{stream} is at version {account.version}, the commit has {commit['version']}"
            self.wrong("B", partition, offset, what)
        self.decided(partition, offset, commit, account)
        self.put("command_outcomes", (stream, command), outcome_row(commit, time, partition))
        for event in commit["events"]:
            account.version += 1
            at = At(stream, account.version, partition, offset, time)
            self._count(at, commit, event["type"], event["data"])
            match at.context:
                case "transfers":
                    self._transfer(at, event["type"], event["data"])
                case "standing_orders":
                    self._standing_order(at, event["type"], event["data"])
                case _:
                    self._happened(at, account, event["type"], event["data"])

    def _count(self, at: At, commit: Mapping[str, Any], kind: str, data: Mapping[str, Any]) -> None:
        """What is once only for each transfer, and the money that is not a transfer's."""
        if STEPS.get(kind) in ENDED:
            self.ends[at.account] += 1
        elif kind in SIGNS and not commit.get("depth"):  # a client's
            self.brought += SIGNS[kind] * data.get("cents", 0)
        elif kind in SIGNS:
            moved = self.debits if SIGNS[kind] < 0 else self.credits
            moved[str(commit.get("correlation_id"))] += 1

    # ── what others make of it ──

    def wrong(self, which: str, partition: int, offset: int, what: str) -> None:
        """The log shows what it must never show. Raises AssertionError."""
        raise AssertionError(f"{which}: events[{partition}] offset {offset}: {what}")

    def decided(self, partition: int, offset: int, commit: Mapping[str, Any], account: Account) -> None:
        """Before a commit's events happen to the account."""

    def put(self, view: str, key: Row, row: Row | None) -> None:
        self.rows[view][key] = row

    # ── the sample's views ──

    def _happened(self, at: At, account: Account, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "AccountOpened":
            account.status, account.limit, account.owner = "open", data["overdraft_limit"], data.get("owner", "")
        elif kind == "AccountClosed":
            account.status = "closed"
        else:
            account.balance += SIGNS.get(kind, 0) * data.get("cents", 0)
        if kind in ("MoneyReturned", "HoldReleased"):
            account.holds.pop(data["hold"], None)
        elif data.get("hold"):
            account.holds[data["hold"]] = data["cents"]
        state = {"status": account.status, "balance": account.balance, "overdraft_limit": account.limit}
        state |= {"holds": dict(account.holds), "owner": account.owner}
        self.put("streams_accounts", (at.stream,), (at.stream, at.version, state, at.partition))
        if kind == "HoldReleased":
            return
        on = date.fromisoformat(data["on"])
        self._balance(at, kind, data, on)
        details = {"operation": "", "purpose": "", "counter_bank": "", "counter_account": ""} | data.get("details", {})
        if kind in SIGNS:
            self._line(at, kind, data, on, details, account)
            self._day(at, kind, data["cents"], on, details)

    def _balance(self, at: At, kind: str, data: Mapping[str, Any], on: date) -> None:
        key = (at.account,)
        if kind == "AccountOpened":
            owner = data.get("owner", "")
            self.put("balances", key, (at.account, 0, data["overdraft_limit"], on, on, 0, None, owner, at.partition))
            return
        new = (at.account, 0, 0, on, on, 0, None, "", 0)
        _, cents, limit, opened, _, count, closed, owner, _ = self.rows["balances"].get(key) or new
        if kind == "AccountClosed":
            closed = on
        else:
            cents, count = cents + SIGNS[kind] * data["cents"], count + 1
        self.put("balances", key, (at.account, cents, limit, opened, on, count, closed, owner, at.partition))

    def _line(
        self, at: At, kind: str, data: Mapping[str, Any], on: date, details: Mapping[str, str], account: Account
    ) -> None:
        words = (details["operation"], details["purpose"], details["counter_bank"], details["counter_account"])
        moved = (SIGNS[kind] * data["cents"], account.balance, account.owner, at.partition)
        self.put("statement", (at.account, at.version), (at.account, at.version, on, CALLED[kind], *words, *moved))

    def _day(self, at: At, kind: str, cents: int, on: date, details: Mapping[str, str]) -> None:
        key = (on, details["operation"] or CALLED[kind], at.partition)
        _, _, count, total, largest, _ = self.rows["daily_totals"].get(key) or (on, "", 0, 0, 0, 0)
        day = (count + 1, total + SIGNS[kind] * cents, max(largest, cents))
        self.put("daily_totals", key, (*key[:2], *day, at.partition))

    def _transfer(self, at: At, kind: str, data: Mapping[str, Any]) -> None:
        key, step = (at.account,), STEPS[kind]
        if kind == "TransferRequested":
            asked, refusal, since = {name: data[name] for name in ("source", "target", "cents", "on")}, "", at.time
        else:
            row = self.rows["transfers"][key]
            assert row is not None, f"{at}: {kind} of a transfer that was never requested"
            _, _, source, target, cents, on, refusal, since, _, _ = row
            asked = {"source": source, "target": target, "cents": cents, "on": on.isoformat()}
        refusal = "timed-out" if kind == "TransferTimedOut" else data.get("refusal", refusal)
        self.put("streams_transfers", (at.stream,), (at.stream, at.version, {"step": step, **asked}, at.partition))
        *words, on = asked.values()
        moved = (at.account, step, *words, date.fromisoformat(on), refusal, since, at.time, at.partition)
        self.put("transfers", key, moved)

    def _standing_order(self, at: At, kind: str, data: Mapping[str, Any]) -> None:
        key = (at.stream,)
        if kind == "StandingOrderPlaced":
            asked = {name: data[name] for name in ("source", "target", "cents")}
            state = {"status": "active", **asked, "day": int(data["first"][-2:]), "following": data["first"]}
        else:
            row = self.rows["streams_standing_orders"][key]
            assert row is not None, f"{at}: {kind} of an order that was never placed"
            changed = {"following": data["following"]} if kind == "InstalmentDue" else {"status": "cancelled"}
            state = row[2] | changed
        self.put("streams_standing_orders", key, (at.stream, at.version, state, at.partition))
