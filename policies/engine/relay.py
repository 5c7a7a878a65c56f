"""The relay: appends the commands that policies wish to `commands`, and marks them sent.

It may append one twice, after a kill or while partitions move to another process: ids are derived, and the handler decides each
once. Commands from one stream to another are appended in order, each after its predecessor's acknowledgement.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message
from msgspec import UNSET

from commands.append import produce
from commands.outcomes import ReadModelNotSetUp, outcomes_of
from infra.archive.whole_log import read_range
from infra.database.connect import Connection, DatabaseUnavailable, session
from infra.log import clients, topics
from infra.log.clients import KafkaUnavailable
from infra.log.records import Command, Opening, decode_event, encode
from infra.observability import logs
from infra.processes.faultpoints import reach
from infra.settings import Settings
from policies.engine.dead_letters import DeadReason
from policies.engine.outbox import CHANNEL, POSTS, refuse
from policies.engine.sender import Sender, UnsentCommand
from projections.engine.store.command_types import CommandType, live_types, own_types

log = logging.getLogger(__name__)

MOST_UNDECIDED = 2_000
"""With so many commands of sources that are not decided, the next ones wait: no client's command waits behind more of them."""
LONG_S = 30.0
"""After so long it says that they wait."""
LOOK_S = 1.0
"""How often the outbox is read, if nothing else happens."""
PAUSE_S = 0.5
"""After a failed append, and while a store is unavailable."""
MOST = 2_000
"""Commands that are read from the outbox at once."""
MOST_KNOWN = 50_000
"""With so many commands in memory, no more are read: while Kafka takes none, they wait in the outbox."""
PAGE_S = 0.05
"""After a full page, until the next one is read."""
ANSWER_S = 0.01
"""How long a poll waits for acknowledgements before notifications are read."""

_REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
}
"""Errors of one record: it is refused each time."""


_UNSENT = "kind = 'send' and sent_at is null and dead is null"
_READ = f"""
with mine (policy, partition) as materialized (select * from unnest(%(policies)s::text[], %(partitions)s::int[])),
at_once as (
  select o.* from mine cross join lateral (
    select * from outbox o where o.policy = mine.policy and o.partition = mine.partition and {_UNSENT} and due is null
     order by stream, version, number limit %(most)s) o
   order by partition, stream, version, number limit %(most)s),
timers as (
  select o.* from mine cross join lateral (
    select * from outbox o
     where o.policy = mine.policy and o.partition = mine.partition and {_UNSENT} and due is not null and due <= %(until)s
     order by due, stream, version, number limit %(most)s) o
   order by due, partition, stream, version, number limit %(most)s)
select {", ".join(UnsentCommand._fields)} from (select * from at_once union all select * from timers) unsent
 order by due nulls first, partition, stream, version, number
"""  # noqa: S608  # each limit ends the walk through an index that has this order, however many rows are behind it


def read_unsent(
    connection: Connection, mine: Set[tuple[str, int]], until: datetime, most: int
) -> Iterator[UnsentCommand]:
    """The first unsent rows of these (policy, partition) that are due by then, in the order in which they are to be sent.

    At most so many that are sent at once, and as many timers: neither crowds the other out.
    """
    return map(UnsentCommand._make, connection.execute(_READ, _columns(mine) | {"until": until, "most": most}))


def mark_sent(connection: Connection, ids: Sequence[str]) -> None:
    connection.execute("update outbox set sent_at = now() where id = any(%s)", [ids])


_UNDER_WAY = "select target, id from outbox where id = any(%s) and kind = 'send' and dead is null"
_CLAIM = """
insert into relay_leases as l
select policy, partition, %(holder)s, now() + %(seconds)s * interval '1 s'
  from unnest(%(policies)s::text[], %(partitions)s::int[]) wanted (policy, partition)
    on conflict (policy, partition) do update set holder = excluded.holder, until = excluded.until
 where l.holder = excluded.holder or l.until < now()
returning policy, partition
"""
_RELEASE = "delete from relay_leases where holder = %s"


def _columns(mine: Set[tuple[str, int]]) -> dict[str, Any]:
    ordered = sorted(mine)
    return {"policies": [policy for policy, _ in ordered], "partitions": [partition for _, partition in ordered]}


class Relay:
    """Sends due commands of these policies' partitions until `stop`. `run` blocks, in a thread of its own.

    `mine` returns the (policy, partition) that this process has now. `on_posts` is called when posts were wished. `yields`: its
    commands wait while many of them are not decided.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        mine: Callable[[], Set[tuple[str, int]]],
        on_posts: Callable[[], None] = lambda: None,
        *,
        yields: bool = False,
    ) -> None:
        self.settings = settings
        self.name = name
        self._yields = yields
        self._to_decide: set[str] = set()
        """If it yields, ids that it sends, until they are found to be decided or gone."""
        self._went_on_at = time.monotonic()
        self._mine = mine
        self._on_posts = on_posts
        self._stopping = threading.Event()
        self._status = logs.StatusLog(log, f"relay {name}")
        self._kafka = clients.Connection(f"relay {name}")
        self._producer = clients.LastingProducer(settings, f"relay {name}", self._kafka)
        self._sender = Sender()
        self._holder = f"{socket.gethostname()}:{os.getpid()} {uuid4()}"
        self._held: Set[tuple[str, int]] = set()
        """(policy, partition) whose commands this process sends: two releases have all of them for a while."""
        self._wanted: Set[tuple[str, int]] = set()
        self._claim_at = 0.0
        self._live = frozenset[CommandType]()
        """Types that handlers decide, as of when another one was last met."""
        self._undecided: dict[tuple[str, int], CommandType] = {}
        """(policy, partition) whose next command has a type that no handler decides yet: another release's process wished it."""
        self._undecided_until = 0.0
        """Then what waits there is read again: handlers may decide it by now, or an operator has dropped it."""
        self._admin = topics.Admin(settings)
        self._reports: deque[tuple[UnsentCommand, KafkaError | None]] = deque()
        self._topic: topics.Topic | None = None

    def stop(self) -> None:
        """Within LOOK_S."""
        self._stopping.set()

    def run(self) -> None:
        """Raises TopicChanged, and the errors of Kafka and the database that do not pass."""
        while not self._stopping.is_set():
            try:
                who = f"samefold relay {self.name}"
                with session(self.settings, who, short_transactions=True, by_key=True) as connection:
                    self._serve(connection)
            except (KafkaUnavailable, DatabaseUnavailable) as error:
                self._status.wrong("stores", error.message, "away")
                self._stopping.wait(PAUSE_S)

    def _serve(self, connection: Connection) -> None:
        connection.execute(f"listen {CHANNEL}")
        topic = self._topic = self._topic or self._known_topic(connection)
        self._live = live_types(connection)
        while (missing := own_types() - self._live) and not self._stopping.is_set():
            self._report_undecided(missing)
            self._stopping.wait(PAUSE_S)
            self._live = live_types(connection)
        self._report_undecided(())
        with suppress(KafkaException):  # the first command would wait for the producer to learn the topic: a second
            self._producer.now.list_topics(topic.name, timeout=PAUSE_S)
        read_at = rested_at = self._claim_at = 0.0
        while not self._stopping.is_set():
            self._take_reports(connection)
            mine = self._claimed(connection)
            if (began := time.monotonic()) >= read_at:
                self._mark(connection, topic)
                wait_s = self._read(connection, mine)
                rested_at = 2 * time.monotonic() - began  # where much waits, reading takes a while: send for as long
                read_at = rested_at + wait_s
                self._status.well("stores", "Kafka and the database are available again")
            is_answered = not len(self._producer.now)
            self._producer.poll(0 if is_answered else ANSWER_S)
            pause = max(read_at - time.monotonic(), 0) if is_answered and not self._reports else 0
            for notification in connection.notifies(timeout=pause, stop_after=1):
                if notification.payload == POSTS:
                    self._on_posts()
                else:
                    read_at = min(read_at, rested_at)
        connection.execute(_RELEASE, [self._holder])

    def _claimed(self, connection: Connection) -> Set[tuple[str, int]]:
        """Of what this process has now, that which no other relay serves."""
        wanted = self._mine()
        if wanted != self._wanted:
            connection.execute(_RELEASE, [self._holder])
        elif time.monotonic() < self._claim_at:
            return self._held
        lease_s = self.settings.session_timeout_ms / 1_000
        self._held, self._wanted = set(), wanted
        found = connection.execute(_CLAIM, _columns(wanted) | {"holder": self._holder, "seconds": lease_s})
        self._held = {(policy, partition) for policy, partition in found}
        self._claim_at = time.monotonic() + (lease_s / 4 if self._held == wanted else LOOK_S)
        return self._held

    # ── out of the database ──

    def _read(self, connection: Connection, mine: Set[tuple[str, int]]) -> float:
        """Send what is due. Returns the seconds until there may be more."""
        self._sender.assigned(mine)
        if time.monotonic() >= self._undecided_until:
            self._undecided, self._undecided_until = {}, time.monotonic() + LOOK_S
        if not (mine := mine - self._undecided.keys()):
            return LOOK_S / 4
        if self._sender.known >= MOST_KNOWN:
            return PAUSE_S
        if self._must_wait(connection):
            return PAGE_S
        [(now,)] = connection.execute("select now()")  # a host whose clock is fast sends no timer too soon
        most = MOST + self._sender.known
        rows = list(read_unsent(connection, mine, now + timedelta(seconds=LOOK_S), most))
        known = [row for row in rows if self._is_decided(connection, row)]
        if self._yields:
            self._to_decide |= {row.id for row in known}
        send, due = self._sender.unsent(known, now)
        for row in send:
            self._send(row)
        self._report_undecided({*self._undecided.values()})
        timers = sum(row.due is not None for row in rows)
        if max(timers, len(rows) - timers) == most:
            return PAGE_S
        return (due - now).total_seconds() if due else LOOK_S

    def _must_wait(self, connection: Connection) -> bool:
        """Whether too many of its commands are not decided. The topic's end would not tell: repeated commands get no commit."""
        if len(self._to_decide) > MOST_UNDECIDED:
            found = connection.execute(_UNDER_WAY, ([*self._to_decide],)).fetchall()
            with suppress(ReadModelNotSetUp):
                self._to_decide = {ident for _, ident in {*found} - outcomes_of(connection, found).keys()}
        if len(self._to_decide) <= MOST_UNDECIDED:
            self._went_on_at = time.monotonic()
            self._status.well("backlog", "handlers have decided enough, and commands are sent again")
        elif time.monotonic() - self._went_on_at > LONG_S:
            what = f"{len(self._to_decide):,} of its commands are not decided, the next ones wait: `samefold doctor` says for what"
            self._status.wrong("backlog", what, "waits")
        return len(self._to_decide) > MOST_UNDECIDED

    def _is_decided(self, connection: Connection, row: UnsentCommand) -> bool:
        """Whether some release's handlers decide it. Until then it waits, and so does what comes behind it."""
        if (pair := (row.policy, row.partition)) in self._undecided:
            return False
        kind = CommandType(row.target.partition("/")[0], row.type)
        if kind not in self._live:
            self._live = live_types(connection)
        if kind in self._live:
            return True
        self._undecided[pair] = kind
        return False

    def _report_undecided(self, types: Collection[CommandType]) -> None:
        if types:  # sent now, they would be rejected as malformed
            names = ", ".join(sorted(map(str, types)))
            self._status.wrong("handlers", f"no handler that decides these has run yet, start those first: {names}")
        else:
            self._status.well("handlers", "handlers decide all commands that policies wish")

    def _mark(self, connection: Connection, topic: topics.Topic) -> None:
        """Mark rows as sent, once it is certain that they are in the topic that the handlers read."""
        ids = self._sender.to_mark(time.monotonic())
        if not ids:
            return
        # a topic that has the same id after the acknowledgement was not recreated before it
        topics.require_same(topic, topics.describe(self.settings, topic.name, admin=self._admin))
        reach("wishes to be marked")
        mark_sent(connection, ids)
        self._sender.marked(ids)

    # ── into Kafka ──

    def _send(self, row: UnsentCommand) -> None:
        command = Command(
            id=row.id,
            stream=row.target,
            type=row.type,
            data=msgspec.Raw(row.body.encode()),
            correlation_id=row.correlation_id or UNSET,
            causation_id=row.causation_id or UNSET,
            depth=row.depth or UNSET,
            by=f"policy:{row.policy}",
        )
        assert self._topic is not None, "it serves"
        producer = self._producer.now
        try:
            headers = [("traceparent", row.trace.encode())] if row.trace else None
            produce(producer, self._topic, command, encode(command), partial(self._reported, row), headers)
            reach("wish sent")
        except BufferError:
            self._reported(row, KafkaError(KafkaError._QUEUE_FULL), None)
        except KafkaException as error:
            if clients.is_finished(error.args[0]):
                self._producer.renew(producer, error.args[0])
            self._reported(row, error.args[0], None)

    def _reported(self, row: UnsentCommand, error: KafkaError | None, _message: Message | None) -> None:
        reach("wish acknowledged")
        self._reports.append((row, error))

    def _take_reports(self, connection: Connection) -> None:
        if again := self._sender.again():
            self._stopping.wait(PAUSE_S)
        for row in again:
            self._send(row)
        while self._reports:
            row, error = self._reports[0]
            following: list[UnsentCommand] = []
            if error is None:
                self._status.well("append", "commands are appended again")
                following = self._sender.acknowledged(row, time.monotonic())
            elif error.code() in _REFUSED:
                is_dead = refuse(connection, row.id, error.str())
                following = self._sender.refused(row)
                what = "it is a dead letter" if is_dead else "what its policy wishes otherwise follows"
                why = f"{DeadReason.REFUSED_BY_KAFKA}: {error.str()}"
                log.error("relay %s: command %s for %s: %s. %s", self.name, row.id, row.target, why, what)
            elif clients.is_denied(error):
                raise clients.denied(self.settings, error, f"Write of topic '{self.settings.commands_topic}'")
            else:
                self._status.wrong("append", f"commands can't be appended, trying again: {error.str()}", error.name())
                self._sender.failed(row)
            self._reports.popleft()
            for one in following:
                self._send(one)

    def _known_topic(self, connection: Connection) -> topics.Topic:
        """The topic of commands that the handlers of this log read. Raises TopicChanged where it was recreated."""
        found = topics.describe(self.settings, self.settings.commands_topic, admin=self._admin)
        opened = connection.execute(
            "select partition, max(epoch) from positions where topic = %s and epoch >= 0 group by partition limit 1",
            [self.settings.events_topic],
        ).fetchone()
        if opened is not None:
            partition, epoch = opened
            [[record]] = read_range(self.settings, self.settings.events_topic, partition, epoch, epoch + 1)
            opening = decode_event(record)
            if isinstance(opening, Opening):
                topics.require_same(replace(found, id=opening.commands_topic_id), found)
        return found
