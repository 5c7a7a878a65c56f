"""make test + test-all: a log is quick to judge, a database is not. The judge can fail: it finds what must not be, and no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from infra.database.connect import connect
from infra.log import topics
from infra.log.records import Command, EventRecord
from infra.settings import Settings
from policies.engine.policy import discover
from proofs.bank_oracle import Place
from proofs.chaos.judge import Judge
from proofs.chaos.ledger import Key, Ledger, Sent
from proofs.chaos.policy_judge import PolicyJudge
from proofs.chaos.tail import Progress, Tail
from tests.engine import spine
from tests.engine.api.api import agent
from tests.engine.log import commit, opening
from tests.engine.policies.test_policies import running
from tools.dev.stack import Stack
from tools.testing.fixtures import world_of
from tools.testing.waiting import until

ADA = "accounts/ada"
SENT = [
    Sent(ADA, "open", "OpenAccount", 100, "2026-01-01"),
    Sent(ADA, "d1", "Deposit", 50, "2026-01-02"),
    Sent(ADA, "d2", "Deposit", 60, "2026-01-02"),
    Sent(ADA, "w1", "Withdraw", 999, "2026-01-03"),
]


# ── the database, changed by hand ──


@pytest.fixture(scope="module")
def transferred(stack: Stack, migrated: str) -> Iterator[Settings]:
    """Four transfers have ended, and one waits for its handler."""
    with world_of(stack, migrated) as world:
        spine.set_up(world)
        accounts = [spine.open_account(name) for name in ("a", "b", "c")]
        more = [spine.deposit("a", "d1", 100), spine.command("accounts/c", "close", "CloseAccount", on="2026-01-03")]
        asked = [
            transfer("t1", "a", "b"),
            transfer("t2", "b", "a", 999),
            transfer("t3", "a", "c"),
            transfer("t4", "b", "b"),
        ]
        with running(world, *discover().values()), agent(world):
            with spine.handler(world):
                spine.send(world, *accounts, *more)
                until(lambda: len(spine.commits(world)) == 5, "all are decided")
                spine.send(world, *asked)
                left = "select array_agg(type order by type) from outbox"
                until(lambda: spine.scalar(world, left) == ["GiveUp"] * 3, "all have ended")
            spine.send(world, transfer("t5", "a", "b"))
            with spine.handler(world):
                until(lambda: spine.scalar(world, left) == ["GiveUp"] * 4, "all have ended")
            ends = topics.describe(world, world.events_topic).end.values()
            folded = "select sum(next_offset) from positions where agent = 'core'"
            until(lambda: spine.scalar(world, folded) == sum(ends), "all is folded")
        yield world


def transfer(name: str, source: str, target: str, cents: int = 10) -> Command:
    asked: dict[str, Any] = {"source": source, "target": target, "cents": cents, "on": "2026-01-04"}
    return spine.command(f"transfers/{name}", f"ask-{name}", "RequestTransfer", **asked)


ONE = 'insert into outbox select (json_populate_record(o, \'{"id": "transfers~other"}\')).* from outbox o where '
LINE = "insert into statement_v2 select (json_populate_record(t, '{\"line\": 9}')).* from statement_v2 t limit 1"
LACKS, HAS = "P: the outbox lacks", "P: the outbox has"
T1 = "stream = 'transfers/t1'"
LONGEST = (
    "agent = 'core' and partition = (select partition from positions order by next_offset desc, partition limit 1)"
)
CHANGES: list[tuple[str, list[str]]] = [
    ("select 1", []),
    ("update balances_v2 set cents = cents + 1", ["C: balances_v2"]),
    ("update streams_accounts_v3 set version = version + 1", ["C: streams_accounts_v3"]),
    ("update daily_totals_v1 set count = 2 * count where operation = 'deposit'", ["C: daily_totals_v1"]),
    ("delete from command_outcomes_v3 where code is not null", ["C: command_outcomes_v3"]),
    (LINE, ["C: statement_v2"]),
    (f"update positions set seq = seq + 1 where {LONGEST}", ["C: the position of partition"]),
    (f"update positions set next_offset = next_offset + 1 where {LONGEST}", ["C: partition"]),
    ("update transfers_v1 set state = 'failed' where transfer = 't1'", ["C: transfers_v1"]),
    (f"delete from outbox where {T1}", [LACKS]),
    (f"{ONE} {T1}", [HAS]),
    (f"update outbox set body = '{{\"a\":1}}' where {T1}", [LACKS, HAS]),
    (f"update outbox set dead = 'refused: failed' where {T1}", [LACKS, HAS]),
    ("update outbox set sent_at = now()", []),
    ("update activations set version = 3 where policy = 'transfers'", ["P: activations are not"]),
    ("update activations set positions = jsonb_set(positions, '{0}', '[1,-1,0,-1]')", ["P: activations are not"]),
    ("delete from activations where policy = 'transfers'", []),  # copied from the topic again
    (
        "update positions set seq = seq + 1 where agent = 'policy_transfers' and partition = 1",
        ["P: the position of transfers"],
    ),
    ("update outbox set due = now() - interval '1 h'", ["P: the outbox is not empty"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "found"), CHANGES, ids=[change[:60] for change, _ in CHANGES])
def test_what_was_changed_in_the_database_is_found(
    change: str, found: list[str], transferred: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is taken back behind it."""
    monkeypatch.setattr("proofs.chaos.judge.LOG_S", 0.1)
    ends = topics.describe(transferred, transferred.events_topic).end
    with connect(transferred, "test") as db, Tail(transferred) as tail:
        until(lambda: all(len(tail.records[one]) == end for one, end in ends.items()), "the tail has all of the log")
        tables = [name for (name,) in db.execute("select tablename from pg_tables where schemaname = 'public'")]
        kept = [name for name in tables if re.search(rf"\b{name}\b", change)]
        for table in kept:
            db.execute(f"create temp table kept_{table} as select * from {table}".encode())
        db.execute(change.encode())
        judge = Judge(transferred, tail, None)
        try:
            judge.look(at_rest=True)
        finally:
            for table in kept:
                db.execute(f"delete from {table}".encode())
                db.execute(f"insert into {table} select * from kept_{table}".encode())
    assert [violation[: len(start)] for violation, start in zip(judge.violations, found, strict=True)] == found
    is_compared = found != ["C: partition"]  # else the position is beyond the log
    assert (judge.seen.snapshots, judge.seen.rows > 0) == (int(is_compared), is_compared)


@pytest.mark.slow
def test_a_position_that_goes_back_is_found(world: Settings) -> None:
    spine.set_up(world)
    with connect(world, "test") as db, Progress(world) as progress:
        db.execute("update positions set next_offset = 7, epoch = 5, seq = 1, command_offset = 3 where partition = 2")
        until(lambda: progress.places[2] == Place(7, 5, 1, 3), "it is seen")
        for number, column in enumerate(("next_offset", "epoch", "command_offset")):
            assert len(progress.violations) == number
            db.execute(f"update positions set {column} = {column} - 1 where partition = 2".encode())
            until(lambda so_far=number: len(progress.violations) > so_far, "it is found")  # type: ignore[misc]


# ── the log ──


def event(kind: str, on: str, **data: Any) -> Any:
    return EventRecord(kind, msgspec.Raw(msgspec.json.encode({**data, "on": on})))


def of(sent: Sent, epoch: int, seq: int, version: int, offset: int, **but: Any) -> bytes:
    """The commit that accepts what was sent."""
    kind = {"OpenAccount": "AccountOpened", "Deposit": "MoneyDeposited", "Withdraw": "MoneyWithdrawn"}[sent.type]
    amount = {"overdraft_limit" if sent.type == "OpenAccount" else "cents": sent.cents}
    made: dict[str, Any] = {
        "stream": sent.stream,
        "version": version,
        "events": [event(kind, sent.on, **amount)],
        "command_id": sent.id,
        "command_offset": offset,
    }
    return commit(epoch, seq, **made | but)


OPEN, D1, D2, W1 = SENT
GOOD = [opening(), of(OPEN, 0, 1, 1, 0), of(D1, 0, 2, 2, 1)]


def ledger_of(log: list[bytes | None]) -> Ledger:
    sent: dict[Key, Sent] = {(one.stream, one.id): one for one in SENT}
    ledger = Ledger(1, sent)
    for offset, value in enumerate(log):
        ledger.take(0, offset, 1000 * offset, value)
    return ledger


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        ([], []),
        ([of(D1, 0, 3, 3, 2)], ["A"]),
        ([of(D2, 0, 3, 4, 2)], ["B"]),
        ([of(W1, 0, 3, 3, 2)], ["B"]),
        ([of(D2._replace(id="d9"), 0, 3, 3, 2)], ["B"]),
        ([of(D2, 0, 3, 2, 2, events=[])], ["B"]),
        ([of(D2, 0, 3, 3, 1)], ["G"]),
        ([of(D2, 0, 4, 3, 2)], []),  # after a lost record: void
        ([of(D2, 7, 3, 3, 2)], []),  # of another epoch: void
        ([None, b"garbage", of(D2, 0, 3, 3, 2)], []),
        ([opening(), of(D1, 0, 3, 3, 2), of(D2, 3, 1, 3, 2)], []),  # a zombie's: void
    ],
)
def test_what_the_log_must_never_show_is_found(log: list[bytes | None], wrong: list[str]) -> None:
    assert [violation[0] for violation in ledger_of([*GOOD, *log]).violations] == wrong


def moved(seq: int, version: int, kind: str, **more: Any) -> bytes:
    """A commit that a policy led to."""
    made = commit(0, seq, stream=ADA, version=version, events=[event(kind, "2026-01-03", cents=5, **more)])
    return made[:-1] + b',"depth":1,"correlation_id":"ask"}'


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        ([moved(3, 3, "MoneyWithdrawn", hold="t1"), moved(4, 4, "MoneyDeposited")], []),
        (
            [moved(3, 3, "MoneyWithdrawn", hold="t1"), moved(4, 4, "MoneyWithdrawn", hold="t2")],
            ["P: transfers have more debits"],
        ),
        ([moved(3, 3, "MoneyDeposited"), moved(4, 4, "MoneyReturned", hold="t1")], ["P: transfers have more credits"]),
    ],
)
def test_a_transfer_that_moves_money_twice_is_found(log: list[bytes | None], wrong: list[str]) -> None:
    bank = Ledger(1, None)
    for offset, value in enumerate([*GOOD, *log]):
        bank.take(0, offset, 1000 * offset, value)
    judge = PolicyJudge(Settings(partitions=1), cast(Tail, None))
    judge.once(bank)
    assert [violation[: len(start)] for violation, start in zip(judge.violations, wrong, strict=True)] == wrong
