"""Two ways to fold a log that share the engine with all others: in memory, and as agents do it on a database."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from infra.domain_model.contexts import Context
from infra.errors import SamefoldError
from infra.log import rule, topics
from infra.log.records import Record
from infra.log.rule import START
from infra.settings import Settings
from projections.engine.fold.fold import Blocked
from projections.engine.fold.plan import Plan
from projections.engine.live.worker import Worker
from projections.engine.rebuild.folded import Folded, added_rows
from projections.engine.store.commit import Batch, Fate
from projections.engine.store.positions import skips_of
from projections.engine.views.view import Kind, View
from proofs.bank_oracle import Entry, Place
from proofs.one_fold.expect import Parked, Skip

ADDED = (Kind.JOURNAL, Kind.OUTCOMES)

Folds = tuple[list[Place], dict[str, list[tuple[Any, ...]]], set[Parked]]
"""Positions by partition, rows by view, and parked streams."""


def in_memory(
    logs: Sequence[Sequence[Entry]],
    views: Mapping[str, View],
    contexts: Mapping[str, Context],
    skips: Sequence[Skip],
    chance: random.Random,
) -> Folds:
    """The engine's own fold of batches of any size, without a database."""
    plan = Plan(views, contexts)
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in views}
    found: set[Parked] = set()
    places = []
    for partition, log in enumerate(logs):
        folded = Folded(plan, Blocked({}, skips_of(skips)))
        reading = START
        records = _records(partition, log)
        while reading.next_offset < len(records):
            was = reading
            more = records[was.next_offset : was.next_offset + chance.randint(1, 40)]
            reading, counted, _ = rule.read(was, more, plan.decode)
            changes = folded.fold(Batch(partition, was, reading, counted))
            for view in views.values():
                if view.kind in ADDED:
                    rows[view.name] += added_rows(view, changes)
        for view in views.values():
            if view.kind not in ADDED:
                rows[view.name] += folded.kept_rows(view, partition)
        found |= {Parked(one.view, one.stream, partition, one.offset, one.version) for one in folded.parked}
        places.append(Place(*reading))
    return places, rows, found


class Live:
    """Agents' own work on one database, without their processes: they take turns as chance has it, each ahead of the others now
    and then, which fences the others."""

    def __init__(
        self,
        place: Settings,
        views: Mapping[str, View],
        chance: random.Random,
        sizes: Sequence[int] = (1, 7, 40, 400),
        *,
        agent: str = "core",
        workers: int = 2,
        lanes: int = 2,
        restarts: float = 0.0,
        drops: float = 0.0,
    ) -> None:
        """`sizes` are those of a batch's share of one partition, in records. `restarts` and `drops` are chances: that a worker
        starts again before a batch, and that it drops what it holds and reads the positions again."""
        self.place, self.views, self.agent, self.lanes = place, views, agent, lanes
        self.chance, self.sizes, self.restarts, self.drops = chance, sizes, restarts, drops
        self.fenced = 0
        self._workers: list[Worker | None] = [None] * workers
        self._at: list[dict[int, rule.Reading] | None] = [None] * workers
        self._turns = [0] * workers

    def __enter__(self) -> Live:
        for number in range(len(self._workers)):
            self._start(number)
        return self

    def __exit__(self, *_error: object) -> None:
        for number in range(len(self._workers)):
            self._close(number)

    def _start(self, number: int) -> Worker:
        self._close(number)
        worker = Worker(self.place, self.agent, self.views, f"agent-{number}", lanes=self.lanes)
        self._workers[number], self._at[number] = worker, None
        worker.start(topics.describe(self.place, self.place.events_topic))
        return worker

    def _close(self, number: int) -> None:
        if (worker := self._workers[number]) is not None:
            for lane in range(self.lanes):
                worker.close(lane)

    def fold(self, logs: Sequence[Sequence[Entry]], ends: Mapping[int, int] | None = None) -> SamefoldError | None:
        """Up to these offsets, or to what stops an agent, which is returned."""
        records = [_records(partition, log) for partition, log in enumerate(logs)]
        ends = ends or {partition: len(log) for partition, log in enumerate(logs)}
        while True:
            number = self.chance.randrange(len(self._workers))
            worker = self._workers[number]
            if worker is None or self.chance.random() < self.restarts:
                worker = self._start(number)
            at = self._at[number]
            if at is None or self.chance.random() < self.drops:
                self._turns[number] += 1
                positions = worker.positions(self._turns[number])
                assert positions is not None
                at = self._at[number] = dict(positions.readings)
            left = [partition for partition, reading in at.items() if reading.next_offset < ends[partition]]
            if not left:
                return None
            takes = {}
            for partition in self.chance.sample(left, self.chance.randint(1, len(left))):
                start = at[partition].next_offset
                stop = min(start + self.chance.choice(self.sizes), ends[partition])
                takes[partition] = (at[partition], records[partition][start:stop])
            done = worker.apply(takes, self._turns[number], self.chance.randrange(self.lanes))
            if done.fate is not Fate.APPLIED:
                assert done.fate is Fate.FENCED, done
                assert len(self._workers) > 1, "fenced, although no other agent folds"
                self.fenced += 1
                self._at[number] = None
                continue
            at.update(done.readings)
            if done.stop:
                return done.stop


def _records(partition: int, log: Sequence[Entry]) -> list[Record]:
    return [Record(partition, offset, entry.time_ms, None, entry.value) for offset, entry in enumerate(log)]
