"""Observes the processes' work: outcomes in the read model, openings and commits in the log, agents' sessions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from confluent_kafka import KafkaException, TopicPartition
from psycopg import sql

from commands.client import CORE_CHANNEL
from commands.outcomes import ReadModelNotSetUp, live_table
from demo.crew import Crew
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.records import Opening, Record, decode_event
from infra.log.rule import START, Reading, read
from infra.processes.supervisor import Child
from infra.settings import Settings
from policies.engine.policy import discover
from proofs.kit import name_of

BATCH = 10_000
TIMEOUT_S = 10.0
AT_WORK_WITHIN_S = 60.0


class NotAtWork(SamefoldError):
    """The demo's processes did not get ready in time."""


@dataclass(frozen=True, slots=True)
class Before:
    """What was there when a process was killed: only what came after it can be its successor's."""

    log_ends: dict[int, int] = field(default_factory=dict)
    sessions: frozenset[int] = frozenset()
    memberships: frozenset[str] = frozenset()


class Watch:
    """An independent reader of the log and of the database.

    After a handler's death its successor is seen by an opening in its name, after an agent's by a place in the consumer group
    and a session of the database in its name.
    """

    def __init__(self, settings: Settings) -> None:
        self._topic = topics.describe(settings, settings.events_topic)
        self._database = connect(settings, "samefold demo watch")
        for listened in (CORE_CHANNEL, *(f"samefold_{policy.agent}" for policy in discover().values())):
            self._database.execute(f"listen {listened}")
        self._consumer = clients.range_consumer(settings)
        self._admin = clients.admin(settings)
        self._asked = topics.Admin(settings)
        self._groups = f"{settings.group_prefix}-"
        self._consumer.assign([TopicPartition(self._topic.name, p, 0) for p in self._topic.end])
        self._readings: dict[int, Reading] = dict.fromkeys(self._topic.end, START)
        self._openings: dict[str, list[tuple[int, int]]] = {}
        self._commits: Counter[tuple[int, int]] = Counter()
        self._seen: dict[str, set[int]] = {}
        self._committed: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._consumer.close()
        self._database.close()

    def visible(self) -> int:
        """How many commands of the bank have their outcome in the read model."""
        try:
            table = live_table(self._database, "command_outcomes")
        except ReadModelNotSetUp:
            return 0
        query = sql.SQL("select count(*) from {} where by is null").format(sql.Identifier(table))
        row = self._database.execute(query).fetchone()
        return int(row[0]) if row else 0

    def decided(self) -> int:
        """How many commits count in the log, as of the last `look`."""
        return self._commits.total()

    def wait(self, seconds: float) -> None:
        """Returns when an agent committed a batch, or the time is over."""
        # an agent notifies in the transaction of its batch, so the notifying session is one that committed
        self._committed.update(told.pid for told in self._database.notifies(timeout=seconds, stop_after=1))

    def wait_until(self, holds: Callable[[], bool], crew: Crew) -> None:
        """Raises NotAtWork after a minute, CrewGone."""
        deadline = time.monotonic() + AT_WORK_WITHIN_S
        while not holds():
            crew.check()
            if time.monotonic() > deadline:
                raise NotAtWork(
                    f"The demo's processes were not at work within {AT_WORK_WITHIN_S:.0f} s.",
                    f"Their logs are in {crew.folder}.",
                )
            self.wait(0.05)
            self.look()

    def look(self) -> None:
        """Read what has happened since the last call."""
        while messages := self._consumer.consume(BATCH, 0):
            for message in messages:
                if message.error() is None:
                    partition, offset = message.partition(), message.offset()
                    self._take(Record(partition, offset, message.timestamp()[1], message.key(), message.value()))
        for name, pid in self._database.execute("select application_name, pid from pg_stat_activity"):
            self._seen.setdefault(name, set()).add(pid)

    def is_ready(self, handlers: Sequence[Child], others: Sequence[Child]) -> bool:
        """Whether every partition was opened, every handler has opened one, and all others have some."""
        opened = {partition for epochs in self._openings.values() for partition, _ in epochs}
        return (
            opened == self._readings.keys()
            and all(name_of(handler) in self._openings for handler in handlers)
            and all(self._memberships(other) for other in others)
        )

    def before(self, child: Child) -> Before:
        """To be taken when a process has just died."""
        ends = topics.ends(self._topic, self._asked)
        self.look()
        return Before(ends, frozenset(self._sessions(child)), frozenset(self._memberships(child)))

    def is_at_its_place(self, child: Child, before: Before) -> bool:
        """Whether a successor is at its place: it opened a partition, or was given some."""
        if child.module == "commands.handler":
            return bool(self._opened(child, before))
        return bool(self._memberships(child) - before.memberships)

    def has_worked(self, child: Child, before: Before) -> bool:
        """Whether a successor did what it is for: a commit that counts, or a batch that was committed."""
        if child.module == "commands.handler":
            return any(self._commits[epoch] for epoch in self._opened(child, before))
        return bool((self._sessions(child) - before.sessions) & self._committed)

    def _opened(self, child: Child, before: Before) -> list[tuple[int, int]]:
        ends = before.log_ends
        return [epoch for epoch in self._openings.get(name_of(child), []) if epoch[1] >= ends.get(epoch[0], 0)]

    def _sessions(self, child: Child) -> set[int]:
        return self._seen.get(f"samefold {name_of(child)}"[:63], set())

    def _memberships(self, child: Child) -> set[str]:
        """The groups' ids of members that have partitions in this child's name; who comes back gets a new one."""
        groups = self._admin.list_consumer_groups(request_timeout=TIMEOUT_S).result().valid
        names = [group.group_id for group in groups if group.group_id.startswith(self._groups)]
        asked = self._admin.describe_consumer_groups(names, request_timeout=TIMEOUT_S) if names else {}
        found = set[str]()
        for group in asked.values():
            with suppress(KafkaException):  # its coordinator moves: the next look finds it
                found |= {
                    str(member.member_id)
                    for member in group.result().members
                    if member.group_instance_id == name_of(child) and member.assignment.topic_partitions
                }
        return found

    def _take(self, record: Record) -> None:
        partition = record.partition
        entry = decode_event(record)
        if isinstance(entry, Opening):
            self._openings.setdefault(entry.writer, []).append((partition, record.offset))
        self._readings[partition], counted, _ = read(self._readings[partition], [record])
        self._commits[partition, self._readings[partition].epoch] += len(counted)
