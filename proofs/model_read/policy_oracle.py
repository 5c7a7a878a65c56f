"""What must hold of a policy's outbox, worked out from the bank's facts without a line of the product."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from domain.accounts import ChargeFee, Deposit, Withdraw
from infra.domain_model.storable import encode as body_of
from infra.log.records import Command
from proofs.model_read.bank import DAY, EVENTS, MORE, MOVING, Bank, Fact, Topics
from proofs.model_read.database import Tables
from proofs.model_read.oracle import LOST, POSITIONS, Violation

OUTBOX = "the outbox is the fold of what counts below the positions"
COPY = "the table of activations is a copy of the topic"
ONCE = "each wish is decided once as it was meant, and so is one follow-up"
ORDER = "commands from one stream to another arrive in order"

Row = tuple[Any, ...]


def wish_id(stream: str, version: int) -> str:
    """The same for ever: other ids would be other commands."""
    place = json.dumps([MOVING, stream, version, 0], separators=(",", ":"))
    return f"{MOVING}~" + base64.b32encode(hashlib.blake2b(place.encode(), digest_size=20).digest()).decode().lower()


def decided(topics: Topics) -> None:
    """Each wish of the first version arrives, and then its follow-up."""
    for fact in [fact for part in topics.facts.values() for fact in part if fact and fact.target]:
        ident, cents = wish_id(fact.stream, fact.version), fact.cents
        wish = _sent(ident, f"accounts/{fact.target}", Deposit(cents=cents, on=DAY), 1, fact.command, fact.command)
        topics.send(wish)
        outcome = next(one for part in topics.facts.values() for one in part if one and one.command == ident)
        kind, which = (ChargeFee, "otherwise") if outcome.refusal else (Withdraw, "then")
        topics.send(_sent(f"{ident}~{which}", fact.stream, kind(cents=cents, on=DAY), 2, fact.command, ident))


def _sent(ident: str, stream: str, command: Any, depth: int, correlation: str, cause: str) -> Command:
    body = msgspec.Raw(body_of(command))
    return Command(ident, stream, type(command).__name__, body, None, correlation, cause, depth)


class PolicyOracle:
    """Knows the outbox at each position. It looks at every commit of a run."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.before: dict[int, int] = {}
        self.checked = 0

    # ── the fold ──

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

    def version(self, partition: int, offset: int) -> int:
        """The version that reacts to the event at this offset, 0 if none does."""
        in_force = 0
        for one in self.activations():
            if one["positions"][str(partition)][0] <= offset:
                in_force = one["version"]
        return in_force

    def wishes(self, ends: Mapping[int, int]) -> dict[str, Row]:
        """By id, what the policy wishes for the events below these offsets: a row's first half."""
        made: dict[str, Row] = {}
        for partition, end in ends.items():
            for offset, fact in enumerate(self.bank.topics.facts[partition][:end]):
                if fact is None or not fact.target or fact.refusal:
                    continue
                if version := self.version(partition, offset):
                    cents = fact.cents + MORE * (version - 1)
                    made[wish_id(fact.stream, fact.version)] = (
                        *(partition, fact.stream, fact.version, f"accounts/{fact.target}", "Deposit", cents),
                        *(fact.depth + 1, fact.correlation, fact.command, "Withdraw", "ChargeFee"),
                    )
        return made

    def outbox(self, ends: Mapping[int, int]) -> dict[str, Row]:
        """By id, the rows that the outbox holds at these positions."""
        wishes: dict[str, Row] = self.wishes(ends)
        outcomes: dict[str, Fact] = {}
        for partition, end in ends.items():
            for fact in self.bank.topics.facts[partition][:end]:
                if fact is not None and fact.command.startswith(f"{MOVING}~"):
                    outcomes[fact.command] = fact
        for ident, wish in list(wishes.items()):
            if (outcome := outcomes.pop(ident, None)) is None:
                continue
            del wishes[ident]
            partition, stream, version, _, _, cents, _, correlation, _, then, otherwise = wish
            follow_up = f"{ident}~{'otherwise' if outcome.refusal else 'then'}"
            if outcomes.pop(follow_up, None) is None:
                kind = otherwise if outcome.refusal else then
                row = (partition, stream, version, stream, kind, cents, outcome.depth + 1, correlation, ident)
                wishes[follow_up] = (*row, None, None)
        return wishes | {
            ident: ("rejected" if one.refusal else "accepted", one.refusal or None) for ident, one in outcomes.items()
        }

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
        of_agent = [row for row in tables["positions"] if row["agent"] == f"policy_{MOVING}"]
        if len({row["generation"] for row in of_agent}) > 1:
            raise Violation(POSITIONS, "several generations")
        for row in of_agent:
            at, seq = row["next_offset"], max(row["next_offset"] - 1, 0)
            reading = (row["epoch"], row["seq"], row["command_offset"])
            if reading != ((0, seq, seq or -1) if at else (-1, 0, -1)):
                raise Violation(POSITIONS, f"{row['partition']} stands at {at}, {reading}")
        self._check_activations(tables)
        wanted = self.outbox(positions_of(tables))
        found = {row["id"]: _seen(row) for row in tables["outbox"]}
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

    # ── at the end ──

    def check_end(self, tables: Tables) -> None:
        """All is read and sent: every wish had its end, once. Raises Violation."""
        if positions_of(tables) != self.bank.topics.ends or tables["outbox"]:
            raise Violation(LOST, f"at {positions_of(tables)} of {self.bank.topics.ends}: {tables['outbox']}")
        facts = {fact.command: fact for part in self.bank.topics.facts.values() for fact in part if fact}
        sent = self.bank.topics.commands[self.bank.client_commands :]
        first = list(dict.fromkeys(one.id for one in sent))
        wanted: list[str] = []
        by_order: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for ident, (_, stream, version, target, _, cents, *_) in self.wishes(self.bank.topics.ends).items():
            outcome = facts.get(ident)
            if outcome is None or (outcome.stream, outcome.cents) != (target, cents):
                raise Violation(ONCE, f"{ident} of {stream} {version} should be {cents} for {target}: {outcome}")
            wanted += [ident, f"{ident}~{'otherwise' if outcome.refusal else 'then'}"]
            by_order.setdefault((stream, target), []).append((version, ident))
        decided = [one for one in facts if one.startswith(f"{MOVING}~")]
        if Counter(decided) != Counter(wanted):
            raise Violation(ONCE, f"decided are {sorted(decided)}, and should be {sorted(wanted)}")
        for order, events in by_order.items():
            found = [ident for ident in first if ident in {one for _, one in events}]
            if found != [one for _, one in sorted(events) if one in found]:
                raise Violation(ORDER, f"{order}: {found}")


def positions_of(tables: Tables) -> dict[int, int]:
    """The policy's, by partition."""
    agent = f"policy_{MOVING}"
    return {row["partition"]: row["next_offset"] for row in tables["positions"] if row["agent"] == agent}


def _seen(row: Mapping[str, Any]) -> Row:
    """What is compared of a row. A dead letter equals none."""
    if row["dead"]:
        return ("dead", row["dead"])
    if row["kind"] is None:
        return (row["outcome"], row["refusal"])
    assert row["type"] in EVENTS
    return (
        *(row["partition"], row["stream"], row["version"], row["target"], row["type"]),
        *(json.loads(row["body"])["cents"], row["depth"], row["correlation_id"], row["causation_id"]),
        *(row["then_type"], row["otherwise_type"]),
    )
