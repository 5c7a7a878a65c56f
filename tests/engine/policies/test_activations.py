"""make test + test-all: stores without processes; killed ones take longer.

The moment when a policy is made live: recorded in the topic of policies, which no restored database can move."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, Thread

import msgspec
import pytest

from domain.accounts import AccountOpened
from infra.archive.whole_log import read_range
from infra.database.connect import Connection, connect
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.clients import KafkaUnavailable
from infra.log.records import Record, UnreadableRecord
from infra.log.rule import START, Reading
from infra.log.topics import TopicChanged, TopicUnfit
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
from policies.engine.activations import (
    Activation,
    AlreadyLive,
    NeverLive,
    OldEventsLeft,
    WishesOpen,
    activations_of,
    bring_in,
    ends_at,
    ensure_positions,
    remove,
    start_all,
    start_new,
    switch,
    version_at,
)
from policies.engine.policy import Policy, discover
from projections.engine.store.positions import read_positions, set_generation
from tests.engine.bookkeeper import Bookkeeper, fold_all, folded_lives
from tests.engine.spine import deposit, in_a_transaction, produce, send, set_up
from tools.testing.waiting import DEADLINE_S, until

ACCOUNTS = [str(number) for number in range(6)]


def policy(version: int = 1, name: str = "greetings") -> Policy:
    return Policy(name, version, lambda _event, _at: (), frozenset({AccountOpened}))


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    """A service with history, all of it folded by the core agent."""
    return folded_lives(world, ACCOUNTS, 3)


@pytest.fixture
def db(world: Settings) -> Iterator[Connection]:
    with connect(world, "test") as connection:
        yield connection


def positions(db: Connection, world: Settings, agent: str = "policy_greetings") -> dict[int, Reading] | None:
    found = read_positions(db, agent, world.events_topic)
    return dict(found.readings) if found else None


def go_on(bank: Bookkeeper) -> dict[int, Reading]:
    """More history, read by the core agent and by the policy's. Returns where both are."""
    bank.life(ACCOUNTS, 2)
    at = fold_all(bank.world)
    with connect(bank.world, "test") as db:
        set_generation(db, bank.world.events_topic, {"policy_greetings": at}, "test")
    return at


def recorded(world: Settings) -> list[Record]:
    end = topics.describe(world, world.policies_topic).end[0]
    return [one for batch in read_range(world, world.policies_topic, 0, 0, end) for one in batch]


class Killed(BaseException):
    """In place of SIGKILL."""


def killed_before_the_topic(world: Settings, version: int) -> None:
    """A switch that ends between its transaction and its record."""

    def kill(point: Point) -> None:
        if point == "activation written":
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faultpoints, "hook", kill)
        with pytest.raises(Killed):
            switch(world, policy(version))


def at_once(*work: object) -> list[SamefoldError | None]:
    """The errors of functions that run in threads of their own, from the same moment on."""
    barrier, errors = Barrier(len(work)), list[SamefoldError | None]()

    def run(one: object) -> None:
        assert callable(one)
        barrier.wait(10)
        try:
            one()
        except SamefoldError as error:
            errors.append(error)
        else:
            errors.append(None)

    threads = [Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == len(work)
    return errors


# ── which version is in force ──


def reading(offset: int) -> Reading:
    return Reading(offset, 0, offset, offset)


LIVES = [
    Activation("greetings", number, version, {0: reading(offset), 1: reading(other)}, number)
    for number, version, offset, other in [(1, 1, 10, 0), (2, 2, 20, 5), (3, 0, 20, 5), (4, 4, 30, 5)]
]


def test_each_offset_belongs_to_one_version() -> None:
    offsets = (0, 9, 10, 19, 20, 29, 30, 99)
    assert [version_at(LIVES, 0, offset) for offset in offsets] == [0, 0, 1, 1, 0, 0, 4, 4]
    assert [ends_at(LIVES, 0, offset) for offset in offsets] == [10, 10, 20, 20, 30, 30, None, None]
    assert [(version_at(LIVES, 1, offset), ends_at(LIVES, 1, offset)) for offset in (0, 4, 5)] == [
        (1, 5),
        (1, 5),
        (4, None),
    ]
    assert (version_at([], 0, 7), ends_at([], 0, 7)) == (0, None)


# ── switches ──


def test_a_new_policy_begins_at_the_end_of_the_log(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    """Whether the core agent is behind, or a new database has no positions of it."""
    bring_in(world, db)
    assert (activations_of(db, "greetings"), positions(db, world)) == ([], None)
    bank.life(ACCOUNTS, 2)
    made = switch(world, policy())
    at = fold_all(world)
    assert made == Activation("greetings", 1, 1, at, 0)
    assert activations_of(db, "greetings") == [made]
    assert positions(db, world) == made.positions
    [record] = recorded(world)
    assert (record.value or b"").startswith(b'{"samefold":"activation/1",')
    assert topics.describe(world, world.policies_topic).partitions == 1
    topics.check(world, [world.policies_topic])
    in_a_transaction(world, world.events_topic, 0, None, b"foreign: void, with a marker behind it that is no record")
    db.execute("delete from positions where agent = 'core'")
    other = switch(world, policy(7, "reports"))
    at[0] = at[0]._replace(next_offset=at[0].next_offset + 1)
    assert other == Activation("reports", 1, 7, at, 1), "each policy has numbers of its own"
    assert (activations_of(db, "greetings"), activations_of(db, "reports")) == ([made], [other])


def test_the_next_version_begins_where_the_policy_is_and_fences_the_one_before(
    world: Settings, bank: Bookkeeper, db: Connection
) -> None:
    switch(world, policy())
    with pytest.raises(AlreadyLive, match="live as version 1"):
        switch(world, policy())
    at = go_on(bank)
    before = read_positions(db, "policy_greetings", world.events_topic)
    bank.life(ACCOUNTS, 2)
    fold_all(world)  # the core agent is ahead now
    made = switch(world, policy(2))
    after = read_positions(db, "policy_greetings", world.events_topic)
    assert (made.number, made.version, made.positions) == (2, 2, at)
    assert before is not None
    assert after is not None
    assert after.readings == before.readings
    assert after.generation != before.generation
    assert len(recorded(world)) == 2


def test_of_switches_at_once_one_is_recorded_and_the_others_see_it(
    world: Settings, bank: Bookkeeper, db: Connection
) -> None:
    bring_in(world, db)
    for version in (1, 2, 3):
        errors = at_once(*[lambda version=version: switch(world, policy(version))] * 3)
        # one that comes while the first is not in the topic yet ends it, and counts as done too
        assert {type(one) for one in errors} <= {AlreadyLive, type(None)}, errors
        assert None in errors
    assert [one.version for one in activations_of(db, "greetings")] == [1, 2, 3]
    assert len(recorded(world)) == 3


# ── what is killed between, restored, or read by several ──


def test_a_killed_switch_is_ended_by_any_worker(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    """Several that end it at once append it once."""

    def worker() -> None:
        with connect(world, "test worker") as own:
            bring_in(world, own)

    for version in range(1, 6):
        killed_before_the_topic(world, version)
        half = activations_of(db, "greetings")[-1]
        assert (half.log_offset, len(recorded(world))) == (None, version - 1)
        assert at_once(*[worker] * 4) == [None] * 4
        assert activations_of(db, "greetings")[-1] == half._replace(log_offset=version - 1)
        bring_in(world, db)
        assert len(recorded(world)) == version


def test_a_killed_switch_is_ended_by_the_same_command(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    killed_before_the_topic(world, 1)
    made = switch(world, policy())
    assert (made.number, made.version, made.log_offset) == (1, 1, 0)
    assert activations_of(db, "greetings") == [made]
    with pytest.raises(AlreadyLive):
        switch(world, policy())


def test_a_restored_database_learns_from_the_topic_what_it_lacks(
    world: Settings, bank: Bookkeeper, db: Connection
) -> None:
    first = switch(world, policy())
    go_on(bank)
    second = switch(world, policy(2))
    for copy in (
        "delete from activations where number > 1",  # made before the second switch
        "delete from activations; delete from positions where agent = 'policy_greetings'",  # before the first
        "update activations set log_offset = null where number = 2",  # between its transaction and its record
    ):
        db.execute(copy.encode())
        bring_in(world, db)
        assert activations_of(db, "greetings") == [first, second]
        assert len(recorded(world)) == 2
    ensure_positions(db, world.events_topic, "greetings")
    assert positions(db, world) == first.positions, "it begins where it began"
    assert version_at([first, second], 0, first.positions[0].next_offset) == 1


def test_the_topic_wins_over_what_was_written_but_not_recorded(
    world: Settings, bank: Bookkeeper, db: Connection
) -> None:
    first = switch(world, policy())
    at = go_on(bank)
    second = switch(world, policy(2))
    db.execute("delete from activations where number = 2")
    killed = Activation("greetings", 2, 5, {**at, 0: START}, None)
    db.execute(
        "insert into activations (policy, number, version, positions) values (%s, %s, %s, %s)",
        (*killed[:3], msgspec.json.encode(killed.positions).decode()),
    )
    bring_in(world, db)
    assert activations_of(db, "greetings") == [first, second]


def test_the_first_record_of_a_number_counts_and_foreign_ones_do_not(
    world: Settings, bank: Bookkeeper, db: Connection
) -> None:
    made = switch(world, policy())
    value = recorded(world)[0].value or b""
    topic = world.policies_topic
    for other in (value, value.replace(b'"version":1', b'"version":9'), b"hello", b'{"policy":"greetings"}', None):
        produce(world, topic, 0, None, other)
    bring_in(world, db)
    assert activations_of(db, "greetings") == [made]
    db.execute("delete from activations")
    bring_in(world, db)
    assert activations_of(db, "greetings") == [made]
    produce(world, topic, 0, None, b'{"samefold":"activation/2","policy":"greetings"}')
    for _ in range(2):
        with pytest.raises(UnreadableRecord, match=f"{topic}\\[0\\] offset 6"):
            bring_in(world, db)


def test_a_recreated_topic_is_refused(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    switch(world, policy())
    admin = clients.admin(world)
    admin.delete_topics([world.policies_topic])[world.policies_topic].result(30)
    until(lambda: world.policies_topic not in admin.list_topics(timeout=DEADLINE_S).topics, "it is gone")
    topics.ensure_policies(world)
    with pytest.raises(TopicChanged, match="ends at 0, but records up to 1 were read"):
        bring_in(world, db)


def test_a_topic_of_another_log_is_refused(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    switch(world, policy())
    value = recorded(world)[0].value or b""
    other = msgspec.json.decode(value) | {"number": 2, "events_topic_id": "another"}
    produce(world, world.policies_topic, 0, None, msgspec.json.encode(other))
    with pytest.raises(TopicChanged, match="with the id another"):
        bring_in(world, db)


def test_a_topic_that_would_lose_records_is_refused(world: Settings, bank: Bookkeeper) -> None:
    unfit = world.model_copy(update={"policies_topic": world.events_topic})
    with pytest.raises(TopicUnfit, match="has 4 partitions"):
        topics.ensure_policies(unfit)


@pytest.mark.slow  # a command waits for Kafka for 15 s
def test_without_kafka_a_switch_changes_nothing(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    killed_before_the_topic(world, 1)
    with pytest.raises(KafkaUnavailable):
        bring_in(world.model_copy(update={"kafka_bootstrap": "127.0.0.1:9"}), db)
    [half] = activations_of(db, "greetings")
    assert half.log_offset is None
    bring_in(world, db)
    assert len(recorded(world)) == 1


# ── positions ──


def test_a_service_that_was_never_asked_anything_runs_its_policies_from_the_beginning(
    world: Settings, db: Connection
) -> None:
    set_up(world)
    for _ in range(2):
        assert start_new(world, db, policy())
    [made] = activations_of(db, "greetings")
    assert (made.version, set(made.positions.values()), made.log_offset) == (1, {START}, 0)
    assert positions(db, world) is None

    def first() -> None:
        with connect(world, "test worker") as own:
            ensure_positions(own, world.events_topic, "greetings")

    assert at_once(*[first] * 4) == [None] * 4
    assert positions(db, world) == made.positions
    before = read_positions(db, "policy_greetings", world.events_topic)
    first()
    assert before == read_positions(db, "policy_greetings", world.events_topic), "no new generation"


def test_the_log_is_kept_for_a_policy_whose_process_never_ran(world: Settings, db: Connection) -> None:
    """Trimming goes by the positions, and so does the lag."""
    set_up(world)
    start_all(world)
    agents = [one.agent for one in discover().values()]
    assert agents
    assert [{*(positions(db, world, agent) or {}).values()} for agent in agents] == [{START}] * len(agents)


def test_a_new_policy_of_a_service_with_history_waits(world: Settings, db: Connection) -> None:
    set_up(world)
    send(world, deposit("1", "d1", 5))
    assert not start_new(world, db, policy())
    assert activations_of(db, "greetings") == []
    ensure_positions(db, world.events_topic, "greetings")
    assert positions(db, world) is None


def test_a_removed_policy_reacts_to_nothing_until_it_is_switched_on_again(
    world: Settings, bank: Bookkeeper, db: Connection
) -> None:
    with pytest.raises(NeverLive):
        remove(world, "greetings")
    switch(world, policy())
    removed_at = go_on(bank)
    gone = remove(world, "greetings")
    assert (gone.number, gone.version, gone.positions) == (2, 0, removed_at)
    with pytest.raises(NeverLive):
        remove(world, "greetings")
    bank.life(ACCOUNTS, 2)
    back = switch(world, policy())
    later = fold_all(world)
    assert (back.number, back.version, back.positions) == (3, 1, later), "also of what the core agent had not read"
    assert positions(db, world) == later
    # a database of the time before: what it reads again ends where the policy was removed
    set_generation(db, world.events_topic, {"policy_greetings": removed_at}, "test")
    ensure_positions(db, world.events_topic, "greetings")
    assert positions(db, world) == later


def test_a_policy_with_open_wishes_is_not_removed(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    switch(world, policy())
    db.execute("insert into outbox (id, policy, kind) values ('greetings~1', 'greetings', 'send')")
    db.execute("insert into outbox (id, policy, outcome) values ('greetings~2', 'greetings', 'accepted')")
    with pytest.raises(WishesOpen, match="has 1 wishes") as error:
        remove(world, "greetings")
    assert "samefold outbox list --policy greetings" in error.value.hint
    db.execute("delete from outbox where id = 'greetings~1'")
    remove(world, "greetings")


def test_old_events_need_the_old_version_first(world: Settings, bank: Bookkeeper, db: Connection) -> None:
    first = switch(world, policy())
    go_on(bank)
    switch(world, policy(2))
    set_generation(db, world.events_topic, {"policy_greetings": first.positions}, "restored")
    ensure_positions(db, world.events_topic, "greetings")
    assert positions(db, world) == first.positions
    with pytest.raises(OldEventsLeft, match="belong to its version 1"):
        switch(world, policy(3))
    with pytest.raises(OldEventsLeft, match="belong to its version 1"):
        remove(world, "greetings")
