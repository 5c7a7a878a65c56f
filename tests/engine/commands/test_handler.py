"""make test + test-all: a handler in a thread; faults of the stores take longer.

The handler on real Kafka and PostgreSQL; the agent is replaced by `project`, so that the test decides when it folds."""

from __future__ import annotations

import asyncio
import json
import zlib
from contextlib import ExitStack, suppress
from functools import partial

import psycopg
import pytest
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import GroupCoordinatorNotAvailableError
from aiokafka.protocol.group import JoinGroupRequest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from commands import release
from commands.group import HandlerFenced, KafkaClientFailed, TopicsInconsistent
from commands.handler import Handler
from commands.intake import reserved_stream
from domain.engine.contexts import RECORDED, UnreadableState
from infra.database.connect import connect
from infra.log import clients, topics
from infra.log.contract import ContractBroken
from infra.log.partitioner import partition_of
from infra.log.records import UnreadableRecord, encode
from infra.log.topics import TopicChanged, TopicMissing, TopicUnfit
from infra.observability.metrics import REGISTRY
from infra.settings import Settings
from projections.engine.store.command_types import drop_other_types, live_types, own_types
from projections.engine.store.event_types import record_event_types
from tests.engine.spine import (
    command,
    commits,
    delete,
    deposit,
    ended_with,
    handler,
    in_a_transaction,
    members,
    open_account,
    openings,
    outcomes,
    produce,
    project,
    scalar,
    send,
    set_up,
    withdraw,
)
from tools.testing.fixtures import Samefold
from tools.testing.waiting import until

HERE = partition_of("accounts/ada", 4)


@pytest.fixture
def world(world: Settings) -> Settings:
    set_up(world)
    return world


def decided(world: Settings, count: int) -> None:
    """Wait until the log has so many commits."""
    until(lambda: len(commits(world)) == count, f"{count} commits")


def serve(world: Settings, count: int) -> None:
    """Run a handler until the log has so many commits."""
    with handler(world):
        decided(world, count)


def test_commands_become_commits_and_rows_and_commits_beyond_the_limit_are_rejected(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.log.clients.MAX_COMMIT_BYTES", 1_024)
    details = dict.fromkeys(("operation", "purpose", "counter_bank", "counter_account"), "x" * 200)
    send(
        world,
        open_account("ada", limit=100),
        command("accounts/ada", "big", "Deposit", cents=1, on="2026-01-01", details=details),
        deposit("ada", "d1", 500),
        withdraw("ada", "w1", 601),
        withdraw("ada", "w2", 600),
    )
    serve(world, 5)
    assert [(c.command_id, c.outcome, c.version, c.reason and c.reason.code) for c in commits(world)] == [
        ("open-ada", "accepted", 1, None),
        ("big", "rejected", 1, "too-large"),
        ("d1", "accepted", 2, None),
        ("w1", "rejected", 2, "insufficient-funds"),
        ("w2", "accepted", 3, None),
    ]
    assert project(world) == 5
    assert scalar(world, "select cents from balances_v2 where account = 'ada'") == -100


def test_a_repeated_command_keeps_its_first_answer_whether_the_read_model_shows_it_yet_or_not(world: Settings) -> None:
    with handler(world):
        send(
            world, open_account("ada"), deposit("ada", "d1", 500), deposit("ada", "d1", 500), withdraw("ada", "w1", 900)
        )
        send(world, withdraw("ada", "w1", 900), deposit("ada", "d2", 1))
        decided(world, 4)
        project(world)
        send(world, deposit("ada", "d3", 1))
        until(lambda: commits(world)[-1].command_id == "d3", "the overlay is evicted by this batch")
        send(world, deposit("ada", "d1", 500), withdraw("ada", "w1", 900), deposit("ada", "d4", 1))
        until(lambda: commits(world)[-1].command_id == "d4", "answers from the database add nothing")
    assert [c.command_id for c in commits(world)] == ["open-ada", "d1", "w1", "d2", "d3", "d4"]


def test_commands_are_told_apart_by_their_streams_and_by_where_the_id_begins(world: Settings) -> None:
    opened = [
        command(f"accounts/{name}", ident, "OpenAccount", overdraft_limit=0, on="2026-01-01")
        for name, ident in (("ada", "1"), ("ad", "a1"), ("bob", "1"))
    ]
    with handler(world):
        send(world, *opened)
        decided(world, 3)
        assert project(world) == 3
        send(world, *opened, *(deposit(name, "d", 1) for name in ("ada", "ad", "bob")))
        decided(world, 6)
    assert project(world) == 3
    assert [one.outcome for one in outcomes(world, [(one.stream, one.id) for one in opened]).values()] == 3 * [
        "accepted"
    ]


def test_the_next_handler_goes_on_where_the_log_says_not_where_the_group_says(world: Settings) -> None:
    send(world, open_account("ada"), *(deposit("ada", f"d{n}", n) for n in range(1, 50)))
    serve(world, 50)
    send(world, *(deposit("ada", f"d{n}", n) for n in range(50, 80)))
    serve(world, 80)
    assert [c.command_id for c in commits(world)] == ["open-ada", *(f"d{n}" for n in range(1, 80))]
    assert [c.version for c in commits(world)] == list(range(1, 81))
    assert project(world) == 80


def test_a_garbage_command_is_a_recorded_rejection_and_later_ones_go_on(world: Settings) -> None:
    send(world, open_account("ada"))
    for value in (b"\x00\xff garbage", b"", None, b'{"samefold":"command/9"}', b"[" * 100_000):
        produce(world, world.commands_topic, HERE, b"accounts/ada", value)
    send(world, deposit("ada", "d1", 5))
    serve(world, 7)
    assert [c.reason.code for c in commits(world) if c.reason] == ["malformed"] * 5
    assert {c.stream for c in commits(world) if c.reason} == {reserved_stream(HERE)}
    assert commits(world)[-1].command_id == "d1"
    project(world)
    assert scalar(world, "select count(*) from command_outcomes_v3 where code = 'malformed'") == 5


def test_hostile_names_reach_the_rows_unharmed(world: Settings) -> None:
    names = ["o'brien; drop table live; --", '"quoted" \\ back', "🏦 emoji", "ü" * 90, "a b"]
    for name in names:
        send(world, open_account(name), deposit(name, f"'; {name}", 7))
    serve(world, 2 * len(names))
    project(world)
    assert scalar(world, "select array_agg(account order by account) from balances_v2 where cents = 7") == sorted(names)


def test_the_handler_waits_while_it_is_too_far_ahead_of_the_read_model(world: Settings) -> None:
    near = world.model_copy(update={"run_ahead": 20})
    elsewhere = next(n for n in map(str, range(40)) if partition_of(f"accounts/{n}", world.partitions) != HERE)
    send(world, open_account("ada"), *(deposit("ada", f"d{n}", n) for n in range(1, 100)))
    with handler(near) as running:
        decided(world, 20)
        assert any(one.writer.room == 0 for one in running.partitions.values())
        send(world, open_account(elsewhere))
        decided(world, 21)
        assert [c.stream for c in commits(world)].count("accounts/ada") == 20
        until(lambda: bool(project(world)) or len(commits(world)) == 101, "it goes on as the read model catches up")
        until(lambda: (project(world), scalar(world, "select max(seq) from positions") == 100)[1], "all are folded")
    assert len(commits(world)) == 101


def test_a_fenced_writer_opens_again_and_loses_nothing(world: Settings) -> None:
    """A foreign opening makes this handler's next commits void; it notices, opens again and decides them again."""
    with handler(world):
        send(world, open_account("ada"))
        decided(world, 1)
        opening = next(o for o in openings(world))
        produce(world, world.events_topic, HERE, None, encode(opening))
        send(world, deposit("ada", "d1", 5), deposit("ada", "d2", 6))
        until(lambda: (project(world), scalar(world, "select cents from balances_v2") == 11)[1], "decided again")
    found = [c.command_id for c in commits(world)]
    assert found.count("d1") >= 2, "the first try was void"
    assert not opening.why
    assert any(one.why for one in openings(world)), "the opening after a doubt tells it"
    assert scalar(world, "select version from streams_accounts_v3") == 3


def test_a_restored_database_makes_the_handler_open_again(world: Settings) -> None:
    """Rule 2: the read model goes back to an older state; decisions still rest on everything that counts."""
    with handler(world):
        send(world, open_account("ada"), deposit("ada", "d1", 10))
        decided(world, 2)
        project(world)
        send(world, withdraw("ada", "w0", 99))
        decided(world, 3)
        with connect(world, "test") as db, db.transaction():
            db.execute("update positions set next_offset = 0, epoch = -1, seq = 0, command_offset = -1")
            for table in (name for (name,) in db.execute("select table_name from live").fetchall()):
                db.execute(f"delete from {table}".encode())
        send(world, withdraw("ada", "w1", 10), withdraw("ada", "w2", 10), deposit("ada", "d1", 10))
        until(lambda: len({c.command_id for c in commits(world)}) == 5, "decided on the whole log")
    project(world)
    answers = outcomes(world, [("accounts/ada", "w1"), ("accounts/ada", "w2")])
    assert [answers["accounts/ada", key].outcome for key in ("w1", "w2")] == ["accepted", "rejected"]
    assert scalar(world, "select cents from balances_v2") == 0


def test_a_database_restored_to_before_a_rebuild_makes_the_handler_open_again(world: Settings) -> None:
    """The table that it read from last is gone, and an older one is live."""
    with connect(world, "test") as db:
        db.execute("create table streams_accounts_v3_r2 (like streams_accounts_v3 including all)")
        db.execute("update live set table_name = 'streams_accounts_v3_r2' where view = 'streams_accounts'")
        with handler(world):
            send(world, open_account("ada"))
            decided(world, 1)
            with db.transaction():
                db.execute("update live set table_name = 'streams_accounts_v3' where view = 'streams_accounts'")
                db.execute("drop table streams_accounts_v3_r2")
            send(world, open_account("bob"), deposit("ada", "d1", 5))
            decided(world, 3)


def test_it_waits_for_a_live_write_model_of_its_own_version(world: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, and where a switch makes outcomes live that have other columns."""
    caplog.set_level("INFO")
    send(world, open_account("ada"))
    with connect(world, "test") as db:
        db.execute("update live set version = 99 where view = 'streams_accounts'")
        with handler(world):
            until(lambda: "another version" in caplog.text, "it logs what it waits for")
            assert openings(world) == []
            db.execute("update live set version = 3 where view = 'streams_accounts'")
            decided(world, 1)
            caplog.clear()
            db.execute(
                "update live set version = 2, table_name = 'command_outcomes_v2' where view = 'command_outcomes'"
            )
            send(world, deposit("ada", "d1", 1))
            until(lambda: "another version" in caplog.text, "it logs what it waits for")
            db.execute(
                "update live set version = 3, table_name = 'command_outcomes_v3' where view = 'command_outcomes'"
            )
            decided(world, 2)


def test_handlers_with_outcomes_of_another_version_have_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one group, those that wait for a switch would hold partitions that the others could serve."""
    ours = release.group_of("samefold")
    monkeypatch.setattr(release, "OUTCOMES_VERSION", 99)
    assert release.group_of("samefold") != ours


def test_a_batch_does_not_gather_more_than_may_be_decided_at_once(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Counted(Consumer):  # type: ignore[misc]
        def consume(self, *most: object) -> list[Message]:
            found: list[Message] = super().consume(*most)
            sizes.append(sum(one.topic() == world.commands_topic for one in found))
            return found

    monkeypatch.setattr(clients, "Consumer", Counted)
    send(world, open_account("ada"), *(deposit("ada", f"d{n}", 1) for n in range(99)))
    with handler(world.model_copy(update={"batch": 10})):
        decided(world, 100)
    assert max(sizes) <= 10


def test_more_partitions_stop_the_handler_by_name(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commands.handler.CHECK_S", 0.2)
    with handler(world) as running:
        until(lambda: len(openings(world)) == 4, "serving")
        admin = clients.admin(world)
        admin.create_partitions([NewPartitions(world.commands_topic, 6)])[world.commands_topic].result(10)
        error = ended_with(running, TopicChanged)
    assert "had 4 partitions and has 6" in str(error)


@pytest.mark.slow
def test_a_recreated_commands_topic_is_refused_at_the_start_and_in_the_middle(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.handler.CHECK_S", 0.2)
    with handler(world) as running:
        until(lambda: len(openings(world)) == 4, "serving")
        _recreate(world, world.commands_topic)
        ended_with(
            running, TopicChanged, TopicMissing, TopicsInconsistent
        )  # whichever check sees it first, or that it was gone
    with handler(world) as running:
        error = ended_with(running, ContractBroken)
    assert world.commands_topic in str(error)
    assert len(openings(world)) == 4, "nothing was written"


@pytest.mark.slow
def test_a_recreated_events_topic_is_refused(world: Settings) -> None:
    _recreate(world, world.events_topic)
    with handler(world) as running:
        ended_with(running, ContractBroken)
    assert openings(world) == []


@pytest.mark.slow
def test_a_state_that_this_code_can_not_read_is_named_with_what_to_do(world: Settings) -> None:
    send(world, open_account("ada"))
    serve(world, 1)
    project(world)
    with connect(world, "test") as db:
        db.execute("update streams_accounts_v3 set state = '{\"balance\":null}'")
    send(world, deposit("ada", "d1", 1))
    with handler(world) as running:
        error = ended_with(running, UnreadableState)
    assert "'accounts/ada'" in str(error)
    assert "STATE_VERSION" in str(error)


def _recreate(world: Settings, name: str) -> None:
    from infra.log.topics import describe, ensure

    before = describe(world, name).id
    admin = clients.admin(world)
    admin.delete_topics([name])[name].result(10)

    def gone() -> bool:
        try:
            return describe(world, name).id != before
        except TopicMissing:
            return True

    until(gone, "the topic is deleted")

    def made() -> bool:
        try:
            ensure(world)
        except (TopicMissing, KafkaException):
            return False
        return describe(world, name).id != before

    until(made, "the topic is recreated")


@pytest.mark.slow
def test_a_trimmed_log_is_refused(world: Settings) -> None:
    send(world, open_account("ada"), deposit("ada", "d1", 1))
    serve(world, 2)
    delete(world, world.events_topic, {HERE: 2})
    with handler(world) as running:
        error = ended_with(running, TopicsInconsistent)
    assert "trimmed" in str(error)


def test_a_handler_waits_while_the_database_is_unavailable(world: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """Sessions ended in the middle, then no new one allowed for a while: the handler waits and goes on."""
    name = world.database.split("?")[0].rpartition("/")[2]
    postgres = world.database.replace(f"/{name}?", "/postgres?")
    with handler(world), psycopg.connect(postgres, autocommit=True) as db:
        send(world, open_account("ada"))
        decided(world, 1)
        db.execute(f'alter database "{name}" connection limit 0')
        db.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
        send(world, deposit("ada", "d1", 5))
        until(lambda: "PostgreSQL does not answer" in caplog.text, "it notices")
        db.execute(f'alter database "{name}" connection limit -1')
        decided(world, 2)


def test_our_producers_use_murmur2(world: Settings) -> None:
    """Delivered partitions, by librdkafka itself, are those that the code computes; with its default they would not be."""
    landed: dict[str, int] = {}
    client: Producer = clients.producer(world)
    names = [f"accounts/{n}" for n in range(50)]
    for name in names:
        client.produce(
            world.commands_topic,
            b"x",
            key=name,
            on_delivery=lambda _, m: landed.__setitem__(m.key().decode(), m.partition()),
        )
    client.flush(10)
    assert landed == {name: partition_of(name, world.partitions) for name in names}
    assert landed != {name: zlib.crc32(name.encode()) % world.partitions for name in names}


@pytest.mark.slow
def test_commands_that_were_trimmed_before_they_were_decided_are_refused(world: Settings) -> None:
    send(world, open_account("ada"), deposit("ada", "d1", 1))
    serve(world, 2)
    send(world, deposit("ada", "d2", 1), deposit("ada", "d3", 1))
    delete(world, world.commands_topic, {HERE: 3})
    with handler(world) as running:
        error = ended_with(running, TopicsInconsistent)
    assert "does not hold the next command" in str(error)
    assert len(commits(world)) == 2, "d3 must not be decided as if d2 had never been"


@pytest.mark.slow
def test_commands_that_were_trimmed_after_they_were_decided_are_not_needed(world: Settings) -> None:
    send(world, open_account("ada"), *(deposit("ada", f"d{n}", 1) for n in range(5)))
    serve(world, 6)
    delete(world, world.commands_topic, {HERE: 3})
    for turn in range(3):  # a read that comes before the pause is refused late, or never
        send(world, deposit("ada", f"later {turn}", 1))
        serve(world, 7 + turn)


@pytest.mark.slow
def test_commands_that_are_trimmed_while_a_handler_starts_never_stop_it_in_silence(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(world, open_account("ada"), *(deposit("ada", f"d{n}", 1) for n in range(5)))
    serve(world, 6)
    look = topics.ensure
    trim_to = 3

    def then_trimmed(settings: Settings) -> tuple[topics.Topic, topics.Topic]:
        found = look(settings)
        delete(settings, settings.commands_topic, {HERE: trim_to})
        return found

    def goes_on_or_ends(running: Handler, count: int) -> bool:
        return len(commits(world)) == count or bool(running.errors)  # type: ignore[attr-defined]

    for turn in range(3):  # a read that comes before the pause is refused late, or never
        send(world, deposit("ada", f"later {turn}", 1))
        trim_to = 3 + turn
        with monkeypatch.context() as trimmed, suppress(KafkaClientFailed):
            trimmed.setattr(topics, "ensure", then_trimmed)
            with handler(world) as running:
                until(partial(goes_on_or_ends, running, 7 + turn), "it goes on, or says why not")
        serve(world, 7 + turn)


@pytest.mark.slow
def test_control_records_among_the_commands_are_passed_over(world: Settings) -> None:
    in_a_transaction(world, world.commands_topic, HERE, b"accounts/ada", encode(open_account("ada")))
    send(world, deposit("ada", "d1", 1))
    with handler(world):
        decided(world, 2)
        in_a_transaction(world, world.commands_topic, HERE, b"accounts/ada", encode(deposit("ada", "d2", 1)))
        in_a_transaction(world, world.commands_topic, HERE, b"accounts/ada", encode(deposit("ada", "d3", 1)))
        send(world, deposit("ada", "d4", 1))
        decided(world, 5)
    assert [one.command_id for one in commits(world)] == ["open-ada", "d1", "d2", "d3", "d4"]


def test_an_unknown_format_of_our_own_stops_the_handler_by_name(world: Settings) -> None:
    send(world, open_account("ada"))
    produce(world, world.events_topic, HERE, b"accounts/ada", b'{"samefold":"commit/2","something":"new"}')
    with handler(world) as running:
        error = ended_with(running, UnreadableRecord)
    assert f"[{HERE}] offset 0" in str(error)


@pytest.mark.slow
def test_garbage_in_the_log_is_void_for_the_handler_too(world: Settings) -> None:
    for value in (b"garbage", None, b"{}"):
        produce(world, world.events_topic, HERE, b"accounts/ada", value)
    send(world, open_account("ada"))
    serve(world, 1)
    assert project(world) == 1


def test_history_shows_what_counts_and_void_records_only_when_asked(world: Settings, samefold: Samefold) -> None:
    with handler(world):
        send(world, open_account("ada"), withdraw("ada", "w1", 5))
        decided(world, 2)
    stale = commits(world)[0]
    produce(world, world.events_topic, HERE, b"accounts/ada", encode(stale))
    plain = [
        json.loads(line) for line in samefold("history", "accounts/ada", "--json", settings=world).stdout.splitlines()
    ]
    assert [(e["version"], e["command_id"], e["outcome"], e["void"]) for e in plain] == [
        (1, "open-ada", "accepted", None),
        (1, "w1", "rejected", None),
    ]
    everything = samefold("history", "accounts/ada", "--void", "--json", settings=world).stdout.splitlines()
    assert [json.loads(line)["void"] for line in everything] == [None, None, "seq"]
    table = samefold("history", "accounts/ada", settings=world).stdout
    assert "AccountOpened" in table
    assert "insufficient-funds" in table
    assert "Nothing has happened" in samefold("history", "accounts/nobody", settings=world).stdout
    unknown = samefold("history", "acounts/ada", settings=world)
    assert (unknown.returncode, "'acounts'" in unknown.stderr) == (2, True)


def test_topics_are_shown_made_and_checked(empty_world: Settings, samefold: Samefold) -> None:
    world = empty_world
    missing = samefold("topics", settings=world)
    assert missing.returncode == 1
    assert "topic-missing" in missing.stderr
    made = json.loads(samefold("topics", "--create", "--json", settings=world).stdout)
    assert {name: topic["partitions"] for name, topic in made.items()} == {
        world.commands_topic: 4,
        world.events_topic: 4,
        world.policies_topic: 1,
        world.public_topic: 4,
    }
    admin = clients.admin(world)
    entry = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, world.events_topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(10)
    unfit = samefold("topics", settings=world)
    assert unfit.returncode == 1
    assert "retention.ms=1000" in unfit.stderr
    assert "--add-config retention.ms=-1" in unfit.stderr
    with handler(world) as running:
        ended_with(running, TopicUnfit)


def test_a_handler_whose_name_another_process_takes_ends_and_does_not_linger_without_partitions(
    world: Settings,
) -> None:
    """Kafka reports it as an ordinary or a fatal error; either ends the handler."""
    with handler(world, "h1") as first:
        until(lambda: len(openings(world)) == world.partitions, "the first one has all partitions")
        with handler(world, "h1"):
            ended_with(first, HandlerFenced)


@pytest.mark.slow
def test_a_handler_that_its_own_join_has_fenced_joins_again(world: Settings) -> None:
    """A broker that stood still gets a join twice, makes two members of it, and fences the one that goes on."""
    starting = Handler(world, "h1")
    until(lambda: joined(world, starting.group, "silent"), "the group has a member, and a coordinator that stays")
    with handler(world, "h1", running=starting):
        until(lambda: "h1" in members(world, starting.group), "the handler waits until the silent one joins again")
        assert joined(world, starting.group, "h1")
        assert not starting.partitions, "it is no member yet"
        joined(world, starting.group, "silent", session_ms=1_000)
        send(world, open_account("after"))
        decided(world, 1)


@pytest.mark.slow
def test_a_member_that_a_join_by_its_name_has_fenced_ends_the_handler(world: Settings) -> None:
    """Also where nothing that it polls says so."""
    with handler(world) as running:
        until(lambda: len(openings(world)) == world.partitions, "it serves")
        assert joined(world, running.group, "h1")
        ended_with(running, HandlerFenced)


def joined(world: Settings, group: str, instance: str, session_ms: int = 60_000) -> bool:
    """Whether the group has this member, after a join by its name; the group waits so long for a member that says no more."""
    asyncio.run(join(world, group, instance, session_ms))
    return instance in members(world, group)


async def join(world: Settings, group: str, instance: str, session_ms: int) -> None:
    """Send a join by a static member's name, and nothing after it."""
    client = AIOKafkaClient(bootstrap_servers=world.kafka)
    await client.bootstrap()
    try:
        node = await _coordinator(client, group)
        await client.ready(node, group=ConnectionGroup.COORDINATION)
        subscribed = ConsumerProtocol.METADATA(0, [world.commands_topic], b"").encode()
        request = JoinGroupRequest(
            group, session_ms, 60_000, "", instance, "consumer", [("cooperative-sticky", subscribed)]
        )
        with suppress(TimeoutError):  # the group answers when all its members have joined again
            await asyncio.wait_for(client.send(node, request, group=ConnectionGroup.COORDINATION), 1)
    finally:
        await client.close()


async def _coordinator(client: AIOKafkaClient, group: str) -> int:
    """The first one of a broker's life has a topic made, and is to be asked for again."""
    async with asyncio.timeout(30):
        while True:
            try:
                return int(await client.coordinator_lookup(CoordinationType.GROUP, group))
            except GroupCoordinatorNotAvailableError:
                await asyncio.sleep(0.1)


@pytest.mark.slow
def test_a_client_that_knows_no_partitions_yet_is_waited_for(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a broker's restart librdkafka may know a topic but none of its partitions."""
    failures: list[TopicPartition] = []

    class KnowsNoneAtFirst(Consumer):  # type: ignore[misc]
        def get_watermark_offsets(self, partition: TopicPartition, *_: object, **more: object) -> tuple[int, int]:
            if len(failures) < 5:
                failures.append(partition)
                raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))
            found: tuple[int, int] = super().get_watermark_offsets(partition, **more)
            return found

    monkeypatch.setattr(clients, "Consumer", KnowsNoneAtFirst)
    send(world, open_account("ada"))
    serve(world, 1)
    assert len(failures) == 5


@pytest.mark.slow
def test_a_live_command_that_this_code_does_not_know_is_left_to_another_release(world: Settings) -> None:
    """It is not answered, and neither is what comes behind it in its partition; all others go on."""
    with connect(world, "test") as db:
        db.execute("insert into command_types values ('accounts', 'Steal')")
    here, there = (partition_of(f"accounts/{name}", world.partitions) for name in ("ada", "bob"))
    assert here != there
    send(world, open_account("ada"), open_account("bob"))
    with handler(world) as running:
        decided(world, 2)
        send(world, command("accounts/ada", "steal", "Steal"), deposit("ada", "d1", 5), deposit("bob", "d1", 5))
        until(lambda: running.partitions[here].writer.left is not None, "the partition is given up")
        decided(world, 3)
        opened = len(openings(world))
        send(world, command("accounts/bob", "rob", "Rob"), command("nowhere/bob", "nowhere", "Steal"))
        partitions = {partition_of(stream, world.partitions) for stream in ("accounts/bob", "nowhere/bob")}
        until(lambda: len(commits(world)) == 5 - (here in partitions), "garbage is still rejected as malformed")
        assert len(openings(world)) == opened, "no handler opens the partition again"
        assert not {("accounts/ada", "steal"), ("accounts/ada", "d1")} & {
            (c.stream, c.command_id) for c in commits(world)
        }
        with connect(world, "test") as db:
            assert drop_other_types(db, world.events_topic) == [("accounts", "Steal")]
        until(lambda: any(c.command_id == "steal" for c in commits(world)), "no release knows it any more: malformed")
    project(world)
    keys = [("accounts/ada", "steal"), ("accounts/ada", "d1"), ("accounts/bob", "rob")]
    found = outcomes(world, keys)
    assert [found[key].code for key in keys] == ["malformed", None, "malformed"]
    assert len(commits(world)) == len({(c.stream, c.command_id) for c in commits(world)}) == 7


@pytest.mark.slow
def test_going_back_is_refused_while_handlers_run_that_know_more_commands(world: Settings, samefold: Samefold) -> None:
    with connect(world, "test") as db:
        db.execute("insert into command_types values ('accounts', 'Steal')")
        newer = Handler(world, "newer")
        newer.group += "0"
        with handler(world, "newer", running=newer):
            until(lambda: newer.group in release.alive(topics.Admin(world), world.group_prefix), "it is there")
            refused = samefold("switch", settings=world)
            assert refused.returncode == 1
            assert "other-release-runs" in refused.stderr
            assert "accounts.Steal" in refused.stderr
            assert live_types(db) > own_types()
        until(lambda: samefold("switch", settings=world).returncode == 0, "it has ended, and its session with it")
        assert live_types(db) == own_types()


@pytest.mark.slow
def test_a_database_that_lost_the_live_commands_while_a_handler_serves_gets_them_again(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was restored. No API appends what is not live: no command would ever have the handler look.

    They are live before a handler serves, too.
    """
    monkeypatch.setattr("commands.handler.CHECK_S", 0.2)
    send(world, open_account("ada"))
    with connect(world, "test") as db:
        assert live_types(db) == own_types(), "by the first start"
        db.execute("delete from command_types")
        with handler(world):
            decided(world, 1)
            assert live_types(db) == own_types()
            db.execute("delete from command_types")
            until(lambda: live_types(db) == own_types(), "they are live again")


@pytest.mark.slow
def test_a_handler_waits_for_agents_that_can_fold_its_events(world: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """They would stop at those that it appends."""
    caplog.set_level("INFO")
    send(world, open_account("ada"))
    with connect(world, "test") as db:
        db.execute("delete from event_types where type = 'accounts.MoneyDeposited'")
        with handler(world):
            says = "no agent that can fold these events has run yet, start those first: accounts.MoneyDeposited"
            until(lambda: says in caplog.text, "it says for what it waits")
            assert openings(world) == []
            assert record_event_types(db) == {"accounts.MoneyDeposited"}
            decided(world, 1)


@pytest.mark.slow
def test_a_handler_leaves_decisions_to_a_newer_release_once_agents_fold_its_events_and_goes_on_when_that_is_gone(
    world: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """No command is new, so nothing else tells it."""
    caplog.set_level("INFO")
    with connect(world, "test") as db:
        db.execute("insert into event_types (type) values ('accounts.MoneyDeposited/2')")
    newer = Handler(world, "newer")
    states, _, types = newer.group.rpartition(".")
    newer.group = f"{states}.1{types}"  # a hundred types more
    with ExitStack() as rest:
        with handler(world, "newer", running=newer):
            until(lambda: len(openings(world)) == world.partitions, "the newer one serves")
            rest.enter_context(handler(world, "older"))
            says = f"another release decides, in the group {newer.group}: it knows accounts.MoneyDeposited/2"
            until(lambda: says in caplog.text, "the older one waits")
            assert {opening.writer for opening in openings(world)} == {"newer"}
        until(lambda: "older" in {opening.writer for opening in openings(world)}, "the older one goes on")


def test_each_rejection_that_tells_of_a_defect_is_logged_counted_and_recorded(
    world: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rejected(code: str) -> float:
        return REGISTRY.get_sample_value("samefold_handler_rejections_total", {"why": code}) or 0

    monkeypatch.setattr("infra.log.clients.MAX_COMMAND_BYTES", 1_024)
    monkeypatch.setattr("domain.accounts.LARGEST_BALANCE", None)  # `decide` raises
    large = dict.fromkeys(("operation", "purpose", "counter_bank", "counter_account"), "private" * 28)
    before = {code: rejected(code) for code in RECORDED}
    elsewhere = (partition_of("accounts/ada", world.partitions) + 1) % world.partitions
    produce(world, world.commands_topic, elsewhere, b"accounts/ada", encode(open_account("ada")))
    send(
        world,
        open_account("ada"),
        deposit("ada", "failed", 1),
        command("accounts/ada", "conflict", "Withdraw", expected_version=7, cents=1, on="2026-01-01"),
        command("accounts/ada", "malformed", "Withdraw", cents=0, on="2026-01-01"),
        command("accounts/ada", "large" * 30, "Deposit", cents=1, on="2026-01-01", details=large),
        open_account("a\N{ZERO WIDTH SPACE}da"),
    )
    serve(world, 7)
    assert {c.reason.code for c in commits(world) if c.reason} == RECORDED
    assert {code: rejected(code) - number for code, number in before.items()} == dict.fromkeys(RECORDED, 1)
    told = {code for code in RECORDED if f"1 commands were rejected as {code}, the first of " in caplog.text}
    assert told == RECORDED - {"version-conflict"}
    assert "private" not in caplog.text
