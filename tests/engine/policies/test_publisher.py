"""make test + test-all + prove: the main way; each refusal on the real stores takes longer.

The publisher: each accepted event is public once and in order, and it stops by name where it can't go on."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from pathlib import Path

import jsonschema_rs
import msgspec
import psutil
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from infra.log import clients, topics
from infra.log.records import EventRecord
from infra.log.rule import Reading
from infra.observability.metrics import REGISTRY
from infra.processes.faultpoints import PUBLISHER
from infra.settings import Settings
from infra.testing.fixtures import Samefold
from infra.testing.waiting import until
from policies.engine.policy import BadPolicy
from policies.engine.public_schema import asyncapi, publication, publication_of
from policies.engine.publisher import Publisher
from policies.engine.publishing import SOURCE, Position
from projections.engine.views.token import Token
from tests.engine.policies.publishers import Log, Process, publisher, reader
from tests.engine.spine import delete

PUBLISHES = "continues at offset"
RAISES = """
def publish(event, at):
    if getattr(event, "cents", 0) == 13: raise RuntimeError("thirteen")
    return _publish(event, at)
"""
NO_DATA = """
def publish(event, at):
    return [Public("money-deposited.v1", {"cents": object()})]
"""
UNKNOWN_TYPE = """
def publish(event, at):
    return [Public("secrets.v1", one.data) for one in _publish(event, at)]
"""
NOT_A_NUMBER = """
@fact
class Measured: value: float
TYPES["measured.v1"] = Measured
def publish(event, at):
    return [Public("measured.v1", Measured(value=float("nan")))]
"""
ENDLESS = """
def publish(event, at):
    while True: yield from _publish(event, at)
"""
LARGE = """
def publish(event, at):
    for one in _publish(event, at):
        if getattr(event, "cents", 0) == 13: one = Public("account-opened.v1", Opened(account="x" * 3_000_000, on=event.on))
        yield one
"""
# the subscription is read from annotations
KEEP = "publish.__annotations__ = _was\n"


def code(text: str) -> str:
    return f"_publish, _was = publish, publish.__annotations__\n{text}{KEEP}"


def group(world: Settings) -> str:
    return f"{world.group_prefix}-publisher"


def committed(world: Settings, partition: int) -> TopicPartition:
    asked = [ConsumerGroupTopicPartitions(group(world), [TopicPartition(world.events_topic, partition)])]
    admin = clients.admin(world)  # its answers end with it
    [future] = admin.list_consumer_group_offsets(asked).values()
    [found] = future.result(30).topic_partitions
    assert isinstance(found, TopicPartition)
    return found


def lose_offsets(world: Settings) -> None:
    admin = clients.admin(world)
    [future] = admin.delete_consumer_groups([group(world)]).values()
    future.result(30)


def gone(world: Settings) -> None:
    """Wait until the group has no members: only then can it be deleted."""

    admin = clients.admin(world)

    def empty() -> bool:
        [future] = admin.describe_consumer_groups([group(world)]).values()
        return not future.result(30).members

    until(empty, "the group is empty")


def strangers_transaction(world: Settings, partition: int, records: int) -> Producer:
    """A transaction of another program in the public topic, which stays open."""
    producer = Producer(
        {"bootstrap.servers": world.kafka, "transactional.id": "stranger", "transaction.timeout.ms": 60_000}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    for _ in range(records):
        producer.produce(world.public_topic, b"{}", partition=partition)
    assert producer.flush(30) == 0
    return producer


def test_an_event_becomes_a_cloud_event(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", 7, 3)
    log.event("a", "FeeCharged", cents=1, on="2026-01-02")
    log.deposit("a", 9)
    private = "accounts/a@4"
    with reader(world) as public, publisher(world, tmp_path) as one:
        public.wait(set(log.accepted) - {private})
        public.require_exactly([ident for ident in log.accepted if ident != private])
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 0
    events, partition = topics.describe(world, world.events_topic), log.partition("a")
    declared = publication()
    document = asyncapi(world, declared)
    for event, headers, key in zip(public.events, public.headers, public.keys, strict=True):
        name = "account-opened.v1" if event["streamversion"] == 1 else "money-deposited.v1"
        schema = {"$ref": f"#/components/messages/{name}/payload", "components": document["components"]}
        jsonschema_rs.validate(schema, event | {"data": event["data"] | {"of_a_later_version": 1}})
        assert event["source"] == f"/{world.group_prefix}/accounts"
        assert (key, event["publicationversion"]) == ("accounts/a", declared.version)
        assert headers["content-type"].startswith(b"application/cloudevents+json")
        position = msgspec.json.decode(headers[SOURCE], type=Position)
        assert Token.parse(event["samefoldposition"]) == Token.of(events.id, {partition: position.reading.next_offset})
    assert public.events[1]["data"] == {"account": "a", "cents": 7, "on": "2026-01-01"}
    assert len(log.accepted) == 5


@pytest.mark.slow
def test_it_goes_on_from_its_position_alone(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    with reader(world) as public:
        for round_ in range(2):
            log.deposit("a", count=3)
            with publisher(world, tmp_path) as one:
                public.wait(log.accepted)
                until(lambda: committed(world, log.partition("a")).offset == len(log.accepted) + 1, "the position")
                if round_:
                    one.process.send_signal(signal.SIGTERM)
                    assert one.ends() == 0
        public.require_exactly(log.accepted)
    position = msgspec.json.decode(committed(world, log.partition("a")).metadata, type=Position)
    assert position.reading == Reading(7, 0, 6, 6)


def test_void_records_are_not_public(world: Settings, tmp_path: Path) -> None:
    from tests.engine.log import commit

    log = Log(world)
    log.deposit("a", count=2)
    partition = log.partition("a")
    deposit = EventRecord("MoneyDeposited", msgspec.Raw(b'{"cents":1,"on":"2026-01-01"}'))
    log.append(partition, commit(99, 1, stream="accounts/a", version=3, events=[deposit]))  # of a fenced writer
    log.append(partition, commit(0, 2, stream="accounts/a", version=3, events=[deposit]))  # sent twice
    log.append(partition, b"garbage")
    log.deposit("a")
    with reader(world) as public, publisher(world, tmp_path):
        public.wait(log.accepted)
        public.require_exactly(log.accepted)


@pytest.mark.slow_but("public records sent")
@pytest.mark.parametrize("point", PUBLISHER)
def test_a_kill_at_each_point_neither_loses_nor_doubles(world: Settings, tmp_path: Path, point: str) -> None:
    log = Log(world)
    log.deposit("a", count=5)
    with reader(world) as public, reader(world, "read_uncommitted") as dirty:
        with publisher(world, tmp_path, point=point) as one:
            assert one.ends() == -signal.SIGKILL
        log.deposit("a", count=2)
        with publisher(world, tmp_path):
            public.wait(log.accepted)
            log.deposit("a")
            public.wait(log.accepted)
        public.require_exactly(log.accepted)
        dirty.wait(log.accepted)
        sent_twice = point in ("public records sent", "publisher's position sent")
        assert (len(dirty.ids) > len(log.accepted)) == sent_twice


@pytest.mark.prove(part="chaos")
def test_a_plain_consumer_sees_each_event_once_under_kills(world: Settings, tmp_path: Path) -> None:
    """Two publishers are killed 36 times, at points and at random moments, while commits come in."""
    chance = random.Random(random.random())
    log = Log(world)
    accounts = [f"x{number}" for number in range(12)]
    points = [*PUBLISHER, "", ""] * 6
    chance.shuffle(points)
    with reader(world) as public, reader(world, "read_uncommitted") as dirty:
        running = {name: Process(world, tmp_path, name) for name in ("p1", "p2")}
        struck = 0
        try:
            for point in points:
                name = chance.choice(sorted(running))
                struck += running[name].says(PUBLISHES)
                running[name].end()
                one = running[name] = Process(world, tmp_path, name, point=point, nth=chance.randint(1, 3))
                until(lambda one=one: one.says(PUBLISHES) or not one.runs, "it publishes")  # type: ignore[misc]
                until_then = time.monotonic() + chance.uniform(0.1, 0.7)
                while one.runs and time.monotonic() < until_then:
                    for account in accounts:
                        log.deposit(account, count=chance.randint(0, 3))
                    public.read()
                    dirty.read()
        finally:
            for one in running.values():
                one.end()
        assert struck >= 30
        with publisher(world, tmp_path, "p1"), publisher(world, tmp_path, "p2"):
            public.wait(log.accepted)
            log.deposit("last", count=2)
            public.wait(log.accepted)
            dirty.wait(log.accepted)
        public.require_exactly(log.accepted)
        assert len(dirty.ids) > len(public.ids), "no kill struck an open transaction"


@pytest.mark.slow
def test_much_at_once_is_several_transactions(world: Settings, tmp_path: Path) -> None:
    """So that each ends before its time-out, however much one batch of the log publishes. A position stands between two."""
    log = Log(world)
    log.deposit("a", count=40)
    partition = log.partition("a")
    full = "import policies.engine.public_schema\npolicies.engine.public_schema.FULL = 1"
    with reader(world) as reading:
        with publisher(world, tmp_path, code=full, point="publication committed", nth=7) as killed:
            killed.ends()
        with publisher(world, tmp_path, code=full):
            reading.wait(log.accepted)
        reading.require_exactly(log.accepted)
    # each transaction ends with a record of its own
    assert topics.describe(world, world.public_topic).end[partition] >= 80


@pytest.mark.slow
def test_two_share_the_partitions(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    accounts = [f"x{number}" for number in range(12)]
    with reader(world) as public, publisher(world, tmp_path, "p1") as one, publisher(world, tmp_path, "p2") as two:
        until(lambda: one.says("has partitions [") and two.says("has partitions ["), "both have partitions")
        for account in accounts:
            log.deposit(account, count=3)
        public.wait(log.accepted)
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 0
        for account in accounts:
            log.deposit(account, count=3)
        public.wait(log.accepted)
        public.require_exactly(log.accepted)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("publisher's position read", marks=pytest.mark.slow),
        pytest.param("public records sent", marks=pytest.mark.slow),
        pytest.param("publisher's position sent", marks=pytest.mark.prove(part="chaos")),
    ],
)
def test_a_zombie_publishes_nothing(world: Settings, tmp_path: Path, point: str) -> None:
    """It is frozen for longer than its session and its transaction may last, overtaken, and woken."""
    log = Log(world)
    log.deposit("a", count=4)
    with reader(world) as public, publisher(world, tmp_path, "p1", point=point, action="SIGSTOP") as zombie:
        seen = psutil.Process(zombie.process.pid)
        until(lambda: seen.status() == psutil.STATUS_STOPPED, f"it is frozen at '{point}'")
        with publisher(world, tmp_path, "p2") as other:
            public.wait(log.accepted)
            log.deposit("a", count=2)
            public.wait(log.accepted)
            until(
                lambda: time.time() - seen.create_time() > clients.TRANSACTION_MS / 1000 + 3,
                "the transaction's time is over",
            )
            seen.resume()
            log.deposit("a", count=2)
            public.wait(log.accepted)
            other.process.send_signal(signal.SIGTERM)
            assert other.ends() == 0
        log.deposit("a", count=2)
        public.wait(log.accepted)
        public.require_exactly(log.accepted)
        assert zombie.process.poll() is None


@pytest.mark.slow
def test_lost_offsets_are_found_in_the_public_topic(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", count=4)
    with reader(world) as public:
        with publisher(world, tmp_path) as one:
            public.wait(log.accepted)
        gone(world)
        lose_offsets(world)
        log.deposit("a", count=2)
        with publisher(world, tmp_path) as one:
            public.wait(log.accepted)
            assert one.says("no offset is committed")
        public.require_exactly(log.accepted)
        gone(world)
        lose_offsets(world)
        delete(world, world.public_topic, topics.describe(world, world.public_topic).end)
        with publisher(world, tmp_path) as one:
            assert one.ends() == 1
            assert one.says("position-unknown")


@pytest.mark.slow
def test_the_last_position_is_found_before_aborted_records(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", count=2)
    with reader(world) as public:
        with publisher(world, tmp_path):
            public.wait(log.accepted)
        stranger = strangers_transaction(world, log.partition("a"), 1_500)
        gone(world)
        lose_offsets(world)
        log.deposit("a", count=2)
        with publisher(world, tmp_path) as one:
            until(lambda: one.says("has an open transaction"), "it waits for the end of the stranger's transaction")
            stranger.abort_transaction(30)
            public.wait(log.accepted)
        public.require_exactly(log.accepted)


@pytest.mark.slow
def test_a_publisher_that_never_committed_starts_at_the_first_event(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", count=2)
    with reader(world) as public:
        strangers_transaction(world, log.partition("a"), 2).abort_transaction(30)
        with publisher(world, tmp_path):
            public.wait(log.accepted)
        public.require_exactly(log.accepted)


@pytest.mark.slow
def test_a_transaction_that_hangs_is_told(
    world: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("policies.engine.publisher.HANGS_S", 3)
    caplog.set_level("INFO")
    log = Log(world)
    log.deposit("a", count=2)
    partition = log.partition("a")

    def still() -> float:
        label = {"partition": str(partition)}
        return REGISTRY.get_sample_value("samefold_publisher_stable_still_seconds", label) or 0

    one = Publisher(world, publication(), "p1")
    running = threading.Thread(target=one.run)
    with reader(world) as public:
        running.start()
        try:
            public.wait(log.accepted)
            until(lambda: still() == 0, "nothing is open")
            stranger = strangers_transaction(world, partition, 1)
            offset = topics.stable_ends(topics.describe(world, world.public_topic), topics.Admin(world))[partition]
            until(lambda: still() > 3, "the metric grows")
            log.deposit("a", count=2)
            told = f"a transaction hangs in {world.public_topic}[{partition}] at offset {offset}"
            until(lambda: told in caplog.text, "the log names it")
            stranger.abort_transaction(30)
            public.wait(log.accepted)
            until(lambda: still() == 0 and "has ended" in caplog.text, "it is over")
        finally:
            one.stop()
            running.join(30)
        public.require_exactly(log.accepted)


@pytest.mark.slow
def test_an_offset_that_was_reset_is_refused(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", count=4)
    with reader(world) as public, publisher(world, tmp_path):
        public.wait(log.accepted)
    gone(world)
    start = TopicPartition(world.events_topic, log.partition("a"), 0)
    reset = [ConsumerGroupTopicPartitions(group(world), [start])]
    admin = clients.admin(world)
    for future in admin.alter_consumer_group_offsets(reset).values():
        future.result(30)
    with publisher(world, tmp_path) as one:
        assert one.ends() == 1
        assert one.says("position-unknown")


@pytest.mark.slow
def test_a_higher_version_goes_on_and_a_lower_one_stops(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", count=2)
    with reader(world) as public:
        with publisher(world, tmp_path):
            public.wait(log.accepted)
        log.deposit("a", count=2)
        with publisher(world, tmp_path, code="VERSION = 2"):
            public.wait(log.accepted)
        log.deposit("a", count=2)
        with publisher(world, tmp_path) as one:
            assert one.ends() == 1
            assert one.says("lower-version")
        public.read()
        public.require_exactly(log.accepted[:4])
        assert [event["publicationversion"] for event in public.events] == [1, 1, 2, 2]


@pytest.mark.slow_but("events")
@pytest.mark.parametrize("topic", ["events", "public"])
def test_a_recreated_topic_is_refused(world: Settings, tmp_path: Path, topic: str) -> None:
    log = Log(world)
    log.deposit("a", count=2)
    with reader(world) as public, publisher(world, tmp_path):
        public.wait(log.accepted)
    name = world.events_topic if topic == "events" else world.public_topic
    admin = clients.admin(world)
    admin.delete_topics([name])[name].result(30)
    until(lambda: name not in admin.list_topics(timeout=10).topics, "it is deleted")
    with publisher(world, tmp_path) as one:
        assert one.ends() == 1
        assert one.says("topic-changed")


@pytest.mark.slow_but("raises")
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (RAISES, "publication-failed"),
        (NO_DATA, "publication-failed"),
        (UNKNOWN_TYPE, "publication-failed"),
        (NOT_A_NUMBER, "publication-failed"),
        (ENDLESS, "publication-failed"),
        (LARGE, "public-event-too-large"),
    ],
    ids=["raises", "no-data", "unknown-type", "not-a-number", "endless", "large"],
)
def test_it_stops_at_an_event_and_goes_on_with_corrected_code(
    world: Settings, tmp_path: Path, wrong: str, named: str
) -> None:
    log = Log(world)
    log.deposit("a", count=3)
    log.deposit("a", 13)
    log.deposit("a", 2)
    other = next(name for name in "bcdefgh" if log.partition(name) != log.partition("a"))
    with reader(world) as public:
        with publisher(world, tmp_path, code=code(wrong)) as one:
            until(lambda: one.says(named), "it stops by name")
            if wrong in (RAISES, LARGE):
                log.deposit(other, count=3)
                public.wait([*log.accepted[:3], *log.accepted[5:]])
                public.require_exactly([*log.accepted[:3], *log.accepted[5:]])
            one.process.send_signal(signal.SIGTERM)
            assert one.ends() == 0
        with publisher(world, tmp_path):
            public.wait(log.accepted)
        public.require_exactly(log.accepted)


def test_an_unknown_event_stops_its_partition(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", count=2)
    log.event("a", "MoneyPrinted")
    log.flush()
    with reader(world) as public, publisher(world, tmp_path) as one:
        until(lambda: one.says("engine-stop") or one.says("unknown-event"), "it stops by name")
        public.wait(log.accepted[:2])


def test_a_compacted_topic_is_refused(world: Settings, tmp_path: Path) -> None:
    Log(world)
    new = NewTopic(world.public_topic, world.partitions, 1, config={"cleanup.policy": "compact"})
    admin = clients.admin(world)
    admin.create_topics([new])[world.public_topic].result(30)
    with publisher(world, tmp_path) as one:
        assert one.ends() == 1
        assert one.says("topic-unfit")
        assert one.says("cleanup.policy")


@pytest.mark.slow
def test_an_event_that_is_not_public_moves_the_position_only(world: Settings, tmp_path: Path) -> None:
    log = Log(world)
    log.deposit("a", count=2)
    with reader(world) as public, publisher(world, tmp_path):
        public.wait(log.accepted)
        log.event("a", "FeeCharged", cents=1, on="2026-01-02")
        log.flush()
        until(lambda: committed(world, log.partition("a")).offset == 4, "the position")
        public.read()
        public.require_exactly(log.accepted[:2])


def test_the_module_is_checked() -> None:
    from policies import public

    declared = publication()
    for name, wrong in (("TYPES", {}), ("TYPES", {"a b": public.Opened}), ("TYPES", {"a": dict}), ("VERSION", 0)):
        module = type(public)("policies.public")
        vars(module).update({**vars(public), name: wrong, "__name__": "policies.public"})
        with pytest.raises(BadPolicy):
            publication_of(module)
    assert json.loads(json.dumps(asyncapi(Settings(), declared)))["asyncapi"] == "3.0.0"


def test_the_types_are_shown(samefold: Samefold) -> None:
    shown = samefold("public")
    assert shown.returncode == 0
    assert "money-deposited.v1" in shown.stdout
    document = json.loads(samefold("public", "--json").stdout)
    for name in document["channels"]["public"]["messages"]:
        schema = {"$ref": f"#/components/messages/{name}/payload", "components": document["components"]}
        jsonschema_rs.validator_for(schema)
