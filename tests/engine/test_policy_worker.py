"""The worker of a policy: which version reacts, whatever becomes of the database."""

from __future__ import annotations

import pytest

from domain.accounts import AccountOpened
from infra.database.connect import DatabaseUnavailable, connect
from infra.log import topics
from infra.log.source import read_range
from infra.settings import Settings
from policies.engine.activations import switch
from policies.engine.policy import Policy
from policies.engine.worker import PolicyWorker
from projections.engine.store.commit import Fate
from tests.engine.bookkeeper import folded_lives

ACCOUNTS = [str(number) for number in range(6)]


def policy(version: int) -> Policy:
    return Policy("greetings", version, lambda _event, _at: (), frozenset({AccountOpened}))


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
    assert worker.apply(takes, 1).fate is Fate.FENCED
    after = worker.positions(2)
    assert after is not None
    assert after.live_set == {"policy_greetings": 2}
    worker.close()
