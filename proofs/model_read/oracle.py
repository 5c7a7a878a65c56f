"""What must hold after every commit, worked out from the story of the log without a line of the product's fold or rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any
from zlib import crc32

from infra.log.records import Record
from proofs.bank_oracle import Place, Reader, digest
from proofs.checker import Violation
from proofs.model_read.database import Row, Tables
from proofs.model_read.log import Log

ROWS = "rows are the fold of what counts below the position"
POSITIONS = "positions never go back"
SET = "only the code whose set is live folds"
READER = "no reader sees an older state"
LOST = "in the end everything is folded"
STOPPED = "no process stops without a reason"


class Partition:
    """What counts in one partition, and the reading after each offset."""

    def __init__(self, records: Sequence[Record]) -> None:
        reader = Reader()
        self.counted: list[tuple[int, dict[str, Any]]] = []
        self.readings = [reader.place]
        for record in records:
            if (commit := reader.read(record.offset, record.value)) is not None:
                self.counted.append((record.offset, commit))
            self.readings.append(reader.place)

    def events(self, end: int) -> list[tuple[str, int, int, int]]:
        """Stream, version, cents and the stream's balance, for each event below `end`."""
        balances: Counter[str] = Counter()
        found = []
        for commit in [commit for offset, commit in self.counted if offset < end]:
            stream, events = commit["stream"], commit["events"]
            for version, event in enumerate(events, commit["version"] - len(events) + 1):
                balances[stream] += event["data"]["cents"]
                found.append((stream, version, event["data"]["cents"], balances[stream]))
        return found


Left = tuple[tuple[str, int], ...]


class Oracle:
    """Knows what each table must hold at each position."""

    def __init__(self, log: Log) -> None:
        self.partitions = {p: Partition(records) for p, records in log.records.items()}
        self.ends = {p: len(records) for p, records in log.records.items()}
        self._rows = cache(self._fold)

    def _fold(self, view: str, version: int, partition: int, end: int, parked: Left, skips: Left) -> frozenset[Any]:
        """A partition's rows of a view's table at `end`, as `_seen` puts them."""
        since, left = dict(parked), set(skips)
        events = self.partitions[partition].events(end)
        if view == "command_outcomes":
            of = [commit for offset, commit in self.partitions[partition].counted if offset < end]
            return frozenset((str(digest(one["stream"], one["command_id"])), one["version"]) for one in of)
        if view == "streams_accounts":
            return frozenset({stream: (stream, v, balance) for stream, v, _, balance in events}.values())
        if view == "moves":
            return frozenset((stream.partition("/")[2], v, balance) for stream, v, _, balance in events)
        if view == "totals":
            every, odd = (
                [f"{stream} {v}" for stream, v, *_ in events],
                [cents for _, _, cents, _ in events if cents % 2],
            )
            total = len(events), sum(event[2] for event in events)
            return frozenset({("all", *total, every[-1], every[0], odd[-1] if odd else None)} if events else ())
        trails: dict[str, str] = {}
        for stream, number, cents, _ in events:
            if number < since.get(stream, number + 1) and (stream, number) not in left:
                trails[stream] = trails.get(stream, f"v{version}") + f" {cents}"
        return frozenset((stream.partition("/")[2], trail) for stream, trail in trails.items())

    def check_table(
        self,
        tables: Tables,
        view: str,
        version: int,
        table: str,
        at: Mapping[int, Place],
        only: Collection[Row] | None = None,
    ) -> None:
        """The rows of `table` are those of `at`; if only some parts are loaded, those of these. Raises Violation."""
        parked = tuple((row["stream"], row["since_version"]) for row in tables["parked"] if row["table_name"] == table)
        skips = tuple((row["stream"], row["version"]) for row in tables["skips"] if row["view"] == view)
        held: dict[int, list[Any]] = {}
        for row in tables.get(table, ()):
            held.setdefault(row["_partition"], []).append(_seen(view, row))
        for partition, reading in at.items():
            rows = held.get(partition, [])
            wanted = self._rows(view, version, partition, reading[0], parked, skips)
            if only is not None:
                mine = [part for part in only if part["partition"] == partition]
                wanted = frozenset(row for row in wanted if any(_is_of(part, view, row) for part in mine))
            if len(rows) != len(wanted) or frozenset(rows) != wanted:
                raise Violation(
                    ROWS, f"{table}[{partition}] at {reading[0]} holds {sorted(rows)}, which should be {sorted(wanted)}"
                )

    def check(self, tables: Tables) -> None:
        """Everything that must hold in each state that is committed. Raises Violation."""
        positions = positions_of(tables)
        generations = {row["generation"] for row in tables["positions"]}
        if len(generations) > 1:
            raise Violation(POSITIONS, f"several generations: {generations}")
        for partition, reading in positions.items():
            self._check_reading("positions", partition, reading)
        for mark in tables["log_marks"]:
            self._check_reading("log_marks", mark["partition"], place(mark))
        for row in tables["live"]:
            self.check_table(tables, row["view"], row["version"], row["table_name"], positions)
        for row in tables["builds"]:
            build = row["id"]
            at = {p["partition"]: place(p) for p in tables["build_positions"] if p["build"] == build}
            for partition, reading in at.items():
                self._check_reading(row["table_name"], partition, reading)
            match row["state"]:
                case "ready" | "old":
                    self.check_table(tables, row["view"], row["version"], row["table_name"], at)
                case "loading":
                    only = [part for part in tables["build_parts"] if part["build"] == build]
                    self.check_table(tables, row["view"], row["version"], row["table_name"], at, only)
                case "live" | "abandoned":
                    pass  # the live tables are checked above; an abandoned one is not read
                case unknown:
                    raise AssertionError(f"what must hold of a build that is {unknown}?")

    def _check_reading(self, what: str, partition: int, reading: Place) -> None:
        if self.partitions[partition].readings[reading[0]] != reading:
            right = self.partitions[partition].readings[reading[0]]
            raise Violation(POSITIONS, f"{what}[{partition}] stands at {reading}, which should be {right}")


def _is_of(part: Row, view: str, seen: Any) -> bool:
    """Whether a build's part has this row of an entity or of states."""
    stream = seen[0] if view == "streams_accounts" else f"accounts/{seen[0]}"
    return bool(part["shares"] == 1 or crc32(stream.encode()) % part["shares"] == part["share"])


def _seen(view: str, row: Row) -> Any:
    """What is compared of a row."""
    match view:
        case "command_outcomes":
            return row["command"], row["version"]
        case "streams_accounts":
            return row["stream"], row["version"], row["state"]["balance"]
        case "moves":
            return row["account"], row["line"], row["balance"]
        case "totals":
            return row["kind"], int(row["count"]), int(row["cents"]), row["last"], row["first"], row["odd"]
        case _:
            return row["account"], row["trail"]


def place(row: Row) -> Place:
    return Place(*(row[name] for name in Place._fields))


def live_set(tables: Tables) -> dict[str, int]:
    """The versions of all views, of stopped ones too."""
    return {row["view"]: row["version"] for row in (*tables["stopped_views"], *tables["live"])}


def positions_of(tables: Tables) -> dict[int, Place]:
    return {row["partition"]: place(row) for row in tables["positions"]}


class Watch:
    """Looks at every commit of a run."""

    def __init__(self, oracle: Oracle, sets: Mapping[str, Mapping[str, int]]) -> None:
        self.oracle = oracle
        self.sets = sets
        """By agent process, the {view: version} of its code."""
        self.before: dict[int, Place] = {}
        self.checked = 0

    def restored(self, tables: Tables) -> None:
        self.before = positions_of(tables)

    def published(self, process: str, tables: Tables) -> None:
        """`process` has committed these. Raises Violation."""
        after = positions_of(tables)
        moved = [p for p, reading in after.items() if reading != self.before.get(p, reading)]
        behind = [p for p in moved if after[p] < self.before[p]]
        if behind:
            raise Violation(POSITIONS, f"{behind} went back from {self.before} to {after}")
        code = self.sets.get(process)
        if moved and code is not None:
            live = live_set(tables)
            if live != code:
                raise Violation(SET, f"{process} with {code} folded while {live} is live")
        self.before = after
        self.checked += 1
        self.oracle.check(tables)
