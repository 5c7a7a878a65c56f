"""The judge can fail: what must not be in the log or in the database is found, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from infra.database.connect import connect
from infra.dev.stack import Stack
from infra.log.records import Command, EventRecord
from infra.settings import Settings
from infra.testing.fixtures import world_of
from policies.engine.policy import discover
from proofs.bank_oracle import Place
from proofs.chaos.judge import Judge
from proofs.chaos.ledger import Key, Ledger, Sent
from proofs.chaos.policy_judge import PolicyJudge
from proofs.chaos.progress import Progress
from proofs.chaos.tail import Tail
from tests.engine import spine
from tests.engine.api.api import agent
from tests.engine.log import commit, opening
from tests.engine.policies.test_policies import running

pytestmark = pytest.mark.slow

ADA = "accounts/ada"
SENT = [
    Sent(ADA, "open", "OpenAccount", 100, "2026-01-01"),
    Sent(ADA, "d1", "Deposit", 50, "2026-01-02"),
    Sent(ADA, "d2", "Deposit", 60, "2026-01-02"),
    Sent(ADA, "w1", "Withdraw", 999, "2026-01-03"),
]


# ── the database, changed by hand ──


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("select 1", []),
        ("update balances_v2 set cents = cents + 1", ["C: balances_v2"]),
        ("update streams_accounts_v3 set version = version + 1", ["C: streams_accounts_v3"]),
        ("update daily_totals_v1 set count = 2 * count where operation = 'deposit'", ["C: daily_totals_v1"]),
        ("delete from command_outcomes_v3 where code is not null", ["C: command_outcomes_v3"]),
        (
            "insert into statement_v2 select (json_populate_record(t, '{\"line\": 9}')).* from statement_v2 t limit 1",
            ["C: stat"],
        ),
        ("update positions set seq = seq + 1 where next_offset > 3", ["C: the position of partition"]),
        ("update positions set next_offset = next_offset + 1 where next_offset > 3", ["C: partition"]),
    ],
)
def test_what_was_changed_in_the_database_is_found(
    change: str, found: list[str], world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proofs.chaos.judge.LOG_S", 0.5)
    spine.set_up(world)
    spine.send(
        world,
        spine.command(ADA, "open", "OpenAccount", overdraft_limit=100, on="2026-01-01"),
        *(spine.command(s.stream, s.id, s.type, cents=s.cents, on=s.on) for s in SENT[1:]),
    )
    with spine.handler(world):
        spine.until(lambda: len(spine.commits(world)) == len(SENT), "all are decided")
    spine.project(world)
    with connect(world, "test") as db:
        db.execute(change)
    with Tail(world) as tail:
        judge = Judge(world, tail, {(s.stream, s.id): s for s in SENT})
        judge.look()
    assert [violation[: len(start)] for violation, start in zip(judge.violations, found, strict=True)] == found
    is_compared = found != ["C: partition"]  # else the position is beyond the log
    assert (judge.seen.snapshots, judge.seen.rows > 0) == (int(is_compared), is_compared)


# ── policies, changed by hand ──


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
                spine.until(lambda: len(spine.commits(world)) == 5, "all are decided")
                spine.send(world, *asked)
                left = "select array_agg(type order by type) from outbox"
                spine.until(lambda: spine.scalar(world, left) == ["GiveUp"] * 3, "all have ended")
            spine.send(world, transfer("t5", "a", "b"))
            with spine.handler(world):
                spine.until(lambda: spine.scalar(world, left) == ["GiveUp"] * 4, "all have ended")
        yield world


def transfer(name: str, source: str, target: str, cents: int = 10) -> Command:
    asked: dict[str, Any] = {"source": source, "target": target, "cents": cents, "on": "2026-01-04"}
    return spine.command(f"transfers/{name}", f"ask-{name}", "RequestTransfer", **asked)


WISH = "from outbox o where stream = 'transfers/t1'"
ONE = f'insert into outbox select (json_populate_record(o, \'{{"id": "transfers~other"}}\')).* {WISH}'


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("select 1", []),
        ("delete from outbox where stream = 'transfers/t1'", ["P: the outbox lacks"]),
        (ONE, ["P: the outbox has"]),
        (
            "update outbox set body = '{\"a\":1}' where stream = 'transfers/t1'",
            ["P: the outbox lacks", "P: the outbox has"],
        ),
        (
            "update outbox set due = due + interval '1 s' where stream = 'transfers/t1'",
            ["P: the outbox lacks", "P: the outb"],
        ),
        ("update outbox set sent_at = now(), attempts = 7", []),
        ("update activations set version = 2 where policy = 'transfers'", ["P: activations are not"]),
        ("update activations set positions = jsonb_set(positions, '{0}', '[1,-1,0,-1]')", ["P: activations are not"]),
        ("delete from activations where policy = 'transfers'", []),  # copied from the topic again
        (
            "update positions set seq = seq + 1 where agent = 'policy_transfers' and partition = 1",
            ["P: the position of transf"],
        ),
        ("update transfers_v1 set state = 'failed' where transfer = 't1'", ["C: transfers_v1"]),
    ],
)
def test_what_was_changed_of_policies_is_found(change: str, found: list[str], transferred: Settings) -> None:
    judge = changed(transferred, change)
    assert [violation[: len(start)] for violation, start in zip(judge.violations, found, strict=True)] == found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("select 1", []),
        (
            "update outbox set due = now() - interval '1 h'",
            ["P: the outbox lacks", "P: the outbox has", "P: the outbox is not em"],
        ),
    ],
)
def test_what_is_left_at_rest_is_found(change: str, found: list[str], transferred: Settings) -> None:
    judge = changed(transferred, change, at_rest=True)
    assert [violation[: len(start)] for violation, start in zip(judge.violations, found, strict=True)] == found


def changed(world: Settings, change: str, *, at_rest: bool = False) -> Judge:
    """What a judge makes of it; taken back behind it."""
    backup = "create temp table kept_{0} as select * from {0}"
    with connect(world, "test") as db, Tail(world) as tail:
        tables = ("outbox", "activations", "positions", "transfers_v1")
        for table in tables:
            db.execute(backup.format(table))
        db.execute(change)
        judge = Judge(world, tail, None)
        try:
            judge.look(at_rest=at_rest)
        finally:
            for table in tables:
                db.execute(f"delete from {table}")
                db.execute(f"insert into {table} select * from kept_{table}")
    return judge


@pytest.mark.parametrize("column", ["next_offset", "epoch", "command_offset"])
def test_a_position_that_goes_back_is_found(world: Settings, column: str) -> None:
    spine.set_up(world)
    with connect(world, "test") as db, Progress(world) as progress:
        db.execute("update positions set next_offset = 7, epoch = 5, seq = 1, command_offset = 3 where partition = 2")
        spine.until(lambda: progress.places[2] == Place(7, 5, 1, 3), "it is seen")
        db.execute(f"update positions set {column} = {column} - 1 where partition = 2")
        spine.until(lambda: bool(progress.violations), "it is found")


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


def test_void_records_have_no_effect() -> None:
    good = ledger_of([*GOOD, of(D2, 0, 3, 3, 2)])
    late = ledger_of([*GOOD, of(D2, 7, 3, 3, 2), None, of(D2, 0, 4, 3, 2), of(D2, 0, 3, 3, 2)])
    times = {"command_outcomes"}  # which hold the record's time
    assert {v: r for v, r in good.lines.items() if v not in times} == {
        v: r for v, r in late.lines.items() if v not in times
    }
    assert late.readers[0].void == 3
    assert good.lines["balances"] == {("ada",): "ada\t110\t100\t2026-01-01\t2026-01-02\t2\t\t\t0"}
