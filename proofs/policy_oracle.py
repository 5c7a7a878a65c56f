"""What policies must have wished after a part of the log, in plain Python: JSON in, the rows of the outbox out.

Written from the protocol and the sample policies' own words, without a line of the engine, the domain or the policies.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from proofs.bank_oracle import Place, Reader

POLICIES = ("standing_orders", "transfers")
PATIENCE_MS = 300_000
QUIET = {"TransferTimedOut", "TransferFailed", "TransferRefunded"}
"""Events of transfers that lead to nothing."""


class Row(NamedTuple):
    """Of the outbox, without what the relay writes; times in ms. When a `later` is due depends on when the answer was read."""

    id: str
    policy: str
    kind: str | None = None
    partition: int | None = None
    stream: str | None = None
    version: int | None = None
    number: int | None = None
    target: str | None = None
    type: str | None = None
    body: str | None = None
    fingerprint: str | None = None
    due: int | None = None
    depth: int | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    wished_at: int | None = None
    then_type: str | None = None
    then_body: str | None = None
    then_fingerprint: str | None = None
    otherwise_type: str | None = None
    otherwise_body: str | None = None
    otherwise_fingerprint: str | None = None
    later_type: str | None = None
    later_body: str | None = None
    later_fingerprint: str | None = None
    after_ms: int | None = None
    expected: str | None = None
    dead: str | None = None
    outcome: str | None = None
    refusal: str | None = None
    outcome_depth: int | None = None
    outcome_fingerprint: str | None = None


COLUMNS = ", ".join(
    f"(extract(epoch from {name}) * 1000)::bigint" if name in ("due", "wished_at") else name for name in Row._fields
)


class Command(NamedTuple):
    """For the stream that wished; with `fills`, its body lacks the refusal."""

    type: str
    body: Mapping[str, Any] = {}
    fills: bool = False


class Wish(NamedTuple):
    """What a policy yields."""

    target: str
    type: str
    body: Mapping[str, Any]
    then: Command | None = None
    otherwise: Command | None = None
    later: Command | None = None
    after_ms: int | None = None


class Event(NamedTuple):
    """As the log has it."""

    stream: str
    version: int
    partition: int
    offset: int
    type: str
    data: Mapping[str, Any]


class Wishes:
    """One policy after the records that were taken: the rows of the outbox by id, and all that it ever wished."""

    def __init__(self, policy: str, partitions: int) -> None:
        self.policy = policy
        self.readers = [Reader() for _ in range(partitions)]
        self.rows: dict[str, Row] = {}
        self.made: dict[str, tuple[str, str, str]] = {}
        """Target, type and body by id."""

    @property
    def places(self) -> list[Place]:
        return [reader.place for reader in self.readers]

    def take(self, partition: int, offset: int, time_ms: int, value: bytes | None) -> None:
        """The partition's next record."""
        commit = self.readers[partition].read(offset, value)
        if commit is None:
            return
        first = commit["version"] - len(commit["events"]) + 1
        for version, event in enumerate(commit["events"], first):
            at = Event(commit["stream"], version, partition, offset, event["type"], event["data"])
            for number, wish in enumerate(self.reaction(at)):
                self._wished(commit, time_ms, at, number, wish)
        ident = commit["command_id"]
        if ident.startswith(f"{self.policy}~"):
            self._put(
                self._row(ident)._replace(
                    outcome=commit["outcome"],
                    refusal=(commit["reason"] or {}).get("code"),
                    outcome_depth=commit.get("depth", 0),
                    outcome_fingerprint=f"{commit['fingerprint']} {commit['stream']}",
                )
            )

    def reaction(self, at: Event) -> Iterator[Wish]:
        """What the policy yields for an event."""
        return _reaction(self.policy, at.stream, at.type, at.data)

    def _wished(self, commit: Mapping[str, Any], time_ms: int, at: Event, number: int, wish: Wish) -> None:
        ident = id_of(self.policy, at.stream, at.version, number)
        self._put(
            self._row(ident)._replace(
                kind="send",
                number=number,
                target=wish.target,
                depth=commit.get("depth", 0) + 1,
                after_ms=wish.after_ms,
                correlation_id=commit.get("correlation_id", commit["command_id"]),
                causation_id=commit["command_id"],
                wished_at=time_ms,
                **{name: getattr(at, name) for name in ("partition", "stream", "version")},
                **_columns("", Command(wish.type, wish.body)),
                **_columns("then_", wish.then),
                **_columns("otherwise_", wish.otherwise),
                **_columns("later_", wish.later),
            )
        )

    def _row(self, ident: str) -> Row:
        return self.rows.get(ident, Row(ident, self.policy))

    def _put(self, row: Row) -> None:
        """Keep the row; or, if both halves are there, what follows."""
        if row.kind:
            self.made[row.id] = (row.target or "", row.type or "", row.body or "")
        same = row.fingerprint is None or f"{row.fingerprint} {row.target}" == row.outcome_fingerprint
        if not row.kind or not row.outcome or not same:
            self.rows[row.id] = row
            return
        half = "then" if row.outcome == "accepted" else "otherwise"
        if half == "otherwise" and row.otherwise_type is None and row.refusal not in (row.expected or "").split():
            self.rows[row.id] = row._replace(dead=f"refused: {row.refusal}")
            return
        self.rows.pop(row.id, None)
        later = {name: getattr(row, name) for name in ("later_type", "later_body", "later_fingerprint", "after_ms")}
        if getattr(row, f"{half}_type") is None:
            half, later = "later", {}
        kind, body, fingerprint = (getattr(row, f"{half}_{of}") for of in ("type", "body", "fingerprint"))
        if kind is None:
            return
        if fingerprint is None:
            body = _json(json.loads(body) | {"refusal": row.refusal})
        ident = f"{row.id}~{half}"
        columns = {"target": row.stream, "type": kind, "body": body, "fingerprint": fingerprint}
        columns |= {"depth": 0 if half == "later" else (row.outcome_depth or 0) + 1, "causation_id": row.id}
        kept = ("kind", "partition", "stream", "version", "number", "correlation_id", "wished_at", "expected")
        self._put(self._row(ident)._replace(**columns, **later, **{name: getattr(row, name) for name in kept}))


def _columns(prefix: str, command: Command | None) -> dict[str, Any]:
    if command is None:
        return {}
    fingerprint = None if command.fills else _fingerprint(command.type, command.body)
    return {f"{prefix}type": command.type, f"{prefix}body": _json(command.body), f"{prefix}fingerprint": fingerprint}


def id_of(policy: str, stream: str, version: int, number: int) -> str:
    digest = hashlib.blake2b(_json([policy, stream, version, number]).encode(), digest_size=20).digest()
    return f"{policy}~{base64.b32encode(digest).decode().lower()}"


def _reaction(policy: str, stream: str, kind: str, data: Mapping[str, Any]) -> Iterator[Wish]:
    context, _, name = stream.partition("/")
    assert context != "standing_orders", "no run of this judge places a standing order"
    if policy != "transfers" or context != "transfers" or kind in QUIET:
        return
    source = f"accounts/{data['source']}"
    match kind:
        case "TransferRequested":
            money = {"cents": data["cents"], "on": data["on"], "details": details_of(data["target"])}
            fails = Command("FailTransfer", fills=True)
            after = Command("RecordDebit"), fails, Command("GiveUp"), PATIENCE_MS
            yield Wish(source, "Withdraw", money | {"hold": name}, *after)
        case "SourceDebited":
            money = {"cents": data["cents"], "on": data["on"], "details": details_of(data["source"])}
            refunds = Command("RefundTransfer", fills=True)
            yield Wish(f"accounts/{data['target']}", "Deposit", money, Command("CompleteTransfer"), refunds)
        case "SourceDebitedTooLate" | "CreditRefused":
            back = {"hold": name, "on": data["on"], "details": details_of("")}
            yield Wish(source, "ReturnMoney", back, Command("RecordRefund"))
        case "TransferCompleted":
            yield Wish(source, "ReleaseHold", {"hold": name})
        case _:
            raise AssertionError(f"{stream}: {kind} is unknown")


def details_of(counter_account: str) -> dict[str, str]:
    return {"operation": "", "purpose": "", "counter_bank": "", "counter_account": counter_account}


def _fingerprint(kind: str, body: Mapping[str, Any]) -> str:
    text = json.dumps([kind, None, body], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
