"""The archive: the whole log in files, once, and readers that do not notice where it ends and Kafka begins."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from infra.log import archive_write, clients
from infra.log.archive_jobs import archive_log, check_archive, plan_trim, trim_log
from infra.settings import Settings
from projections.engine.system import all_views
from projections.engine.verify import verify
from tests.bookkeeper import DAY, Bookkeeper, fold_all
from tests.spine import records_of, set_up

ACCOUNTS = [str(number) for number in range(12)]


@pytest.fixture
def bank(world: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bookkeeper:
    """Some life on 12 accounts with void records between, all folded; files of the archive are short."""
    monkeypatch.setattr(archive_write, "MOST_RECORDS", 40)
    world = world.model_copy(update={"archive_url": str(tmp_path / "archive"), "archive_restore_days": 0})
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 20)
    for partition in range(world.partitions):
        keeper.garbage(partition)
        keeper.open(partition)
    keeper.life(ACCOUNTS, 5, DAY + timedelta(days=5))
    fold_all(world)
    return keeper


def trim_all(world: Settings) -> int:
    topic, cuts = plan_trim(world)
    return sum(cut.records for cut in trim_log(world, topic, cuts))


def test_round_trip(bank: Bookkeeper) -> None:
    world = bank.world
    before = records_of(world, world.events_topic)
    done = archive_log(world)
    assert sum(one.records for one in done) == len(before)
    assert trim_all(world) == len(before)
    assert records_of(world, world.events_topic) == before
    assert verify(world, all_views()).differences == 0
    assert [one.wrong for one in check_archive(world)] == [[]] * world.partitions
