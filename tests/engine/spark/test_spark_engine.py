"""make test + test-all: views and jobs where Spark runs anyway; what fails is tried again, which takes longer.

The Spark engine: the same rows as the local one and as the live fold, errors as they were raised, no secret on the way.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from infra.database.connect import DatabaseUnavailable, connect
from infra.log import topics
from infra.log.clients import KafkaUnavailable
from infra.log.rule import START
from infra.processes.code_identity import CODE
from infra.processes.engines import Local
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged, PoisonEvent
from projections.engine.operate.verify import verify
from projections.engine.rebuild.builds import begin
from projections.engine.rebuild.claims import BuildAbandoned
from projections.engine.rebuild.load import RowsRefused, load, parts
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.views.core_views import agent_views, all_views, code_set
from spark_jobs.engine.services import Services
from spark_jobs.engine.spark import Spark, SparkGaveUp, attempts_of
from spark_jobs.engine.task import CodeMissing, ExecutorNotConfigured, Failure, Task, pack
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.projections.bankviews import live_rows, live_table, rows
from tests.engine.projections.builders import shared
from tests.engine.projections.test_verify import plant, told_of
from tests.engine.spark.spark_tasks import Order, Staged, compare_and_die_once, die, double, fail, load_staged, seen
from tests.engine.spine import scalar, set_up

ACCOUNTS = [str(number) for number in range(30)]
EVERY = list(all_views())
SECRET = "p-a-s-s"


@pytest.fixture(autouse=True)
def _with_topics(world: Settings) -> None:
    """A job names its sender's topic to every task."""
    topics.ensure(world)


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 10)
    keeper.garbage(1)
    fold_all(world)
    return keeper


class Told:
    """What a command's progress bar would show."""

    def __init__(self) -> None:
        self.stages: dict[str, int] = {}

    def begin(self, stage: str, total: int | None = None) -> None:
        self.stages[stage] = 0

    def advance(self, count: int) -> None:
        self.stages[list(self.stages)[-1]] += count


def test_every_view_rebuilt_on_spark_has_the_rows_of_the_live_fold_and_of_the_local_engine(
    bank: Bookkeeper, spark_engine: Spark
) -> None:
    world = bank.world
    live = live_rows(world)
    assert sum(map(bool, live.values())) >= 5, "there is something to compare"
    assert any("owner of" in outcome for (outcome,) in live["command_outcomes"])
    local = rebuild(world, EVERY, all_views(), engine_for=lambda _: Local(1))
    assert live_rows(world) == live
    told = Told()
    on_spark = rebuild(world, EVERY, all_views(), engine_for=lambda _: spark_engine, progress=told)
    assert on_spark.tables == {name: f"{all_views()[name].table_name}_r3" for name in EVERY}
    assert live_rows(world) == live
    assert (on_spark.rows, on_spark.commits, on_spark.events) == (local.rows, local.commits, local.events)
    assert (local.engine, on_spark.engine) == ("local", "spark")
    records = int(scalar(world, "select sum(next_offset) from positions where agent = 'core'"))
    assert told.stages["load"] == records, "each record was told of once"


def test_verify_on_spark_finds_what_was_planted_and_nothing_else(bank: Bookkeeper, spark_engine: Spark) -> None:
    whole = verify(bank.world, all_views(), engine_for=lambda _: spark_engine)
    assert (whole.differences, whole.commits) == (0, 11 * len(ACCOUNTS))
    planted = plant(bank.world)
    assert told_of(verify(bank.world, all_views(), engine_for=lambda _: spark_engine)) == planted


@pytest.mark.slow
def test_a_task_of_verify_that_is_lost_compares_again(
    bank: Bookkeeper, spark_engine: Spark, spark_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("projections.engine.operate.verify.verify_partition", compare_and_die_once)
    (spark_place / "died").unlink(missing_ok=True)
    result = verify(bank.world, all_views(), engine_for=lambda _: spark_engine)
    assert (spark_place / "died").exists()
    assert (result.differences, result.commits) == (0, 11 * len(ACCOUNTS)), "nothing was counted twice"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["build part written", "build part committed"])
def test_a_task_killed_before_or_after_its_commit_writes_its_rows_once(
    bank: Bookkeeper, spark_engine: Spark, tmp_path: Path, point: str
) -> None:
    """Of a view whose rows are kept until the part ends, and of one whose rows stream out while it goes on."""
    world = bank.world
    views = {name: all_views()[name] for name in ("balances", "statement")}
    with connect(world, "test builder") as db:
        made, pin = begin(db, list(views.values()), world.events_topic, code_set(agent_views("core")), "core")
    work = parts(world, world.events_topic, made, views, shared(pin, {0: 2, 1: 3}))
    staged = [Staged(world, replace(part, settings=None), tmp_path, f"die at {point}") for part in work]  # type: ignore[arg-type]
    loaded = spark_engine.run(load_staged, staged, 1, lambda _: None)
    assert seen(tmp_path, "reached-*.0") >= len(staged), "each part's first attempt died"
    for build in made:
        live = rows(world, live_table(world, build.view))
        assert rows(world, build.table) == live
        assert sum(part.rows[build.view] for part in loaded) == len(live)


# ── tasks ──


def test_results_come_in_the_order_of_the_arguments_and_progress_adds_up(
    world: Settings, spark_engine: Spark, tmp_path: Path
) -> None:
    told: list[int] = []
    orders = [Order(world, number, tmp_path) for number in (5, 1, 4, 2, 7)]
    assert spark_engine.run(double, orders, 19, told.append) == [10, 2, 8, 4, 14]
    assert sum(told) == 19
    assert spark_engine.run(double, [], 0, told.append) == []


@pytest.mark.slow
def test_what_a_task_has_folded_is_told_while_it_runs(world: Settings, spark_engine: Spark, tmp_path: Path) -> None:
    class Enough(Exception): ...

    def advance(count: int) -> None:
        if count:
            raise Enough

    with pytest.raises(Enough):
        spark_engine.run(fail, [Order(world, 1, tmp_path)], 1, advance)
    assert seen(tmp_path, "ended-1") == 0


ERRORS: list[Exception] = [
    PoisonEvent("balances", "accounts/3", 7, partition=3, offset=9, cause=ValueError("no")),
    LogChanged("events", 1, START, START, START),
    RowsRefused("balances", ValueError("no")),
    BuildAbandoned("It was abandoned.", "Again."),
    ZeroDivisionError("a defect"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_from_a_task(error: Exception) -> None:
    arrived = Failure(pickle.dumps(error), "where it was").error()
    assert type(arrived) is type(error)
    assert (vars(arrived), arrived.args) == (vars(error), error.args)
    assert "where it was" in str(arrived.__cause__)


@pytest.mark.slow
def test_an_error_arrives_at_once_and_is_not_tried_again(world: Settings, spark_engine: Spark, tmp_path: Path) -> None:
    orders = [Order(world, 1, tmp_path), Order(world, 2, tmp_path, ERRORS[0])]
    with pytest.raises(PoisonEvent) as raised:
        spark_engine.run(fail, orders, 1, lambda _: None)
    assert vars(raised.value) == vars(ERRORS[0])
    assert "spark_tasks.py" in str(raised.value.__cause__), "where it was raised is told too"
    assert seen(tmp_path, "began-2") == 1
    assert seen(tmp_path, "ended-1") == 0, "the other task did not run to its end"


@pytest.mark.slow
def test_errors_that_may_pass_are_tried_again_and_arrive_if_they_do_not(
    world: Settings, spark_engine: Spark, tmp_path: Path
) -> None:
    passes = Order(world, 1, tmp_path, KafkaUnavailable("Away.", "Wait."), times=1)
    assert spark_engine.run(fail, [passes], 1, lambda _: None) == [1]
    assert seen(tmp_path, "began-1") == 2
    with pytest.raises(DatabaseUnavailable, match="Gone"):
        spark_engine.run(fail, [Order(world, 2, tmp_path, DatabaseUnavailable("Gone.", "Wait."))], 1, lambda _: None)
    assert seen(tmp_path, "began-2") == attempts_of(spark_engine.session.sparkContext) == 4


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced_and_one_that_is_always_killed_ends_the_job_by_name(
    world: Settings, spark_engine: Spark, tmp_path: Path
) -> None:
    assert spark_engine.run(die, [Order(world, 1, tmp_path, times=2)], 1, lambda _: None) == [1]
    assert seen(tmp_path, "began-1") == 3
    with pytest.raises(SparkGaveUp, match="Python worker"):
        spark_engine.run(die, [Order(world, 2, tmp_path)], 1, lambda _: None)
    assert spark_engine.run(double, [Order(world, 3, tmp_path)], 1, lambda _: None) == [6], "the session goes on"


# ── settings ──


@pytest.mark.slow
def test_no_secret_leaves_the_driver(bank: Bookkeeper, spark_engine: Spark) -> None:
    """Neither in what is pickled, arguments and tasks, nor in Spark's configuration."""
    from pyspark.cloudpickle import dumps

    parts_of = {"balances": all_views()["balances"]}
    with connect(bank.world, "test") as db:
        made, pin = begin(db, list(parts_of.values()), bank.world.events_topic, code_set(agent_views("core")), "core")
    world = bank.world.model_copy(
        update={"database_url": Settings(database_url=f"host=h password={SECRET}").database_url}
    )
    arguments = parts(world, world.events_topic, made, parts_of, pin)
    assert SECRET in repr(arguments[0].settings.environment()), "it is there to be told"
    for slot, argument in enumerate(arguments):
        sent = pack(Services.of(bank.world), slot, load, argument)
        assert SECRET.encode() not in dumps((sent, Task(CODE, "channel", 4, None)))
        assert b"balances" in sent.work
    conf = dict(spark_engine.session.sparkContext.getConf().getAll())
    assert bank.world.database not in repr(conf)
    assert not [name for name in conf if "SAMEFOLD" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "why"), [("", "No Kafka is configured"), ("SAMEFOLD_PARTITIONS=0\n", "SAMEFOLD_PARTITIONS")]
)
def test_an_executor_without_settings_is_named(
    world: Settings, spark_engine: Spark, spark_place: Path, tmp_path: Path, lines: str, why: str
) -> None:
    (spark_place / "dev.env").write_text(lines)
    with pytest.raises(ExecutorNotConfigured, match=why):
        spark_engine.run(double, [Order(world, 1, tmp_path)], 1, lambda _: None)


@pytest.mark.slow
def test_code_that_an_executor_lacks_is_named(
    world: Settings, spark_engine: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("only_in_the_driver")
    monkeypatch.setitem(sys.modules, "only_in_the_driver", module)
    exec("class Lost(Exception): ...", module.__dict__)
    with pytest.raises(CodeMissing, match="only_in_the_driver"):
        spark_engine.run(double, [Order(world, 1, tmp_path, module.Lost())], 1, lambda _: None)
