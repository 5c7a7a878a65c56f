"""make test-all: attempts that are killed and wait for each other take seconds.

Spark's attempts: killed, twins, orphans. Whatever becomes of them, a row is written once, and never into another table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.settings import Settings
from infra.testing.fixtures import dev_env
from infra.testing.waiting import DEADLINE_S, until
from projections.engine.rebuild.build_locks import BuildAbandoned
from projections.engine.rebuild.builds import Build, Pin, abandon, begin
from projections.engine.rebuild.load import parts
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import agent_views, all_views, code_set
from spark_jobs.engine import Spark
from tests.engine.bookkeeper import Bookkeeper, folded_lives
from tests.engine.projections.bankviews import build_states, live_table, rows
from tests.engine.spark.spark_tasks import Staged, load_staged, seen
from tests.engine.spine import scalar

pytestmark = pytest.mark.slow

ACCOUNTS = [str(number) for number in range(30)]
VIEWS = {name: all_views()[name] for name in ("balances", "statement")}
"""One whose rows are kept until the part ends, and one whose rows stream out while it goes on."""
BEFORE = "build part written"
AFTER = "build part committed"


@pytest.fixture
def bank(world: Settings, spark_engine: Spark, spark_place: Path) -> Bookkeeper:
    # a transaction that a test holds open is not to be ended for it
    (spark_place / "dev.env").write_text(dev_env(world) + "SAMEFOLD_IDLE_IN_TRANSACTION_TIMEOUT_MS=120000\n")
    return folded_lives(world, ACCOUNTS, 4)


def _begin(world: Settings) -> tuple[list[Build], Pin]:
    with connect(world, "test builder") as db:
        return begin(db, list(VIEWS.values()), world.events_topic, code_set(agent_views("core")), "core")


def _staged(world: Settings, made: Sequence[Build], pin: Pin, folder: Path, point: str) -> list[Staged]:
    work = parts(world, world.events_topic, made, VIEWS, pin)
    return [Staged(world, replace(part, settings=None), folder, point) for part in work]  # type: ignore[arg-type]


def _run(engine: Spark, staged: Sequence[Staged]) -> dict[str, int]:
    loaded = engine.run(load_staged, staged, 1, lambda _: None)
    return {name: sum(part.rows[name] for part in loaded) for name in VIEWS}


def _written(world: Settings, made: Sequence[Build]) -> dict[str, list[tuple[object, ...]]]:
    return {build.view: rows(world, build.table) for build in made}


def _live(world: Settings) -> dict[str, list[tuple[object, ...]]]:
    return {name: rows(world, live_table(world, name)) for name in VIEWS}


@pytest.mark.parametrize("point", [BEFORE, AFTER])
def test_a_task_killed_before_or_after_its_commit_writes_its_rows_once(
    bank: Bookkeeper, spark_engine: Spark, tmp_path: Path, point: str
) -> None:
    world = bank.world
    made, pin = _begin(world)
    staged = _staged(world, made, pin, tmp_path, f"die at {point}")[:2]
    told = _run(spark_engine, staged)
    kills = seen(tmp_path, "reached-*.0")
    assert kills >= 2, "each part's first attempt died"
    written = _written(world, made)
    partitions = {one.part.partition for one in staged}
    live = {name: [row for row in found if _partition(row) in partitions] for name, found in _live(world).items()}
    assert written == live
    assert told == {name: len(found) for name, found in live.items()}


def _partition(row: tuple[object, ...]) -> int:
    """The last column of a row as text."""
    return int(str(row[0]).rstrip(")").rpartition(",")[2])


def test_two_attempts_of_a_part_at_once_write_it_once(bank: Bookkeeper, spark_engine: Spark, tmp_path: Path) -> None:
    """As speculation makes them: the one waits for the other's transaction, and finds the part written."""
    world = bank.world
    made, pin = _begin(world)
    staged = _staged(world, made, pin, tmp_path, f"wait at {BEFORE}")[:1]
    results: list[dict[str, int]] = []
    twins = [Thread(target=lambda: results.append(_run(spark_engine, staged))) for _ in range(2)]
    for twin in twins:
        twin.start()
    until(lambda: seen(tmp_path, "reached-*") == 1 and _waits_for_the_part(world), "one has written, the other waits")
    (tmp_path / "go").touch()
    for twin in twins:
        twin.join(DEADLINE_S)
    assert results[0] == results[1]
    assert {name: len(found) for name, found in _written(world, made).items()} == results[0]
    written = _written(world, made)
    assert all(len(found) == len(set(found)) for found in written.values())
    assert any(written.values())


def _waits_for_the_part(world: Settings) -> bool:
    query = (
        "select count(*) from pg_stat_activity where datname = current_database() "
        "and starts_with(application_name, 'samefold build') and wait_event_type = 'Lock'"
    )
    return int(scalar(world, query)) > 0


def test_an_orphan_of_an_abandoned_build_that_wakes_later_writes_nothing_anywhere(
    bank: Bookkeeper, spark_engine: Spark, tmp_path: Path
) -> None:
    world = bank.world
    orphaned, pin = _begin(world)
    staged = _staged(world, orphaned, pin, tmp_path, f"wait at {BEFORE}")[:2]
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _run(spark_engine, staged)
        except SamefoldError as error:
            errors.append(error)

    job = Thread(target=run)
    job.start()
    until(lambda: seen(tmp_path, "reached-*") >= 2, "both parts hang before their COMMIT")
    with connect(world, "another builder") as db:
        for build in orphaned:
            abandon(db, build)
    made, pin = _begin(world)
    before = _live(world)
    (tmp_path / "go").touch()
    job.join(DEADLINE_S)
    assert [type(error) for error in errors] == [BuildAbandoned], "tried again, it learns that nobody waits for it"
    assert _written(world, made) == {name: [] for name in VIEWS}, "the next build's tables are untouched"
    assert _live(world) == before
    assert build_states(world, "balances") == {
        "balances_v2": "live",
        "balances_v2_r2": "abandoned",
        "balances_v2_r3": "loading",
    }
    assert scalar(world, "select to_regclass('balances_v2_r2')") is None
    assert scalar(world, "select count(*) from build_parts") == 0
    assert verify(world, all_views()).differences == 0
