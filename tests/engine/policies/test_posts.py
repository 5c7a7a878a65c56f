"""make test + test-all: a database and no process; a million rows take longer.

Posts: what is claimed and recorded of them by several processes at once, and what it costs however many wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import pytest
from psycopg.errors import LockNotAvailable

from infra.database.connect import Connection, connect
from infra.settings import Settings
from policies.engine import operate, posts
from policies.engine.operate import Which, retry, wishes
from policies.engine.posts import Lane, PendingPost
from tests.engine.policies.test_webhooks import (
    START,
    Receiver,
    posting,
    put,
    receiver,  # noqa: F401  # a fixture
    waiting,
    with_endpoints,
    written,
)
from tools.testing.waiting import until

LATER = START + timedelta(hours=1)


@pytest.fixture
def db(world: Settings) -> Iterator[Connection]:
    with connect(world, "test", by_key=True, statement_timeout_ms=0) as connection:
        yield connection


def claimed(db: Connection, now: datetime = START, lease_s: float = 60) -> tuple[Lane, PendingPost]:
    """The only lane that is due."""
    [(lane, post)] = posts.claim(db, "crm", 4, lease_s, now)
    assert post
    return lane, post


def test_a_lane_is_claimed_once_until_its_lease_ends(world: Settings, db: Connection) -> None:
    put(world, "crm", "boxes/1", [1, 2])
    lane, post = claimed(db)
    assert posts.claim(db, "crm", 4, 60, START + timedelta(seconds=59)) == []
    again, same = claimed(db, START + timedelta(seconds=60))
    assert (again[:3], same) == (lane[:3], post)


RECORDS: dict[str, Callable[[Connection, Lane, PendingPost], PendingPost | None]] = {
    "delivered": posts.delivered,
    "dead": lambda db, lane, post: posts.bury(db, lane, post, "gone: it answered 410")[1],
    "failed": lambda db, lane, post: posts.try_later(db, lane, post, 3600, LATER),
    "given back": lambda db, lane, _: posts.release(db, lane, START),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_process_that_wakes_after_its_lease_does_not_disturb_the_next_one(
    world: Settings, db: Connection, record: Callable[[Connection, Lane, PendingPost], PendingPost | None]
) -> None:
    put(world, "crm", "boxes/1", [1, 2])
    lane, post = claimed(db)
    taken, _ = claimed(db, LATER)
    assert record(db, lane, post) is None, "it does not go on"
    assert posts.claim(db, "crm", 4, 60, LATER) == [], "the lane is the other one's"
    assert set(waiting(world).values()) == {(0, None)}
    second = posts.delivered(db, taken, post)
    assert second
    assert second.version == 2


def test_a_lane_does_not_end_while_a_batch_writes_into_it(world: Settings, db: Connection) -> None:
    put(world, "crm", "boxes/1", [1])
    lane, post = claimed(db)
    assert posts.delivered(db, lane, post) is None
    with connect(world, "batch") as batch, batch.transaction():
        written(batch, "crm", "boxes/1", [2])
        with pytest.raises(LockNotAvailable):
            posts.release(db, lane, START)
        assert posts.claim(db, "crm", 4, 60, LATER) == [], "nobody waits for the batch"
    posts.release(db, lane, START)
    lane, post = claimed(db)
    assert post.version == 2
    assert posts.delivered(db, lane, post) is None
    posts.release(db, lane, START)
    assert posts.endpoints(db) == set()


def test_a_lane_whose_first_post_was_tried_in_vain_and_dropped_goes_on_at_once(world: Settings, db: Connection) -> None:
    [first, _] = put(world, "crm", "boxes/1", [1, 2])
    [(lane, post)] = posts.claim(db, "crm", 1, 60)
    assert post
    posts.try_later(db, lane, post, 86_400)
    assert posts.claim(db, "crm", 1, 60) == []
    posts.drop(db, [first])
    [(_, following)] = posts.claim(db, "crm", 1, 60)
    assert following
    assert following.version == 2


def test_a_record_does_not_wait_for_an_operator(world: Settings, db: Connection) -> None:
    """One who drops the post that is just being delivered."""
    [ident, _] = put(world, "crm", "boxes/1", [1, 2])
    lane, post = claimed(db)
    with connect(world, "operator") as operator, operator.transaction():
        posts.drop(operator, [ident])
        for record in RECORDS.values():
            with pytest.raises(LockNotAvailable):
                record(db, lane, post)
    second = posts.delivered(db, lane, post)
    assert second
    assert second.version == 2


# ── cost against backlog ──

FEW, MANY = 1_000, 1_000_000
STREAM = "case mod(n, 2) when 0 then 'boxes/0' else 'boxes/' || lpad(n::text, 8, '0') end"
BACKLOG = (
    "insert into posts (id, policy, stream, version, number, endpoint, body, wished_at)"
    f" select 'letters~' || lpad(n::text, 8, '0'), 'letters', {STREAM}, n, 0, 'crm', '{{}}', %(at)s"
    " from generate_series(%(from)s::int, %(to)s::int) n",
    f"insert into lanes select 'crm', 'letters', {STREAM}, %(at)s from generate_series(%(from)s::int, %(to)s::int) n"
    " where n = 2 or mod(n, 2) = 1",
)
"""Half of them in one lane, the other half in a lane each."""


def calls(world: Settings, db: Connection) -> dict[str, Callable[[], object]]:
    """All that is asked of the tables again and again, and the listing."""

    def first() -> tuple[Lane, PendingPost]:
        return posts.claim(db, "crm", 1, 60, START)[0]  # type: ignore[return-value]

    lane, post = Lane("crm", "letters", "boxes/0", START), PendingPost("letters~00000002", "{}", 0, 2, 0)
    return {
        "endpoints with posts": lambda: posts.endpoints(db),
        "claim 4 lanes": lambda: posts.claim(db, "crm", 4, 60, START),
        "record a delivery": lambda: posts.delivered(db, lane, post),
        "record a dead letter": lambda: posts.bury(db, lane, post, "gone: it answered 410"),
        "record a failure": lambda: posts.try_later(db, lane, post, 60, START),
        "give a lane back": lambda: posts.release(db, lane, START),
        "write a batch of 10 posts": lambda: written(db, "crm", "boxes/0", range(10_000_001, 10_000_011)),
        "`outbox list`": lambda: wishes(world, Which(alive=True), limit=100),
        "`outbox list --dead`": lambda: wishes(world, Which(), limit=100),
        "`outbox list --endpoint`": lambda: wishes(world, Which(alive=True, endpoint="crm"), limit=100),
    }


def blocks(db: Connection, call: Callable[[], object]) -> int:
    """Blocks of the tables and their indexes that a call touches; what it wrote is undone."""

    def touched() -> int:
        db.execute("select pg_stat_force_next_flush()")
        [(count,)] = db.execute(
            "select sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::int"
            " from pg_statio_user_tables where relname in ('posts', 'lanes')"
        )
        return int(count)

    before = touched()
    with db.transaction(force_rollback=True):
        call()
    # a session of its own may report in parts, the last one when it ends
    until(lambda: list(db.execute(_LISTING)) == [(0,)], "the session of a listing has ended")
    until(lambda: touched() > before, "the session of the call has reported it")
    return touched() - before


_LISTING = (
    "select count(*) from pg_stat_activity where application_name = 'samefold outbox' and datname = current_database()"
)


def test_to_revive_posts_costs_as_much_however_many_were_revived_before(world: Settings, db: Connection) -> None:
    """With the plan of a table that was analyzed when all of it was dead letters."""
    db.execute("alter table posts set (autovacuum_enabled = off)")
    ids = [ident for number in range(40) for ident in put(world, "crm", f"boxes/{number}", range(1, 51))]
    db.execute("update posts set dead = 'gave-up: attempt 10'")
    db.execute("truncate lanes")
    db.execute("vacuum (full, analyze) posts")
    before = blocks(db, lambda: posts.revive(db, ids[-5:]))
    posts.revive(db, ids[:1_500])
    assert blocks(db, lambda: posts.revive(db, ids[-5:])) <= before + 50


def test_between_two_steps_of_a_retry_no_transaction_is_open(
    world: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be ended if a step were slow, and hold up vacuum while a million posts are changed."""
    monkeypatch.setattr(operate, "STEP", 1)
    put(world, "crm", "boxes/1", [1, 2])
    db.execute("update posts set dead = 'gave-up: attempt 10'")
    found: list[tuple[str, int]] = []

    def advance(_: int) -> None:
        query = "select state, count(*) from pg_stat_activity where application_name = 'samefold outbox' group by state"
        found.extend(db.execute(query))

    assert retry(world, Which(endpoint="crm"), advance) == (2, 0)
    assert found == [("idle", 2)] * 2


@pytest.mark.slow
def test_what_waits_for_a_dead_endpoint_costs_as_much_whether_it_is_a_thousand_or_a_million(
    world: Settings,
    db: Connection,
    receiver: Receiver,  # noqa: F811
) -> None:
    """With the plans that were made when the tables were empty: PostgreSQL keeps them until it analyzes a table."""
    for table in ("posts", "lanes"):
        db.execute(f"alter table {table} set (autovacuum_enabled = off)".encode())
    every = calls(world, db)
    for _ in range(8):
        for call in every.values():
            blocks(db, call)
    cost: dict[int, dict[str, int]] = {}
    begin = 1
    for number in (FEW, MANY):
        for statement in BACKLOG:
            db.execute(statement.encode(), {"at": START, "from": begin, "to": number})
        begin = number + 1
        db.execute("update lanes set claimed = true where stream = 'boxes/0'")
        for call in every.values():
            blocks(db, call)
        cost[number] = {name: blocks(db, call) for name, call in every.items()}
    print(cost)
    assert {name: (few, cost[MANY][name]) for name, few in cost[FEW].items() if cost[MANY][name] > 2 * few + 20} == {}
    settings = with_endpoints(world, crm="http://127.0.0.1:1/", good=receiver.url("good/ok"))
    with posting(settings, [3600.0] * 9):
        ids = put(world, "good", "boxes/1", range(1, 51))
        until(lambda: len(receiver.got("good")) == len(ids), "the healthy endpoint gets all of its posts")
