"""make test-all: a database and no process; a million rows take most of a minute.

What is done again and again, by time or for each batch, costs as much however many wishes and parked streams an outage has left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from domain.accounts import Deposit
from infra.database.connect import Connection, connect
from infra.log.rule import START
from infra.settings import Settings
from policies.engine.outbox import id_of, refuse
from policies.engine.relay import mark_sent, read_unsent
from projections.engine.live.lag import VIEWS
from projections.engine.store.commit import CommitStatus
from projections.engine.store.positions import set_generation
from projections.engine.views import queries
from projections.engine.views.core_views import all_views
from projections.engine.views.pages import Page, order_of, page_query
from tests.engine.policies.test_outbox import DAY, Agent, deposited, outcome, policy, saving
from tests.engine.policies.test_webhooks import START as AT
from tests.engine.spine import set_up
from tools.testing.waiting import until

FEW, MANY = 1_000, 1_000_000
TABLES = ["outbox", "parked"]
PLANNED_ANEW = {"look at views (API, exporter)", "read a page of a view"}
"""These may scan a small table. They have new plans soon after it has grown: when autovacuum analyzes it."""
BACKLOG = (
    "insert into outbox (id, policy, kind, partition, stream, version, number, target, type, body, due, depth, sent_at, outcome,"
    " otherwise_type, otherwise_body, dead, wished_at, correlation_id, causation_id)"
    " select 'saving~' || lpad(n::text, 8, '0'), 'saving', case when has <> 'outcome' then 'send' end, mod(n, 4), 'accounts/' || n,"
    " n, 0, 'accounts/savings', 'Deposit', '{}', case has when 'timer' then now() end, 1, case has when 'sent' then now() end,"
    " case has when 'outcome' then 'accepted' end, 'FailTransfer', '{}', case has when 'dead' then 'no' end, now(), 'c', 'c'"
    " from (select n, (array['unsent', 'timer', 'sent', 'outcome', 'dead'])[1 + mod(n, 5)] as has"
    " from generate_series(%(from)s::int, %(to)s::int) n) w",
    "insert into parked (table_name, stream, view, partition, since_offset, since_version, error)"
    " select 'balances_v2', 'accounts/' || n, 'balances', 0, n, 1, 'no' from generate_series(%(from)s::int, %(to)s::int) n",
)
"""A fifth each: commands and timers to be sent, what is sent, outcomes whose wish is not there, and dead letters."""


@pytest.mark.slow
def test_a_backlog_costs_as_much_whether_it_is_a_thousand_or_a_million(world: Settings) -> None:
    """With the plans of when the tables were empty, and with those that are made after `analyze`."""
    set_up(world)
    with connect(world, "test", by_key=True, statement_timeout_ms=0) as db, connect(world, "api") as plain:
        at = dict.fromkeys(range(8), START._replace(next_offset=1, epoch=0))
        set_generation(db, world.events_topic, {"policy_saving": at}, "test")
        db.execute("insert into activations (policy, number, version, positions) values ('saving', 1, 1, '{}')")
        every = calls(world, db, plain)
        for table in TABLES:
            db.execute(f"alter table {table} set (autovacuum_enabled = off)".encode())
        for _ in range(8):
            for call in every.values():
                call()
        cost: dict[str, dict[str, tuple[int, frozenset[str]]]] = {}
        begin = 1
        for number in (FEW, MANY):
            for statement in BACKLOG:
                db.execute(statement.encode(), {"from": begin, "to": number})
            begin = number + 1
            for name in (f"{number}", f"{number} analyzed"):
                for call in every.values():
                    call()
                cost[name] = {name: touched(db, plain, call) for name, call in every.items()}
                db.execute("analyze outbox, parked")
    print(cost)
    for name in every:
        first, small, stale, analyzed = (one[name] for one in cost.values())
        many = [analyzed] if name in PLANNED_ANEW else [stale, analyzed]
        most = queries.MOST_PARKED if name in PLANNED_ANEW else 2 * max(first[0], small[0]) + 20
        assert all(blocks <= most for blocks, _ in many), name
        assert all(plan.isdisjoint(TABLES) for _, plan in many), f"{name} scans a table"
        assert name in PLANNED_ANEW or {plan for _, plan in many} == {first[1], small[1]}, f"the plans of {name} differ"


def calls(world: Settings, db: Connection, plain: Connection) -> dict[str, Callable[[], object]]:
    agent, numbers = Agent(db, world, policy(saving)), count(1)
    mine = {("saving", partition) for partition in range(4)}
    balances = all_views()["balances"]
    page = page_query(balances, "balances_v2", world.events_topic, Page((), order_of(balances), 10))

    def batch() -> None:
        """Wishes, and the outcome of another one."""
        number = next(numbers)
        answer = outcome(id_of("saving", "accounts/a", number - 1, 0), "accounts/savings", Deposit(cents=1, on=DAY))
        assert agent.apply({0: [deposited(number)], 1: [answer]}) is CommitStatus.APPLIED

    def undone(call: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            with db.transaction(force_rollback=True):
                call()

        return work

    return {
        "read what is to be sent": lambda: [*read_unsent(db, mine, AT.replace(year=2100), 10)],
        "mark 10 commands as sent": undone(lambda: mark_sent(db, [f"saving~{5 * n:08}" for n in range(1, 11)])),
        "record that Kafka refuses one": undone(lambda: refuse(db, "saving~00000005", "too large")),
        "write a batch of wishes and outcomes": batch,
        "look at views (API, exporter)": lambda: plain.execute(VIEWS).fetchall(),
        "read a page of a view": lambda: plain.execute(page.text, page.parameters).fetchall(),
    }


def touched(db: Connection, other: Connection, call: Callable[[], object]) -> tuple[int, frozenset[str]]:
    """Blocks of the tables and their indexes that a call touches, and what it scans: indexes, and tables as a whole."""

    def now() -> tuple[int, dict[str, int]]:
        for connection in (other, db):
            connection.execute("select pg_stat_force_next_flush()")
        found = db.execute(
            "select indexrelname, idx_scan from pg_stat_user_indexes where relname = any(%(tables)s)"
            " union all select relname, seq_scan from pg_stat_user_tables where relname = any(%(tables)s)"
            " union all select '', sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::bigint"
            " from pg_statio_user_tables where relname = any(%(tables)s)",
            {"tables": TABLES},
        )
        scans: dict[str, int] = dict(found.fetchall())
        return scans.pop(""), scans

    blocks, scans = now()
    call()
    until(lambda: now()[0] > blocks, "the session of the call has reported it")
    blocks_then, scans_then = now()
    return blocks_then - blocks, frozenset(name for name, number in scans_then.items() if number > scans[name])
