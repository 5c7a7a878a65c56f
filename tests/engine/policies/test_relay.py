"""make test: stores without processes.

The relay on the real stores: what it appends to `commands`, when, in which order, and what it marks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Self

import msgspec
import pytest

from commands.intake import fingerprint_of
from infra.database.connect import Connection, connect
from infra.log import clients, topics
from infra.log.records import Command, decode_command
from infra.log.topics import TopicChanged
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
from policies.engine import relay as relay_engine
from policies.engine import sender as sender_engine
from policies.engine.operate import Which, drop
from policies.engine.outbox import CHANNEL
from policies.engine.relay import Relay, read_unsent
from policies.engine.sender import UnsentCommand
from tests.engine.spine import beside, handler, open_account, project, records_of, scalar, send, set_up
from tools.migrations.migrate import upgrade
from tools.testing.waiting import DEADLINE_S, until

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


class Killed(BaseException):
    """In place of SIGKILL."""


@pytest.fixture
def db(world: Settings) -> Iterator[Connection]:
    set_up(world)
    with connect(world, "test") as connection:
        yield connection


def all_of(world: Settings) -> set[tuple[str, int]]:
    return {("saving", partition) for partition in range(world.partitions)}


@contextmanager
def relay(world: Settings, name: str = "r1") -> Iterator[list[BaseException]]:
    """A relay that looks and marks often; what ended it."""
    running = Relay(world, name, lambda: all_of(world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_engine, "LOOK_S", 0.1)
        patch.setattr(sender_engine, "MARK_S", 0.1)
        with beside(running.run, running.stop, name) as errors:
            yield errors


def wish(
    db: Connection,
    ident: str,
    *,
    stream: str = "accounts/a",
    version: int = 1,
    target: str = "accounts/b",
    due: timedelta | None = None,
    body: str = "{}",
    kind: str = "Deposit",
    partition: int = 0,
    otherwise: str | None = None,
) -> None:
    db.execute(
        "insert into outbox (id, policy, kind, partition, stream, version, number, target, type, body, due, depth, "
        "correlation_id, causation_id, otherwise_type, otherwise_body) "
        "values (%s, 'saving', 'send', %s, %s, %s, 0, %s, %s, %s, %s, 1, 'c', 'c', %s, '{}')",
        (ident, partition, stream, version, target, kind, body, None if due is None else NOW + due, otherwise),
    )


def sent(world: Settings) -> list[str]:
    """Ids of the commands in the topic, by partition and offset."""
    return [decode_command(record.value or b"").id for record in records_of(world, world.commands_topic)]


def unmarked(world: Settings) -> int:
    count: int = scalar(world, "select count(*) from outbox where sent_at is null and dead is null")
    return count


def test_what_was_read_is_sent_before_it_is_read_again(
    world: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes a while where much waits, and each batch of each policy notifies."""
    reads = list[float]()

    def slow(*arguments: Any) -> list[UnsentCommand]:
        reads.append(0.2)
        time.sleep(reads[-1])
        return [*read_unsent(*arguments)]

    monkeypatch.setattr(relay_engine, "read_unsent", slow)
    for number in range(200):
        wish(db, f"{number}", version=number)
    with relay(world):
        while unmarked(world):
            db.execute(f"notify {CHANNEL}")
    assert sent(world) == [f"{number}" for number in range(200)]
    assert len(reads) < 100, "one for each command"


def test_timers_go_by_the_databases_clock(world: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fast(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(hours=2)

    monkeypatch.setattr(relay_engine, "datetime", Fast)
    wish(db, "in an hour", due=HOUR)
    one = Relay(world, "r1", lambda: all_of(world))
    with beside(one.run, one.stop, "r1"):
        for number, ident in enumerate(["at once", "and again"], 2):
            wish(db, ident, version=number)
            db.execute(f"notify {CHANNEL}")
            until(lambda ident=ident: ident in sent(world), "it is sent")  # type: ignore[misc]
    assert sent(world) == ["at once", "and again"]


def test_late_timers_fire_at_once_in_order_and_once(world: Settings, db: Connection) -> None:
    for ident, due in (("second", -2 * HOUR), ("first", -3 * HOUR), ("third", -HOUR), ("later", HOUR)):
        wish(db, ident, stream=f"accounts/{ident}", due=due)
    with relay(world):
        until(lambda: unmarked(world) == 1, "all that are due are marked")
        assert sent(world) == ["first", "second", "third"]
        db.execute("update outbox set due = now() where id = 'later'")
        until(lambda: unmarked(world) == 0, "the last one is marked")
    assert sent(world) == ["first", "second", "third", "later"]


def test_commands_of_one_stream_for_another_are_sent_in_order(world: Settings, db: Connection) -> None:
    for version in range(50, 0, -1):
        wish(db, f"{version}", version=version)
    with relay(world):
        until(lambda: unmarked(world) == 0, "all are marked")
    assert sent(world) == [f"{version}" for version in range(1, 51)]
    commands = [decode_command(record.value or b"") for record in records_of(world, world.commands_topic)]
    assert {one.by for one in commands} == {"policy:saving"}
    assert {fingerprint_of(one) for one in commands} == {
        fingerprint_of(Command("w", "accounts/b", "Deposit", msgspec.Raw(b"{}")))
    }


def test_nothing_is_sent_before_handlers_decide_all_commands_of_this_code(
    world: Settings, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("delete from command_types where (context, type) = ('accounts', 'ReturnMoney')")
    wish(db, "w")
    with relay(world):
        says = "no handler that decides these has run yet, start those first: accounts.ReturnMoney"
        until(lambda: says in caplog.text, "it says for what it waits")
        assert sent(world) == []
        db.execute("insert into command_types (context, type) values ('accounts', 'ReturnMoney')")
        until(lambda: unmarked(world) == 0, "it is marked")


def test_a_command_that_a_newer_release_wished_waits_for_handlers_that_decide_it_and_so_do_those_behind_it(
    world: Settings, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """That release's policies were started too early, and stopped again."""
    wish(db, "before", version=1)
    wish(db, "newer", version=2, kind="Deposit/2")
    wish(db, "behind", version=3)
    wish(db, "beside", partition=1, stream="accounts/c")
    with relay(world):
        until(lambda: unmarked(world) == 2, "the others are marked")
        wish(db, "later", partition=1, stream="accounts/c", version=2)
        until(lambda: unmarked(world) == 2, "so are those that come meanwhile")
        assert sorted(sent(world)) == ["before", "beside", "later"]
        assert "no handler that decides these has run yet, start those first: accounts.Deposit/2" in caplog.text
        db.execute("insert into command_types (context, type) values ('accounts', 'Deposit/2')")
        until(lambda: unmarked(world) == 0, "none is left")
    assert sent(world)[-2:] == ["newer", "behind"]


def test_a_full_page_behind_a_command_that_nobody_decides_is_told(
    world: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_engine, "MOST", 2)
    for version in range(1, 4):
        wish(db, f"{version}", version=version, kind="Deposit/2")
    one = Relay(world, "r1", lambda: {("saving", 0)})
    with beside(one.run, one.stop, "r1"):
        until(lambda: "start those first: accounts.Deposit/2" in caplog.text, "it says for what it waits")


def test_what_waits_behind_a_command_that_nobody_decides_goes_on_when_that_is_dropped(
    world: Settings, db: Connection
) -> None:
    for version, kind in enumerate(("Deposit", "Deposit/2", "Deposit"), 1):
        wish(db, f"{version}", version=version, kind=kind)
    with relay(world):
        until(lambda: unmarked(world) == 2, "the first one is marked")
        assert drop(world, Which(ids=["2"])) == 1
        until(lambda: sent(world) == ["1", "3"], "the last one is sent")


def test_what_no_page_had_room_for_is_read_at_once(
    world: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a timer, which has a page of its own."""
    monkeypatch.setattr(relay_engine, "MOST", 10)
    for version in range(1, 31):
        wish(db, f"{version:03}", version=version)
    wish(db, "timer", stream="accounts/t", due=-HOUR)
    mine = all_of(world)
    one, asked = Relay(world, "r1", lambda: mine), list[UnsentCommand]()
    monkeypatch.setattr(one, "_send", asked.append)
    assert one._read(db, mine) == relay_engine.PAGE_S
    assert {row.id for row in asked} == {"001", "timer"}


def test_a_command_that_is_too_large_is_a_dead_letter_and_the_rest_goes_on(world: Settings, db: Connection) -> None:
    wish(db, "large", version=1, body=f'{{"text": "{"x" * (world.max_commit_bytes + 200_000)}"}}')
    wish(db, "small", version=2)
    with relay(world):
        until(lambda: unmarked(world) == 0, "none is left")
    assert sent(world) == ["small"]
    dead: str = scalar(world, "select dead from outbox where id = 'large'")
    assert dead.startswith("refused-by-kafka: ")


def test_the_otherwise_of_a_command_that_is_too_large_follows(world: Settings, db: Connection) -> None:
    """As if a handler had rejected it, with that code."""
    body = f'{{"text": "{"x" * (world.max_commit_bytes + 200_000)}"}}'
    wish(db, "large", stream="transfers/1", body=body, otherwise="FailTransfer")
    with relay(world):
        until(lambda: sent(world) == ["large~otherwise"], "it is sent")
    [record] = records_of(world, world.commands_topic)
    command = decode_command(record.value or b"")
    assert (command.stream, command.type, bytes(command.data)) == (
        "transfers/1",
        "FailTransfer",
        b'{"refusal":"refused-by-kafka"}',
    )


def test_of_two_releases_that_have_all_partitions_one_sends(world: Settings, db: Connection) -> None:
    for version in range(1, 301):
        wish(db, f"{version:03}", version=version, partition=version % world.partitions, stream=f"accounts/{version}")
    with relay(world, name="old"), relay(world, name="new"):
        until(lambda: unmarked(world) == 0, "all are marked")
        wish(db, "last")
        until(lambda: unmarked(world) == 0, "so is what comes meanwhile")
    assert sorted(sent(world)) == [*(f"{version:03}" for version in range(1, 301)), "last"]


def test_what_a_killed_relay_held_another_one_sends_when_the_lease_has_ended(world: Settings, db: Connection) -> None:
    db.execute(
        "insert into relay_leases select 'saving', p, 'killed', now() + interval '1 s' from generate_series(0, %s) p",
        [world.partitions - 1],
    )
    wish(db, "w")
    with relay(world):
        until(lambda: unmarked(world) == 0, "it is marked")
        assert scalar(world, "select count(*) from relay_leases where until < now()") == 0
    assert scalar(world, "select count(*) from relay_leases") == 0, "one that stops gives them up at once"


def test_commands_that_are_sent_at_once_and_timers_do_not_crowd_each_other_out(world: Settings, db: Connection) -> None:
    for number in range(9):
        wish(db, f"at once {number}", version=number)
        wish(db, f"timer {number}", version=number, due=timedelta(seconds=number - 9))
    found = [row.id for row in read_unsent(db, all_of(world), NOW, 2)]
    assert found == ["at once 0", "at once 1", "timer 0", "timer 1"]


def test_what_was_not_marked_is_sent_again_after_a_kill(
    world: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(point: Point) -> None:
        if point == "wishes to be marked":
            raise Killed

    monkeypatch.setattr(faultpoints, "hook", kill)
    wish(db, "w")
    with relay(world) as errors:
        until(lambda: bool(errors), "the relay is killed")
        assert isinstance(errors.pop(), Killed)
    assert (sent(world), unmarked(world)) == (["w"], 1)
    monkeypatch.setattr(faultpoints, "hook", None)
    with relay(world, name="r2"):
        until(lambda: unmarked(world) == 0, "it is marked")
    assert sent(world) == ["w", "w"]


def test_commands_that_kafka_does_not_take_wait_in_the_outbox_not_in_memory(
    world: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_engine, "MOST", 10)
    monkeypatch.setattr(relay_engine, "MOST_KNOWN", 30)
    for version in range(1, 101):
        wish(db, f"{version:03}", version=version, target=f"accounts/{version}")
    mine = all_of(world)
    one, asked = Relay(world, "r1", lambda: mine), list[UnsentCommand]()
    monkeypatch.setattr(one, "_send", asked.append)
    for _ in range(20):
        one._read(db, mine)
    assert [row.id for row in asked] == [f"{version:03}" for version in range(1, 31)]
    for row in asked[:]:
        one._sender.acknowledged(row, 0)
    one._sender.marked([row.id for row in asked])
    db.execute("update outbox set sent_at = now() where id <= '030'")
    for _ in range(20):
        one._read(db, mine)
    assert len(asked) == 60


@pytest.mark.parametrize("due", ["null::timestamptz", "now() - interval '1 hour'"], ids=["at-once", "timers"])
def test_a_page_is_read_without_the_rest_however_many_wait(world: Settings, due: str) -> None:
    """Planned when the outbox was empty, as in a process that has run for a while."""
    upgrade(world)
    mine, until_then = all_of(world), datetime.now(UTC)

    def read(db: Connection) -> int:
        [(rows,)] = db.execute(
            "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relname = 'outbox'"
        )
        return int(rows)

    with connect(world, "test", by_key=True) as db:
        db.execute("alter table outbox set (autovacuum_enabled = off)")
        db.execute("vacuum analyze outbox")
        for _ in range(12):
            assert not [*read_unsent(db, mine, until_then, 10)]
        db.execute(
            "insert into outbox (id, policy, kind, partition, stream, version, number, target, type, body, depth, "
            "correlation_id, causation_id, due) select 'saving~' || n, 'saving', 'send', n %% 4, 'accounts/' || n, n, 0, "
            f"'accounts/x', 'Deposit', '{{}}', 1, 'c', 'c', {due} from generate_series(1, 20000) n",
            [],
        )
        for _ in range(2):
            with db.transaction():
                before = read(db)
                assert len([*read_unsent(db, mine, until_then, 10)]) == 10
                assert read(db) - before <= 10 * len(mine)
            db.execute("analyze outbox")


def test_a_recreated_topic_of_commands_is_refused_by_name(world: Settings, db: Connection) -> None:
    with handler(world):
        send(world, open_account("b"))
        until(lambda: project(world) > 0, "the log has an opening, and the agent has read it")
    admin = clients.admin(world)  # its futures end with it
    admin.delete_topics([world.commands_topic])[world.commands_topic].result(30)
    until(lambda: world.commands_topic not in admin.list_topics(timeout=DEADLINE_S).topics, "it is gone")
    topics.ensure(world)
    wish(db, "w")
    with relay(world) as errors:
        until(lambda: bool(errors), "the relay ends")
        error = errors.pop()
    assert isinstance(error, TopicChanged)
    assert world.commands_topic in error.message
    assert (sent(world), unmarked(world)) == ([], 1)
