"""The fold of the log in plain Python: the sample's views, and the tests' own, which park, stop and take rows away."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from proofs.bank_oracle import SIGNS, Account, At, Bank, Entry, Place, Row

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
    rows: dict[str, list[Row]]
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
        json.dumps(value, sort_keys=True)
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
            ours.take(partition, offset, *entry)
    return ours.expected()


class _Fold(Bank):
    def __init__(self, partitions: int, skips: Sequence[Skip], parked: Iterable[Parked] | None) -> None:
        super().__init__(partitions)
        self.rows |= {view: {} for view in LETTERS}
        self.skips = skips
        self.is_on_record = parked is not None
        self.parked = {(one.view, one.stream): one for one in parked or ()}

    def expected(self) -> Expected:
        return Expected(
            self.places,
            {view: [row for row in rows.values() if row is not None] for view, rows in self.rows.items()},
            set(self.parked.values()),
            self.commits,
            sum(reader.void for reader in self.readers),
        )

    def happened(
        self, at: At, account: Account, kind: str, data: Mapping[str, Any], on: date, details: Mapping[str, str]
    ) -> None:
        for view, own in _OWN.items():
            parked = self.parked.get((view, at.stream))
            is_parked = parked is not None and at.version >= parked.version
            if kind in TAKES[view] and not self.leaves_out(view, at) and not is_parked:
                if _fails(view, kind, data, details["purpose"]):
                    self._fail(view, at)
                else:
                    own(self, at, account, kind, data, on, details)

    def leaves_out(self, view: str, at: At) -> bool:
        return any((s.view, s.stream) == (view, at.stream) and s.first <= at.version <= s.last for s in self.skips)

    def _fail(self, view: str, at: At) -> None:
        if view not in PARKING:
            raise StoppedAt(view, at)
        assert not self.is_on_record, f"{view} fails at {at}, before which nothing is parked on record"
        self.parked[view, at.stream] = Parked(view, at.stream, at.partition, at.offset, at.version)

    def _holder(
        self, at: At, _account: Account, kind: str, data: Mapping[str, Any], on: date, details: Mapping[str, str]
    ) -> None:
        rows, key = self.rows["holders"], (at.account,)
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
        self, at: At, _account: Account, kind: str, data: Mapping[str, Any], _on: date, details: Mapping[str, str]
    ) -> None:
        rows, key = self.rows["purposes"], (at.account, details["purpose"])
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
        self, at: At, account: Account, kind: str, data: Mapping[str, Any], _on: date, _details: Mapping[str, str]
    ) -> None:
        rows = self.rows["moves"]
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
        self, at: At, _account: Account, kind: str, data: Mapping[str, Any], on: date, _details: Mapping[str, str]
    ) -> None:
        rows = self.rows["extremes"]
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
        self, at: At, _account: Account, _kind: str, _data: Mapping[str, Any], _on: date, _details: Mapping[str, str]
    ) -> None:
        rows, key = self.rows["strict"], (at.account,)
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
