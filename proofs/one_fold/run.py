"""Folds generated histories in every way there is: `python -m proofs.one_fold.run` in a tree that has their modules.

All histories share one log. Three databases are filled live, in batches of 1, of 7 and of all, by workers that restart, drop what
they hold and fence each other now and then. Then tables are built on the local engine and on Spark, caught up with, switched to,
and made of the past. In a fourth database parked streams are dropped or replayed on the way.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from infra.errors import SamefoldError
from infra.log.records import EventRecord
from infra.processes.engines import Local
from infra.settings import PREFIX, Settings
from projections.engine.fold.errors import PoisonEvent
from projections.engine.operate.replaying import drop, replay
from projections.engine.operate.verify import verify
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.rebuild.time_travel import look_back
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from proofs.bank_oracle import Entry
from proofs.one_fold.expect import Found, Result, Skip, differences, expect, found_rows
from proofs.one_fold.folding import live
from proofs.one_fold.generate import HistorySpec, context_name, view_name
from proofs.one_fold.histories import history
from proofs.one_fold.places import Places, live_tables, parked_of, places_of, read_log, rows_of, write_skips
from spark_jobs.engine.spark import Spark
from tools.dev.stack import Stack
from tools.testing.fixtures import dev_env

PARTITIONS = 3
TASKS = (1, 4, 7)
HERE: dict[str, Any] = {"engine_for": lambda _: Local(1)}
OWN = re.compile(r"(?:streams_)?h(\d+)(?:_[a-z])?")
IDS = ("576", "Zür/ich ", "o'Neil \"%s\\")


def commits_of(number: int, spec: HistorySpec) -> Iterator[tuple[str, list[EventRecord]]]:
    waiting: dict[str, list[EventRecord]] = {}
    for one in spec.events:
        stream = stream_name(number, spec, one.stream)
        body = msgspec.json.encode({"act": one.act, "keys": one.keys, "picks": one.picks})
        waiting.setdefault(stream, []).append(EventRecord("Noted" if one.noted else "Happened", msgspec.Raw(body)))
        if one.ends or len(waiting[stream]) == 3:
            yield stream, waiting.pop(stream)
    yield from waiting.items()


def stream_name(number: int, spec: HistorySpec, stream: int) -> str:
    name = f"{context_name(number)}/{IDS[stream]}"
    return name + "i" * (200 - len(name.encode())) if spec.long_ids else name


def mixed(chance: random.Random, specs: Mapping[int, HistorySpec]) -> list[tuple[str, list[EventRecord]]]:
    """The commits of all histories, each one's in its order, and rejections."""
    waiting = [list(commits_of(number, spec)) for number, spec in specs.items()]
    found: list[tuple[str, list[EventRecord]]] = []
    while waiting := [one for one in waiting if one]:
        found.append(chance.choice(waiting).pop(0))
        if chance.random() < 0.1:
            found.append((found[-1][0], []))
    return found


def skips_of(specs: Mapping[int, HistorySpec]) -> list[Skip]:
    return [
        Skip(view_name(number, spec.views[view]), stream_name(number, spec, stream), version, version)
        for number, spec in specs.items()
        for view, stream, version in spec.skips
        if view < len(spec.views)
    ]


class Folding:
    """One run."""

    def __init__(self, specs: Mapping[int, HistorySpec], chance: random.Random, report: Found) -> None:
        self.specs = specs
        self.chance = chance
        self.report = report
        self.views = {
            name: view for name, view in all_views().items() if OWN.fullmatch(name) or name == "command_outcomes"
        }
        self.logs: list[list[Entry]] = []
        self._expected: dict[tuple[int, ...], Result] = {}
        self.skips = skips_of(specs)

    @property
    def ends(self) -> dict[int, int]:
        return {partition: len(log) for partition, log in enumerate(self.logs)}

    def expected(self, ends: Mapping[int, int]) -> Result:
        """The oracle's fold to these offsets."""
        at = tuple(ends[partition] for partition in range(PARTITIONS))
        if at not in self._expected:
            self._expected[at] = expect(self.logs, self.specs, self.skips, ends)
        return self._expected[at]

    def of_agents(self) -> dict[str, dict[str, View]]:
        agents = sorted({view.agent for view in self.views.values()}, key=lambda agent: (agent != "core", agent))
        return {agent: {name: view for name, view in self.views.items() if view.agent == agent} for agent in agents}

    @property
    def core(self) -> dict[str, View]:
        """The views that park, and the write side's. Those that stop have agents of their own."""
        return self.of_agents()["core"]

    def some(self, part: int) -> dict[str, View]:
        """One of so many of them: making tables takes long."""
        return {
            name: view
            for name, view in self.core.items()
            if (found := OWN.fullmatch(name)) and int(found[1]) % part == 0
        }

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What is raised in here is a difference, of the history that it names."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            named = getattr(error, "view", None) or text
            found = OWN.search(re.sub(r"(Place|Reading).*", "", str(named)))
            trace = "" if isinstance(error, SamefoldError) else traceback.format_exc(limit=-4)
            self.report.differences.append(
                (int(found[1]) if found else None, f"{name}: raised", short(f"{text} {trace}"))
            )

    def add(self, step: str, lines: Sequence[str]) -> None:
        for line in lines:
            found = OWN.search(line)
            self.report.differences.append((int(found[1]) if found else None, step, short(line)))

    # ── live ──

    def live(self, place: Settings, size: int, ends: Mapping[int, int], name: str) -> None:
        """All agents, up to these offsets or to where they must stop."""
        expected = self.expected(ends)
        for agent, views in self.of_agents().items():
            if agent != "core" and size == 1:
                continue  # it stops for longer than it folds
            with self.step(f"{name}: {'core' if agent == 'core' else 'others'}"):
                agents = 2 if size == 7 else 1
                stop, outrun = live(place, agent, views, self.logs, ends, size, agents, self.chance)
                self.compare_stop(name, stop, expected, views)
                self.report.reached["outrun"] += outrun
                self.compare(place, name, views, self.tables(place, views), agent)

    # ── comparing ──

    def compare_stop(self, step: str, stop: SamefoldError | None, expected: Result, views: Collection[str]) -> None:
        """What stopped a fold of these views, or nothing, against where the oracle stops one of them."""
        wanted = {which: at for which, at in expected.stops.items() if which[0] in views}
        if isinstance(stop, PoisonEvent):
            at = wanted.get((stop.view, stop.partition))
            if at is None or (at.stream, at.version, at.offset) != (stop.stream, stop.version, stop.offset):
                self.add(step, [f"{stop.view}: stopped, not at {at}: {stop}"])
        elif stop is not None:
            raise stop
        else:
            self.add(step, [f"{view}: did not stop at {at}" for (view, _), at in wanted.items()])

    def tables(self, place: Settings, views: Mapping[str, View]) -> dict[str, str]:
        return {view: table for view, table in live_tables(place).items() if view in views}

    def compare(
        self,
        place: Settings,
        step: str,
        views: Mapping[str, View],
        tables: Mapping[str, str],
        agent: str,
        build: str | None = None,
    ) -> None:
        """The rows and parked streams of tables at the positions of their agent, or of the build with the table `build`."""
        at = places_of(place, build, agent)
        expected = self.expected({n: one.next_offset for n, one in enumerate(at)})
        if at != expected.places:
            self.add(step, [f"stands at {at}, not {expected.places}"])
        self.compare_at(place, step, tables, expected)

    def compare_at(self, place: Settings, step: str, tables: Mapping[str, str], expected: Result) -> None:
        live = live_tables(place)
        for view, table in tables.items():
            found = OWN.fullmatch(view)
            rows = found_rows(self.specs[int(found[1])] if found else None, view, rows_of(place, table))
            self.add(step, differences(view, expected.rows[view], rows))
            if view in expected.read and table == live.get(view):
                read = found_rows(None, view, rows_of(place, view))  # the SQL view
                self.add(f"{step}: read", differences(view, expected.read[view], read))
        wanted = {one for one in expected.parked if one.view in tables}
        there = parked_of(place, tables.values())
        self.add(step, [f"not parked: {one}" for one in sorted(wanted - there)])
        self.add(step, [f"parked: {one}" for one in sorted(there - wanted)])

    def verify(self, place: Settings, name: str, views: Mapping[str, View], **how: Any) -> None:
        with self.step(name):
            found = verify(place, views, **(HERE | how))
            self.add(name, [f"verify: {one}" for one in found.positions])
            self.add(name, [f"{view}: verify: {one}" for view, of in found.views.items() for one in of.differences])

    def build(self, place: Settings, name: str, views: Mapping[str, View], **how: Any) -> None:
        with self.step(name):
            how = HERE | {"tasks": self.chance.choice(TASKS)} | how
            tables = rebuild(place, views, self.views, make_live=False, **how).tables
            for view, table in tables.items():
                self.compare(place, name, self.views, {view: table}, self.views[view].agent, table)

    def past(self, place: Settings, name: str, ends: Mapping[int, int], **how: Any) -> None:
        """Some that park; locally also, one after the other, those that stop."""
        expected = self.expected(ends)
        with self.step(name):
            how = HERE | {"tasks": self.chance.choice(TASKS)} | how
            self.compare_at(place, name, look_back(place, self.some(4).values(), ends, **how).tables, expected)
        for view in self.views.values():
            if view.agent == "core" or "engine_for" in how:
                continue
            ends, expected = self.ends, self.expected(self.ends)
            with self.step(f"{name}: stops"):
                stop = None
                try:
                    self.compare_at(place, name, look_back(place, [view], ends).tables, expected)
                except PoisonEvent as poison:
                    stop = poison
                self.compare_stop(name, stop, expected, [view.name])

    def put_right(self, place: Settings, middle: Mapping[int, int]) -> None:
        """Parked streams are dropped or replayed while agents go on: a dropped event is a skip, which every fold leaves out from
        then on; what else is poison is parked again."""
        self.live(place, 40, middle, "live by 40, middle")
        of_this = Folding(self.specs, self.chance, self.report)
        of_this.logs = self.logs
        with self.step("dropped and replayed"):
            parked = sorted(parked_of(place, self.tables(place, self.core).values()))
            for number, one in enumerate(parked):
                if number % 3:
                    drop(place, self.views[one.view], one.stream)
                    of_this.skips.append(Skip(one.view, one.stream, one.version, one.version))
                else:
                    replay(place, self.views[one.view], one.stream)
            self.report.reached["put right"] += len(parked)
        of_this.live(place, 40, self.ends, "live by 40, after drops")
        of_this.verify(place, "verify after drops", self.core)
        of_this.build(place, "built after drops", self.some(4))

    # ── all of it ──

    def run(self, ground: Places, spark: Callable[[Settings], Any]) -> None:
        chance = self.chance
        made = history(chance, PARTITIONS, mixed(chance, self.specs))
        place = ground.make(made.logs)
        self.logs = read_log(place)
        expected = self.expected(self.ends)
        self.report.reached = expected.reached + made.made
        left_out = {one.view for one in expected.parked} | {view for view, _ in expected.stops}
        self.report.folded = sum(
            not any(view_name(number, view) in left_out for view in spec.views) for number, spec in self.specs.items()
        )
        self.report.histories = len(self.specs)
        self.report.events = sum(len(spec.events) for spec in self.specs.values())
        middle = {partition: chance.randint(0, end) for partition, end in self.ends.items()}
        filled = {1: place, 7: ground.with_database(place), 10**6: ground.with_database(place)}
        for size, one in filled.items():
            write_skips(one, self.skips)
            self.live(one, size, middle, f"live by {size}, middle")
            if size == 7:
                self.build(one, "built in the middle", self.some(4))
            self.live(one, size, self.ends, f"live by {size}")
        self.verify(filled[7], "verify", self.views)
        with self.step("switched"):
            go_to(filled[7], self.some(4), self.views)
            for agent, views in self.of_agents().items():
                self.compare(filled[7], "switched", views, self.tables(filled[7], views), agent)
        self.build(filled[7], "built", self.some(2))
        fourth = ground.with_database(place)
        write_skips(fourth, self.skips)
        self.put_right(fourth, middle)
        self.past(filled[7], "past", middle)
        last = filled[10**6]
        engine = spark(last)
        stopping = {name: view for name, view in self.views.items() if view.agent != "core"}
        self.build(last, "built on Spark", self.some(2) | stopping, engine_for=lambda _: engine)
        self.verify(last, "verify on Spark", self.views, engine_for=lambda _: engine)
        self.past(last, "past on Spark", middle, engine_for=lambda _: engine)


def short(text: str) -> str:
    text = re.sub(r"(.)\1{30,}", r"\1…", text)
    return text if len(text) < 1_500 else f"{text[:700]} … {text[-700:]}"


@contextmanager
def on_spark(folder: Path) -> Iterator[Callable[[Settings], Any]]:
    """`spark(place)` is an engine whose executors have the place's settings, and this tree."""
    from spark_jobs.engine.session import session

    os.environ[f"{PREFIX}DATA_DIR"] = str(folder)
    tree = {"spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"]}
    with session("one fold", "local[2]", tree) as started:

        def engine(place: Settings) -> Spark:
            (folder / "dev.env").write_text(dev_env(place))
            return Spark(started)

        yield engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="with `specs`; `report` is written there")
    parser.add_argument("--stack", type=Path, required=True)
    parser.add_argument("--seed", required=True)
    asked = parser.parse_args()
    specs = pickle.loads((asked.folder / "specs").read_bytes())
    report = Found()
    folding = Folding(specs, random.Random(asked.seed), report)
    name = "fold_" + re.sub(r"\W", "_", asked.seed)
    with closing(Places(Stack(asked.stack), name, folding.views)) as ground, on_spark(asked.folder) as spark:
        folding.run(ground, spark)
    (asked.folder / "report").write_bytes(pickle.dumps(report))


if __name__ == "__main__":
    main()
