"""make test-all: processes that are killed and frozen.

`samefold archive` and `trim`, killed and frozen at each of their steps: manifest, files, rows and positions are exact.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.archive.jobs import archive_log
from infra.log import topics
from infra.processes.faultpoints import ARCHIVER, TRIMMER
from infra.settings import Settings
from infra.testing.waiting import DEADLINE_S
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.infra.archives import (
    ACCOUNTS,
    archived_records,
    banks,
    frozen,
    held,
    is_exact,
    manifest,
    on_disk,
    struck,
    trim_all,
)
from tests.engine.projections.bankviews import rows
from tests.engine.spine import records_of, scalar

pytestmark = pytest.mark.slow


@pytest.fixture
def bank(world: Settings, tmp_path: Path) -> Iterator[Bookkeeper]:
    with banks(world, tmp_path) as keeper:
        yield keeper


def killed(world: Settings, point: str, *arguments: str) -> None:
    """Where it gets to this point for the second time: with one file, or one partition, behind it."""
    nth = 1 if point in ("trim planned", "archive verified") else 2
    assert struck(world, point, nth, "SIGKILL", *arguments).wait(DEADLINE_S) == -signal.SIGKILL, point


def test_killed_at_each_step(bank: Bookkeeper) -> None:
    """Of the archiver, then of the trimmer, while the log grows."""
    world = bank.world
    for point in ARCHIVER:
        bank.life(ACCOUNTS, 2)
        killed(world, point, "archive")
        known, there = manifest(world), records_of(world, world.events_topic)
        end = {file.partition: file.end.next_offset for file in known}
        assert archived_records(world) == [one for one in there if one.offset < end.get(one.partition, 0)]
        assert on_disk(world) >= {file.path for file in known}
        if point in ("file written", "file placed"):
            assert on_disk(world) > {file.path for file in known}, "something is left, which a later run has to sweep"
    fold_all(world)
    before, views = records_of(world, world.events_topic), all_views()

    def readable() -> tuple[object, ...]:
        tables = [rows(world, view.table_name) for view in views.values()]
        positions = scalar(world, "select json_agg(p order by partition)::text from positions p")
        return tables, positions, records_of(world, world.events_topic)

    was = readable()
    archive_log(world)
    is_exact(world, before)
    first = 0
    for keep, step in zip((24, 20, 16), TRIMMER, strict=True):
        killed(world, step, "archive", "trim", "--yes", "--keep", str(keep))
        topic = topics.describe(world, world.events_topic)
        assert all(max(0, end - keep) >= topic.first[p] for p, end in topic.end.items()), "no more than was asked for"
        assert sum(topic.first.values()) >= first
        first = sum(topic.first.values())
    assert first > 0
    trim_all(world)
    assert held(world) == 0
    is_exact(world, before)
    assert readable() == was
    assert verify(world, views).differences == 0


@pytest.mark.parametrize("point", ["range read", "file written", "file placed", "file entered"])
def test_an_archiver_that_wakes_up_late_harms_nothing(bank: Bookkeeper, point: str) -> None:
    """Others archived more, in files with other ends, swept and trimmed meanwhile."""
    world = bank.world
    with frozen(world, point, "archive"):
        bank.life(ACCOUNTS, 1)
        fold_all(world)
        archive_log(world)
        trim_all(world)
        archived = archived_records(world)
    assert archived_records(world) == archived == records_of(world, world.events_topic)
    archive_log(world)
    is_exact(world, archived)


def test_a_trimmer_that_wakes_up_late_cuts_what_it_verified(bank: Bookkeeper) -> None:
    world = bank.world
    archive_log(world)
    before = records_of(world, world.events_topic)
    with frozen(world, "archive verified", "archive", "trim", "--yes", "--keep", "10"):
        trim_all(world)
        assert held(world) == 0
        bank.life(ACCOUNTS, 2)
    assert held(world) == 2 * len(ACCOUNTS)
    assert records_of(world, world.events_topic)[:10] == before[:10]
