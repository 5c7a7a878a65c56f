"""make test + test-all: a switch takes a second; rebuilds at once and waits take longer.

The switch: readers and agents go over together, nobody sees an older state, and nothing is folded twice or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from domain.accounts import Details, MoneyDeposited
from infra.database.connect import TransactionTimedOut, connect
from infra.processes import faultpoints
from infra.settings import Settings
from projections.engine.operate.verify import verify
from projections.engine.rebuild import builds as engine_builds
from projections.engine.rebuild import catch_up as tail_module
from projections.engine.rebuild import switch as switch_module
from projections.engine.rebuild.builds import Build, NotDroppable, abandon, builds_of, drop_tables, droppable
from projections.engine.rebuild.catch_up import Ahead, Group, MovedElsewhere, Tail
from projections.engine.rebuild.claims import BuildAbandoned, claim
from projections.engine.rebuild.rebuild import NoBuild, go_to, rebuild
from projections.engine.rebuild.switch import (
    Pointer,
    SetDiffers,
    Switched,
    SwitchTimedOut,
    _Switch,
    plan_move,
    pointers,
    switch,
)
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.event_types import foldable_types, own_event_types
from projections.engine.store.positions import read_positions
from projections.engine.views.core_views import agent_views, all_views
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper, _ends, fold_all, live_agent
from tests.engine.projections.bankviews import (
    ACCOUNTS,
    BALANCES_2,
    BROKEN,
    PARKING,
    a_batch_around,
    behind,
    build_states,
    live_table,
    make_tables,
    parking,
    rows,
    view,
    with_views,
)
from tests.engine.spine import scalar, set_up
from tools.testing.waiting import DEADLINE_S, until


def _differences(world: Settings, views: dict[str, View] | None = None) -> int:
    return verify(world, views or all_views()).differences


def _ready(world: Settings, *names: str, views: dict[str, View] | None = None) -> list[Build]:
    """All builds that are ready and not switched to, these views' among them."""
    rebuild(world, names, views or all_views(), make_live=False)
    with connect(world, "test") as db:
        return [build for build in builds_of(db) if build.state == "ready"]


def _switch(world: Settings, builds: list[Build], give_up_s: float = 20) -> Switched:
    with connect(world, "test switch") as db:
        for build in builds:
            claim(db, build.view)
        return switch(world, db, builds, all_views(), give_up_s=give_up_s)


def test_an_agent_that_read_before_the_switch_is_fenced(bank: Bookkeeper) -> None:
    world = bank.world
    _ready(world, "balances")
    bank.life(ACCOUNTS, 1)
    status = a_batch_around(world, agent_views("core"), lambda: go_to(world, ["balances"], all_views()))
    assert status == BatchResult(CommitStatus.FENCED)
    fold_all(world)
    assert _differences(world) == 0


# ── going back ──


def test_going_back_to_the_older_version_with_the_older_code(bank: Bookkeeper) -> None:
    world = bank.world
    old = agent_views("core")
    new = with_views({"balances": view(BALANCES_2, "balances")})
    make_tables(world, new)
    rebuild(world, [], new)
    bank.life(ACCOUNTS, 4)
    fold_all(world, new)
    assert _differences(world, new) == 0
    back = go_to(world, [], old)
    assert back.tables == {"balances": "balances_v2"}
    assert back.commits == 4 * len(ACCOUNTS)
    assert build_states(world, "balances") == {"balances_v2": "live", "balances_v3": "old"}
    assert _differences(world, old) == 0
    assert scalar(world, "select sum(fees) from balances") is None, "the older table has no such column"
    bank.life(ACCOUNTS, 1)
    fold_all(world, old)
    forth = go_to(world, ["balances"], new)
    assert forth.tables == {"balances": "balances_v3"}
    assert _differences(world, new) == 0


def test_after_going_back_no_handler_waits_for_one_that_can_not_decide(world: Settings) -> None:
    """Nobody is said to fold the newer code's events: its handlers wait for its views, and would be left the decisions."""
    set_up(world)
    old, new = agent_views("core"), with_views({"balances": view(BALANCES_2, "balances")})
    make_tables(world, new)
    rebuild(world, [], new)
    with connect(world, "test") as db:
        db.execute("insert into event_types (type) values ('accounts.MoneyDeposited/2')")
        go_to(world, ["balances"], old)
        assert foldable_types(db) == own_event_types()


def test_what_the_live_agents_fold_stays_recorded_when_no_view_changes_its_version(world: Settings) -> None:
    """A rebuild with older code, beside newer agents whose views are the same."""
    set_up(world)
    with connect(world, "test") as db:
        db.execute("insert into event_types (type) values ('accounts.MoneyDeposited/2')")
        rebuild(world, ["balances"], agent_views("core"))
        assert foldable_types(db) == {*own_event_types(), "accounts.MoneyDeposited/2"}


def test_a_journal_does_not_go_back_behind_its_states(bank: Bookkeeper) -> None:
    world = bank.world
    _ready(world, "statement")
    bank.life(ACCOUNTS, 1)
    fold_all(world)
    rebuild(world, ["streams_accounts"], all_views())
    with pytest.raises(NoBuild, match=r"streams_accounts.*together with statement_v2_r2"):
        go_to(world, ["statement"], all_views())


def test_tables_at_different_positions_switch_together(bank: Bookkeeper) -> None:
    world = bank.world
    _ready(world, "daily_totals")
    bank.life(ACCOUNTS, 2)
    fold_all(world)
    _ready(world, "statement")
    bank.life(ACCOUNTS, 2)
    fold_all(world)
    _ready(world, "balances")
    bank.life(ACCOUNTS, 2)
    fold_all(world)
    assert len(go_to(world, ["statement", "balances", "daily_totals"], all_views()).tables) == 4
    assert _differences(world) == 0


# ── under load ──


def _more_under_way(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Before each of the first attempts to switch, the bank and its agent go on."""
    attempt: Callable[[_Switch, int], float] = _Switch._attempt
    left = [times]

    def delayed(self: _Switch, few: int) -> float:
        if left[0]:
            left[0] -= 1
            bank.life(ACCOUNTS, 1)
            fold_all(bank.world)
        return attempt(self, few)

    monkeypatch.setattr(_Switch, "_attempt", delayed)


def test_several_rounds_under_load(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_module, "FEW_RECORDS", 5)
    _more_under_way(bank, monkeypatch, 3)
    result = rebuild(bank.world, ["statement", "balances"], all_views()).switched
    assert result is not None
    assert result.tries > 3, "too much was left each time"
    assert result.commits == 3 * len(ACCOUNTS)
    assert _differences(bank.world) == 0


@pytest.mark.slow
def test_the_limit_grows_when_there_is_never_a_quiet_moment(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_module, "FEW_RECORDS", 1)
    _more_under_way(bank, monkeypatch, 1_000)
    assert rebuild(bank.world, ["balances"], all_views()).switched is not None
    assert _differences(bank.world) == 0


@pytest.mark.slow
def test_two_rebuilds_of_different_views_at_once(bank: Bookkeeper) -> None:
    world = bank.world
    with live_agent(world), ThreadPoolExecutor() as threads:
        futures = [threads.submit(rebuild, world, [name], all_views()) for name in ("statement", "balances")]
        bank.life(ACCOUNTS, 5)
        tables = {name: table for future in futures for name, table in future.result(DEADLINE_S).tables.items()}
        until(lambda: behind(world) == 0, "the agent catches up")
    assert tables == {
        name: f"{all_views()[name].table_name}_r2" for name in ("balances", "statement", "streams_accounts")
    }
    assert _differences(world) == 0


def test_a_catching_up_that_was_cut_off_goes_on_where_it_was(bank: Bookkeeper) -> None:
    world = bank.world
    builds = _ready(world, "statement")
    rebuild(world, [], all_views())  # nothing is needed: the ready build stays as it is
    bank.life(ACCOUNTS, 4)
    at = fold_all(world)
    group = Group("core", all_views(), builds)
    with connect(world, "test") as db, Tail(world, world.events_topic, group.at) as tail:
        first = group.catch_up(db, tail, {**group.at, 1: at[1]})
    assert 0 < first < 4 * len(ACCOUNTS)
    assert go_to(world, ["statement"], all_views()).commits == 4 * len(ACCOUNTS) - first
    assert _differences(world) == 0


@pytest.mark.slow
def test_a_transaction_that_catches_up_may_take_longer_than_one_that_agents_wait_for(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds nothing that an agent wants."""
    quick = bank.world.model_copy(update={"idle_in_transaction_timeout_ms": 2_000})
    _ready(bank.world, "statement")
    bank.life(ACCOUNTS, 4)
    fold_all(bank.world)
    idle = "select count(*) from pg_stat_activity where state = 'idle in transaction' and xact_start < now() - interval '2.5 s'"

    def fold_long(reached: str) -> None:
        if reached == "catch-up written":
            until(
                lambda: scalar(bank.world, f"{idle} and application_name like 'samefold switch%%'") == 1,
                "longer than it",
            )

    monkeypatch.setattr(faultpoints, "hook", fold_long)
    assert go_to(quick, ["statement"], all_views()).commits == 4 * len(ACCOUNTS)
    assert _differences(bank.world) == 0


def test_a_switch_that_stood_still_for_too_long_says_so_and_has_changed_nothing(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = bank.world.model_copy(update={"idle_in_transaction_timeout_ms": 100})
    _ready(bank.world, "statement")
    was = live_table(bank.world, "statement")
    idle = "select count(*) from pg_stat_activity where application_name like 'samefold switch%%'"

    def stand_still(reached: str) -> None:
        if reached == "switch locked":
            until(lambda: scalar(bank.world, idle) == 0, "PostgreSQL ends the session")

    with monkeypatch.context() as frozen:
        frozen.setattr(faultpoints, "hook", stand_still)
        with pytest.raises(TransactionTimedOut):
            go_to(quick, ["statement"], all_views())
    assert live_table(bank.world, "statement") == was
    go_to(bank.world, ["statement"], all_views())
    assert live_table(bank.world, "statement") != was


def test_poison_and_refused_rows_met_while_catching_up_are_parked_for_the_new_table(bank: Bookkeeper) -> None:
    world = bank.world
    refused = """
    ON_POISON = "park"

    class Line(NamedTuple):
        account: Key[str]
        line: Key[int]

    def rows(event: MoneyDeposited, after: State, at: At) -> Iterable[Line]:
        yield Line(at.id, 10**30 if event.details.purpose == "poison" else at.version)
    """
    new = parking(BROKEN) | {"lines": view(refused, "lines")}
    make_tables(world, new)
    rebuild(world, ["lines", *PARKING], new, make_live=False)
    bank.commit("1", MoneyDeposited(cents=5, on=DAY, details=Details(purpose="poison")))
    bank.life(ACCOUNTS, 2)
    fold_all(world)
    go_to(world, [], new)
    parked = scalar(world, "select array_agg(table_name || ' ' || stream order by table_name) from parked")
    assert parked == [f"{name}_v1 accounts/1" for name in sorted(["lines", *PARKING])]
    assert _differences(world, new) == 0


# ── what it refuses ──


def test_a_table_ahead_of_a_position_is_refused(bank: Bookkeeper) -> None:
    world = bank.world
    [build] = _ready(world, "balances")
    with connect(world, "restored") as db:
        db.execute("update positions set next_offset = next_offset - 1, seq = seq - 1 where partition = 1")
    with pytest.raises(Ahead, match="partition 1"):
        _switch(world, [build])
    assert live_table(world, "balances") == "balances_v2"


def test_a_build_that_somebody_moved_or_abandoned_is_left_alone(bank: Bookkeeper) -> None:
    world = bank.world
    [build] = _ready(world, "balances")
    with connect(world, "test") as db:
        stale = Group("core", all_views(), [build])
        db.execute("update build_positions set next_offset = next_offset - 1 where partition = 1")
        with pytest.raises(MovedElsewhere), db.transaction():
            stale.check(engine_builds.lock_builds(db, stale.ids))
        abandon(db, build)
        with pytest.raises(BuildAbandoned), db.transaction():
            stale.check(engine_builds.lock_builds(db, stale.ids))


def test_catching_up_never_goes_beyond_the_agent(bank: Bookkeeper) -> None:
    world = bank.world
    [build] = _ready(world, "balances")
    bank.life(ACCOUNTS, 1)  # in the log, but not folded by the agent
    group = Group("core", all_views(), [build])
    with connect(world, "test") as db, Tail(world, world.events_topic, group.at) as tail:
        end = {p: reading.next_offset + 1 for p, reading in group.at.items()}
        with pytest.raises(Ahead):
            group.catch_up(db, tail, _ends(group.at, end))
    assert _differences(world) == 0


@pytest.mark.slow
def test_a_frozen_transaction_on_the_positions_delays_the_switch_and_no_more(bank: Bookkeeper) -> None:
    world = bank.world
    [build] = _ready(world, "balances")
    with connect(world, "frozen") as db:
        db.execute("begin")
        db.execute("select from positions where partition = 3 for update")
        with pytest.raises(SwitchTimedOut):
            _switch(world, [build], give_up_s=0.5)
        assert live_table(world, "balances") == "balances_v2"
        assert build_states(world, "balances")["balances_v2_r2"] == "ready"
        db.execute("rollback")
    assert _switch(world, [build]).tables == {"balances": "balances_v2_r2"}
    assert _differences(world) == 0


# ── between agents ──


def test_a_view_moves_to_an_agent_of_its_own_without_showing_less(bank: Bookkeeper) -> None:
    world = bank.world
    moved = with_views({"daily_totals": replace(all_views()["daily_totals"], agent="reports", version=2)})
    make_tables(world, moved)
    before = rows(world, "daily_totals_v1")
    result = rebuild(world, [], moved)
    assert result.tables == {"daily_totals": "daily_totals_v2"}
    assert rows(world, "daily_totals_v2") == before
    assert scalar(world, "select agent from live where view = 'daily_totals'") == "reports"
    with connect(world, "test") as db:
        core, reports = (read_positions(db, agent, world.events_topic) for agent in ("core", "reports"))
    assert core is not None
    assert reports is not None
    assert reports.readings == core.readings, "the new agent begins where the view stands"
    assert reports.live_set == {"daily_totals": 2}
    assert "daily_totals" not in core.live_set
    assert _differences(world, moved) == 0


def _bring(world: Settings, agent: str, other: str) -> None:
    """Have an agent stand where another one does."""
    with connect(world, agent) as db:
        db.execute(
            "update positions r set next_offset = c.next_offset, epoch = c.epoch, seq = c.seq, "
            "command_offset = c.command_offset from positions c "
            "where r.agent = %s and c.agent = %s and c.partition = r.partition",
            (agent, other),
        )


@pytest.mark.slow_but("8")
@pytest.mark.parametrize("few", [8, 10_000])
def test_more_than_one_read_gives_is_never_switched_to(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """The agent that a view moves to is behind for some tries; then, while the switch is frozen, it goes far ahead of the build."""
    world = bank.world
    monkeypatch.setattr(tail_module, "AHEAD", 10)
    monkeypatch.setattr(switch_module, "AHEAD", 10)
    monkeypatch.setattr(switch_module, "FEW_RECORDS", few)
    first = with_views({"daily_totals": replace(all_views()["daily_totals"], agent="reports", version=2)})
    make_tables(world, first)
    rebuild(world, [], first)
    second = {**first, "statement": replace(all_views()["statement"], version=3)}
    second["balances"] = replace(all_views()["balances"], agent="reports", version=3)
    make_tables(world, second)
    builds = _ready(world, "balances", "statement", views=second)
    core = {name: one for name, one in first.items() if one.agent == "core"}
    attempt: Callable[[_Switch, int], float] = _Switch._attempt
    behind, tries = 18, []

    def frozen(self: _Switch, left: int) -> float:
        tries.append(left)
        if len(tries) == 1:
            bank.life(ACCOUNTS, 10)
            fold_all(world, core)
        if len(tries) == behind + 1:
            _bring(world, "reports", "core")
        return attempt(self, left)

    monkeypatch.setattr(_Switch, "_attempt", frozen)
    with connect(world, "test") as db:
        switched = switch(world, db, builds, second, give_up_s=DEADLINE_S)
    assert live_table(world, "balances") == "balances_v3"
    assert len(switched.tables) == 3
    assert _differences(world, {name: second[name] for name in ("balances", "statement")}) == 0
    assert switched.commits == 2 * 10 * len(ACCOUNTS), "each build took all of it"
    assert tries[: behind + 1] == [few] * (behind + 1), "while an agent is behind, no more may be left than before"
    assert max(tries) <= max(few, 10), "nor ever is it let grow beyond what one read gives"


# ── plans and leftovers ──


def test_a_switch_needs_the_whole_set() -> None:
    views = all_views()
    live = {name: Pointer(name, "core", one.version, one.table_name) for name, one in views.items()}
    assert plan_move(live, ["balances"], views).outgoing == (live["balances"],)
    raised = {
        **views,
        "balances": replace(views["balances"], version=3),
        "statement": replace(views["statement"], version=3),
    }
    with pytest.raises(SetDiffers, match="statement"):
        plan_move(live, ["balances"], raised)
    assert plan_move(live, ["balances", "statement"], raised).agents == ("core",)
    fewer = {name: one for name, one in views.items() if name != "daily_totals"}
    assert plan_move(live, [], fewer).removed == ("daily_totals",)


@pytest.mark.slow
def test_only_tables_that_nobody_reads_are_dropped(bank: Bookkeeper) -> None:
    world = bank.world
    rebuild(world, ["balances"], all_views())
    rebuild(world, ["balances"], all_views())
    with pytest.raises(NotDroppable, match="balances_v2_r3 is live"):
        droppable(world, "balances", "balances_v2_r3")
    old = droppable(world, "balances", "2")
    assert [build.table for build in old] == ["balances_v2", "balances_v2_r2"]
    drop_tables(world, old, all_views()["balances"])
    assert scalar(world, "select to_regclass('balances_v2_r2')") is None
    assert rows(world, "balances_v2") == [], "emptied: later builds of the version are made like it"
    assert len(rows(world, "balances")) == len(ACCOUNTS)
    assert rebuild(world, ["balances"], all_views()).tables == {"balances": "balances_v2_r4"}
    with connect(world, "test") as db:
        assert set(pointers(db)) == set(all_views())
    assert _differences(world) == 0
