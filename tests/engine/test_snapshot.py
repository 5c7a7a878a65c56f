"""A moment of the database, shared: all see the same, it is let go of when the last has come, and then nobody else can."""

from __future__ import annotations

import pytest

from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.verify import database_snapshot as snapshots
from projections.engine.verify.database_snapshot import Snapshot, SnapshotGone, imported
from tests.engine.spine import scalar, until

COUNT = "select count(*) from things"


@pytest.fixture
def things(world: Settings) -> Settings:
    with connect(world, "test") as db:
        db.execute("create table things as select 1 as thing")
    return world


def _add(world: Settings) -> None:
    with connect(world, "test") as db:
        db.execute("insert into things values (2)")


def _let_go(snapshot: Snapshot) -> bool:
    snapshot.watch()
    return snapshot.connection.closed


def test_importers_see_the_moment_and_it_ends_when_the_last_has_come(
    things: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LOOK_S", 0)
    with Snapshot(things) as snapshot:
        snapshot.expect(2)
        _add(things)
        with imported(things, snapshot.shared, 0) as first:
            assert first.execute(COUNT).fetchone() == (1,)
            snapshot.watch()
            assert not snapshot.connection.closed, "one is still on its way"
            with imported(things, snapshot.shared, 1) as second:
                until(lambda: _let_go(snapshot), "it is let go of")
                assert second.execute(COUNT).fetchone() == (1,)
            _add(things)
            assert first.execute(COUNT).fetchone() == (1,), "whoever has it keeps it"
        with pytest.raises(SnapshotGone), imported(things, snapshot.shared, 0):
            pass
    assert scalar(things, COUNT) == 3


def test_one_importer_that_comes_twice_does_not_count_for_another(
    things: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LOOK_S", 0)
    with Snapshot(things) as snapshot:
        snapshot.expect(2)
        for _ in range(2):
            with imported(things, snapshot.shared, 0):
                snapshot.watch()
        snapshot.watch()
        assert not snapshot.connection.closed
