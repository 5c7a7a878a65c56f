"""make test: a database and no process. The worker of a policy: which version reacts, whatever becomes of the database."""

from __future__ import annotations

import pytest

from domain.accounts import AccountOpened
from infra.archive.whole_log import read_range
from infra.database.connect import DatabaseUnavailable, connect
from infra.log import topics
from infra.log.records import Record
from infra.log.rule import START
from infra.settings import Settings
from policies.engine.activations import Activation, switch
from policies.engine.policy import Policy
from policies.engine.worker import PolicyWorker
from projections.engine.store.commit import CommitStatus
from tests.engine.bookkeeper import folded_lives

ACCOUNTS = [str(number) for number in range(6)]


def policy(version: int) -> Policy:
    return Policy("greetings", version, lambda _event, _at: (), frozenset({AccountOpened}))


def test_a_version_that_was_in_force_nowhere_in_a_partition_stops_no_worker_there(world: Settings) -> None:
    """Version 2 was live for a moment in which nothing came. Then the database was restored to before."""

    def activation(number: int, version: int, offset: int) -> Activation:
        at = START._replace(next_offset=offset)
        return Activation("greetings", number, version, {0: at}, number)

    def record(offset: int) -> Record:
        return Record(0, offset, 0, None, None)

    worker = PolicyWorker(world, policy(1), "w")
    worker._activations = [activation(1, 1, 0), activation(2, 2, 100), activation(3, 1, 100), activation(4, 3, 110)]
    records = [record(offset) for offset in range(90, 120)]
    mine, stop = worker.own(0, START._replace(next_offset=90), records)
    assert [one.offset for one in mine] == [*range(90, 110)]
    assert stop is not None
    assert "version 3 of policy 'greetings' is in force" in stop.message


def test_a_switch_that_a_restored_database_forgot_still_fences_a_worker(world: Settings) -> None:
    """The copy has the generation that the worker knows. Only the topic of policies has the switch."""
    bank = folded_lives(world, ACCOUNTS, 3)
    switch(world, policy(1))
    worker = PolicyWorker(world, policy(1), "w")
    before = worker.positions(1)
    assert before is not None
    switch(world, policy(2))
    with connect(world, "test") as db:
        db.execute("delete from activations where number = 2")
        db.execute("update positions set generation = %s where agent = 'policy_greetings'", [before.generation])
        db.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
        )
    with pytest.raises(DatabaseUnavailable):
        worker.ping()
    worker.ping()  # a new connection
    bank.life(ACCOUNTS, 2)
    bank.flush()
    ends = topics.describe(world, world.events_topic).end
    takes = {
        partition: (
            at,
            [one for batch in read_range(world, world.events_topic, partition, at.next_offset, end) for one in batch],
        )
        for partition, at in before.readings.items()
        if (end := ends[partition]) > at.next_offset
    }
    assert takes
    assert worker.apply(takes, 1).status is CommitStatus.FENCED
    after = worker.positions(2)
    assert after is not None
    assert after.live_set == {"policy_greetings": 2}
    worker.close()
