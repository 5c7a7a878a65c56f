"""make test + test-all: a rebuild takes a second; builders that die take longer.

Rebuilding beside live traffic: the same rows as the live fold made, whatever kills the builder on the way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from domain.accounts import Details, MoneyDeposited
from infra.database.connect import DatabaseBehind, connect
from infra.log import topics
from infra.log.contract import ContractBroken
from infra.processes.engines import Local, Silent
from infra.settings import Settings
from projections.engine.fold.errors import LogChanged, PoisonEvent
from projections.engine.operate.verify import verify
from projections.engine.rebuild import claims, shares
from projections.engine.rebuild.builds import BuildState, NotStarted, abandon, begin, finish_loading
from projections.engine.rebuild.claims import BuildAbandoned, BuildAlive
from projections.engine.rebuild.load import PartWriter, load, parts
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.rebuild.switch import SetDiffers
from projections.engine.views.core_views import agent_views, all_views, code_set
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper, fold_all, live_agent, start
from tests.engine.projections.bankviews import (
    ACCOUNTS,
    BALANCES_2,
    BROKEN,
    behind,
    build_states,
    live_rows,
    live_table,
    make_tables,
    parking,
    rows,
    view,
    with_views,
)
from tests.engine.projections.builders import STAGES, killed, shared
from tests.engine.spine import scalar, set_up
from tools.migrations.migrate import check
from tools.testing.waiting import until

EVERY = list(all_views())


def _nothing_differs(world: Settings, views: dict[str, View] | None = None) -> None:
    result = verify(world, views or all_views())
    assert result.differences == 0, [compared.differences[:3] for compared in result.views.values()]
    assert result.commits > 0


@pytest.mark.parametrize("processes", [1, 2])
def test_every_view_rebuilt_has_the_rows_that_the_live_fold_made(bank: Bookkeeper, processes: int) -> None:
    world = bank.world
    before = live_rows(world)
    result = rebuild(world, EVERY, all_views(), engine_for=lambda _: Local(processes))
    assert result.switched is not None
    assert result.tables == {name: f"{all_views()[name].table_name}_r2" for name in EVERY}
    assert live_rows(world) == before
    assert sum(map(bool, before.values())) >= 5, "there was something to compare"
    assert result.rows == {name: len(before[name]) for name in EVERY}
    _nothing_differs(world)
    check(world)


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 11])
def test_any_number_of_tasks_makes_the_same_tables(
    bank: Bookkeeper, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parked streams, too; more tasks than partitions, of which some have no stream."""
    monkeypatch.setattr(shares, "LEAST", 1)
    world = bank.world
    for account in ACCOUNTS[:3]:
        bank.commit(account, MoneyDeposited(cents=5, on=DAY, details=Details(purpose="poison")))
    bank.life(ACCOUNTS, 2)
    views = parking(BROKEN)
    make_tables(world, views)
    fold_all(world)
    before = rebuild(world, [], views, tasks=1)
    rebuild(world, [*views], views, tasks=1)
    was, parked = _all_rows(world, views), _parked(world)
    assert len(parked) == 9

    seen = Counting()
    result = rebuild(world, [*views], views, engine_for=lambda _: Local(1), tasks=tasks, progress=seen)
    assert result.switched is not None
    assert _all_rows(world, views) == was
    assert _parked(world) == parked
    assert result.rows == {name: len(was[name]) for name in views}
    assert result.commits == before.commits, "each is counted once"
    assert seen.done == seen.total
    _nothing_differs(world, views)


def test_no_more_tasks_than_the_records_are_worth() -> None:
    def count(sizes: dict[int, int], tasks: int | None, processes: int = 2) -> dict[int, int]:
        return {at: len(some) for at, some in shares.split(sizes, Local(processes), tasks).items()}

    assert count({0: 1_000, 1: 1_000}, 64) == {0: 1, 1: 1}, "a partition has one"
    assert count({0: 35_000, 1: 5_000}, 64) == {0: 3, 1: 1}
    assert count({0: 30_000, 1: 20_000}, 4) == {0: 2, 1: 2}, "the largest is as small as can be"
    assert count({0: 90_000, 1: 30_000}, None, 100) == {0: 9, 1: 3}
    assert count({0: 50_000, 1: 50_000}, None, 100) == {0: 1, 1: 1}, "not asked for, and a small log"


def _all_rows(world: Settings, views: dict[str, View]) -> dict[str, list[Any]]:
    return {name: rows(world, live_table(world, name)) for name in views}


def _parked(world: Settings) -> list[Any]:
    with connect(world, "test") as db:
        live = "from parked join live using (view, table_name) order by view, stream"
        return db.execute(f"select view, stream, partition, since_offset, since_version, error {live}").fetchall()


class Counting(Silent):
    """The records of the load, as they are shown."""

    done = total = 0
    is_load = False

    def begin(self, stage: str, total: int | None = None) -> None:
        self.is_load = stage == "load"
        self.total = total or 0 if self.is_load else self.total

    def advance(self, count: int) -> None:
        self.done += count if self.is_load else 0


def test_a_new_shape_goes_live_with_the_code_that_has_it(bank: Bookkeeper) -> None:
    world = bank.world
    new = with_views({"balances": view(BALANCES_2, "balances")})
    make_tables(world, new)
    with live_agent(world), live_agent(world, new):
        bank.life(ACCOUNTS, 3)
        until(lambda: behind(world) == 0, "the old code's agent serves")
        result = rebuild(world, [], new)
        assert result.tables == {"balances": "balances_v3"}
        bank.life(ACCOUNTS, 3)
        until(lambda: behind(world) == 0, "the new code's agent serves")
    assert build_states(world, "balances") == {"balances_v2": "old", "balances_v3": "live"}
    assert scalar(world, "select sum(fees) from balances") > 0, "people see the new column"
    _nothing_differs(world, new)


@pytest.mark.slow
def test_a_view_that_no_build_ever_had_and_one_that_the_code_lost_change_in_one_switch(bank: Bookkeeper) -> None:
    world = bank.world
    new = with_views(parking(BROKEN), "daily_totals")
    make_tables(world, new)
    result = rebuild(world, [], new)
    assert sorted(result.tables) == ["moves", "streams_accounts", "sums", "totals"]
    assert result.removed == ["daily_totals"]
    assert build_states(world, "daily_totals") == {"daily_totals_v1": "old"}
    assert scalar(world, "select count(*) from daily_totals") == 0, "nothing is live there for people either"
    _nothing_differs(world, new)


def test_a_rebuild_that_would_leave_no_code_to_run_is_refused_before_it_loads(bank: Bookkeeper) -> None:
    world = bank.world
    new = with_views({"balances": view(BALANCES_2, "balances")})
    make_tables(world, new)
    with pytest.raises(SetDiffers, match="balances"):
        rebuild(world, ["statement"], new)
    assert build_states(world, "statement") == {"statement_v2": "live"}


def test_a_build_that_is_ready_comes_along_when_the_code_needs_it(bank: Bookkeeper) -> None:
    world = bank.world
    new = with_views({"balances": view(BALANCES_2, "balances")})
    make_tables(world, new)
    rebuild(world, ["balances"], new, make_live=False)
    bank.life(ACCOUNTS, 1)
    fold_all(world)
    result = rebuild(world, ["daily_totals"], new)
    assert result.tables == {"balances": "balances_v3", "daily_totals": "daily_totals_v1_r2"}
    _nothing_differs(world, new)


def test_an_agent_that_never_started_is_named_and_can_still_start(world: Settings) -> None:
    topics.ensure(world)
    with pytest.raises(NotStarted):
        rebuild(world, (), all_views())
    start(world)
    assert build_states(world, "balances") == {"balances_v2": "live"}, "the first start gets the migration's table"
    assert verify(world, all_views()).differences == 0


# ── builders that die ──


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
@pytest.mark.slow_but("before the switch")
def test_a_builder_killed_at_any_stage_harms_nothing_and_the_next_one_takes_its_place(
    bank: Bookkeeper, stage: str
) -> None:
    world = bank.world
    before = rows(world, "balances")
    killed(world, stage, "rebuild", "balances", "statement")
    assert live_table(world, "balances") == "balances_v2"
    assert rows(world, "balances") == before
    bank.life(ACCOUNTS, 1)
    fold_all(world)
    result = rebuild(world, ["balances", "statement"], all_views())
    assert result.tables == {
        name: f"{all_views()[name].table_name}_r3" for name in ("balances", "statement", "streams_accounts")
    }
    assert build_states(world, "balances") == {
        "balances_v2": "old",
        "balances_v2_r2": "abandoned",
        "balances_v2_r3": "live",
    }
    assert scalar(world, "select to_regclass('balances_v2_r2')") is None, "what the dead one left is gone"
    _nothing_differs(world)


def test_loaders_of_an_abandoned_build_write_nothing_and_are_ended_where_they_are_frozen(bank: Bookkeeper) -> None:
    world, views = bank.world, {"statement": all_views()["statement"]}
    with connect(world, "test builder") as db:
        [build], pin = begin(db, [*views.values()], world.events_topic, code_set(agent_views("core")), "core")
    one, other, *_ = parts(world, world.events_topic, [build], views, pin)
    with PartWriter(one, build) as frozen:
        with connect(world, "test") as db:
            abandon(db, build)
        with pytest.raises(Exception, match=r"terminat|connection|closed|SSL"):
            frozen.finish([])
    with pytest.raises(BuildAbandoned):
        load(other)
    assert scalar(world, f"select to_regclass('{build.table}')") is None
    assert build_states(world, "statement")[build.table] == "abandoned"


def test_a_table_is_never_made_of_two_splits(bank: Bookkeeper) -> None:
    """As if tasks of a split that was given up came late."""
    world, views = bank.world, {"balances": all_views()["balances"]}
    for late in (1, 2, 3):
        with connect(world, "test builder") as db:
            [build], pin = begin(db, [*views.values()], world.events_topic, code_set(agent_views("core")), "core")
            for part in parts(world, world.events_topic, [build], views, shared(pin, {0: 2})):
                assert load(part).rows == load(part).rows, "a second attempt finds the part written"
            for part in parts(world, world.events_topic, [build], views, shared(pin, {0: late})):
                if part.partition == 0:
                    load(part)
            if late == 2:
                finish_loading(db, build, BuildState.READY, len(pin.ends))
            else:
                with pytest.raises(BuildAbandoned):
                    finish_loading(db, build, BuildState.READY, len(pin.ends))


def test_one_builder_per_view(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    world = bank.world
    monkeypatch.setattr(claims, "CLAIM_S", 0.2)
    with connect(world, "another builder") as other:
        begin(other, [all_views()["balances"]], world.events_topic, {}, "core")
        with pytest.raises(BuildAlive, match="balances"):
            rebuild(world, ["balances"], all_views())
        assert build_states(world, "balances")["balances_v2_r2"] == "loading", "it was left alone"
    rebuild(world, ["balances"], all_views())
    assert build_states(world, "balances")["balances_v2_r2"] == "abandoned"


# ── what a load refuses ──


def test_poison_stops_a_build_and_leaves_what_is_live_alone(bank: Bookkeeper) -> None:
    world = bank.world
    bank.commit("1", MoneyDeposited(cents=5, on=DAY, details=Details(purpose="poison")))
    bank.flush()
    fold_all(world)
    stopping = replace(parking(BROKEN)["sums"], on_poison="stop")
    new = with_views({"sums": stopping})
    make_tables(world, new)
    with pytest.raises(PoisonEvent, match="accounts/1"):
        rebuild(world, [], new)
    assert build_states(world, "sums") == {"sums_v1": "abandoned"}
    assert rows(world, "sums_v1") == []
    _nothing_differs(world)


def test_a_version_without_a_table_is_not_made_up(bank: Bookkeeper) -> None:
    new = with_views({"balances": view(BALANCES_2, "balances")})
    with pytest.raises(DatabaseBehind, match="balances_v3"):
        rebuild(bank.world, [], new)


def test_a_log_that_leads_elsewhere_than_the_positions_say_is_refused(bank: Bookkeeper) -> None:
    world = bank.world
    with connect(world, "test") as db:
        db.execute("update positions set seq = seq + 1 where partition = 2")
    with pytest.raises(LogChanged, match=r"\[2\]"):
        rebuild(world, ["balances"], all_views())
    assert build_states(world, "balances")["balances_v2_r2"] == BuildState.ABANDONED


def test_another_topic_of_the_same_name_is_refused(bank: Bookkeeper) -> None:
    world = bank.world
    with connect(world, "test") as db:
        db.execute("update topics set topic_id = 'another'")
    for act in (lambda: rebuild(world, ["balances"], all_views()), lambda: verify(world, all_views())):
        with pytest.raises(ContractBroken):
            act()
    assert build_states(world, "balances") == {"balances_v2": "live"}


def test_a_tables_name_is_never_used_twice(world: Settings) -> None:
    set_up(world)
    for _ in range(2):
        rebuild(world, ["balances"], all_views(), make_live=False)
    assert build_states(world, "balances") == {
        "balances_v2": "live",
        "balances_v2_r2": "abandoned",
        "balances_v2_r3": "ready",
    }
    assert rebuild(world, ["daily_totals"], all_views()).rows == {"daily_totals": 0}, "nor is an empty log refused"
    live = all_views()["daily_totals"].table_name
    assert build_states(world, "daily_totals") == {live: "old", f"{live}_r2": "live"}
