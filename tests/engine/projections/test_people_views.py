"""make test + test-all: main ways first. The SQL view of a view for people: the live table's rows, whatever versions there are."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.views.core_views import all_views
from projections.engine.views.sql_views import ViewInUse, replace_sql_view
from projections.engine.views.view import View
from tests.engine.bookkeeper import Bookkeeper
from tests.engine.projections.bankviews import (
    ACCOUNTS,
    BALANCES_2,
    build_states,
    live_table,
    make_tables,
    view,
    with_views,
)
from tests.engine.spine import scalar
from tools.migrations.migrate import check, upgrade
from tools.testing.fixtures import Samefold
from tools.testing.waiting import DEADLINE_S, until

WAITS = "select count(*) from pg_locks where not granted and relation = 'balances'::regclass"
OTHER_TYPES = """
    VERSION = 3

    class Balance(NamedTuple):
        account: Key[str]
        cents: str

    def evolve(row: Balance | None, event: MoneyDeposited, at: At) -> Balance | None:
        return Balance(at.id, "much")
"""


def _columns(world: Settings, name: str) -> list[str]:
    with connect(world, "test") as db:
        cursor = db.execute(f'select * from "{name}" limit 0'.encode())
    assert cursor.description is not None
    return [column.name for column in cursor.description]


def _built(world: Settings, body: str) -> dict[str, View]:
    """The views with another version of `balances`, which is ready to go live."""
    new = with_views({"balances": view(body, "balances")})
    make_tables(world, new)
    rebuild(world, ["balances"], new, make_live=False)
    return new


def test_every_view_has_one_from_the_first_start_on(bank: Bookkeeper) -> None:
    for name, one in all_views().items():
        assert _columns(bank.world, name) == [column.name for column in one.columns], "_partition stays hidden"
    assert scalar(bank.world, "select count(*) from statement") == 5 * len(ACCOUNTS)
    check(bank.world)


def test_one_in_which_an_older_release_shows_hidden_columns_is_made_again(bank: Bookkeeper) -> None:
    """A release that did not know `Latest` takes its columns for those of the key."""
    with connect(bank.world, "test") as db:
        db.execute("drop view daily_totals")
        older = "select * from daily_totals_v1 where exists (select from live) or exists (select from stopped_views)"
        db.execute(f"create view daily_totals as {older}")
    upgrade(bank.world)
    assert _columns(bank.world, "daily_totals") == [column.name for column in all_views()["daily_totals"].columns]


def test_a_summary_is_added_up_over_its_partitions(bank: Bookkeeper) -> None:
    days = scalar(bank.world, "select count(distinct (day, operation)) from daily_totals_v1")
    assert scalar(bank.world, "select count(*) from daily_totals_v1") > days, "several partitions have a share of a day"
    assert scalar(bank.world, "select count(*) from daily_totals") == days
    summed, stored = (
        scalar(bank.world, f"select (sum(count), sum(cents), max(largest)) from {table}")
        for table in ("daily_totals", "daily_totals_v1")
    )
    assert summed == stored


def test_a_query_opens_only_the_live_table(bank: Bookkeeper) -> None:
    world = bank.world
    rebuild(world, ["balances"], all_views())
    with connect(world, "test") as db:
        plan = [
            line for (line,) in db.execute("explain (analyze, costs off) select * from balances where account = '3'")
        ]
    scans = [line for line in plan if "Scan" in line and "balances_v2" in line]
    assert len(scans) == 2
    assert [("never executed" in line) for line in scans].count(True) == 1, plan


def test_the_newest_versions_columns_win_and_older_ones_show_nothing_there(bank: Bookkeeper) -> None:
    world = bank.world
    total = scalar(world, "select sum(cents) from balances")
    new = _built(world, BALANCES_2)
    assert _columns(world, "balances") == ["account", "cents", "fees"], "as soon as a build is ready"
    assert scalar(world, "select count(*) from balances where fees is null") == len(ACCOUNTS), "the older one is live"
    go_to(world, [], new)
    assert scalar(world, "select count(*) from balances where fees is null") == 0
    assert scalar(world, "select sum(cents) from balances") == total
    check(world)


@pytest.mark.slow
def test_a_column_of_another_type_is_cast_when_it_is_read(bank: Bookkeeper) -> None:
    new = _built(bank.world, OTHER_TYPES)
    assert scalar(bank.world, "select cents from balances where account = '3'").lstrip("-").isdigit()
    go_to(bank.world, [], new)
    assert scalar(bank.world, "select cents from balances where account = '3'") == "much"


def test_a_long_query_delays_it_and_others_do_not_queue_up_behind(bank: Bookkeeper) -> None:
    world = bank.world
    with (
        connect(world, "long query") as reader,
        connect(world, "replaces") as db,
        connect(world, "short query") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        reader.execute("begin")
        reader.execute("select count(*) from balances")
        replaced = pool.submit(replace_sql_view, db, "balances")
        other.execute(f"set statement_timeout = '{DEADLINE_S:.0f}s'")
        for _ in range(5):
            until(lambda: other.execute(WAITS).fetchone() == (1,), "it waits for the lock")
            other.execute("select count(*) from balances")
        assert not replaced.done()
        reader.execute("rollback")
        replaced.result(DEADLINE_S)


def test_a_forgotten_transaction_is_named_and_the_finished_table_kept(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    with connect(world, "somebody's tool") as reader, connect(world, "later") as later:
        reader.execute("begin")
        reader.execute("select count(*) from balances")
        who = rf"session {reader.info.backend_pid} \(somebody's tool, user samefold, idle in transaction since \d{{4}}-.* UTC\)\."
        for command, ready in (
            ("rebuild", "balances_v2_r2"),
            ("rebuild", "balances_v2_r3"),
            ("switch", "balances_v2_r3"),
        ):
            done = samefold(command, "balances", "--wait", "0.2", settings=world)
            assert done.returncode == 1
            assert re.search(f"view-in-use: The SQL view 'balances' was locked for 0 s by {who}", done.stderr), (
                done.stderr
            )
            assert "`samefold switch balances` does the rest" in done.stderr
            assert build_states(world, "balances")[ready] == "ready"
            assert live_table(world, "balances") == "balances_v2", "readers see what they saw"
        with ThreadPoolExecutor(1) as pool:
            switched = pool.submit(samefold, "switch", "balances", "--wait", f"{DEADLINE_S}", settings=world)
            until(lambda: later.execute(WAITS).fetchone() == (1,), "it waits for the lock")
            reader.execute("rollback")
            assert "balances is live in balances_v2_r3" in switched.result(DEADLINE_S).stdout


@pytest.mark.slow
def test_what_depends_on_it_is_not_dropped(bank: Bookkeeper) -> None:
    with connect(bank.world, "test") as db:
        db.execute("create view report as select sum(cents) from balances")
    check(bank.world)  # what people query is no drift
    with pytest.raises(ViewInUse, match="report"):
        _built(bank.world, OTHER_TYPES)
    assert scalar(bank.world, "select count(*) from report") == 1


@pytest.mark.slow
def test_what_was_made_by_hand_is_named_before_a_switch_leaves_it_behind(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    made = {
        "create index by_cents on balances_v2 (cents, account)": (
            'index by_cents (drop it, or declare it in its view\'s file: `INDEXES = (Index("cents", "account"),)`)'
        ),
        "create index by_time on statement_v2 ((cents + 1))": "index by_time",
        "alter table balances_v2 add constraint once unique (account, cents)": "constraint once on table balances_v2",
        "create trigger t after insert on balances_v2 execute function noted()": "trigger t on table balances_v2",
        "create policy p on balances_v2": "policy p on table balances_v2",
    }
    assert "made by hand" not in samefold("doctor", settings=world).stdout
    with connect(world, "somebody") as db:
        db.execute("create function noted() returns trigger language plpgsql as 'begin return null; end'")
        for statement in made:
            db.execute(statement.encode())
    told = samefold("doctor", settings=world).stdout
    assert f"made by hand, and left behind by the next switch: {', '.join(sorted(made.values()))}\n" in told
    done = samefold("rebuild", "balances", settings=world, process_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    [warning] = [line for line in done.stderr.splitlines() if "made by hand" in line]
    assert {what for what in made.values() if what in warning} == {*made.values()} - {"index by_time"}
    assert "by_cents" not in samefold("doctor", settings=world).stdout
