"""The fold of the log in plain Python, written from the protocol and the views' own words: JSON in, rows out.

Without a line of the engine, the domain or the views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from proofs.chaos.ledger import Place, Reader

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SIGNS = {"MoneyDeposited": 1, "InterestCredited": 1, "MoneyWithdrawn": -1, "FeeCharged": -1}
CALLED = {
    "MoneyDeposited": "deposit",
    "InterestCredited": "interest",
    "MoneyWithdrawn": "withdrawal",
    "FeeCharged": "fee",
}
LETTERS = {"holders": "h", "purposes": "p", "moves": "m", "extremes": "e", "strict": "s"}
PARKING = ("holders", "purposes", "moves", "extremes")
TAKES = {
    "holders": {"AccountOpened", "MoneyDeposited", "MoneyWithdrawn", "FeeCharged", "AccountClosed"},
    "purposes": {"MoneyDeposited", "MoneyWithdrawn"},
    "moves": {"MoneyDeposited", "MoneyWithdrawn", "FeeCharged", "AccountClosed"},
    "extremes": set(SIGNS),
    "strict": {"MoneyDeposited"},
}
POISON = "poison:"


class Entry(NamedTuple):
    """A record as the topic has it, at the offset that is its place in its partition's list."""

    time_ms: int
    value: bytes | None


class Skip(NamedTuple):
    """Events that a view leaves out on record: of a stream, from one version to another, both included."""

    view: str
    stream: str
    first: int
    last: int


class Parked(NamedTuple):
    """A stream that a view leaves out, as the `parked` table has it."""

    view: str
    stream: str
    partition: int
    offset: int
    version: int


class At(NamedTuple):
    stream: str
    version: int
    partition: int
    offset: int
    time: datetime

    @property
    def account(self) -> str:
        return self.stream.partition("/")[2]


@dataclass(slots=True)
class _Account:
    version: int = 0
    status: str = "new"
    balance: int = 0
    limit: int = 0


class StoppedAt(Exception):
    """An event that a view which does not park can't take."""

    def __init__(self, view: str, at: At) -> None:
        super().__init__(f"{view} at {at}")
        self.view = view
        self.at = at


@dataclass(slots=True)
class Expected:
    """What the database must hold. Rows are by view; a row is its values in column order, the partition last."""

    places: list[Place]
    rows: dict[str, list[tuple[Any, ...]]]
    parked: set[Parked]
    commits: int = 0
    void: int = 0

    def differences(self, view: str, found: Iterable[tuple[Any, ...]]) -> list[str]:
        """In words, what a table's rows have too many or too few."""
        wanted, there = (Counter(map(comparable, rows)) for rows in (self.rows[view], found))
        return [
            *(f"{view}: missing {row}" for row in (wanted - there).elements()),
            *(f"{view}: too many {row}" for row in (there - wanted).elements()),
        ]


def comparable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row whose equal values are equal and hashable, whichever type PostgreSQL's client made of them."""
    return tuple(
        tuple(sorted(value.items()))
        if isinstance(value, dict)
        else bytes(value)
        if isinstance(value, memoryview)
        else value
        for value in row
    )


def fold(
    logs: Sequence[Sequence[Entry]],
    ends: Mapping[int, int] | None = None,
    *,
    skips: Sequence[Skip] = (),
    parked: Iterable[Parked] | None = None,
) -> Expected:
    """Fold the partitions' records, up to these offsets. Raises StoppedAt.

    Streams are parked where a view fails on them; with `parked` given, those are parked, and a failure before is an error.
    """
    ours = _Fold(len(logs), skips, parked)
    for partition, log in enumerate(logs):
        for offset, entry in enumerate(log[: None if ends is None else ends[partition]]):
            ours.take(partition, offset, entry)
    return ours.expected()


@dataclass(slots=True)
class _Fold:
    partitions: int
    skips: Sequence[Skip]
    on_record: Iterable[Parked] | None
    readers: list[Reader] = field(init=False)
    accounts: dict[str, _Account] = field(default_factory=dict)
    keyed: dict[str, dict[tuple[Any, ...], tuple[Any, ...] | None]] = field(init=False)
    """By view: rows by key; None where one was taken away."""
    parked: dict[tuple[str, str], Parked] = field(init=False)
    commits: int = 0

    def __post_init__(self) -> None:
        self.readers = [Reader() for _ in range(self.partitions)]
        names = ("balances", "command_outcomes", "daily_totals", "statement", "streams_accounts", *LETTERS)
        self.keyed = {name: {} for name in names}
        self.parked = {(one.view, one.stream): one for one in self.on_record or ()}

    def expected(self) -> Expected:
        return Expected(
            [reader.place for reader in self.readers],
            {view: [row for row in rows.values() if row is not None] for view, rows in self.keyed.items()},
            set(self.parked.values()),
            self.commits,
            sum(reader.void for reader in self.readers),
        )

    def take(self, partition: int, offset: int, entry: Entry) -> None:
        commit = self.readers[partition].read(offset, entry.value)
        if commit is None:
            return
        self.commits += 1
        time = EPOCH + timedelta(milliseconds=entry.time_ms)
        stream, command, reason = commit["stream"], commit["command_id"], commit["reason"] or {}
        outcomes = self.keyed["command_outcomes"]
        assert (stream, command) not in outcomes, f"{command} counts twice"
        outcomes[stream, command] = (
            stream,
            command,
            commit["outcome"],
            reason.get("code"),
            reason.get("message"),
            commit["version"],
            commit["fingerprint"],
            time,
            partition,
        )
        for event in commit["events"]:
            account = self.accounts.setdefault(stream, _Account())
            account.version += 1
            self._happened(At(stream, account.version, partition, offset, time), account, event["type"], event["data"])
        version = self.accounts[stream].version if stream in self.accounts else 0
        assert commit["version"] == version, f"{stream} is at version {version}, and a commit says {commit['version']}"

    def _happened(self, at: At, account: _Account, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "AccountOpened":
            account.status, account.limit = "open", data["overdraft_limit"]
        elif kind == "AccountClosed":
            account.status = "closed"
        else:
            account.balance += SIGNS[kind] * data["cents"]
        state = {"status": account.status, "balance": account.balance, "overdraft_limit": account.limit}
        self.keyed["streams_accounts"][at.stream,] = (at.stream, at.version, state, at.partition)
        on = date.fromisoformat(data["on"])
        self._balance(at, kind, data, on)
        details = {"operation": "", "purpose": "", "counter_bank": "", "counter_account": ""} | data.get("details", {})
        if kind in SIGNS:
            if not self._skipped("statement", at):
                self._line(at, kind, data, on, details, account)
            if not self._skipped("daily_totals", at):
                self._day(at, kind, data["cents"], on, details)
        for view, own in _OWN.items():
            if kind in TAKES[view] and not self._left_out(view, at):
                if _fails(view, kind, data, details["purpose"]):
                    self._fail(view, at)
                else:
                    own(self, at, account, kind, data, on, details)

    def _skipped(self, view: str, at: At) -> bool:
        return any((s.view, s.stream) == (view, at.stream) and s.first <= at.version <= s.last for s in self.skips)

    def _left_out(self, view: str, at: At) -> bool:
        parked = self.parked.get((view, at.stream))
        return self._skipped(view, at) or (parked is not None and at.version >= parked.version)

    def _fail(self, view: str, at: At) -> None:
        if view not in PARKING:
            raise StoppedAt(view, at)
        assert self.on_record is None, f"{view} fails at {at}, before which nothing is parked on record"
        self.parked[view, at.stream] = Parked(view, at.stream, at.partition, at.offset, at.version)

    # ── the sample's views ──

    def _balance(self, at: At, kind: str, data: Mapping[str, Any], on: date) -> None:
        rows = self.keyed["balances"]
        key = (at.account,)
        if kind == "AccountOpened":
            rows[key] = (at.account, 0, data["overdraft_limit"], on, on, 0, None, at.partition)
            return
        _, cents, limit, opened, _, count, closed, _ = rows[key] or ()
        if kind == "AccountClosed":
            closed = on
        else:
            cents, count = cents + SIGNS[kind] * data["cents"], count + 1
        rows[key] = (at.account, cents, limit, opened, on, count, closed, at.partition)

    def _line(
        self, at: At, kind: str, data: Mapping[str, Any], on: date, details: Mapping[str, str], account: _Account
    ) -> None:
        self.keyed["statement"][at.account, at.version] = (
            at.account,
            at.version,
            on,
            CALLED[kind],
            details["operation"],
            details["purpose"],
            details["counter_bank"],
            details["counter_account"],
            SIGNS[kind] * data["cents"],
            account.balance,
            at.partition,
        )

    def _day(self, at: At, kind: str, cents: int, on: date, details: Mapping[str, str]) -> None:
        rows = self.keyed["daily_totals"]
        key = (on, details["operation"] or CALLED[kind], at.partition)
        _, _, count, total, largest, _ = rows.get(key) or (on, "", 0, 0, 0, 0)
        rows[key] = (*key[:2], count + 1, total + SIGNS[kind] * cents, max(largest, cents), at.partition)

    # ── the tests' own ──

    def _holder(
        self, at: At, _account: _Account, kind: str, data: Mapping[str, Any], on: date, details: Mapping[str, str]
    ) -> None:
        rows, key = self.keyed["holders"], (at.account,)
        if kind == "AccountClosed":
            rows[key] = None
            return
        _, cents, moves, weight, last, _ = rows.get(key) or (at.account, 0, 0, 0, None, 0)
        if kind == "AccountOpened":
            cents = moves = weight = 0
            last = None
        else:
            cents, moves, last = cents + SIGNS[kind] * data["cents"], moves + 1, on
            weight = max(weight, data["cents"])
        rows[key] = (at.account, cents, moves, weight, last, at.partition)

    def _purpose(
        self, at: At, _account: _Account, kind: str, data: Mapping[str, Any], _on: date, details: Mapping[str, str]
    ) -> None:
        rows, key = self.keyed["purposes"], (at.account, details["purpose"])
        before = rows.get(key)
        cents = (before[2] if before else 0) + SIGNS[kind] * data["cents"]
        rows[key] = None
        if cents:
            mood = "above nothing" if cents > 0 else "below nothing"
            mark = UUID(int=at.version * 2**64 + at.offset)
            amount = Decimal(cents).scaleb(-2)
            even, raw, note = not at.version % 2, key[1].encode(), details["operation"] or None
            rows[key] = (*key, cents, amount, mood, even, at.time, raw, mark, note, at.partition)

    def _move(
        self, at: At, account: _Account, kind: str, data: Mapping[str, Any], _on: date, _details: Mapping[str, str]
    ) -> None:
        rows = self.keyed["moves"]
        cents = {0: 0} if kind == "AccountClosed" else {1: data["cents"]}
        if kind == "FeeCharged" and cents[1] % 2:
            return
        if kind == "MoneyWithdrawn":
            cents[2] = -data["cents"]
        for side, amount in cents.items():
            rows[at.stream, at.version, side] = (
                at.account,
                at.version,
                side,
                amount,
                account.balance,
                account.status,
                at.partition,
            )

    def _extreme(
        self, at: At, _account: _Account, kind: str, data: Mapping[str, Any], on: date, _details: Mapping[str, str]
    ) -> None:
        rows = self.keyed["extremes"]
        cents = data["cents"]
        amount = Decimal(SIGNS[kind] * cents).scaleb(-2)
        for name in (kind, "all"):
            key = (name, at.partition)
            one = (name, 1, amount, cents, amount, on, on, at.time, at.time)
            if was := rows.get(key):
                one = (
                    name,
                    was[1] + 1,
                    was[2] + amount,
                    min(was[3], cents),
                    max(was[4], amount),
                    min(was[5], on),
                    max(was[6], on),
                    min(was[7], at.time),
                    max(was[8], at.time),
                )
            rows[key] = (*one, at.partition)

    def _strict(
        self, at: At, _account: _Account, _kind: str, _data: Mapping[str, Any], _on: date, _details: Mapping[str, str]
    ) -> None:
        rows, key = self.keyed["strict"], (at.account,)
        before = rows.get(key)
        rows[key] = (at.account, (before[1] if before else 0) + 1, at.partition)


_OWN: Mapping[str, Callable[..., None]] = {
    "holders": _Fold._holder,
    "purposes": _Fold._purpose,
    "moves": _Fold._move,
    "extremes": _Fold._extreme,
    "strict": _Fold._strict,
}


def _fails(view: str, kind: str, data: Mapping[str, Any], purpose: str) -> bool:
    if view == "moves" and kind == "FeeCharged" and data["cents"] % 2:
        return False
    if view == "holders" and purpose == "weight:o":  # its row is beyond 64 bits
        return True
    return purpose.startswith(POISON) and LETTERS[view] in purpose.removeprefix(POISON)
