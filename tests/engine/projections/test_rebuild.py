"""make test + test-all: a rebuild takes a second; agents beside it and builders that die take longer.

Rebuilding beside live traffic: the same rows as the live fold made, whatever kills the builder on the way.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

import pytest

from domain.accounts import Details, MoneyDeposited
from infra.database.connect import DatabaseBehind, connect
from infra.database.migrate import check, upgrade
from infra.log import topics
from infra.log.records import Commit, encode
from infra.settings import Settings
from infra.testing.waiting import until
from projections.engine.fold.errors import LogChanged, PoisonEvent
from projections.engine.live.startup import ContractBroken
from projections.engine.rebuild import build_locks as claims
from projections.engine.rebuild import builds as engine_builds
from projections.engine.rebuild.build_locks import BuildAbandoned, BuildAlive
from projections.engine.rebuild.builds import BuildState, NotStarted, abandon, begin, builds_of
from projections.engine.rebuild.load import PartWriter, load, parts
from projections.engine.rebuild.rebuild import UnknownView, rebuild
from projections.engine.rebuild.switch import SetDiffers
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import agent_views, all_views, code_set
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper, fold_all, live_agent, start
from tests.engine.projections.bankviews import (
    BALANCES_2,
    BROKEN,
    PARKING,
    behind,
    build_states,
    live_table,
    make_tables,
    parking,
    rows,
    view,
    with_views,
)
from tests.engine.projections.builders import STAGES, killed
from tests.engine.spine import scalar, set_up

ACCOUNTS = [str(number) for number in range(30)]
EVERY = list(all_views())


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    """Some life on 30 accounts, with void records between, all folded."""
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 10)
    for partition in range(world.partitions):
        keeper.garbage(partition)
    old_epochs = dict(keeper._epoch)
    for partition in range(world.partitions):
        keeper.open(partition)
    keeper.life(ACCOUNTS, 3, DAY + timedelta(days=5))
    _zombie(keeper, old_epochs)
    fold_all(world)
    return keeper


def _zombie(keeper: Bookkeeper, epochs: dict[int, int]) -> None:
    """Late commits of superseded writers, which no reader may count."""
    for partition, epoch in epochs.items():
        commit = Commit("accounts/zombie", 1, [], "late", 9_999_999, "f", "rejected", None, epoch, 10_000)
        keeper._append(partition, b"accounts/zombie", encode(commit))
    keeper.flush()


def _nothing_differs(world: Settings, views: dict[str, View] | None = None) -> None:
    result = verify(world, views or all_views())
    assert result.differences == 0, [compared.differences[:3] for compared in result.views.values()]
    assert result.commits > 0


@pytest.mark.parametrize("processes", [1, 2])
def test_every_view_rebuilt_has_the_rows_that_the_live_fold_made(bank: Bookkeeper, processes: int) -> None:
    world = bank.world
    before = {name: rows(world, live_table(world, name)) for name in EVERY}
    result = rebuild(world, EVERY, all_views(), processes=processes)
    assert result.switched is not None
    assert result.tables == {name: f"{all_views()[name].table_name}_r2" for name in EVERY}
    assert {name: rows(world, live_table(world, name)) for name in EVERY} == before
    assert sum(map(bool, before.values())) >= 5, "there was something to compare"
    assert result.rows == {name: len(before[name]) for name in EVERY}
    _nothing_differs(world)
    check(world)


def test_the_agent_goes_on_where_the_rebuilt_tables_stand(bank: Bookkeeper) -> None:
    rebuild(bank.world, EVERY, all_views())
    bank.life(ACCOUNTS, 2, DAY + timedelta(days=9))
    fold_all(bank.world)
    assert live_table(bank.world, "balances") == "balances_v2_r2"
    assert rows(bank.world, "balances_v2_r2") != rows(bank.world, "balances_v2"), "the old table stands still"
    _nothing_differs(bank.world)


@pytest.mark.slow
def test_rebuilds_beside_a_writer_and_an_agent_lose_and_double_nothing(bank: Bookkeeper) -> None:
    world = bank.world
    with live_agent(world):
        for number, name in enumerate(
            ["statement", "balances", "daily_totals", "streams_accounts", "command_outcomes"]
        ):
            bank.life(ACCOUNTS, 4, DAY + timedelta(days=number))
            switched = rebuild(world, [name], all_views()).switched
            assert switched is not None
            assert switched.tables[name].startswith(f"{all_views()[name].table_name}_r")
            bank.life(ACCOUNTS, 2)
        until(lambda: behind(world) == 0, "the agent catches up")
    _nothing_differs(world)


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


def test_an_unknown_view_is_named(world: Settings) -> None:
    set_up(world)
    with pytest.raises(UnknownView, match="nonsense"):
        rebuild(world, ["nonsense"], all_views())


def test_an_agent_that_never_started_is_named_and_can_still_start(world: Settings) -> None:
    upgrade(world)
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


def _begin(world: Settings, name: str = "balances") -> tuple[engine_builds.Build, list[engine_builds.Pin]]:
    with connect(world, "test builder") as db:
        made, pin = begin(db, [all_views()[name]], world.events_topic, code_set(agent_views("core")), "core")
    return made[0], [pin]


def test_a_part_that_is_loaded_twice_is_there_once(bank: Bookkeeper) -> None:
    world = bank.world
    build, [pin] = _begin(world)
    work = parts(world, world.events_topic, [build], {"balances": all_views()["balances"]}, pin)
    first = [load(part).rows["balances"] for part in work]
    again = [load(part).rows["balances"] for part in work]
    assert sum(first) == len(ACCOUNTS)
    assert again == first
    assert scalar(world, f"select count(*) from {build.table}") == len(ACCOUNTS)


def test_a_loader_frozen_in_its_copy_is_ended_by_whoever_abandons_the_build(bank: Bookkeeper) -> None:
    world = bank.world
    build, [pin] = _begin(world, "statement")
    part = parts(world, world.events_topic, [build], {"statement": all_views()["statement"]}, pin)[0]
    with PartWriter(part, build) as frozen:
        with connect(world, "test") as db:
            abandon(db, build)
        with pytest.raises(Exception, match=r"terminat|connection|closed|SSL"):
            frozen.finish([])
    assert scalar(world, f"select to_regclass('{build.table}')") is None
    assert build_states(world, "statement")[build.table] == "abandoned"


def test_an_orphaned_part_writes_nothing_into_a_build_that_was_abandoned(bank: Bookkeeper) -> None:
    world = bank.world
    build, [pin] = _begin(world)
    work = parts(world, world.events_topic, [build], {"balances": all_views()["balances"]}, pin)
    with connect(world, "test") as db:
        abandon(db, build)
    with pytest.raises(BuildAbandoned):
        load(work[0])


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


@pytest.mark.slow
def test_poison_in_a_build_is_parked_for_its_table(bank: Bookkeeper) -> None:
    world = bank.world
    bank.commit("1", MoneyDeposited(cents=5, on=DAY, details=Details(purpose="poison")))
    bank.life(["1", "2"], 4)
    fold_all(world)
    new = parking(BROKEN)
    make_tables(world, new)
    rebuild(world, [], new)
    with connect(world, "test") as db:
        parked = db.execute("select table_name, view, stream, error from parked order by view").fetchall()
    assert parked == [(f"{name}_v1", name, "accounts/1", "ValueError: can't take this") for name in sorted(PARKING)]
    _nothing_differs(world, new)


REFUSED = {
    "two rows with one key": ("Move(at.id, event.cents)", "duplicate key"),
    "a value out of range": ("Move(at.id, event.cents * 10**30)", "range|too large|OverflowError|int"),
}


@pytest.mark.parametrize(("row", "why"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("on_poison", ["stop", "park"])
@pytest.mark.slow
def test_rows_that_can_not_be_stored_are_poison(bank: Bookkeeper, row: str, why: str, on_poison: str) -> None:
    """Only account 3 makes them. They park their stream in a build as they would in the agent, or stop the build by name."""
    world = bank.world
    source = f"""
    ON_POISON = "{on_poison}"

    class Move(NamedTuple):
        account: Key[str]
        cents: Key[int]

    def rows(event: MoneyDeposited, after: State, at: At) -> Iterable[Move]:
        yield {row} if at.id == "3" else Move(at.id, at.version)
    """
    new = with_views({"moves": view(source, "moves")})
    make_tables(world, new)
    if on_poison == "stop":
        with pytest.raises(PoisonEvent, match=rf"accounts/3 .*({why})"):
            rebuild(world, [], new)
        assert build_states(world, "moves") == {"moves_v1": "abandoned"}
        return
    result = rebuild(world, ["statement", "moves"], new)
    with connect(world, "test") as db:
        [(table, stream, error)] = db.execute("select table_name, stream, error from parked").fetchall()
    assert (table, stream) == ("moves_v1", "accounts/3")
    assert re.search(why, error)
    assert result.rows == {view: len(rows(world, table)) for view, table in result.tables.items()}
    assert result.rows["moves"] > 100
    _nothing_differs(world, new)


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


def test_an_empty_log_is_rebuilt_too(world: Settings) -> None:
    set_up(world)
    assert rebuild(world, ["balances", "daily_totals"], all_views()).rows == {"balances": 0, "daily_totals": 0}
    with connect(world, "test") as db:
        assert [b.state for b in builds_of(db, ["balances"])] == [BuildState.OLD, BuildState.LIVE]


def test_starts_and_unused_names(world: Settings) -> None:
    """The first start fills the version's own table; a table's name is never used twice."""
    set_up(world)
    start(world)
    for _ in range(2):
        rebuild(world, ["balances"], all_views(), make_live=False)
    assert build_states(world, "balances") == {
        "balances_v2": "live",
        "balances_v2_r2": "abandoned",
        "balances_v2_r3": "ready",
    }
