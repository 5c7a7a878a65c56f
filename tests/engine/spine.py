"""The spine on a test's own piece of the stack, without the processes: set it up, run a handler in a thread, fold what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import msgspec
from confluent_kafka import KafkaException, Producer, TopicPartition

from commands.client import Sender
from commands.handler import Handler
from commands.outcomes import Outcome, outcomes_of
from infra.archive.whole_log import read_range
from infra.database.connect import connect
from infra.log import clients, topics
from infra.log.contract import Contract
from infra.log.records import Command, Commit, Opening, Record, decode_event
from infra.log.rule import read
from infra.settings import Settings
from projections.engine.fold.plan import Plan
from projections.engine.live.startup import ensure_started
from projections.engine.store.commit import Batch, CommitStatus, Committer
from projections.engine.views.core_views import agent_views
from tools.migrations.migrate import upgrade
from tools.testing.waiting import DEADLINE_S, until


def set_up(world: Settings) -> None:
    """Tables, topics, positions and pointers: what the first start of an agent leaves behind."""
    upgrade(world)
    _, events = topics.ensure(world)
    with connect(world, "test") as db:
        ensure_started(db, "core", agent_views("core"), Contract.of(events))


def delete(world: Settings, topic: str, to: dict[int, int]) -> None:
    """Delete records of a topic up to these offsets, as Kafka's own tools can."""
    admin = clients.admin(world)
    cuts = [TopicPartition(topic, partition, offset) for partition, offset in to.items()]
    for future in clients.delete_records(admin, cuts).values():
        future.result(30)


def command(stream: str, command_id: str, kind: str, expected_version: int | None = None, **data: Any) -> Command:
    return Command(command_id, stream, kind, msgspec.Raw(msgspec.json.encode(data)), expected_version)


def open_account(name: str, limit: int = 0) -> Command:
    return command(f"accounts/{name}", f"open-{name}", "OpenAccount", overdraft_limit=limit, on="2026-01-01")


def deposit(name: str, command_id: str, cents: int) -> Command:
    return command(f"accounts/{name}", command_id, "Deposit", cents=cents, on="2026-01-02")


def withdraw(name: str, command_id: str, cents: int) -> Command:
    return command(f"accounts/{name}", command_id, "Withdraw", cents=cents, on="2026-01-03")


def send(world: Settings, *commands: Command) -> None:
    Sender(world).send(commands, lambda _: None)


def produce(world: Settings, topic: str, partition: int, key: bytes | None, value: bytes | None) -> None:
    """Append any record to a topic."""
    client = clients.producer(world)
    failed: list[object] = []
    client.produce(topic, value, key=key, partition=partition, on_delivery=lambda error, _: failed.append(error))
    client.flush(10)
    assert failed == [None]


def in_a_transaction(world: Settings, topic: str, partition: int, key: bytes | None, value: bytes) -> None:
    """Append to a partition as a transactional producer does: with a marker behind it, a little later."""

    def end() -> int:
        return topics.describe(world, topic).end[partition]

    was = end()
    client = Producer({"bootstrap.servers": world.kafka, "transactional.id": f"{topic}-stranger"})
    client.init_transactions(10)
    client.begin_transaction()
    client.produce(topic, value, key=key, partition=partition)
    client.commit_transaction(10)
    until(lambda: end() == was + 2, "the marker is there")


@contextmanager
def beside(run: Callable[[], None], stop: Callable[[], None], name: str = "beside") -> Iterator[list[BaseException]]:
    """`run` in a thread, until the block is over and `stop` was called.

    What ended it is in the list that is yielded, and raised at the end unless the test took it out.
    """
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=work, name=name)
    thread.start()
    try:
        yield errors
    finally:
        stop()
        thread.join(DEADLINE_S)
    assert not thread.is_alive(), f"{name} does not end"
    if errors:
        raise errors[0]


@contextmanager
def handler(world: Settings, name: str = "h1", *, running: Handler | None = None) -> Iterator[Handler]:
    """A handler in a thread; an error that ended it is raised at the end, unless the test took it (`ended_with`)."""
    running = running or Handler(world, name)
    with beside(running.run, running.stop, name) as errors:
        running.errors = errors  # type: ignore[attr-defined]
        yield running


def ended_with(running: Handler, *kinds: type[BaseException]) -> BaseException:
    """The named error a handler ended with; taken, so that it does not fail the test."""
    errors: list[BaseException] = running.errors  # type: ignore[attr-defined]
    until(lambda: bool(errors), f"the handler ends with one of {kinds}")
    error = errors.pop()
    assert isinstance(error, kinds), error
    return error


def project(world: Settings) -> int:
    """Fold everything that is in the log into the read models, once, as an agent would; the number of commits folded."""
    views = agent_views("core")
    with connect(world, "test") as db:
        topic = topics.describe(world, world.events_topic)
        positions = ensure_started(db, "core", views, Contract.of(topic))
        assert positions is not None
        committer = Committer(Plan(views), positions)
        folded = 0
        for partition, reading in positions.readings.items():
            was = reading
            for records in read_range(world, topic.name, partition, was.next_offset, topic.end[partition]):
                after, counted, _ = read(was, records)
                assert committer.apply(db, [Batch(partition, was, after, counted)]).status is CommitStatus.APPLIED
                was, folded = after, folded + len(counted)
    return folded


def members(world: Settings, group: str) -> set[str | None]:
    """The names of the group's static members; none while no broker coordinates it."""
    admin = clients.admin(world)
    [described] = admin.describe_consumer_groups([group]).values()
    try:
        return {member.group_instance_id for member in described.result(10).members}
    except KafkaException as error:
        if not clients.may_pass(error.args[0]):
            raise
        return set()


def records_of(world: Settings, topic_name: str) -> list[Record]:
    topic = topics.describe(world, topic_name)
    return [
        record
        for partition in range(topic.partitions)
        for batch in read_range(world, topic_name, partition, 0, topic.end[partition])
        for record in batch
    ]


def commits(world: Settings) -> list[Commit]:
    """All commits that stand in the log, counted or not, by partition and offset."""
    found = [decode_event(record) for record in records_of(world, world.events_topic)]
    return [entry for entry in found if isinstance(entry, Commit)]


def openings(world: Settings) -> list[Opening]:
    found = [decode_event(record) for record in records_of(world, world.events_topic)]
    return [entry for entry in found if isinstance(entry, Opening)]


def outcomes(world: Settings, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    with connect(world, "test") as db:
        return outcomes_of(db, keys)


def scalar(world: Settings, query: str, *parameters: Any) -> Any:
    with connect(world, "test") as db:
        row = db.execute(query, parameters).fetchone()
        return row[0] if row else None
