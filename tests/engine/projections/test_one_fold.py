"""One fold: whoever folds a log, live or from its beginning, in one process or on a cluster, ends with the same rows at the same
positions, and they are those of a fold that shares no line with the engine (`proofs/one_fold/oracle.py`)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.processes import Process
from demo.bank import bank
from infra.dev.stack import Stack
from infra.errors import SamefoldError
from infra.log.records import Command
from infra.settings import Settings
from infra.testing.fixtures import SEED, dev_env
from projections.engine.fold.errors import PoisonEvent
from projections.engine.operate.replaying import drop, replay
from projections.engine.rebuild.engines import A, R, Silent
from projections.engine.rebuild.load import PartWriter
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.rebuild.workers import Advance
from projections.engine.store import commit as engine_commit
from projections.engine.views.core_views import agent_views
from proofs.bank_oracle import Entry
from proofs.one_fold.folding import (
    Engines,
    Live,
    agent_on_spark,
    build_differences,
    built,
    engines_with,
    expected_at,
    live_differences,
    verified,
)
from proofs.one_fold.histories import History, history
from proofs.one_fold.kinds import all_kinds
from proofs.one_fold.oracle import Expected, Skip, StoppedAt, fold
from proofs.one_fold.places import Places, live_tables, parked_of, places, places_of, read_log, write_skips
from tests.engine import spine

pytestmark = pytest.mark.timeout(300)

VIEWS = all_kinds()
RICH = 600
"""Steps of a history in which everything happens."""

# shrinking would take hours here; the histories of test_one_fold_in_memory.py shrink
generated = settings(deadline=None, database=None, phases=[Phase.generate])


@pytest.fixture(scope="module")
def ground(stack: Stack) -> Iterator[Places]:
    with places(stack, "one_fold", VIEWS) as made:
        yield made


@pytest.fixture
def engines(spark: Any, spark_place: Path) -> Engines:
    return engines_with(spark, spark_place)


def put(ground: Places, made: History) -> tuple[Settings, list[list[Entry]]]:
    """A place with this log, and the log as it stands there."""
    place = ground.make(made.logs)
    write_skips(place, made.skips)
    return place, read_log(place)


def live_to_the_middle(
    place: Settings, logs: Sequence[Sequence[Entry]], made: History, live: Live, chance: random.Random
) -> Expected:
    """Live agents fold a part of each partition; the oracle's fold to there."""
    middle = {partition: chance.randint(0, len(log)) for partition, log in enumerate(logs)}
    assert live.fold(logs, middle) is None
    expected = expected_at(logs, place, made.skips)
    assert [at.next_offset for at in expected.places] == list(middle.values())
    assert live_differences(place, expected) == []
    return expected


@pytest.mark.slow
@seed(SEED)
@settings(generated, max_examples=3)
@given(chance=st.randoms(use_true_random=True), partitions=st.integers(1, 16))
def test_live_agents_and_the_local_engine(ground: Places, chance: random.Random, partitions: int) -> None:
    made = history(chance, partitions, RICH)
    place, logs = put(ground, made)
    assert [[entry.value for entry in log] for log in logs] == made.logs
    with Live(place, VIEWS, chance) as live:
        expected = live_to_the_middle(place, logs, made, live, chance)
        assert build_differences(place, expected, built(place, VIEWS)) == []
        assert live.fold(logs) is None
    # now the tables that were built catch up, and go live
    expected = fold(logs, skips=made.skips)
    assert live_differences(place, expected) == []
    switched = go_to(place, VIEWS, VIEWS)
    assert set(switched.tables) == set(VIEWS)
    assert live_differences(place, expected) == []
    assert verified(place, VIEWS) == 0


@pytest.mark.slow
def test_agents_that_do_not_compare_before_they_set_are_caught(ground: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = "and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)"
    assert compare in engine_commit.COMPARE_AND_SET
    monkeypatch.setattr(engine_commit, "COMPARE_AND_SET", engine_commit.COMPARE_AND_SET.replace(compare, ""))
    chance = random.Random(SEED)
    made = history(chance, 2, RICH, letters="")
    place, logs = put(ground, made)
    with Live(place, VIEWS, chance, sizes=(1, 7)) as live:
        try:
            stopped = live.fold(logs)
        except (SamefoldError, psycopg.Error):
            return
    assert stopped or live_differences(place, fold(logs, skips=made.skips)) != []


class Twice:
    """An engine whose every task runs twice, one after the other, as Spark's may."""

    name = "twice"

    def run(self, task: Callable[[A, Advance], R], arguments: Sequence[A], records: int, advance: Advance) -> list[R]:
        return [[task(argument, advance) for _ in range(2)][1] for argument in arguments]


class Stages(Silent):
    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, stage: str, total: int | None = None) -> None:
        self.begun.append(stage)


@pytest.mark.parametrize("entered", [True, False])
@pytest.mark.slow
def test_a_part_that_is_loaded_twice(ground: Places, monkeypatch: pytest.MonkeyPatch, entered: bool) -> None:
    """Is there once. Without its entry in `build_parts` the keys refuse it, and the view is loaded anew, row by row."""
    chance = random.Random(SEED)
    made = history(chance, 2, 100, letters="")
    place, logs = put(ground, made)
    with Live(place, VIEWS, chance) as live:
        assert live.fold(logs) is None
    if not entered:
        monkeypatch.setattr(PartWriter, "enter_part", lambda _: True)
    stages = Stages()
    tables = rebuild(place, VIEWS, VIEWS, make_live=False, engine_for=lambda _: Twice(), progress=stages).tables
    assert build_differences(place, fold(logs, skips=made.skips), tables) == []
    assert ("slow load" in stages.begun) == (not entered)


# ── poison that stops ──


@pytest.mark.slow
def test_all_stop_at_the_same_event(ground: Places, engines: Engines) -> None:
    chance = random.Random(SEED)
    made = history(chance, 3, RICH, letters="s", poison=0.1)
    place, logs = put(ground, made)
    with Live(place, VIEWS, chance) as live:
        stopped = live.fold(logs)
    assert isinstance(stopped, PoisonEvent)
    ends = {partition: at.next_offset for partition, at in enumerate(places_of(place))}
    assert ends[stopped.partition] == stopped.offset
    _stops(logs, {**ends, stopped.partition: stopped.offset + 1}, made, stopped)
    expected = fold(logs, ends, skips=made.skips)
    assert live_differences(place, expected) == []
    for engine in engines.values():
        assert build_differences(place, expected, built(place, VIEWS, engine(place))) == []
        assert verified(place, VIEWS, engine(place)) == 0


@pytest.mark.slow
def test_a_build_stops_where_a_new_view_would(ground: Places, engines: Engines) -> None:
    chance = random.Random(SEED)
    made = history(chance, 3, RICH, letters="s", poison=0.1)
    place, logs = put(ground, made)
    without = {name: view for name, view in VIEWS.items() if name != "strict"}
    with Live(place, without, chance) as live:
        assert live.fold(logs) is None
    for engine in engines.values():
        with pytest.raises(PoisonEvent) as stopped:
            rebuild(place, ["strict"], VIEWS, make_live=False, engine_for=engine(place))
        ends = dict.fromkeys(range(len(logs)), 0)
        _stops(logs, {**ends, stopped.value.partition: len(logs[stopped.value.partition])}, made, stopped.value)


def _stops(logs: Sequence[Sequence[Entry]], ends: Mapping[int, int], made: History, stopped: PoisonEvent) -> None:
    """The oracle's fold to these offsets stops at the same event."""
    with pytest.raises(StoppedAt) as expected:
        fold(logs, ends, skips=made.skips)
    at = expected.value.at
    assert (expected.value.view, at.stream, at.version) == (stopped.view, stopped.stream, stopped.version)
    assert (at.partition, at.offset) == (stopped.partition, stopped.offset)


# ── parked streams that are put right ──


@pytest.mark.slow
def test_streams_that_are_dropped_or_replayed_fold_the_same(ground: Places, engines: Engines) -> None:
    """While agents go on. A dropped event is a skip, which every fold leaves out; what else is poison is parked again."""
    chance = random.Random(SEED)
    made = history(chance, 3, RICH, poison=0.1)
    place, logs = put(ground, made)
    skips = list(made.skips)
    with Live(place, VIEWS, chance) as live:
        assert live.fold(logs, {partition: len(log) // 2 for partition, log in enumerate(logs)}) is None
        parked = sorted(parked_of(place, live_tables(place).values()))
        assert len(parked) > 3
        for number, one in enumerate(parked):
            if number % 3:
                drop(place, VIEWS[one.view], one.stream)
                skips.append(Skip(one.view, one.stream, one.version, one.version))
            else:
                replay(place, VIEWS[one.view], one.stream)
        assert live.fold(logs) is None
    expected = fold(logs, skips=skips)
    assert live_differences(place, expected) == []
    for engine in engines.values():
        assert build_differences(place, expected, built(place, VIEWS, engine(place))) == []
        assert verified(place, VIEWS, engine(place)) == 0


# ── rows that can't be stored ──


@pytest.mark.slow
def test_rows_that_cant_be_stored_park_their_streams_from_the_very_event(ground: Places, engines: Engines) -> None:
    chance = random.Random(SEED)
    made = history(chance, 2, RICH, letters="", refused=0.06)
    place, logs = put(ground, made)
    with Live(place, VIEWS, chance) as live:
        assert live.fold(logs) is None
    expected = fold(logs, skips=made.skips)
    assert any(one.view == "holders" for one in expected.parked)
    assert live_differences(place, expected) == []
    assert verified(place, VIEWS) == 0
    for engine in engines.values():
        assert build_differences(place, expected, built(place, VIEWS, engine(place))) == []


# ── on Spark, sixteen partitions at once ──


@pytest.mark.slow
def test_spark_folds_the_same(ground: Places, engines: Engines) -> None:
    chance = random.Random(SEED)
    made = history(chance, 16, 3 * RICH)
    place, logs = put(ground, made)
    with Live(place, VIEWS, chance) as live:
        expected = live_to_the_middle(place, logs, made, live, chance)
        tables = built(place, VIEWS, engines["spark"](place))
        assert build_differences(place, expected, tables) == []
        assert live.fold(logs) is None
        assert live.fenced > 0
    go_to(place, VIEWS, VIEWS)
    assert live_tables(place) == tables
    assert live_differences(place, fold(logs, skips=made.skips)) == []
    assert verified(place, VIEWS, engines["spark"](place)) == 0


@pytest.mark.slow
def test_an_agent_on_spark_folds_the_same(ground: Places, spark: Any, spark_place: Path) -> None:
    """From where others stand."""
    views = agent_views("core")
    chance = random.Random(SEED)
    made = history(chance, 8, 2 * RICH)
    place, logs = put(ground, made)
    (spark_place / "dev.env").write_text(dev_env(place))
    with Live(place, views, chance) as live:
        assert live.fold(logs, {partition: len(log) // 3 for partition, log in enumerate(logs)}) is None
        with agent_on_spark(place, spark):
            spine.until(lambda: [at.next_offset for at in places_of(place)] == list(map(len, logs)), "it arrives", 120)
    assert live_differences(place, fold(logs, skips=made.skips)) == []


# ── the agent's process, and a bank ──


ACCOUNTS = 15


@pytest.mark.slow
def test_the_agents_process_on_a_banks_real_transactions(world: Settings, tmp_path: Path, engines: Engines) -> None:
    """Two agents, one of which is killed on the way; commands as the demo sends them, through a real handler."""
    views = agent_views("core")
    spine.set_up(world)
    commands = _some_of_a_bank(tmp_path)
    half = len(commands) // 2
    with ExitStack() as open_:
        first, _ = (
            open_.enter_context(
                Process(
                    world, tmp_path, name, "projections.engine.live.agent", "--name", f"{world.group_prefix}-{name}"
                )
            )
            for name in ("one", "two")
        )
        open_.enter_context(spine.handler(world))
        spine.send(world, *commands[:half])
        spine.until(lambda: _answered(world) > half // 2, "the agents are at it")
        os.kill(first.pid, signal.SIGKILL)
        spine.send(world, *commands[half:])
        spine.until(lambda: _answered(world) == len(commands), "all commands are answered", 60)
    logs = read_log(world)
    expected = fold(logs)
    assert expected.commits == len(commands)
    assert 0 < sum(code is not None for _, _, _, _, code, *_ in expected.rows["command_outcomes"]) < len(commands) / 2
    assert live_differences(world, expected) == []
    for engine in engines.values():
        assert build_differences(world, expected, built(world, views, engine(world))) == []
        assert verified(world, views, engine(world)) == 0


def _some_of_a_bank(folder: Path) -> list[Command]:
    """All that was ordered on some accounts; without every third deposit, so that the bank must say no now and then."""
    whole = bank(folder, None, overdraft_limit=0, seed=None).commands
    accounts = set(list(dict.fromkeys(command.stream for command in whole))[:ACCOUNTS])
    of_accounts = [command for command in whole if command.stream in accounts]
    return [command for n, command in enumerate(of_accounts) if n % 3 or command.type != "Deposit"]


def _answered(world: Settings) -> int:
    return int(spine.scalar(world, "select count(*) from command_outcomes_v3"))
