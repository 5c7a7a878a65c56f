"""The Spark engine: the same rows as the local one and as the live fold, errors as they were raised, and no secret on the way."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark import TaskContext

from domain.accounts import Details, MoneyDeposited
from infra.database.connect import DatabaseAway, connect
from infra.log.clients import KafkaAway
from infra.settings import Settings
from projections.engine.builds import begin
from projections.engine.engines import Local
from projections.engine.errors import LogChanged, PoisonEvent
from projections.engine.local import RowsRefused, parts
from projections.engine.memory import MemoryShort
from projections.engine.rebuild import rebuild
from projections.engine.system import agent_views, all_views, code_set
from projections.engine.verify import verify
from projections.engine.workers import Advance
from spark_jobs.engine import Spark, SparkGaveUp, attempts_of
from spark_jobs.task import CodeMissing, ExecutorNotConfigured, pack
from tests.bankviews import live_table, rows
from tests.bookkeeper import DAY, Bookkeeper, fold_all
from tests.spine import scalar, set_up

ACCOUNTS = [str(number) for number in range(30)]
EVERY = list(all_views())
DEADLINE_S = 60


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 10)
    keeper.garbage(1)
    fold_all(world)
    return keeper


def test_every_view_rebuilt_on_spark_has_the_rows_of_the_live_fold_and_of_the_local_engine(
    bank: Bookkeeper, spark_engine: Spark
) -> None:
    world = bank.world
    live = {name: rows(world, live_table(world, name)) for name in EVERY}
    assert all(live.values()), "there is something to compare"
    local = rebuild(world, EVERY, all_views(), engine_for=lambda _: Local(1))
    assert {name: rows(world, live_table(world, name)) for name in EVERY} == live
    told: list[int] = []
    on_spark = rebuild(world, EVERY, all_views(), engine_for=lambda _: spark_engine, progress=_Told(told))
    assert on_spark.tables == {name: f"{all_views()[name].table_name}_r3" for name in EVERY}
    assert {name: rows(world, live_table(world, name)) for name in EVERY} == live
    assert (on_spark.rows, on_spark.commits, on_spark.events) == (local.rows, local.commits, local.events)
    assert (local.engine, on_spark.engine) == ("local", "spark")
    records = int(scalar(world, "select sum(next_offset) from positions where agent = 'core'"))
    assert sum(told) == records + len(EVERY), "each record was told of once, and each table's keys"


class _Told:
    def __init__(self, told: list[int]) -> None:
        self.told = told

    def begin(self, stage: str, total: int | None = None) -> None: ...

    def advance(self, count: int) -> None:
        self.told.append(count)
