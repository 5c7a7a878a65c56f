"""make test + test-all + prove: the main way; each refusal on the real stores takes longer.

The publisher: each accepted event is public once and in order, and it stops by name where it can't go on."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema_rs
import msgspec
import psutil
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from infra.log import clients, topics
from infra.log.records import EventRecord
from infra.log.rule import Reading
from infra.observability.metrics import REGISTRY
from infra.processes.faultpoints import PUBLISHER
from infra.settings import Settings
from policies.engine.policy import BadPolicy
from policies.engine.public_schema import asyncapi, publication, publication_of
from policies.engine.publisher import Publisher
from policies.engine.publishing import SOURCE, Position
from projections.engine.views.token import Token
from tests.engine.log import commit
from tests.engine.policies.publishers import Log, Process, Reader, publisher, reader
from tests.engine.spine import delete
from tools.testing.fixtures import Samefold
from tools.testing.waiting import DEADLINE_S, SLOWNESS, until

PUBLISHES = "continues at offset"
# the subscription is read from annotations
WRONG = """
_publish, _was = publish, publish.__annotations__
def publish(event, at):
    while getattr(event, "cents", 0) == 13: {}
    return _publish(event, at)
publish.__annotations__ = _was
"""
FULL = "import policies.engine.public_schema\npolicies.engine.public_schema.FULL = 1"
AT_ONCE = "import policies.engine.publishing\npolicies.engine.publishing.IDLE_POSITION_S = 0"
BRIEF_S = 3
BRIEF = f"import infra.log.clients\ninfra.log.clients.TRANSACTION_MS = {BRIEF_S * 1_000}"


@pytest.fixture
def world(world: Settings) -> Settings:
    """Its groups forget a killed member soon, and none that is only slow."""
    return world.model_copy(update={"session_timeout_ms": int(1_500 * SLOWNESS)})


@pytest.fixture
def log(world: Settings) -> Log:
    return Log(world)


@pytest.fixture
def public(log: Log) -> Iterator[Reader]:
    with reader(log.settings) as reading:
        yield reading


@pytest.fixture
def dirty(log: Log) -> Iterator[Reader]:
    """It also reads what was aborted."""
    with reader(log.settings, "read_uncommitted") as reading:
        yield reading


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
    """Wait until the group has no members: only then can its offsets be changed."""
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


def test_each_accepted_event_becomes_a_cloud_event_and_nothing_else_does(
    world: Settings, log: Log, public: Reader, tmp_path: Path
) -> None:
    log.deposit("a", 7, 3)
    partition, deposit = (
        log.partition("a"),
        EventRecord("MoneyDeposited", msgspec.Raw(b'{"cents":1,"on":"2026-01-01"}')),
    )
    log.append(partition, commit(99, 1, stream="accounts/a", version=4, events=[deposit]))  # of a fenced writer
    log.append(partition, commit(0, 3, stream="accounts/a", version=4, events=[deposit]))  # sent twice
    log.append(partition, b"garbage")
    accepted = [*log.accepted]
    log.event("a", "HoldReleased", hold="t1")  # is not public
    log.deposit("a", 9)
    accepted.append(log.accepted[-1])
    with publisher(world, tmp_path) as one:
        public.wait(accepted)
        public.require_exactly(accepted)
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 0
    events, declared = topics.describe(world, world.events_topic), publication()
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
    assert public.events[1]["data"] == {"account": "a", "cents": 7, "on": "2026-01-01", "hold": ""}


@pytest.mark.slow
def test_it_goes_on_from_its_position_alone_which_moves_past_what_is_not_public(
    world: Settings, log: Log, public: Reader, tmp_path: Path
) -> None:
    accepted: list[str] = []
    for _ in range(2):
        log.deposit("a", count=3)
        accepted += log.accepted[-3:]
        with publisher(world, tmp_path, code=AT_ONCE):
            public.wait(accepted)
            log.event("a", "HoldReleased", hold="t1")
            log.flush()
            until(lambda: committed(world, log.partition("a")).offset == len(log.accepted) + 1, "the position")
    public.read()
    public.require_exactly(accepted)
    position = msgspec.json.decode(committed(world, log.partition("a")).metadata, type=Position)
    assert position.reading == Reading(9, 0, 8, 8)


@pytest.mark.slow_but("public records sent")
@pytest.mark.parametrize("point", PUBLISHER)
def test_a_kill_at_each_point_neither_loses_nor_doubles(
    world: Settings, log: Log, public: Reader, dirty: Reader, tmp_path: Path, point: str
) -> None:
    log.deposit("a", count=5)
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
def test_a_plain_consumer_sees_each_event_once_under_kills(
    world: Settings, log: Log, public: Reader, dirty: Reader, tmp_path: Path
) -> None:
    """Two publishers are killed 36 times, at points and at random moments, while commits come in."""
    chance = random.Random(random.random())
    accounts = [f"x{number}" for number in range(12)]
    points = [*PUBLISHER, "", ""] * 6
    chance.shuffle(points)
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
def test_much_at_once_is_several_transactions(world: Settings, log: Log, public: Reader, tmp_path: Path) -> None:
    """So that each ends before its time-out, however much one batch of the log publishes. A position stands between two."""
    log.deposit("a", count=40)
    with publisher(world, tmp_path, code=FULL, point="publication committed", nth=7) as killed:
        killed.ends()
    with publisher(world, tmp_path, code=FULL):
        public.wait(log.accepted)
    public.require_exactly(log.accepted)
    # each transaction ends with a record of its own
    assert topics.describe(world, world.public_topic).end[log.partition("a")] >= 80


@pytest.fixture
def running(world: Settings, log: Log) -> Iterator[Publisher]:
    """A publisher in a thread of this process, which has published the first event of each of ten accounts."""
    one = Publisher(world, publication(), "p1")
    thread = threading.Thread(target=one.run)
    thread.start()
    with reader(world) as public:
        for number in range(10):
            log.deposit(f"x{number}")
        public.wait(log.accepted)
    yield one
    one.stop()
    thread.join(30)


@pytest.mark.usefixtures("running")
def test_events_gather_for_a_transaction(world: Settings, log: Log, public: Reader) -> None:
    partition = log.partition("x1")
    before = topics.describe(world, world.public_topic).end[partition]
    for _ in range(40):
        log.deposit("x1")
    public.wait(log.accepted)
    public.require_exactly(log.accepted)
    # each transaction ends with a record of its own; alone each of the events would have one
    assert topics.describe(world, world.public_topic).end[partition] - before - 40 < 20


@pytest.mark.usefixtures("running")
def test_a_slow_partition_holds_up_no_other(
    world: Settings, log: Log, public: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused while batches wait for it, and goes on without a gap."""
    slow, goes_on = f"partition {log.partition('x1')}", threading.Event()

    def hook(point: str) -> None:
        if point == "public records sent" and threading.current_thread().name == slow:
            goes_on.wait(60)

    monkeypatch.setattr("infra.processes.faultpoints.hook", hook)
    for _ in range(6):
        for number in range(10):
            log.deposit(f"x{number}", count=2)
        time.sleep(0.3)  # they are batches of their own
    others = [one for one in log.accepted if log.partition(one[9:11]) != log.partition("x1")]
    try:
        public.wait(others)
        assert not set(log.accepted) <= set(public.ids)
    finally:
        goes_on.set()
    public.wait(log.accepted)
    public.require_exactly(log.accepted)


@pytest.mark.slow
def test_two_share_the_partitions(world: Settings, log: Log, public: Reader, tmp_path: Path) -> None:
    with publisher(world, tmp_path, "p1") as one, publisher(world, tmp_path, "p2") as two:
        until(lambda: one.says("has partitions [") and two.says("has partitions ["), "both have partitions")
        for leaves in (True, False):
            for number in range(12):
                log.deposit(f"x{number}", count=3)
            public.wait(log.accepted)
            if leaves:
                one.process.send_signal(signal.SIGTERM)
                assert one.ends() == 0
        public.require_exactly(log.accepted)


@pytest.mark.usefixtures("log")
def test_one_whose_name_another_takes_ends_with_an_error(world: Settings, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with publisher(world, folders[0], "p1") as first:
        until(lambda: first.says("has partitions ["), "it has partitions")
        with publisher(world, folders[1], "p1"):
            assert first.ends() == 1
        assert first.says("publisher-fenced")


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("public records sent", marks=pytest.mark.slow),
        *(
            pytest.param(point, marks=pytest.mark.prove(part="chaos"))
            for point in ("publisher's position read", "publisher's position sent")
        ),
    ],
)
def test_a_zombie_publishes_nothing(world: Settings, log: Log, public: Reader, tmp_path: Path, point: str) -> None:
    """It is frozen for longer than its session and its transaction may last, overtaken, and woken."""
    log.deposit("a", count=4)
    with publisher(world, tmp_path, "p1", code=BRIEF, point=point, action="SIGSTOP") as zombie:
        seen = psutil.Process(zombie.process.pid)
        until(lambda: seen.status() == psutil.STATUS_STOPPED, f"it is frozen at '{point}'")
        over = time.monotonic() + BRIEF_S
        with publisher(world, tmp_path, "p2") as other:
            public.wait(log.accepted)
            log.deposit("a", count=2)
            public.wait(log.accepted)
            until(lambda: time.monotonic() > over, "the transaction's time is over")
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
def test_lost_offsets_are_found_in_the_public_topic_and_unknown_positions_are_refused(
    world: Settings, log: Log, public: Reader, tmp_path: Path
) -> None:
    log.deposit("a", count=4)
    with publisher(world, tmp_path):
        public.wait(log.accepted)
    gone(world)
    lose_offsets(world)
    log.deposit("a", count=2)
    with publisher(world, tmp_path) as one:
        public.wait(log.accepted)
        assert one.says("no offset is committed")
    public.require_exactly(log.accepted)

    def reset() -> None:
        start = TopicPartition(world.events_topic, log.partition("a"), 0)
        admin = clients.admin(world)
        [future] = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group(world), [start])]).values()
        future.result(30)

    def lose_both() -> None:
        lose_offsets(world)
        delete(world, world.public_topic, topics.describe(world, world.public_topic).end)

    forgotten: list[Callable[[], None]] = [reset, lose_both]
    for forget in forgotten:
        gone(world)
        forget()
        with publisher(world, tmp_path) as one:
            assert one.ends() == 1
            assert one.says("position-unknown")


@pytest.mark.slow
def test_the_last_position_is_found_before_aborted_records_and_where_there_is_none_it_starts_at_the_first_event(
    world: Settings, log: Log, public: Reader, tmp_path: Path
) -> None:
    log.deposit("a", count=2)
    strangers_transaction(world, log.partition("a"), 2).abort_transaction(30)
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
def test_a_transaction_that_hangs_is_told(
    world: Settings, log: Log, public: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("policies.engine.publisher.HANGS_S", 1)
    monkeypatch.setattr("policies.engine.publisher.CHECK_S", 0.5)
    caplog.set_level("INFO")
    log.deposit("a", count=2)
    partition = log.partition("a")

    def still() -> float:
        label = {"partition": str(partition)}
        return REGISTRY.get_sample_value("samefold_publisher_stable_still_seconds", label) or 0

    one = Publisher(world, publication(), "p1")
    running = threading.Thread(target=one.run)
    running.start()
    try:
        public.wait(log.accepted)
        until(lambda: still() == 0, "nothing is open")
        stranger = strangers_transaction(world, partition, 1)
        offset = topics.stable_ends(topics.describe(world, world.public_topic), topics.Admin(world))[partition]
        until(lambda: still() > 1, "the metric grows")
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
def test_a_higher_version_goes_on_and_a_lower_one_stops(
    world: Settings, log: Log, public: Reader, tmp_path: Path
) -> None:
    now = publication().version
    for version in (now, now + 1):
        log.deposit("a", count=2)
        with publisher(world, tmp_path, code=f"VERSION = {version}"):
            public.wait(log.accepted)
    log.deposit("a", count=2)
    with publisher(world, tmp_path) as one:
        assert one.ends() == 1
        assert one.says("lower-version")
    public.read()
    public.require_exactly(log.accepted[:4])
    assert [event["publicationversion"] for event in public.events] == [now, now, now + 1, now + 1]


@pytest.mark.slow_but("events")
@pytest.mark.parametrize("topic", ["events", "public"])
def test_a_recreated_topic_is_refused(world: Settings, log: Log, public: Reader, tmp_path: Path, topic: str) -> None:
    log.deposit("a", count=2)
    with publisher(world, tmp_path):
        public.wait(log.accepted)
    name = world.events_topic if topic == "events" else world.public_topic
    admin = clients.admin(world)
    admin.delete_topics([name])[name].result(30)
    until(lambda: name not in admin.list_topics(timeout=DEADLINE_S).topics, "it is deleted")
    with publisher(world, tmp_path) as one:
        assert one.ends() == 1
        assert one.says("topic-changed")


@pytest.mark.slow_but("raises")
@pytest.mark.parametrize(
    ("fault", "why"),
    [("raise RuntimeError('thirteen')", "thirteen"), ("pass", "too-slow: it takes longer than 1 s")],
    ids=["raises", "never-ends"],
)
def test_it_stops_at_an_event_and_goes_on_with_corrected_code(
    world: Settings, log: Log, public: Reader, tmp_path: Path, fault: str, why: str
) -> None:
    world = world.model_copy(update={"decide_limit_s": 1})
    log.deposit("a", count=3)
    log.deposit("a", 13)
    log.deposit("a", 2)
    other = next(name for name in "bcdefgh" if log.partition(name) != log.partition("a"))
    with publisher(world, tmp_path, code=WRONG.format(fault)) as one:
        until(lambda: one.says("publication-failed"), "it stops by name")
        assert one.says(why)
        log.deposit(other, count=3)
        public.wait([*log.accepted[:3], *log.accepted[5:]])
        public.require_exactly([*log.accepted[:3], *log.accepted[5:]])
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 0
    with publisher(world, tmp_path):
        public.wait(log.accepted)
    public.require_exactly(log.accepted)


def test_a_compacted_topic_is_refused(world: Settings, log: Log, tmp_path: Path) -> None:
    new = NewTopic(world.public_topic, world.partitions, 1, config={"cleanup.policy": "compact"})
    admin = clients.admin(world)
    admin.create_topics([new])[world.public_topic].result(30)
    with publisher(world, tmp_path) as one:
        assert one.ends() == 1
        assert one.says("topic-unfit")
        assert one.says("cleanup.policy")


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


@pytest.mark.usefixtures("running")
def test_a_check_of_kafka_that_hangs_holds_up_no_partition(
    world: Settings, log: Log, public: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another broker hangs: what reads and publishes goes on."""
    began, goes_on = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        began.set()
        goes_on.wait(2 * DEADLINE_S)
        raise clients.KafkaUnavailable("It does not answer.")

    monkeypatch.setattr("infra.log.topics.Watch.check", hangs)
    assert began.wait(DEADLINE_S)
    try:
        for number in range(10):
            log.deposit(f"x{number}")
        public.wait(log.accepted)
    finally:
        goes_on.set()


@pytest.mark.usefixtures("running")
def test_a_partition_that_begins_again_and_again_holds_up_no_other(
    world: Settings, log: Log, public: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, failed = f"partition {log.partition('x1')}", threading.Event()

    def hook(point: str) -> None:
        if point == "public records sent" and threading.current_thread().name == slow:
            failed.set()
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr("infra.processes.faultpoints.hook", hook)
    log.deposit("x1")
    assert failed.wait(DEADLINE_S)
    others = [f"x{number}" for number in range(10) if log.partition(f"x{number}") != log.partition("x1")]
    for other in others:
        log.deposit(other)
        public.wait(log.accepted[-1:])
    monkeypatch.setattr("infra.processes.faultpoints.hook", lambda _: None)
    public.wait(log.accepted)
    public.require_exactly(log.accepted)
