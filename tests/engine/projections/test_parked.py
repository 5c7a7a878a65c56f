"""make test + test-all: a replay takes a moment; one beside a busy agent takes longer.

Parked streams: replayed in order with corrected code, or dropped for good; nothing of them is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from domain.accounts import AccountOpened, Details, Event, MoneyDeposited, MoneyWithdrawn
from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.operate.replaying import NotParked, _Replay, drop, replay
from projections.engine.operate.verify import NotLive, verify
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.parking import parked_streams
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper, fold_all
from tests.engine.projections.bankviews import (
    BROKEN,
    CORRECTED,
    PARKING,
    STILL_BROKEN,
    a_batch_around,
    build_states,
    make_tables,
    parking,
    rows,
    start_over,
)
from tests.engine.projections.test_verify import change, found_by
from tests.engine.spine import scalar, set_up

KINDS = list(PARKING)
ACCOUNTS = ["1", "2", "3"]


def deposited(cents: int, purpose: str = "") -> MoneyDeposited:
    return MoneyDeposited(cents=cents, on=DAY, details=Details(purpose=purpose))


LIFE: Sequence[Event] = [
    AccountOpened(overdraft_limit=0, on=DAY),
    deposited(100),
    deposited(10, "poison"),  # version 3
    MoneyWithdrawn(cents=5, on=DAY),
    deposited(20, "worse"),  # version 5
    deposited(1000),
]


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    """Accounts of which the first is parked since version 3, for a view of each kind; the others are in order."""
    set_up(world)
    views = parking(BROKEN)
    start_over(world, views)
    keeper = Bookkeeper(world)
    for account in ACCOUNTS[1:]:
        keeper.commit(account, *LIFE[:2])
    for event in LIFE:
        keeper.commit("1", event)
    keeper.life(ACCOUNTS[1:], 3)
    fold_all(world, views)
    return keeper


def _parked(world: Settings) -> dict[str, tuple[str, int]]:
    """By table: stream and version since which it is parked."""
    with connect(world, "test") as db:
        return {one.table: (one.stream, one.since_version) for one in parked_streams(db)}


def _as_if_never_parked(world: Settings, name: str, views: Mapping[str, View]) -> None:
    """The live table holds what a fold of the whole log by this code makes, and nothing is parked."""
    assert verify(world, {name: views[name]}).differences == 0
    assert _parked(world).get(f"{name}_v1") is None


def test_a_replay_with_corrected_code_leaves_no_trace(bank: Bookkeeper) -> None:
    world, views = bank.world, parking(CORRECTED)
    for name in KINDS:
        done = replay(world, views[name], "accounts/1")
        assert (done.events, done.parked, done.dropped) == (4, None, None)
        _as_if_never_parked(world, name, views)
    bank.commit("1", deposited(1))
    bank.flush()
    fold_all(world, views)
    for name in KINDS:
        _as_if_never_parked(world, name, views)


def test_an_event_that_fails_again_stays_parked_from_there(bank: Bookkeeper) -> None:
    world, views, corrected = bank.world, parking(STILL_BROKEN), parking(CORRECTED)
    for name in KINDS:
        done = replay(world, views[name], "accounts/1")
        assert done.events == 2
        assert done.parked is not None
        assert (done.parked.version, done.parked.error) == (5, "ValueError: can't take this either")
        assert _parked(world)[f"{name}_v1"] == ("accounts/1", 5)
        assert verify(world, {name: views[name]}).differences == 0
        assert replay(world, corrected[name], "accounts/1").events == 2
        _as_if_never_parked(world, name, corrected)


def test_a_drop_leaves_one_event_out_for_good_and_replays_the_rest(bank: Bookkeeper) -> None:
    world, views = bank.world, parking(BROKEN)
    for name in KINDS:
        with pytest.raises(NotParked, match="since version 3 now, not 5"):
            drop(world, views[name], "accounts/1", version=5)
        first = drop(world, views[name], "accounts/1", version=3)
        assert (first.dropped, first.events) == (3, 1)
        assert first.parked is not None
        assert first.parked.version == 5, "and the command says that the next one is parked"
        second = drop(world, views[name], "accounts/1")
        assert (second.dropped, second.events, second.parked) == (5, 1, None)
        _as_if_never_parked(world, name, views)
    assert scalar(world, "select cents from sums where account = '1'") == 100 - 5 + 1000
    assert scalar(world, "select array_agg(line order by line) from moves where account = '1'") == [2, 4, 6]
    assert scalar(world, "select balance from moves where (account, line) = ('1', 6)") == 1125, "the domain's own state"
    rebuild(world, KINDS, views)
    for name in KINDS:
        assert rows(world, f"{name}_v1_r2") == rows(world, f"{name}_v1"), "a later build honours the skips"
        _as_if_never_parked(world, name, parking(CORRECTED))


@pytest.mark.parametrize("act", [replay, drop])
def test_an_agent_that_holds_the_stream_parked_is_fenced(bank: Bookkeeper, act: Callable[..., object]) -> None:
    world, views = bank.world, parking(CORRECTED)
    bank.commit("1", deposited(7))
    bank.flush()
    status = a_batch_around(world, views, lambda: [act(world, views[name], "accounts/1") for name in KINDS])
    assert status == BatchResult(CommitStatus.FENCED)
    fold_all(world, views)
    assert verify(world, views).differences == 0


@pytest.mark.slow
def test_what_is_left_to_read_under_the_locks_is_little(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent goes on between the first reading and the locks: once too far, so that the log is read on, then a little."""
    world, views = bank.world, parking(CORRECTED)
    monkeypatch.setattr("projections.engine.operate.replaying.FEW_RECORDS", 5)
    attempt = _Replay._attempt
    left = [9, 1]
    tries: list[int] = []

    def delayed(self: _Replay, connection: object) -> object:
        if left:
            for _ in range(left.pop(0)):
                bank.commit("1", deposited(1))
            bank.flush()
            fold_all(world, views)
        tries.append(1)
        return attempt(self, connection)  # type: ignore[arg-type]

    monkeypatch.setattr(_Replay, "_attempt", delayed)
    assert replay(world, views["sums"], "accounts/1").events == 4 + 10
    assert len(tries) == 2
    _as_if_never_parked(world, "sums", views)


# ── dropping and other tables of the view ──


def test_a_drop_abandons_the_tables_that_hold_the_event_and_keeps_those_that_do_not(world: Settings) -> None:
    set_up(world)
    views = {name: one for name, one in parking(BROKEN).items() if name not in ("moves", "totals")}
    make_tables(world, views)
    keeper = Bookkeeper(world)
    for account in ACCOUNTS:
        keeper.commit(account, *LIFE[:2])
    keeper.flush()
    fold_all(world)
    rebuild(world, [], views)
    rebuild(world, ["sums"], views)  # sums_v1 is old now, and stands before the poison
    keeper.commit("1", LIFE[2])
    keeper.life(ACCOUNTS, 2)
    fold_all(world, views)
    rebuild(world, ["sums"], views)  # sums_v1_r2 is old too, beyond the poison
    rebuild(world, ["sums"], views, make_live=False)  # sums_v1_r4 is ready, beyond it
    done = drop(world, views["sums"], "accounts/1")
    assert sorted(done.abandoned) == ["sums_v1_r2", "sums_v1_r4"]
    assert build_states(world, "sums") == {
        "sums_v1": "old",
        "sums_v1_r2": "abandoned",
        "sums_v1_r3": "live",
        "sums_v1_r4": "abandoned",
    }
    assert scalar(world, "select to_regclass('sums_v1_r4')") is None, "readers never saw it"
    assert scalar(world, "select to_regclass('sums_v1_r2')") is not None, "a reader may still ask it"
    assert go_to(world, ["sums"], views).tables == {"sums": "sums_v1"}
    assert verify(world, views).differences == 0, "going back honours the skip"


def test_parked_streams_stay_with_their_table(bank: Bookkeeper) -> None:
    world, views = bank.world, parking(CORRECTED)
    rebuild(world, ["sums"], views)
    assert _parked(world)["sums_v1"] == ("accounts/1", 3), "the old table's"
    assert "sums_v1_r2" not in _parked(world), "a new build starts with none"
    with pytest.raises(NotParked):
        replay(world, views["sums"], "accounts/1")
    go_to(world, ["sums"], views)
    assert verify(world, {"sums": views["sums"]}).differences == 0
    assert replay(world, views["sums"], "accounts/1").events == 4
    _as_if_never_parked(world, "sums", views)


# ── what it refuses ──


def test_only_what_is_parked_in_a_live_table_of_this_code(bank: Bookkeeper) -> None:
    views = parking(BROKEN)
    with pytest.raises(NotParked, match="accounts/2"):
        replay(bank.world, views["sums"], "accounts/2")
    with pytest.raises(NotLive, match="version 2"):
        replay(bank.world, replace(views["sums"], version=2), "accounts/1")


# ── what verify finds ──


def test_poison_that_is_not_on_record_is_a_difference(bank: Bookkeeper) -> None:
    change(bank.world, "delete from parked where view = 'sums'")
    [difference] = found_by(verify(bank.world, parking(BROKEN)))
    assert (difference.view, difference.what) == ("sums", "poison")
    assert difference.key["stream"] == "accounts/1"


SKIP_ALL = (
    "insert into skips (view, stream, version, through, partition, reason) "
    "select v, 'accounts/1', 1, 1000, 0, '' from unnest(array['sums', 'moves', 'totals']) v"
)


def test_rows_that_are_missing_without_a_record_and_skipped_ones_that_are_there_are_differences(
    bank: Bookkeeper,
) -> None:
    for statement in ("delete from parked", SKIP_ALL):  # what was folded before the poison is there, and then too much
        change(bank.world, statement)
        assert {one.view for one in found_by(verify(bank.world, parking(CORRECTED)))} == set(KINDS)
