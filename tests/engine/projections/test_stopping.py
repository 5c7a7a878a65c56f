"""make test: each takes a second or two.

A view that can't take an event stops alone: its table keeps the rows and positions of then, everybody else goes on, and once its
code is corrected it goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat

import pytest

from domain.accounts import AccountOpened, Details, MoneyDeposited
from infra.archive.whole_log import read_range
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log import topics
from infra.log.contract import Contract
from infra.log.partitioner import partition_of
from infra.settings import Settings
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.plan import Plan
from projections.engine.live.startup import ShapeChanged, ensure_started
from projections.engine.live.stopping import stop_view
from projections.engine.live.worker import Worker
from projections.engine.operate.overview import overview
from projections.engine.operate.verify import verify
from projections.engine.rebuild.builds import NotDroppable, droppable
from projections.engine.rebuild.rebuild import NoBuild, NotStopped, go_to, rebuild, resume
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.positions import read_positions
from projections.engine.views.core_views import OUTCOMES
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper
from tests.engine.projections.bankviews import (
    BALANCES_2,
    BROKEN,
    CORRECTED,
    PARKING,
    STILL_BROKEN,
    a_batch_around,
    behind,
    build_states,
    make_tables,
    rows,
    start_over,
    stop_as_older_code_would,
    stopping,
    view,
    with_views,
)
from tests.engine.spine import scalar, set_up

ACCOUNTS = ["1", "2", "3", "4"]


def deposited(cents: int, purpose: str = "") -> MoneyDeposited:
    return MoneyDeposited(cents=cents, on=DAY, details=Details(purpose=purpose))


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    """Accounts with a life, of which one gets an event that the broken views can't take, and then all live on."""
    set_up(world)
    start_over(world, stopping(BROKEN))
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 4)
    keeper.commit("1", deposited(10, "poison"))
    keeper.life(ACCOUNTS, 4)
    return keeper


def fold(world: Settings, views: Mapping[str, View], *, most: int = 10_000) -> None:
    """Fold to the log's end, as one agent of these views does, up to so many records of each partition at once."""
    work = Worker(world, "core", views, "test agent", Plan(views))
    while behind(world):
        done = apply_next(work, most)
        assert done.stop is None or done.status is CommitStatus.FENCED
    work.close()


def apply_next(work: Worker, most: int) -> BatchResult:
    """One batch."""
    positions = work.positions()
    assert positions is not None
    end = topics.describe(work.settings, positions.topic).end
    takes = {}
    for partition, at in positions.readings.items():
        stop = min(at.next_offset + most, end[partition])
        found = read_range(work.settings, positions.topic, partition, at.next_offset, stop)
        takes[partition] = at, [record for records in found for record in records]
    return work.apply({partition: taken for partition, taken in takes.items() if taken[1]})


def stopped(world: Settings, views: Mapping[str, View]) -> dict[str, tuple[str, int, str]]:
    """By view: stream and version of the event that it stopped at, and the code of the reason."""
    found = overview(world, views).views
    return {one.name: (why.stream, why.stream_version, why.code) for one in found if (why := one.stopped)}


def differences(world: Settings, views: Mapping[str, View]) -> int:
    """Of all views but those that are stopped."""
    found = verify(world, views)
    assert set(found.stopped) == stopped(world, views).keys()
    return found.differences


RAISED = ("SystemExit(3)", "MemoryError", "RecursionError", "GeneratorExit", "__import__('asyncio').CancelledError")


@pytest.mark.parametrize(("most", "raised"), [(1, "OSError"), (3, "OSError"), *((10_000, one) for one in RAISED)])
def test_views_of_each_kind_stop_at_their_event_and_the_others_go_on(bank: Bookkeeper, most: int, raised: str) -> None:
    """Whatever they raise."""
    world, views = bank.world, stopping(BROKEN.replace('ValueError("can\'t take this")', raised))
    fold(world, views, most=most)
    # the first account's 4 events of 4 rounds, and its opening, come before
    assert stopped(world, views) == dict.fromkeys(PARKING, ("accounts/1", 6, "poison-event"))
    assert differences(world, views) == 0
    assert {name: build_states(world, name) for name in PARKING} == {name: {f"{name}_v1": "old"} for name in PARKING}
    for name in PARKING:
        assert rows(world, name), "people see its last rows"


def test_a_view_that_never_stops_making_rows_stops_alone(bank: Bookkeeper) -> None:
    world = bank.world
    endless = {
        name: replace(one, function=lambda *_: repeat(None))
        for name, one in stopping(CORRECTED).items()
        if name in ("moves", "totals")
    }
    views = stopping(CORRECTED) | endless
    fold(world, views)
    found = overview(world, views).views
    assert {one.name for one in found if one.stopped and "100000" in one.stopped.error} == endless.keys()


@pytest.mark.parametrize("most", [2, 10_000])
def test_a_view_that_is_resumed_with_corrected_code_is_as_if_it_had_never_stopped(bank: Bookkeeper, most: int) -> None:
    world, corrected = bank.world, stopping(CORRECTED)
    fold(world, stopping(BROKEN), most=most)
    bank.commit("new", AccountOpened(overdraft_limit=0, on=DAY), deposited(7))
    bank.flush()
    fold(world, stopping(BROKEN))
    assert resume(world, ["sums", "totals"], corrected).tables == {"sums": "sums_v1", "totals": "totals_v1"}
    assert scalar(world, "select cents from sums where account = 'new'") == 7
    assert stopped(world, corrected).keys() == {"moves"}
    assert resume(world, [], corrected).tables == {}, "a journal is rebuilt"
    with pytest.raises(NoBuild, match="moves"):
        resume(world, ["moves"], corrected)
    rebuild(world, ["moves"], corrected)
    bank.life(ACCOUNTS, 2)
    fold(world, corrected)
    assert stopped(world, corrected) == {}
    assert differences(world, corrected) == 0


def test_a_view_that_fails_again_stays_stopped_where_it_is(bank: Bookkeeper) -> None:
    world, still, corrected = bank.world, stopping(STILL_BROKEN), stopping(CORRECTED)
    fold(world, stopping(BROKEN))
    bank.commit("2", deposited(20, "worse"))
    bank.flush()
    fold(world, still)
    with pytest.raises(PoisonEvent, match="accounts/2"):
        resume(world, ["sums"], still)
    assert stopped(world, still)["sums"] == ("accounts/1", 6, "poison-event")
    resume(world, ["sums"], corrected)
    assert differences(world, corrected) == 0
    # the agent still has the code that fails, and meets the next such event
    bank.commit("3", deposited(20, "worse"))
    bank.flush()
    fold(world, still)
    assert stopped(world, still)["sums"][0] == "accounts/3"
    resume(world, ["sums"], corrected)
    assert differences(world, corrected) == 0


def test_other_views_are_rebuilt_and_switched_while_one_is_stopped_and_so_is_its_next_version(bank: Bookkeeper) -> None:
    world = bank.world
    fold(world, stopping(BROKEN))
    newer = stopping(BROKEN) | {"balances": view(BALANCES_2, "balances")}
    make_tables(world, newer)
    assert rebuild(world, [], newer).tables == {"balances": "balances_v3"}
    assert stopped(world, newer).keys() == set(PARKING)
    assert differences(world, newer) == 0

    raised = newer | {"sums": replace(stopping(CORRECTED)["sums"], version=2)}
    make_tables(world, {"sums": raised["sums"]})
    rebuild(world, ["sums"], raised)
    assert stopped(world, raised).keys() == {"moves", "totals"}
    assert build_states(world, "sums") == {"sums_v1": "old", "sums_v2": "live"}
    bank.life(ACCOUNTS, 1)
    fold(world, raised)
    # going back catches the table up from where it stopped
    back = newer | {"sums": stopping(CORRECTED)["sums"]}
    assert go_to(world, ["sums"], back).tables == {"sums": "sums_v1"}
    assert differences(world, back) == 0


def test_code_without_the_view_removes_it(bank: Bookkeeper) -> None:
    world = bank.world
    fold(world, stopping(BROKEN))
    fewer = with_views({})
    assert set(rebuild(world, [], fewer).removed) == set(PARKING)
    assert stopped(world, fewer) == {}
    bank.life(ACCOUNTS, 1)
    fold(world, fewer)
    assert differences(world, fewer) == 0


def test_a_batch_that_was_folded_before_the_stop_is_fenced(bank: Bookkeeper) -> None:
    """It would fold on into a table that stands at positions of its own."""
    world, views = bank.world, stopping(CORRECTED)
    assert a_batch_around(world, views, lambda: stop_as_older_code_would(world, "sums")).status is CommitStatus.FENCED


def test_a_worker_that_is_late_stops_nothing(bank: Bookkeeper) -> None:
    """Another worker, with corrected code, has gone on beyond the event meanwhile; or it has stopped the view already."""
    world, broken, corrected = bank.world, stopping(BROKEN), stopping(CORRECTED)
    fold(world, corrected)
    other = Worker(world, "core", broken, "another agent", Plan(broken))
    for meanwhile in (lambda: fold(world, corrected), lambda: apply_next(other, 1)):
        with connect(world, "late agent") as db:
            positions = read_positions(db, "core", world.events_topic)
            assert positions is not None
            at = partition_of("accounts/2", len(positions.readings))
            bank.commit("2", deposited(10, "poison"))
            bank.flush()
            meanwhile()
            before = stopped(world, broken)
            name, offset = next(iter(before), "sums"), positions.readings[at].next_offset
            stop_view(db, positions, PoisonEvent(name, "accounts/2", 99, partition=at, offset=offset, cause="late"))
        assert stopped(world, broken) == before
    assert len(stopped(world, broken)) == 1
    other.close()


def test_what_commands_are_decided_on_never_leaves(bank: Bookkeeper) -> None:
    world, views = bank.world, stopping(CORRECTED)
    fold(world, views)
    bank.commit("2", deposited(1), fingerprint="none of ours")
    bank.flush()
    work = Worker(world, "core", views, "test agent", Plan(views))
    stop = apply_next(work, 10_000).stop
    work.close()
    assert isinstance(stop, PoisonEvent)
    assert stop.view == OUTCOMES
    assert stopped(world, views) == {}


def test_a_view_that_moves_to_an_agent_of_its_own_while_it_is_stopped_is_rebuilt(bank: Bookkeeper) -> None:
    world = bank.world
    fold(world, stopping(BROKEN))
    moved = stopping(CORRECTED)
    moved["sums"] = replace(moved["sums"], agent="side", version=2)
    make_tables(world, {"sums": moved["sums"]})
    contract = Contract.of(topics.describe(world, world.events_topic))
    with connect(world, "test") as db:
        assert ensure_started(db, "side", {"sums": moved["sums"]}, contract) is None
    rebuild(world, ["sums"], moved)
    assert stopped(world, moved).keys() == {"moves", "totals"}
    assert differences(world, moved) == 0


def test_what_is_not_stopped_can_not_be_resumed_and_what_is_stopped_is_not_dropped_by_its_version(
    bank: Bookkeeper,
) -> None:
    world, views = bank.world, stopping(BROKEN)
    fold(world, views)
    for name in ("balances", "nobody"):
        with pytest.raises(SamefoldError, match=name):
            resume(world, [name], views)
    with pytest.raises(NotStopped, match="sums, totals"):
        resume(world, ["balances"], views)
    with pytest.raises(ShapeChanged, match="still version 1") as refused:
        resume(world, ["sums"], views | {"sums": replace(views["sums"], shape="other columns")})
    assert "samefold rebuild sums" in refused.value.hint
    for which in ("1", "sums_v1"):
        with pytest.raises(NotDroppable, match="stopped"):
            droppable(world, "sums", which)
