"""The judge can fail: what must not be in the log or in the database is found, and nothing else is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from infra.database.connect import connect
from infra.log.records import EventRecord
from infra.settings import Settings
from proofs.bank_oracle import Place
from proofs.chaos.judge import Judge
from proofs.chaos.ledger import Key, Ledger, Sent
from proofs.chaos.progress import Progress
from proofs.chaos.tail import Tail
from tests.engine import spine
from tests.engine.log import commit, opening

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
        ("update balances_v1 set cents = cents + 1", ["C: balances_v1"]),
        ("update streams_accounts_v1 set version = version + 1", ["C: streams_accounts_v1"]),
        ("update daily_totals_v1 set count = 2 * count where operation = 'deposit'", ["C: daily_totals_v1"]),
        ("delete from command_outcomes_v1 where command_id = 'w1'", ["C: command_outcomes_v1"]),
        (
            "insert into statement_v1 select (json_populate_record(t, '{\"line\": 9}')).* from statement_v1 t limit 1",
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


def test_void_records_have_no_effect() -> None:
    good = ledger_of([*GOOD, of(D2, 0, 3, 3, 2)])
    late = ledger_of([*GOOD, of(D2, 7, 3, 3, 2), None, of(D2, 0, 4, 3, 2), of(D2, 0, 3, 3, 2)])
    times = {"command_outcomes"}  # which hold the record's time
    assert {v: r for v, r in good.lines.items() if v not in times} == {
        v: r for v, r in late.lines.items() if v not in times
    }
    assert late.readers[0].void == 3
    assert good.lines["balances"] == {("ada",): "ada\t110\t100\t2026-01-01\t2026-01-02\t2\t\t0"}
