"""What a command's way costs at the very least: two acknowledged sends and one transaction, in one thread, nothing else.

The records are as large as a command and its commit, the four statements are those of an agent's batch of one: compare-and-set
of the position with a notification, the stream's state, the view's row, the outcome; one round trip. No process waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import NewTopic

from benchmarks.stage import World
from infra.database.connect import Connection, connect
from infra.log import clients
from infra.log.contract import Contract
from projections.engine.live.startup import ensure_started
from projections.engine.views.core_views import agent_views

COMMAND = b'{"samefold":"command/1","id":"%032x","stream":"accounts/000001","type":"Deposit","data":{"cents":1}}'
COMMIT = COMMAND + b" " * 250
"""A commit of the sample takes about 350 bytes."""
ACCOUNT = "000001"

_MOVE = """
update positions set next_offset = next_offset + 1, seq = seq + 1, command_offset = command_offset + 1
 where agent = 'core' and topic = %s and partition = 0 and next_offset = %s
returning pg_notify('samefold_floor', '0:1')
"""
_STATE = """
insert into streams_accounts_v3 as t (stream, version, state, _partition) values (%s, %s, %s::json, 0)
    on conflict (stream) do update set version = excluded.version, state = excluded.state
"""
_ROW = """
insert into balances_v2 as t (account, cents, overdraft_limit, opened_on, last_on, transactions, owner, _partition)
values (%s, %s, 0, '2026-01-02', '2026-01-02', %s, '', 0)
    on conflict (account) do update set cents = excluded.cents, transactions = excluded.transactions
"""
_OUTCOME = """
insert into command_outcomes_v3 (command, fingerprint, version, at, _partition) values (%s, %s, %s, now(), 0)
"""


class Floor:
    """`with floor_of(world) as floor: floor.step()`, on a database and topics of its own."""

    def __init__(self, world: World, database: Connection, topics: list[str]) -> None:
        self._events = world.events.name
        self._database = database
        self._topics = topics
        self._producer: Producer = clients.producer(world.settings)
        self._failed: list[KafkaError] = []
        self.count = 0

    def step(self) -> None:
        """One command's worth. Raises AssertionError where a send was not acknowledged."""
        database, number = self._database, self.count
        for topic, value in zip(self._topics, (COMMAND, COMMIT), strict=True):
            self._producer.produce(topic, value % number, key=b"accounts/000001", on_delivery=self._acknowledged)
            left = self._producer.flush(30)
            assert not left, "a send was not acknowledged"
            assert not self._failed, self._failed
        self.count = number + 1
        name = f"{number:032x}"
        stream = f"accounts/{ACCOUNT}"
        with database.pipeline():
            database.execute("begin")
            database.execute(_MOVE, [self._events, number])
            database.execute(_STATE, [stream, self.count, f'{{"status":"open","balance":{number}}}'])
            database.execute(_ROW, [ACCOUNT, number, number])
            database.execute(_OUTCOME, [name, name, self.count])
            database.execute("commit")

    def _acknowledged(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failed.append(error)


@contextmanager
def floor_of(world: World) -> Iterator[Floor]:
    names = [f"{world.settings.group_prefix}-floor-{n}" for n in (1, 2)]
    admin = clients.admin(world.settings)  # a name of its own: without one it would end before the answer comes
    for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
        future.result(15)
    with connect(world.settings, "samefold bench floor") as database:
        ensure_started(database, "core", agent_views("core"), Contract.of(world.events))
        yield Floor(world, database, names)
