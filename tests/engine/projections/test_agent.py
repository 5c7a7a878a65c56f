"""make test + test-all: one process starts, folds and ends; what else becomes of it takes more of them.

The agent as a process: it folds, holds, goes on and ends as it says.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions

from domain.accounts import AccountOpened, MoneyDeposited
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log import clients, partitioner, topics
from infra.observability.logs import StatusLog
from infra.processes.process_end import Parts
from infra.settings import Settings
from projections.engine.live.membership import Membership, what_it_knows
from tests.engine.api import api
from tests.engine.bookkeeper import DAY, Bookkeeper
from tests.engine.service.test_two_releases import NOTES, write_tree
from tests.engine.spawned import spawned
from tests.engine.spine import delete, set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until


class Log(Bookkeeper):
    """The writer of all partitions of a world's log, which no agent has folded."""

    def __init__(self, world: Settings) -> None:
        topics.ensure(world)
        super().__init__(world)

    def deposit(self, account: str, count: int = 1) -> None:
        """So many deposits of 0.01 each, after the opening of the account."""
        for _ in range(count):
            is_new = f"accounts/{account}" not in self._versions
            self.commit(
                account, AccountOpened(overdraft_limit=0, on=DAY) if is_new else MoneyDeposited(cents=1, on=DAY)
            )
        self.flush()


@dataclass
class NoteTaken:
    """An event that this code does not know."""

    on: date


@dataclass
class Process:
    """An agent process of a world."""

    process: subprocess.Popen[bytes]
    log: Path

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def ends(self) -> int:
        return self.process.wait(DEADLINE_S)


@contextmanager
def agent(settings: Settings, folder: Path, name: str = "a1", code: Path = ROOT) -> Iterator[Process]:
    log = folder / f"{name}.log"
    command = (sys.executable, "-m", "projections.engine.live.agent", "--name", name)
    with spawned(settings, log, *command, code=code) as process:
        yield Process(process, log)


def rows(settings: Settings, query: str) -> list[Any]:
    with connect(settings, "test") as db:
        return db.execute(query).fetchall()


def transactions(settings: Settings) -> dict[str, int]:
    return dict(rows(settings, "select account, transactions from balances_v2"))


@pytest.fixture
def log(world: Settings) -> Log:
    return Log(world)


def test_it_starts_folds_and_ends_on_sigterm(log: Log, tmp_path: Path) -> None:
    with agent(log.world, tmp_path) as one:
        log.deposit("a", 4)
        until(lambda: transactions(log.world) == {"a": 3}, "what was there")
        log.deposit("b", 2)
        until(lambda: transactions(log.world) == {"a": 3, "b": 1}, "what came")
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 0
    with agent(log.world, tmp_path) as one:
        log.deposit("a", 1)
        until(lambda: transactions(log.world) == {"a": 4, "b": 1}, "after coming back")
        one.process.send_signal(signal.SIGINT)
        assert one.ends() == 0
    assert list(tmp_path.iterdir()) == [one.log]


@pytest.mark.slow
def test_it_holds_while_another_set_is_live(log: Log, tmp_path: Path) -> None:
    with agent(log.world, tmp_path) as one:
        log.deposit("a", 2)
        until(lambda: transactions(log.world) == {"a": 1}, "it folds")
        with connect(log.world, "test") as db, db.transaction():
            db.execute("update live set version = 7 where view = 'balances'")
            db.execute("update positions set generation = %s", [uuid4()])
        log.deposit("a", 1)
        until(lambda: one.says("balances is live as v7, this code has v2"), "it says what is live")
        assert one.says("samefold rebuild balances")
        assert transactions(log.world) == {"a": 1}
        assert one.process.poll() is None
        with connect(log.world, "test") as db:
            db.execute("update live set version = 2 where view = 'balances'")
        until(lambda: transactions(log.world) == {"a": 2}, "it goes on")


@pytest.mark.slow
def test_it_stands_right_before_what_it_does_not_know_until_newer_code_has_folded_it(log: Log, tmp_path: Path) -> None:
    accounts = {partitioner.partition_of(f"accounts/{n}", log.world.partitions): str(n) for n in range(40)}
    other, *where = accounts
    for partition in where:
        log.deposit(accounts[partition], 3)
    offsets = topics.describe(log.world, log.world.events_topic).end
    for partition in where:
        log.commit(accounts[partition], NoteTaken(DAY))  # type: ignore[arg-type]
    for partition in where:
        log.deposit(accounts[partition], 1)
    before, after, more = (dict.fromkeys((accounts[one] for one in where), count) for count in (2, 3, 4))
    with agent(log.world, tmp_path, "old") as old:
        for partition in where:
            said = f"unknown-event: accounts/{accounts[partition]} has an event 'NoteTaken'"
            until(lambda said=said: old.says(said), "it says what it does not know")  # type: ignore[misc]
        assert old.says("Nothing was skipped. Run the code that knows it")
        log.deposit(accounts[other], 2)
        until(lambda: transactions(log.world) == before | {accounts[other]: 1}, "the other partition goes on")
        positions = dict(rows(log.world, "select partition, next_offset from positions"))
        assert positions.items() >= {partition: offsets[partition] for partition in where}.items()
        with agent(log.world, tmp_path, "new", write_tree(tmp_path / "newer", ROOT, NOTES)):
            until(lambda: transactions(log.world) == after | {accounts[other]: 1}, "newer code folds them")
        for partition in where:
            log.deposit(accounts[partition], 1)
        until(lambda: transactions(log.world) == more | {accounts[other]: 1}, "the older one goes on alone")
        assert old.process.poll() is None
        assert old.log.read_text().count("unknown-event") == len(where), "each was said once"


def _more_partitions(log: Log) -> None:
    more = [NewPartitions(name, 5) for name in (log.world.commands_topic, log.world.events_topic)]
    admin = clients.admin(log.world)
    for future in admin.create_partitions(more).values():
        future.result(DEADLINE_S)


def _trimmed(log: Log) -> None:
    at = partitioner.partition_of("accounts/a", log.world.partitions)
    delete(log.world, log.world.events_topic, {at: 3})


def _tables_gone(log: Log) -> None:
    with connect(log.world, "test") as db:
        db.execute("drop table alembic_version cascade")


REFUSED = {
    "a database without our tables": (_tables_gone, ["database-behind", "samefold db upgrade"]),
    "another number of partitions": (_more_partitions, ["has 5 partitions; it had 4"]),
    "trimmed_log": (_trimmed, ["log-trimmed", "continues at 0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_it_does_not_start_on(log: Log, tmp_path: Path, change: Callable[[Log], None], said: list[str]) -> None:
    log.deposit("a", 5)
    set_up(log.world)
    change(log)
    with agent(log.world, tmp_path) as one:
        assert one.ends() == 1
        assert all(map(one.says, said))


def test_a_rebalance_that_completes_while_it_leaves_the_group_is_ignored(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Consumer:
        """The first one loses the group, and gets a partition while it is being stopped."""

        made = 0

        def __init__(self, **_settings: object) -> None:
            Consumer.made += 1

        def subscribe(self, topics: list[str], listener: Any) -> None:
            self.assigned: Callable[[], Any] = lambda: listener.on_partitions_assigned({TopicPartition(topics[0], 0)})

        async def start(self) -> None: ...

        async def getmany(self, timeout_ms: int) -> None:
            if Consumer.made == 1:
                raise KafkaError("lost")
            await asyncio.sleep(timeout_ms / 10_000)

        async def stop(self) -> None:
            await self.assigned()

    monkeypatch.setattr("projections.engine.live.membership.AIOKafkaConsumer", Consumer)
    with api.agent(log.world):
        until(lambda: Consumer.made == 2, "it joins again")


def test_one_that_ends_while_it_joins_its_group_takes_no_partition_and_leaves_no_connection_open(log: Log) -> None:
    """Kafka's answer about its brokers comes through a port of the test's, after the agent was told to end."""
    host, _, port = log.world.kafka.rpartition(":")

    async def join_and_end() -> None:
        asked, may_answer, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        taken: list[Sequence[int]] = []

        async def pass_on(from_agent: asyncio.StreamReader, to_agent: asyncio.StreamWriter) -> None:
            from_broker, to_broker = await asyncio.open_connection(host, int(port))
            requests = 0
            while request := await from_agent.read(1 << 16):
                to_broker.write(request)
                answer = await from_broker.read(1 << 16)
                requests += 1
                if requests == 2:  # the first one asks for the versions of the protocol
                    asked.set()
                    await may_answer.wait()
                to_agent.write(answer)
            for writer in (to_broker, to_agent):
                writer.close()
                await writer.wait_closed()
            closed.set()

        async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as server:
            address = "{}:{}".format(*server.sockets[0].getsockname())
            settings = log.world.model_copy(update={"kafka_bootstrap": address})
            logger = logging.getLogger(__name__)
            member = Membership(settings, "group", "a1", Parts("a1", print), StatusLog(logger, "a1"), taken.append)
            staying = asyncio.ensure_future(member.stay())
            await asked.wait()
            staying.cancel()
            await asyncio.sleep(0)
            may_answer.set()
            await asyncio.wait({staying})
            await member.leave()
            await closed.wait()
        assert not any(taken)

    asyncio.run(asyncio.wait_for(join_and_end(), DEADLINE_S))


def test_an_idle_one_tells_a_restored_database_again_which_events_it_folds(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler would wait for ever: it opens nothing before it knows, and without a record nothing else wakes the agent."""
    monkeypatch.setattr("projections.engine.live.agent.CHECK_S", 0.1)
    set_up(log.world)
    known = {*rows(log.world, "select type from event_types")}
    with api.agent(log.world), connect(log.world, "test") as db:
        for moment in ("it starts", "it is idle"):
            db.execute("delete from event_types")
            until(lambda: {*rows(log.world, "select type from event_types")} == known, moment)


@pytest.mark.slow
def test_code_older_than_the_database_folds_what_is_live_of_its_own_and_nothing_else(log: Log, tmp_path: Path) -> None:
    set_up(log.world)
    with connect(log.world, "test") as db:
        db.execute("insert into alembic_version values ('9999')")
    log.deposit("a", 2)
    with agent(log.world, tmp_path) as one:
        until(lambda: transactions(log.world) == {"a": 1}, "the newer code's views are not live yet")
    with connect(log.world, "test") as db:
        db.execute("update live set version = 3 where view = 'balances'")
    with agent(log.world, tmp_path) as one:
        assert one.ends() == 1
        assert one.says("database-ahead: The database is at migration 9999")


@pytest.mark.slow
def test_a_topic_made_anew_under_it_ends_it(log: Log, tmp_path: Path) -> None:
    with agent(log.world, tmp_path) as one:
        log.deposit("a", 2)
        until(lambda: transactions(log.world) == {"a": 1}, "it folds")
        admin = clients.admin(log.world)
        admin.delete_topics([log.world.events_topic])[log.world.events_topic].result(DEADLINE_S)
        until(lambda: is_made(log.world), "the topic is there again")
        assert one.ends() == 1
        assert one.says("topic-changed") or one.says("topic-missing") or one.says("log-trimmed")


def is_made(settings: Settings) -> bool:
    """Ask for the topic; the broker refuses while the old one is being deleted."""
    try:
        topics.ensure(settings)
    except (KafkaException, SamefoldError):
        return False
    return True


def test_the_group_is_named_after_the_set_and_the_events_that_are_known() -> None:
    assert what_it_knows({"a": 1, "b": 2}, ["x", "y"]) == what_it_knows({"b": 2, "a": 1}, ["y", "x"])
    sets: list[dict[str, int]] = [{"a": 1}, {"a": 2}, {"b": 1}, {}]
    assert len({what_it_knows(code, events) for code in sets for events in ([], ["x"], ["y"], ["x", "y"])}) == 16
