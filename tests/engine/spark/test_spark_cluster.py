"""make test-all + prove: scripts run on this machine; what dies on a cluster, `test_spark_engine.py` kills sooner.

On a standalone master with workers, and by spark-submit: the same jobs, the same rows, whatever dies.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.database.connect import connect
from infra.settings import Settings
from tests.engine.bookkeeper import Bookkeeper, folded_lives
from tests.engine.projections.bankviews import live_table, rows
from tests.engine.spark.spark_cluster import Cluster, plain_environment, spark_submit
from tests.engine.spark.test_source import event_rows
from tools.testing.fixtures import ROOT

ACCOUNTS = [str(number) for number in range(30)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    return folded_lives(world, ACCOUNTS, 6)


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
from spark_jobs.engine.spark import Spark
from spark_jobs.engine.session import session
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


@pytest.mark.prove(part="chaos")
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
    )
    assert ran.returncode == 0, ran.stderr
    told, table = ran.stdout.split()
    assert int(told) == len(ACCOUNTS)
    assert rows(world, table) == rows(world, "balances_v2")
    for partition in (0, 1):
        assert len(list(tmp_path.glob(f"reached-{partition}.*"))) >= 1
    assert list(tmp_path.glob("began-0.1.*")), "the executor was lost, and the part tried again"
    assert list(tmp_path.glob("twin-1.1.*")), "there was a speculative attempt"


@pytest.mark.slow
def test_a_script_is_run_by_spark_submit(bank: Bookkeeper, tmp_path: Path) -> None:
    assert_rebuilds("local[2]", bank.world, tmp_path)
    assert_asks("local[2]", bank.world, tmp_path)


@pytest.mark.prove(part="chaos")
def test_the_same_scripts_are_run_on_a_cluster(bank: Bookkeeper, cluster: Cluster, tmp_path: Path) -> None:
    world = bank.world
    cluster.settings_for(world)
    assert_rebuilds(cluster.url, world, tmp_path)
    assert_asks(cluster.url, world, tmp_path)
    with connect(world, "vandal") as db:
        db.execute("delete from balances_v2 where account = '7'")
    verified = spark_submit(cluster.url, "verify.py", "balances", "--json", settings=world, cwd=tmp_path)
    assert verified.returncode == 1, verified.stderr
    assert _printed(verified.stdout)["views"]["balances"]["shown"][0]["what"] == "missing"


def assert_rebuilds(master: str, world: Settings, folder: Path) -> None:
    """The script rebuilds a view to the rows that it has."""
    live = rows(world, "statement_v2")
    rebuilt = spark_submit(master, "rebuild.py", "statement", "--json", settings=world, cwd=folder)
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert _printed(rebuilt.stdout)["rows"] == {
        "statement": len(live),
        "streams_accounts": len(rows(world, "streams_accounts_v3")),
    }
    assert live_table(world, "statement") == "statement_v2_r2"
    assert rows(world, "statement_v2_r2") == live
    assert world.database not in rebuilt.stderr


ASKED = """
from pyspark.sql import SparkSession

from domain.accounts import MoneyDeposited
from spark_jobs import events

spark = SparkSession.builder.getOrCreate()
print(events(spark, MoneyDeposited).agg({"cents": "sum"}).first()[0])
"""


def assert_asks(master: str, world: Settings, folder: Path) -> None:
    """A file of an author's asks the log a question."""
    (folder / "asked.py").write_text(ASKED)
    asked = spark_submit(master, str(folder / "asked.py"), settings=world, cwd=folder)
    assert asked.returncode == 0, asked.stderr
    deposits = (event.data for _, event in event_rows(world) if event.type == "MoneyDeposited")
    assert int(asked.stdout.splitlines()[-1]) == sum(msgspec.json.decode(data)["cents"] for data in deposits) > 0


def _printed(output: str) -> Any:
    """spark-submit puts the driver's standard error into its standard output; the result comes last."""
    return json.loads(output.splitlines()[-1])
