"""The ways to fold a log, each ending in rows that can be compared with the oracle's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.errors import SamefoldError
from infra.log import rule, topics
from infra.log.records import Record
from infra.log.rule import START
from infra.settings import Settings
from infra.testing.fixtures import dev_env
from projections.engine.fold.fold import Blocked
from projections.engine.fold.plan import Plan
from projections.engine.live.worker import Worker
from projections.engine.rebuild.engines import EngineFor, Local
from projections.engine.rebuild.folded import Folded, added_rows
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.store.commit import Batch, Fate
from projections.engine.store.positions import skips_of
from projections.engine.verify.verify import verify
from projections.engine.views.view import Kind, View
from proofs.bank_oracle import Entry, Place
from proofs.one_fold.oracle import Expected, Parked, Skip, fold
from proofs.one_fold.places import PATIENCE_S, live_tables, parked_of, places_of, rows_of
from spark_jobs.agent import Agent
from spark_jobs.engine import Spark


def in_memory(
    logs: Sequence[Sequence[Entry]], views: Mapping[str, View], skips: Sequence[Skip], chance: random.Random
) -> Expected:
    """The engine's own fold of batches of any size, without a database."""
    plan = Plan(views)
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
                if view.kind in (Kind.JOURNAL, Kind.OUTCOMES):
                    rows[view.name] += added_rows(view, changes)
        for view in views.values():
            if view.kind is Kind.SNAPSHOT:
                rows[view.name] += ((*row[:2], json.loads(row[2]), row[3]) for row in folded.kept_rows(view, partition))
            elif view.kind not in (Kind.JOURNAL, Kind.OUTCOMES):
                rows[view.name] += folded.kept_rows(view, partition)
        found |= {Parked(one.view, one.stream, partition, one.offset, one.version) for one in folded.parked}
        places.append(Place(*reading))
    return Expected(places, rows, found)


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


@contextmanager
def agent_on_spark(place: Settings, spark: Any) -> Iterator[None]:
    """An agent with the sample's views, as a query on this Spark; its executors have the place's settings."""
    agent = Agent(place, "core", "agent-on-spark", lambda: spark)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(agent.run)
        try:
            yield
        finally:
            agent.stop()
        running.result(PATIENCE_S)


Engines = Mapping[str, Callable[[Settings], EngineFor]]
"""What loads and comparisons of a place run on."""


def engines_with(spark: Any, spark_place: Path) -> Engines:
    def on_spark(place: Settings) -> EngineFor:
        (spark_place / "dev.env").write_text(dev_env(place))
        return lambda _: Spark(spark)

    return {"local": lambda _: lambda _: Local(1), "spark": on_spark}


# ── comparing ──


def live_differences(place: Settings, expected: Expected) -> list[str]:
    """Of the tables that are live and the agent's positions."""
    return _differences(place, expected, live_tables(place), places_of(place))


def build_differences(place: Settings, expected: Expected, tables: Mapping[str, str]) -> list[str]:
    """Of tables that were built, by view, and each one's positions."""
    found = []
    for view, table in tables.items():
        found += _differences(place, expected, {view: table}, places_of(place, table))
    return found


def _differences(place: Settings, expected: Expected, tables: Mapping[str, str], at: list[Place]) -> list[str]:
    found = [] if at == expected.places else [f"{', '.join(tables)}: stands at {at}, not {expected.places}"]
    for view, table in tables.items():
        found += expected.differences(view, rows_of(place, table))
    wanted, there = {one for one in expected.parked if one.view in tables}, parked_of(place, tables.values())
    found += [f"not parked: {one}" for one in wanted - there]
    found += [f"parked: {one}" for one in there - wanted]
    return found


def built(
    place: Settings, views: Mapping[str, View], engine_for: EngineFor | None = None, processes: int | None = 1
) -> dict[str, str]:
    """Rebuild all views on an engine, without a switch: tables by view."""
    return rebuild(place, views, views, make_live=False, engine_for=engine_for, processes=processes).tables


def verified(
    place: Settings, views: Mapping[str, View], engine_for: EngineFor | None = None, processes: int | None = 1
) -> int:
    """Differences that the product itself finds."""
    return verify(place, views, engine_for=engine_for, processes=processes).differences


def expected_at(logs: Sequence[Sequence[Entry]], place: Settings, skips: Sequence[Skip]) -> Expected:
    """The oracle's fold to where the agent stands."""
    ends = {partition: at.next_offset for partition, at in enumerate(places_of(place))}
    return fold(logs, ends, skips=skips)
