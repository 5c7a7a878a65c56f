"""Two ways to fold a log that share the engine with all others: in memory, and as agents do it on a database."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from domain.engine.contexts import Context
from infra.errors import SamefoldError
from infra.log import rule, topics
from infra.log.records import Record
from infra.log.rule import START
from infra.settings import Settings
from projections.engine.fold.fold import Blocked
from projections.engine.fold.plan import Plan
from projections.engine.live.worker import Worker
from projections.engine.rebuild.folded import Folded, added_rows
from projections.engine.store.commit import Batch, CommitStatus
from projections.engine.store.positions import skips_of
from projections.engine.views.view import Kind, View
from proofs.bank_oracle import Entry, Place
from proofs.one_fold.expect import Parked, Skip

ADDED = (Kind.JOURNAL, Kind.OUTCOMES)
RESTARTS, DROPS = 0.04, 0.08
"""Chances before a batch: that an agent starts again, and that it drops what it holds and reads the positions again."""

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


class _Agent:
    """A process's worker, and the positions that it read last."""

    def __init__(self, place: Settings, agent: str, views: Mapping[str, View], name: str, lanes: int) -> None:
        self.worker = Worker(place, agent, views, name, lanes=lanes)
        self.worker.start(topics.describe(place, place.events_topic))
        self.lanes = range(lanes)
        self.turn = 0
        self.at: dict[int, rule.Reading] = {}

    def look(self) -> None:
        self.turn += 1
        positions = self.worker.positions(self.turn)
        assert positions is not None
        self.at = dict(positions.readings)

    def close(self) -> None:
        for lane in self.lanes:
            self.worker.close(lane)


def live(
    place: Settings,
    agent: str,
    views: Mapping[str, View],
    logs: Sequence[Sequence[Entry]],
    ends: Mapping[int, int],
    size: int,
    agents: int,
    chance: random.Random,
) -> tuple[SamefoldError | None, int]:
    """As so many agents do it, with as many lanes, without their processes: they take turns as chance has it, each ahead of the
    others now and then, which fences the others; they start again, or drop what they hold. Batches have up to `size` records of a
    partition. Up to these offsets, or to what stops an agent, which is returned; and how often one was fenced."""
    records = [_records(partition, log) for partition, log in enumerate(logs)]
    running: dict[int, _Agent] = {}
    fenced = 0
    try:
        while True:
            number = chance.randrange(agents)
            if number not in running or chance.random() < RESTARTS:
                if number in running:
                    running.pop(number).close()
                running[number] = _Agent(place, agent, views, f"agent-{number}", agents)
            one = running[number]
            if not one.at or chance.random() < DROPS:
                one.look()
            left = [partition for partition, reading in one.at.items() if reading.next_offset < ends[partition]]
            if not left:
                return None, fenced
            takes = {}
            for partition in chance.sample(left, chance.randint(1, len(left))):
                start = one.at[partition].next_offset
                takes[partition] = (one.at[partition], records[partition][start : min(start + size, ends[partition])])
            done = one.worker.apply(takes, one.turn, chance.randrange(agents))
            if done.status is CommitStatus.APPLIED:
                one.at.update(done.readings)
            else:
                assert done.status is CommitStatus.FENCED, done
                assert agents > 1, "fenced, although no other agent folds"
                fenced += 1
                one.at = {}
            if done.stop:
                return done.stop, fenced
    finally:
        for one in running.values():
            one.close()


def _records(partition: int, log: Sequence[Entry]) -> list[Record]:
    return [Record(partition, offset, entry.time_ms, None, entry.value) for offset, entry in enumerate(log)]
