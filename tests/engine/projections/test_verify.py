"""make test + test-all: a short log is quick to compare; switches beside it take longer.

Verify: whatever is not as the fold of the log has it is found and named, and nothing else is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, LiteralString
from uuid import UUID

import pytest
from psycopg import sql

from infra.database.connect import Connection, connect
from infra.processes.engines import Local
from infra.settings import Settings
from projections.engine.operate.verify import SHOWN, Difference, NotLive, Verified, What, verify
from projections.engine.rebuild.builds import drop_tables, droppable
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.store.positions import Positions, read_positions
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import PARTITION
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from tests.engine.bookkeeper import Bookkeeper, Meanwhile, fold_all, folded_lives
from tests.engine.projections.bankviews import ACCOUNTS, BALANCES_2, rows, view, with_views
from tests.engine.spine import scalar
from tools.testing.waiting import until


def change(world: Settings, *statements: str) -> None:
    with connect(world, "vandal") as db:
        for statement in statements:
            assert db.execute(statement.encode()).rowcount > 0, statement


def found_by(result: Verified) -> list[Difference]:
    return [*result.positions, *(d for compared in result.views.values() for d in compared.differences)]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_an_agent_folded_has_no_difference(bank: Bookkeeper, processes: int) -> None:
    result = verify(bank.world, all_views(), engine_for=lambda _: Local(processes))
    assert result.differences == 0
    assert result.commits == 6 * len(ACCOUNTS)
    assert {name: compared.rows for name, compared in result.views.items()} == {
        "balances": 20,
        "command_outcomes": 120,
        "daily_totals": result.views["daily_totals"].rows,
        "statement": 100,
        "streams_accounts": 20,
        **dict.fromkeys(("streams_standing_orders", "streams_transfers", "transfers"), 0),
    }


def test_a_state_that_is_written_in_another_way_is_no_difference(bank: Bookkeeper) -> None:
    """As another process writes a set, or another version of the encoder a number."""
    change(
        bank.world,
        """update streams_accounts_v3 set state = json_build_object(
               'holds', state->'holds', 'overdraft_limit', state->'overdraft_limit', 'balance', state->'balance',
               'status', state->'status')""",
    )
    assert verify(bank.world, all_views()).differences == 0


Planted = tuple[str, What, int, tuple[tuple[str, Any], ...]]
"""A difference that verify should tell of: view, what, partition and key."""
OTHER: dict[Scalar, LiteralString] = {
    Scalar.STR: "{} || ' too'",
    Scalar.UUID: "'00000000-0000-0000-0000-000000000001'::uuid",
}
"""Another key, by the kind of its column."""
STATES = {
    "accounts/7": '{"status":"open","balance":1,"overdraft_limit":1000,"holds":{}}',
    "accounts/8": '{"status":"open","balance":null}',  # which is none
}
IN_ANOTHER_PARTITION = """
update daily_totals_v1 was set _partition = 77 from
    (select day, operation, _partition from daily_totals_v1 order by 1 desc, 2 desc, 3 desc limit 1) last
 where (was.day, was.operation, was._partition) = (last.day, last.operation, last._partition)
returning last.day, last.operation, last._partition
"""


def plant(world: Settings) -> set[Planted]:
    """In each view with rows, which are one of each kind, one row changed, one missing and one too many; two states, a row in
    another partition and positions."""
    planted = {one for view in all_views().values() if rows(world, view.table_name) for one in _plant(world, view)}
    with connect(world, "vandal") as db:
        for stream, state in STATES.items():
            query = "update streams_accounts_v3 set state = %s where stream = %s returning _partition"
            [(partition,)] = db.execute(query, (state, stream)).fetchall()
            planted.add(("streams_accounts", "changed", partition, (("stream", stream),)))
        [(day, operation, partition)] = db.execute(IN_ANOTHER_PARTITION).fetchall()
        key = (("day", day), ("operation", operation))
        planted |= {("daily_totals", "missing", partition, key), ("daily_totals", "extra", 77, key)}
    for partition, column in enumerate(("epoch", "seq", "command_offset")):
        change(world, f"update positions set {column} = {column} + 1 where partition = {partition}")
        planted.add(("positions", "position", partition, (("agent", "core"), ("partition", partition))))
    return planted


def _plant(world: Settings, view: View) -> Iterator[Planted]:
    """Change a row, take one away, and add one that is like another but for its key; what verify should say of each."""
    keys = [column.name for column in view.key]
    number = next(c.name for c in view.columns if not c.is_key and c.scalar in (Scalar.INT, Scalar.DECIMAL))
    name, to_another = next((c.name, OTHER[c.scalar]) for c in view.key if c.scalar in OTHER)
    table, key = sql.Identifier(view.table_name), sql.SQL(", ").join(map(sql.Identifier, [*keys, PARTITION]))
    others = [sql.Identifier(c.name) for c in view.columns if c.name != name]
    statements: dict[What, sql.Composed] = {
        "changed": sql.SQL("update {} set {} = {} + 1").format(table, *[sql.Identifier(number)] * 2),
        "missing": sql.SQL("delete from {}").format(table),
        "extra": sql.SQL("insert into {0} ({1}, {2}, {3}) select {4}, {2}, {3} from {0}").format(
            table,
            sql.Identifier(name),
            sql.SQL(", ").join(others),
            sql.Identifier(PARTITION),
            sql.SQL(to_another).format(sql.Identifier(name)),
        ),
    }
    with connect(world, "vandal") as db:
        three = db.execute(sql.SQL("select {0} from {1} order by {0} limit 3").format(key, table)).fetchall()
        for (what, statement), row in zip(statements.items(), three, strict=True):
            where = sql.SQL(" where ({}) = ({})").format(key, sql.SQL(", ").join([sql.Placeholder()] * len(row)))
            assert db.execute(statement + where, row).rowcount == 1
            named = dict(zip(keys, row[:-1], strict=True))
            if what == "extra":
                named[name] = f"{named[name]} too" if isinstance(named[name], str) else UUID(int=1)
            yield view.name, what, row[-1], tuple(named.items())


def told_of(result: Verified) -> set[Planted]:
    assert result.differences == len(found_by(result))
    return {(one.view, one.what, one.partition, tuple(one.key.items())) for one in found_by(result)}


def test_each_kind_of_damage_in_each_kind_of_view_is_named_and_nothing_else(bank: Bookkeeper) -> None:
    planted = plant(bank.world)
    assert told_of(verify(bank.world, all_views())) == planted


def test_rows_of_which_the_position_knows_nothing_are_named(bank: Bookkeeper) -> None:
    """A position that was set back: its rows are ahead of it."""
    change(bank.world, "update positions set next_offset = next_offset - 1 where partition = 1")
    result = verify(bank.world, all_views())
    assert {difference.what for difference in result.positions} == {"position"}
    assert result.views["command_outcomes"].total == 1


def test_many_differences_are_counted_and_the_first_listed(bank: Bookkeeper) -> None:
    change(bank.world, "update statement_v2 set balance = balance + 1")
    compared = verify(bank.world, all_views()).views["statement"]
    assert compared.total == compared.rows == 100
    assert len(compared.differences) == SHOWN


@pytest.mark.slow
def test_rows_and_positions_are_of_one_moment(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent goes on between the two."""

    def read_while_the_agent_goes_on(snapshot: Connection, *what: str) -> Positions | None:
        positions = read_positions(snapshot, *what)
        bank.life(ACCOUNTS, 1)
        fold_all(bank.world)
        return positions

    monkeypatch.setattr("projections.engine.operate.verify.read_positions", read_while_the_agent_goes_on)
    assert verify(bank.world, {"balances": all_views()["balances"]}).differences == 0


@pytest.mark.slow
def test_a_table_that_goes_live_during_verification_is_reported(bank: Bookkeeper) -> None:
    engine = Meanwhile(lambda: rebuild(bank.world, ["balances"], all_views()))
    with pytest.raises(NotLive, match="Another table went live during verification, for balances"):
        verify(bank.world, all_views(), engine_for=lambda _: engine)
    assert verify(bank.world, all_views()).differences == 0


def test_a_table_that_is_emptied_after_a_switch_is_not_taken_for_one_without_rows(world: Settings) -> None:
    """The only task waits for the table of one view; meanwhile the other view is switched and its old table dropped."""
    bank = folded_lives(world.model_copy(update={"partitions": 1}), ACCOUNTS, 6)
    views = {name: all_views()[name] for name in ("balances", "daily_totals")}
    locking = connect(bank.world, "locks")

    def switch_and_drop() -> None:
        waits = "select count(*) from pg_locks where not granted and relation = 'balances_v2'::regclass"
        until(lambda: scalar(bank.world, waits), "the task waits for the table")
        rebuild(bank.world, ["daily_totals"], all_views())
        old = droppable(bank.world, "daily_totals", "daily_totals_v1")
        drop_tables(bank.world, old, views["daily_totals"])
        locking.execute("commit")

    def lock_and_go_on() -> None:
        locking.execute("begin")
        locking.execute("lock table balances_v2 in access exclusive mode")
        threading.Thread(target=switch_and_drop).start()

    with locking, pytest.raises(NotLive, match="Another table went live during verification, for daily_totals"):
        verify(bank.world, views, engine_for=lambda _: Meanwhile(lock_and_go_on))


def test_views_that_are_not_live_as_this_code_has_them_are_refused(bank: Bookkeeper) -> None:
    new = with_views({"balances": view(BALANCES_2, "balances")})
    with pytest.raises(NotLive, match="balances"):
        verify(bank.world, new)
