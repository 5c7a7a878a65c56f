"""make test-all + prove: one such answer is enough to see that none is left out; the others come seldom, and take long.

A broker that refuses reads for a moment, or answers them from a later offset: no record is left out."""

from __future__ import annotations

import struct
import threading
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from infra.archive.whole_log import read_range
from infra.database.connect import connect
from infra.log import topics
from infra.log.clients import KafkaUnavailable
from infra.log.rule import START, Reading, read
from infra.settings import Settings
from projections.engine.rebuild.catch_up import Tail
from proofs.chaos.ground import Ground
from proofs.chaos.wires import Frame, KafkaWire
from tests.engine.spine import commits, deposit, handler, members, open_account, project, scalar, send, set_up
from tools.testing.waiting import until

OTHERS = pytest.mark.prove(part="chaos")

UNKNOWN_SERVER_ERROR = -1
WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
LONG_MS = 60_000


class Reads(KafkaWire):
    """What is asked of a topic's only partition, and answered."""

    topic_id = b""
    asked = 0
    """How often something was asked for, and the offset of the last time."""
    asked_from = 0
    refuses = threading.Event()
    refused = 0
    passes_over: int | None = None
    """The offset which, when it is asked for, is answered from the next one on; once."""

    def requests(self, data: bytes) -> Iterator[Frame]:
        for frame in super().requests(data):
            place = frame.data.find(self.topic_id) if frame.kind == "fetch" else -1
            if place < 0:
                yield frame
                continue
            # behind the id: one byte, the number of partitions; four, the partition; four, its epoch; eight, the offset
            at = place + len(self.topic_id) + 9
            (offset,) = struct.unpack_from(">q", frame.data, at)
            changed = bytearray(frame.data)
            if offset == self.passes_over:
                struct.pack_into(">q", changed, at, offset + 1)
                Reads.passes_over = None
            yield Frame(bytes(changed), frame.kind)
            Reads.asked_from = offset
            Reads.asked += 1

    def answers(self, data: bytes) -> Iterator[Frame]:
        for frame in super().answers(data):
            place = frame.data.find(self.topic_id) if frame.kind == "fetch answer" else -1
            if place < 0 or not self.refuses.is_set():
                yield frame
                continue
            changed = bytearray(frame.data)
            # behind the id: one byte, the number of partitions; four, the partition; two, its error
            struct.pack_into(">h", changed, place + len(self.topic_id) + 5, UNKNOWN_SERVER_ERROR)
            yield Frame(bytes(changed), frame.kind)
            Reads.refused += 1


@pytest.fixture
def world(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Set up, with one partition. Who goes through the proxy has its reads of commands changed."""
    for name in ("LOCK_TIMEOUT_MS", "STATEMENT_TIMEOUT_MS"):
        monkeypatch.setattr(f"infra.database.connect.{name}", LONG_MS)
    few = {"partitions": 1, "run_ahead": 2, "batch": 500, "idle_in_transaction_timeout_ms": LONG_MS}
    world = ground.world().model_copy(update=few)
    set_up(world)
    monkeypatch.setattr(ground.kafka, "wire", Reads)
    changes(world, world.commands_topic)
    Reads.passes_over = None
    Reads.refuses.clear()
    return world


def changes(world: Settings, topic: str) -> None:
    Reads.topic_id = urlsafe_b64decode(topics.describe(world, topic).id + "==")
    Reads.asked_from = 0


@contextmanager
def refused() -> Iterator[None]:
    """What is read of the topic while the block lasts. It begins when two reads were: the first answer may be taken for the end."""
    Reads.refused = 0
    Reads.refuses.set()
    until(lambda: Reads.refused >= 2, "two reads are refused")
    try:
        yield
    finally:
        Reads.refuses.clear()


def it_reads_again() -> None:
    """Four times: it stands at an end."""
    asked = Reads.asked
    until(lambda: Reads.asked > asked + 4, "it reads again")


def decided(world: Settings) -> list[str]:
    """The ids of the commands that are decided. What is folded makes room for more."""
    project(world)
    return [one.command_id for one in commits(world)]


@contextmanager
def serving(of: Settings, world: Settings) -> Iterator[None]:
    """A handler of these settings, which has decided its first command."""
    with handler(of):
        send(world, open_account("ada"))
        until(lambda: decided(world) == ["open-ada"], "serving")
        yield


@pytest.mark.slow
def test_no_command_is_left_out_where_an_error_came_right_before_a_pause(ground: Ground, world: Settings) -> None:
    """Librdkafka before 2.13.2 takes the error for a record, and would go on behind the next one (its issue 4844)."""
    with serving(ground.fronted(world), world):
        with ExitStack() as refusing:
            with connect(world, "test") as db, db.transaction():
                db.execute("lock table command_outcomes_v3 in access exclusive mode")
                send(world, deposit("ada", "first", 1))
                until(lambda: scalar(world, WAITING) == 1, "the handler asks the database")
                more = [deposit("ada", f"more {n}", 1) for n in range(6)]
                send(world, *more)
                until(lambda: Reads.asked_from == 8, "all that was sent is in the handler's memory")
                refusing.enter_context(refused())
                send(world, deposit("ada", "next", 1))
            # it finds the six and the error behind them; there is no room for all, so that it pauses
            until(lambda: len(decided(world)) >= 8, "what it has read is decided")
        until(lambda: decided(world)[-1] == "next", "it reads again")
    assert decided(world) == ["open-ada", "first", *(one.id for one in more), "next"]


@OTHERS
def test_no_command_is_left_out_where_an_error_came_right_before_a_rebalance(ground: Ground, world: Settings) -> None:
    """While it rebalances, the client pauses what the handler keeps."""
    with serving(ground.fronted(world), world):
        with refused():
            send(world, deposit("ada", "next", 1))
            with handler(world, "h2") as other:
                until(lambda: members(world, other.group) == {"h1", "h2"}, "another handler has joined")
        until(lambda: decided(world)[-1] == "next", "it reads again")
        send(world, deposit("ada", "last", 1))
        until(lambda: decided(world)[-1] == "last", "it goes on")
    assert decided(world) == ["open-ada", "next", "last"]


@pytest.mark.slow
def test_an_idle_handler_does_not_ask_for_what_is_beyond_the_end_after_an_error(
    ground: Ground, world: Settings
) -> None:
    """Where the error counts as a record, it does at the next rebalance, if its first answer comes soon: hence five of them."""
    with serving(ground.fronted(world), world):
        for turn in range(5):
            with refused():
                pass
            it_reads_again()
            with handler(world, f"other-{turn}") as other:
                until(lambda it=other: it.name in members(world, it.group), "another handler has joined")  # type: ignore[misc]
                it_reads_again()
        send(world, deposit("ada", "next", 1))
        until(lambda: decided(world)[-1] == "next", "it goes on")


@OTHERS
def test_each_time_that_reads_are_refused_is_told_once(
    ground: Ground, world: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> int:
        return sum("unknown broker error" in record.getMessage().lower() for record in caplog.records)

    with serving(ground.fronted(world), world):
        for turn in range(1, 4):
            with refused():
                until(lambda times=turn: told() == times, "it is told")  # type: ignore[misc]
            send(world, deposit("ada", f"d{turn}", 1))
            until(lambda name=f"d{turn}": decided(world)[-1] == name, "it goes on")  # type: ignore[misc]
    assert told() == 3


@OTHERS
def test_a_command_that_a_read_has_passed_over_is_asked_for_again(ground: Ground, world: Settings) -> None:
    with serving(world, world):
        pass
    for name in ("first", "second", "third"):  # each a batch of its own: Kafka answers with whole ones
        send(world, deposit("ada", name, 1))
    Reads.passes_over = 1
    with handler(ground.fronted(world), "h2"):
        until(lambda: decided(world)[-1] == "third", "decided")
    assert Reads.passes_over is None
    assert decided(world) == ["open-ada", "first", "second", "third"]


@pytest.mark.slow
def test_nothing_is_left_out_of_a_tail_that_goes_on_after_an_error(ground: Ground, world: Settings) -> None:
    with serving(world, world):
        pass
    changes(world, world.events_topic)
    at, _ = readings(world)
    with Tail(ground.fronted(world), world.events_topic, {0: at}) as tail:
        with refused():
            pass  # the error waits in the tail's memory
        for command in (deposit("ada", "d1", 1), deposit("ada", "d2", 1)):  # each in an epoch of its own
            send(world, command)
            with handler(world):
                until(lambda name=command.id: decided(world)[-1] == name, "decided")  # type: ignore[misc]
        to, ids = readings(world)
        until(lambda: Reads.asked_from == to.next_offset, "all is in the tail's memory, behind the error")
        with pytest.raises(KafkaUnavailable):
            tail.exactly({0: at}, {0: to})
        [batch] = tail.exactly({0: at}, {0: to})
    assert [one.commit.command_id for one in batch.counted] == ids[1:] == ["d1", "d2"]


def readings(world: Settings) -> tuple[Reading, list[str]]:
    """Where the log ends, and the ids of all commands that count in it."""
    end = topics.describe(world, world.events_topic).end[0]
    records = [record for batch in read_range(world, world.events_topic, 0, 0, end) for record in batch]
    reading, counted, _ = read(START, records)
    return reading, [one.commit.command_id for one in counted]
