"""On a standalone master with a worker, and by spark-submit: the same jobs, the same rows, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.database.connect import connect
from infra.settings import Settings
from infra.testing.fixtures import ROOT, Samefold
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.projections.bankviews import build_states, live_table, rows
from tests.engine.spark.spark_cluster import Cluster, plain_environment, runs, spark_submit
from tests.engine.spine import scalar, set_up, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
ACCOUNTS = [str(number) for number in range(30)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 6)
    fold_all(world)
    return keeper


LOADERS = """
select count(*) from pg_stat_activity
 where datname = current_database() and starts_with(application_name, 'samefold build')
"""
FAULTY = """
import sys
from pathlib import Path
from typing import Any
from dataclasses import replace
from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.rebuild.builds import begin
from projections.engine.rebuild.load import parts
from projections.engine.views.core_views import agent_views, all_views, code_set
from spark_jobs.engine import Spark
from spark_jobs.session import session
from tests.engine.spark.spark_cluster import SMALL
from tests.engine.spark.spark_tasks import Staged, load_staged

master, folder = sys.argv[1:3]
points = {0: 'kill the executor at build part committed', 1: 'wait for a twin at build part written'}
world = Settings()
views = {"balances": all_views()["balances"]}
with connect(world, "test builder") as db:
    made, pin = begin(db, list(views.values()), world.events_topic, code_set(agent_views("core")), "core")
speculation = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.ui.enabled": "false",
}
with session("faults", master, SMALL | speculation) as spark:
    staged = [
        Staged(world, replace(part, settings=None), Path(folder), points.get(part.partition, ''))
        for part in parts(world, world.events_topic, made, views, pin)
    ]
    loaded = Spark(spark).run(load_staged, staged, 1, lambda _: None)
print(sum(part.rows["balances"] for part in loaded), made[0].table)
"""


def test_a_lost_executor_and_speculation_write_each_row_once(
    bank: Bookkeeper, cluster: Cluster, tmp_path: Path
) -> None:
    """Partition 0's first attempt ends its executor after its COMMIT; partition 1's waits until there is a speculative one."""
    world = bank.world
    cluster.settings_for(world.model_copy(update={"idle_in_transaction_timeout_ms": 120_000}))
    ran = subprocess.run(
        [sys.executable, "-c", FAULTY, cluster.url, str(tmp_path)],
        env=plain_environment() | world.environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    told, table = ran.stdout.split()
    assert int(told) == len(ACCOUNTS)
    assert rows(world, table) == rows(world, "balances_v2")
    for partition in (0, 1):
        assert len(list(tmp_path.glob(f"reached-{partition}.*"))) >= 1
    assert list(tmp_path.glob("began-0.1.*")), "the executor was lost, and the part tried again"
    assert list(tmp_path.glob("twin-1.1.*")), "there was a speculative attempt"


def test_a_driver_that_is_killed_harms_nothing_and_the_next_one_takes_its_place(
    bank: Bookkeeper, cluster: Cluster, samefold: Samefold, tmp_path: Path
) -> None:
    world = bank.world
    cluster.settings_for(world)
    before = rows(world, "balances")
    # whoever runs the tests in the background has Ctrl-C ignored
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{hears}; from infra.cli import main; main()"
    command = [sys.executable, "-c", code, "rebuild", "balances", "--engine", "spark"]
    with connect(world, "test") as db:
        # who loads can't enter its part as long as this is held
        db.execute("set idle_in_transaction_session_timeout = 0")
        db.execute("begin")
        db.execute("lock table build_parts in share mode")
        driver = subprocess.Popen(
            [*command, "--master", cluster.url],
            env=plain_environment() | world.environment() | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: int(scalar(world, LOADERS)) > 0, "tasks run", 90)
        driver.kill()
        driver.wait()
        db.execute("rollback")
    assert rows(world, "balances") == before
    bank.life(ACCOUNTS, 1)
    fold_all(world)
    again = samefold("rebuild", "balances", "--engine", "local", "--json", settings=world)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["tables"] == {"balances": "balances_v2_r3"}
    assert build_states(world, "balances") == {
        "balances_v2": "old",
        "balances_v2_r2": "abandoned",
        "balances_v2_r3": "live",
    }
    assert scalar(world, "select to_regclass('balances_v2_r2')") is None
    assert verify(world, all_views()).differences == 0


def test_ctrl_c_ends_the_command_spark_and_its_tasks_and_leaves_what_is_live_alone(
    bank: Bookkeeper, tmp_path: Path
) -> None:
    world = bank.world
    # whoever runs the tests in the background has Ctrl-C ignored
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{hears}; from infra.cli import main; main()"
    command = [sys.executable, "-c", code, "rebuild", "balances", "--engine", "spark"]
    with connect(world, "test") as db:
        db.execute("set idle_in_transaction_session_timeout = 0")
        db.execute("begin")
        db.execute("lock table build_parts in share mode")
        driver = subprocess.Popen(
            [*command, "--master", "local[2]"],
            env=plain_environment() | world.environment() | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(lambda: int(scalar(world, LOADERS)) > 0, "tasks run", 90)
        children = psutil.Process(driver.pid).children(recursive=True)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does it
        assert driver.wait(90) == 130
        until(lambda: int(scalar(world, LOADERS)) == 0, "the tasks end", 90)
        until(lambda: not any(map(runs, children)), "Spark ends", 90)
        db.execute("rollback")
    assert build_states(world, "balances") == {"balances_v2": "live", "balances_v2_r2": "abandoned"}


def test_the_same_scripts_run_by_spark_submit_on_the_cluster(
    bank: Bookkeeper, cluster: Cluster, tmp_path: Path
) -> None:
    world = bank.world
    cluster.settings_for(world)
    live = rows(world, "statement_v2")
    rebuilt = spark_submit(cluster.url, "rebuild.py", "statement", "--json", settings=world, cwd=tmp_path)
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert _printed(rebuilt.stdout)["rows"] == {
        "statement": len(live),
        "streams_accounts": len(rows(world, "streams_accounts_v3")),
    }
    assert live_table(world, "statement") == "statement_v2_r2"
    assert rows(world, "statement_v2_r2") == live
    assert world.database not in rebuilt.stderr


def test_verify_by_spark_submit_has_the_exit_codes_of_the_command_line(bank: Bookkeeper, tmp_path: Path) -> None:
    world = bank.world
    with connect(world, "vandal") as db:
        db.execute("delete from balances_v2 where account = '7'")
    found = spark_submit("local[2]", "verify.py", "balances", "--json", settings=world, cwd=tmp_path)
    assert found.returncode == 1, found.stderr
    assert _printed(found.stdout)["views"]["balances"]["shown"][0]["what"] == "missing"


def _printed(output: str) -> Any:
    """spark-submit puts the driver's standard error into its standard output; the result comes last."""
    return json.loads(output.splitlines()[-1])
