"""make test + test-all: the lake."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from infra.settings import Settings
from spark_jobs.engine import lake
from tests.engine.bookkeeper import Bookkeeper
from tests.engine.spine import set_up
from tools.testing.fixtures import Samefold, dev_env


@pytest.fixture
def bank(world: Settings, spark_place: Path, tmp_path: Path) -> Bookkeeper:
    world = world.model_copy(update={"lake_url": str(tmp_path / "lake")})
    (spark_place / "dev.env").write_text(dev_env(world))
    set_up(world)
    return Bookkeeper(world)


def read(world: Settings, name: str, columns: str) -> list[tuple[object, ...]]:
    """As DuckDB sees it, which knows nothing of Samefold."""
    found = duckdb.sql(f"select {columns} from '{world.lake}/{name}/**/*.parquet'")
    assert found is not None
    return found.fetchall()


def test_an_update_writes_a_table_of_each_event_class_and_the_datasets(
    bank: Bookkeeper, spark: SparkSession, samefold: Samefold
) -> None:
    world = bank.world
    for rounds in (1, 2):
        bank.life(["1", "2", "3"], 10)
        done = {one.name: one for one in lake.update(world, spark)}
        assert done["events/accounts.MoneyDeposited"].rows == 18
        assert read(world, "events/accounts.MoneyDeposited", "count(*), sum(cents)") == [(18 * rounds, 198 * rounds)]
        turnover = pd.read_parquet(Path(world.lake) / "monthly_turnover")
        assert int(turnover.movements.sum()) == 24 * rounds
    assert not any(one.differs for one in lake.verify(world, spark))
    told = json.loads(samefold("lake", "status", "--json", settings=world).stdout)
    assert {one["state"] for one in told["datasets"]} == {"ready"}
