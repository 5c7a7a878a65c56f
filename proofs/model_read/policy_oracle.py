"""What must hold of a policy's outbox, worked out from the bank's records by the oracle of `proofs/policy_oracle.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from infra.log.records import Command
from proofs import policy_oracle as wished
from proofs.checker import Violation
from proofs.model_read.bank import DAY, MORE, MOVING, PARTITIONS, Bank, Topics
from proofs.model_read.database import Tables
from proofs.model_read.oracle import LOST, POSITIONS, place
from proofs.policy_oracle import Event, Row, Wish, Wishes, id_of

OUTBOX = "the outbox is the fold of what counts below the positions"
COPY = "the table of activations is a copy of the topic"
ONCE = "each wish is decided once as it was meant, and so is one follow-up"
ORDER = "commands from one stream to another arrive in order"
AGENT = f"policy_{MOVING}"
TIMES = ("due", "wished_at")


class Moved(Wishes):
    """The policy `moving` over the records below these offsets; without activations, its first version."""

    def __init__(self, topics: Topics, ends: Mapping[int, int], activations: list[Mapping[str, Any]] | None) -> None:
        super().__init__(MOVING, PARTITIONS)
        self.activations = activations
        self.order: dict[tuple[str, str], list[str]] = {}
        """Ids of wishes in the order of their events, by the streams from and to which they go."""
        for partition, end in ends.items():
            for record in topics.records[partition][:end]:
                self.take(partition, record.offset, record.time_ms, record.value)

    def reaction(self, at: Event) -> Iterator[Wish]:
        purpose = at.data.get("details", {}).get("purpose")
        if at.type == "MoneyDeposited" and purpose and (version := self.version(at)):
            cents = at.data["cents"] + MORE * (version - 1)
            body = {"cents": cents, "on": str(DAY), "details": wished.details_of("")}
            target = f"accounts/{purpose}"
            self.order.setdefault((at.stream, target), []).append(id_of(MOVING, at.stream, at.version, 0))
            back = wished.Command("Withdraw", body | {"hold": ""})
            yield Wish(target, "Deposit", body, back, wished.Command("ChargeFee", body))

    def version(self, at: Event) -> int:
        """Of the policy, which reacts to this event; 0 if none does."""
        if self.activations is None:
            return 1
        in_force = [one for one in self.activations if one["positions"][str(at.partition)][0] <= at.offset]
        return in_force[-1]["version"] if in_force else 0


def decided(topics: Topics) -> None:
    """Each wish of the first version arrives, and then its follow-up."""
    while rows := [row for row in Moved(topics, topics.ends, None).rows.values() if row.kind]:
        for row in rows:
            data = msgspec.Raw((row.body or "").encode())
            columns = (row.correlation_id, row.causation_id, row.depth)
            topics.send(Command(row.id, row.target or "", row.type or "", data, None, *columns))  # type: ignore[arg-type]


class PolicyOracle:
    """Knows the outbox at each position. It looks at every commit of a run."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.before: dict[int, int] = {}
        self.checked = 0

    def activations(self) -> list[Mapping[str, Any]]:
        """Those that count, by number: the first record of each."""
        found: dict[int, Mapping[str, Any]] = {}
        for record in self.bank.topics.activations:
            one = json.loads(record.value or b"")
            found.setdefault(one["number"], one)
        return [one for _, one in sorted(found.items())]

    def made_live(self) -> list[int]:
        """The versions that are or were in force."""
        return list(dict.fromkeys(one["version"] for one in self.activations()))

    def moved(self, ends: Mapping[int, int]) -> Moved:
        return Moved(self.bank.topics, ends, self.activations())

    # ── what is committed ──

    def restored(self, tables: Tables) -> None:
        self.before = positions_of(tables)

    def published(self, _process: str, tables: Tables) -> None:
        """Raises Violation."""
        after = positions_of(tables)
        if behind := [p for p, offset in after.items() if offset < self.before.get(p, 0)]:
            raise Violation(POSITIONS, f"{behind} went back from {self.before} to {after}")
        self.before = after
        self.checked += 1
        self.check(tables)

    def check(self, tables: Tables) -> None:
        """Everything that must hold in each state that is committed. Raises Violation."""
        of_agent = [row for row in tables["positions"] if row["agent"] == AGENT]
        if len({row["generation"] for row in of_agent}) > 1:
            raise Violation(POSITIONS, "several generations")
        moved = self.moved(positions_of(tables))
        for row in of_agent:
            if place(row) != moved.places[row["partition"]]:
                raise Violation(POSITIONS, f"{row['partition']} stands at {place(row)}")
        self._check_activations(tables)
        found = {row["id"]: _seen(row) for row in tables["outbox"]}
        wanted = {ident: _seen(row._asdict()) for ident, row in moved.rows.items()}
        if found != wanted:
            more = {ident: row for ident, row in found.items() if wanted.get(ident) != row}
            less = {ident: row for ident, row in wanted.items() if found.get(ident) != row}
            raise Violation(OUTBOX, f"at {positions_of(tables)} it holds {more} instead of {less}")

    def _check_activations(self, tables: Tables) -> None:
        topic = self.bank.topics.activations
        for row in tables["activations"]:
            if row["log_offset"] is None:
                continue
            record = json.loads(topic[row["log_offset"]].value or b"") if row["log_offset"] < len(topic) else {}
            if any(row[name] != record.get(name) for name in ("policy", "number", "version", "positions")):
                raise Violation(COPY, f"{row} of {record}")

    def check_end(self, tables: Tables) -> None:
        """All is read and sent: every wish and every follow-up arrived, as it was meant. Raises Violation."""
        topics = self.bank.topics
        if positions_of(tables) != topics.ends or tables["outbox"]:
            raise Violation(LOST, f"at {positions_of(tables)} of {topics.ends}: {tables['outbox']}")
        moved = self.moved(topics.ends)
        arrived: dict[str, tuple[str, str, str]] = {}
        for one in topics.commands:
            if one.id.startswith(f"{MOVING}~"):
                arrived.setdefault(one.id, (one.stream, one.type, bytes(one.data).decode()))
        if arrived != moved.made:
            raise Violation(ONCE, f"decided are {arrived}, and should be {moved.made}")
        for streams, wanted in moved.order.items():
            if (found := [ident for ident in arrived if ident in wanted]) != wanted:
                raise Violation(ORDER, f"{streams}: {found} instead of {wanted}")


def positions_of(tables: Tables) -> dict[int, int]:
    """The policy's, by partition."""
    return {row["partition"]: row["next_offset"] for row in tables["positions"] if row["agent"] == AGENT}


def _seen(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is compared of a row. A dead letter equals none."""
    return row.get("dead"), *(row[name] for name in Row._fields if name not in TIMES)
