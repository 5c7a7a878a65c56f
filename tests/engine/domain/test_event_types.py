"""make test: one process. Event types that agents can fold: recorded by agents with live views, dropped when somebody says so."""

from __future__ import annotations

from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.live.worker import Worker
from projections.engine.store.event_types import drop_other_event_types, foldable_types, own_event_types
from projections.engine.views.core_views import agent_views
from tests.engine.spine import set_up


def test_the_first_start_records_those_of_its_code(world: Settings) -> None:
    set_up(world)
    with connect(world, "test") as db:
        assert foldable_types(db) == own_event_types() > {"accounts.MoneyDeposited", "transfers.TransferRequested"}


def test_an_agent_records_its_own_once_its_views_are_live_and_leaves_those_of_other_releases(world: Settings) -> None:
    set_up(world)
    views = agent_views("core")
    others = {name: view for name, view in views.items() if name != "statement"}
    with connect(world, "test") as db:
        db.execute("delete from event_types")
        db.execute("insert into event_types (type) values ('accounts.MoneyDeposited/2')")
        for its, recorded in ((others, frozenset[str]()), (views, own_event_types()), (views, own_event_types())):
            worker = Worker(world, "core", its, "w1")
            assert worker.positions() is not None
            assert foldable_types(db) == {"accounts.MoneyDeposited/2", *recorded}
            db.execute("delete from event_types where type <> 'accounts.MoneyDeposited/2'")
            worker.ping()
            worker.close()
            assert foldable_types(db) == {"accounts.MoneyDeposited/2", *recorded}, (
                "also after the database was restored"
            )
        drop_other_event_types(db)
        assert foldable_types(db) == own_event_types()
