"""The handler: a thin shell around the writers of the partitions that the group gave to this process.

Reads `commands` in batches, lets each partition's `Writer` decide, carries out what it says. Several handlers share the partitions
through a consumer group; safety does not rest on it. One thread; librdkafka's own threads do the sending and fetching.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec
import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from opentelemetry.trace import Span, SpanKind

from commands import release
from commands.intake import Intake, Received, receive
from commands.snapshots import Question, SnapshotReader
from commands.writer import (
    Action,
    Append,
    Confirm,
    Doubt,
    Limits,
    Load,
    Open,
    Phase,
    ReadLog,
    Refuse,
    Serve,
    Snapshot,
    Wait,
    Writer,
)
from infra.archive.manifest import ends_of
from infra.database.connect import DatabaseAway, connect, named, passes
from infra.domain_model.contexts import RECORDED
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.records import Headers, Opening, Record, encode
from infra.log.source import read_range
from infra.observability import logs, metrics, tracing
from infra.processes.faultpoints import reach
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import AGAIN, exit_code_of
from infra.settings import Settings
from projections.engine.live.startup import Contract, check_contract
from projections.engine.store.command_types import CommandType, make_types_live

log = logging.getLogger(__name__)

IDLE_S = 0.2
BUSY_S = 0.005
DATABASE_RETRY_S = 0.25
BEHIND_RETRY_S = 0.02
WAIT_S = 0.2
CHECK_S = 5.0
CHECK_WITHIN_S = 2.0
"""Commands wait meanwhile."""
CONFIRM_S = (0.05, 0.3)
CONFIRM_WITHIN_S = 20.0
GROUPS_S = 1.0
"""How often a handler that may have to wait for those of another release asks whether they are there."""


class WorldChanged(SamefoldError):
    """Topics and positions do not belong together any more."""


class HandlerFenced(SamefoldError):
    """Another process runs under this handler's name: this process must end."""


class GroupSilent(SamefoldError):
    """Kafka has not answered what the group was asked."""


class _NotJoined(Exception):
    """The consumer can't go on, and was no member of the group yet."""

    def __init__(self, error: KafkaError) -> None:
        self.error = error


class NotTaken(SamefoldError):
    """Kafka's client refuses a record or a place to read from: a defect, or a topic that is not as it was."""


@dataclass(slots=True)
class _Lot:
    """Commands of one partition in order, for its writer in the epoch in which they were read. In another one they mean nothing."""

    writer: Writer
    epoch: int
    commands: list[Received]

    @property
    def stands(self) -> bool:
        return self.writer.phase is Phase.SERVING and self.writer.epoch == self.epoch


Lots = Mapping[int, _Lot]
"""By partition."""


class Handler:
    """One handler process. `run` returns after `stop`; it raises a named error when it must not go on.

    While the database reads what a batch of commands wants, the next batch is received: `_asked` is the one under way.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.group = release.group_of(settings.group_prefix)
        self.stopping = threading.Event()
        self.writers: dict[int, Writer] = {}
        self._asked: tuple[Lots, Question] | None = None
        self._held: dict[int, _Lot] = {}
        self._paused: set[int] = set()
        self._next: dict[int, int] = {}
        """By partition that is served, the offset of the next command to take."""
        self._holes: dict[int, tuple[int, int]] = {}
        """By partition, what was to come and what came instead. If it comes again, the hole is the topic's own."""
        self._rebalanced = False
        self._timers: dict[int, tuple[float, Callable[[], Action | None]]] = {}
        self._due_database = 0.0
        self._due_check = time.monotonic() + CHECK_S
        self._due_types = time.monotonic() + CHECK_S
        self._said: dict[int, str] = {}
        self._refused: set[int] = set()
        """Partitions whose reads are refused, which was said."""
        self._is_member = False
        """The group has given it partitions, or none, since it last joined."""
        self._asking_group: dict[int, tuple[Writer, float]] = {}
        """By partition, who asked the group whether it still is the assignee, and when."""
        self._finished: tuple[KafkaError, bool] | None = None
        """Why the consumer can't go on, and whether it was a member then: its partitions are taken away right after."""
        self._alive: list[str] = []
        self._due_groups = 0.0
        self._error: SamefoldError | None = None
        self._database: psycopg.Connection[Any] | None = None
        self._database_is_away = False

    def stop(self) -> None:
        self.stopping.set()

    def run(self) -> None:
        """Serve until stopped. Waits out Kafka and PostgreSQL being away, at the start too."""
        there = self._until_there()
        if there is None:
            return
        commands, events = self._topics = there
        self._events = events.name
        self._intake = Intake(commands.id, commands.partitions, self.settings.max_command_bytes)
        self._connection = clients.Connection(f"handler {self.name}")
        self._admin = topics.Admin(self.settings, CHECK_WITHIN_S)
        self._producer = clients.LastingProducer(self.settings, f"handler {self.name}", self._connection)
        self._log_reader = clients.range_consumer(self.settings)
        self._join()
        log.info("handler %s: serving '%s' to '%s', in the group %s", self.name, commands.name, events.name, self.group)
        try:
            while not self.stopping.is_set():
                try:
                    self._turn()
                except _NotJoined as failed:
                    self._rejoin(failed.error)
                if self._error:
                    raise self._error
        finally:
            self._close()

    def _turn(self) -> None:
        self._producer.poll(0)
        now = time.monotonic()
        for writer in list(self.writers.values()):
            self._do(writer, writer.on_clock(now))
        self._check_topics(now)
        lots = self._poll()
        self._require_answer()
        if self._asked:
            self._decide(*self._asked)
        # from here on nothing is asked, and the connection is free
        now = time.monotonic()
        self._run_timers(now)
        self._check_types(now)
        self._ask(self._due(lots, now))

    def _check_topics(self, now: float) -> None:
        """A topic that is made anew or gets more partitions while we run is as wrong as at the start."""
        if now < self._due_check:
            return
        self._due_check = now + CHECK_S
        commands, events = self._topics
        with suppress(clients.KafkaAway):
            commands = self._same(commands)
            events = self._same(events)
        self._topics = commands, events

    def _same(self, topic: topics.Topic) -> topics.Topic:
        found = topics.describe(self.settings, topic.name, admin=self._admin)
        topics.require_same(topic, found)
        return found

    def _check_types(self, now: float) -> None:
        """A restored database may lack them, and no API appends what would have us look."""
        if now < self._due_types:
            return
        self._due_types = now + CHECK_S
        if not any(writer.phase is Phase.SERVING for writer in self.writers.values()):
            return
        try:
            snapshot = self._snapshots().read()
            if snapshot.fits and snapshot.unrecorded:
                self._first(snapshot)
        except (psycopg.Error, DatabaseAway) as error:
            self._database_away(error)

    # ── commands in ──

    def _poll(self) -> dict[int, _Lot]:
        """What has arrived: wait for the first, unless there is something to do, and take what is there."""
        try:
            messages = self._consumer.consume(1, self._patience())
            if messages:
                messages += self._consumer.consume(self.settings.handler_batch, 0)
        except KafkaException as raised:
            if not clients.is_finished(raised.args[0]):
                raise
            self._on_finished(raised.args[0])
            messages = []
        self._require_consumer()
        serving = {p: writer for p, writer in self.writers.items() if writer.phase is Phase.SERVING}
        lots: dict[int, _Lot] = {}
        again: set[int] = set()
        for message in messages:
            if error := message.error():
                self._on_consumer_error(error, message.partition())
                self._holes.pop(message.partition(), None)
                again.add(message.partition())
                continue
            record = _record(message)
            if (writer := serving.get(record.partition)) and record.partition not in again:
                if record.offset != self._next[record.partition] and not self._passes_over(record, again):
                    continue
                self._next[record.partition] = record.offset + 1
                lot = lots.get(record.partition)
                if lot is None:
                    self._refused.discard(record.partition)
                    lot = lots[record.partition] = _Lot(writer, writer.epoch, [])
                received = receive(record, self._intake)
                if (headers := message.headers()) and (kept := tracing.kept(headers)):
                    received = msgspec.structs.replace(received, headers=kept)
                lot.commands.append(received)
        if self._rebalanced:  # librdkafka has paused what is kept, and may have missed that we resumed it
            self._rebalanced = False
            again |= serving.keys()
        for partition in (again & serving.keys()) - self._paused:
            self._read_on(serving[partition])
        if lots:
            self._connection.seen()
            reach("command read")
        return lots

    def _passes_over(self, record: Record, again: set[int]) -> bool:
        """Whether a record is taken that is not the next: if it came twice in its place. Else its partition is read `again`."""
        wanted = self._next[record.partition]
        if record.offset < wanted:
            return False
        if self._holes.get(record.partition) == (wanted, record.offset):
            return True
        self._holes[record.partition] = wanted, record.offset
        again.add(record.partition)
        return False

    def _on_consumer_error(self, error: KafkaError, partition: int = -1) -> None:
        if _ends(error):
            self._on_finished(error)
            self._require_consumer()
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            if (writer := self.writers.get(partition)) is not None and writer.phase is not Phase.SERVING:
                # it was assigned from where the topic began some seconds ago, and librdkafka reads no more of it; whether the
                # next command is still there, only its writer knows
                raise NotTaken(f"Commands of partition {partition} were deleted while it was assigned.", AGAIN)
            raise WorldChanged(
                f"'{self.settings.commands_topic}' does not hold the next command any more: {error.str()}.",
                "The topic was trimmed or made anew. Restore it, or, if its commands may be lost for good, start with new topics.",
            )
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise WorldChanged(
                f"Topic '{self.settings.commands_topic}' is gone.", "Restore it: its id is part of every position."
            )
        if clients.may_pass(error):
            return
        if partition not in self.writers:
            log.warning("handler %s: %s", self.name, error.str())
        elif partition not in self._refused:
            self._refused.add(partition)
            log.warning("handler %s, partition %d: %s", self.name, partition, error.str())

    def _on_finished(self, error: KafkaError) -> None:
        if self._finished is None:
            self._finished = error, self._is_member

    def _require_consumer(self) -> None:
        """That the consumer can go on. Raises HandlerFenced, _NotJoined."""
        if self._finished is None:
            return
        error, was_member = self._finished
        if not was_member:
            raise _NotJoined(error)
        raise HandlerFenced(
            f"Handler '{self.name}' was fenced out of its group: {error.str()}.",
            "Give each handler a name of its own (`samefold run handler --name`), and start it again.",
        )

    def _due(self, lots: dict[int, _Lot], now: float) -> Lots:
        """What is to be decided next: commands that were held until now, and behind them those that have just come."""
        for partition, held in list(self._held.items()):
            if partition in lots:
                held.commands += lots.pop(partition).commands
            if now >= self._due_database:
                lots[partition] = self._held.pop(partition)
        return lots

    def _ask(self, lots: Lots) -> None:
        """Have the database read what the writers want for these commands, as many of them as there is room for."""
        wanted: dict[int, _Lot] = {}
        streams: set[tuple[str, str]] = set()
        outcomes: set[tuple[str, str]] = set()
        for partition, lot in lots.items():
            writer = lot.writer
            if self.writers.get(partition) is not writer or not lot.stands:
                continue
            now = lot.commands[: max(writer.room, 0)]
            if rest := lot.commands[len(now) :]:
                self._hold(partition, _Lot(writer, lot.epoch, rest), BEHIND_RETRY_S)
            wanted[partition] = _Lot(writer, lot.epoch, now)
            its_streams, its_outcomes = writer.wants(now)
            streams |= its_streams
            outcomes |= its_outcomes
        if not wanted:
            return
        try:
            self._asked = wanted, self._snapshots().ask(streams, outcomes)
        except (psycopg.Error, DatabaseAway) as error:
            self._not_answered(wanted, error)

    def _decide(self, lots: Lots, question: Question) -> None:
        """Let the writers decide on what the database answered."""
        self._asked = None
        try:
            snapshot = self._reader.answer(question)
        except (psycopg.Error, DatabaseAway) as error:
            self._not_answered(lots, error)
            return
        reach("states loaded")
        now = time.monotonic()
        for partition, lot in lots.items():
            writer = lot.writer
            if self.writers.get(partition) is not writer or not lot.stands:
                continue
            actions = writer.on_commands(lot.commands, snapshot, now)
            for action in actions:
                self._do(writer, action)
            _count(actions)
            if partition in self._paused and partition not in self._held and writer.phase is Phase.SERVING:
                self._read_on(writer)

    def _read_on(self, writer: Writer) -> None:
        """Take commands of the writer's partition, from the next on.

        It is told from where: librdkafka before 2.13.2 takes an error that it gives for a record (its issue 4844), and after a
        pause, ours or its own while it rebalances, would go on behind a command that was never taken.
        """
        here = TopicPartition(self.settings.commands_topic, writer.partition, self._next[writer.partition])
        self._paused.discard(writer.partition)
        try:
            self._consumer.seek(here)
            self._consumer.resume([here])
        except KafkaException as error:  # in a delivery report: what is raised from there can't be caught
            if error.args[0].code() in _NOT_YET:
                self._later(writer, BEHIND_RETRY_S, lambda: self._read_on(writer))
            elif not clients.is_finished(error.args[0]):
                self._error = NotTaken(f"No commands can be read: {error.args[0].str()}.", AGAIN)

    def _not_answered(self, lots: Lots, error: psycopg.Error | DatabaseAway) -> None:
        """Try again a moment later, with these commands before those that are held already."""
        self._database_away(error)
        for partition, lot in lots.items():
            if self.writers.get(partition) is lot.writer and lot.stands:
                after = self._held.pop(partition, None)
                lot.commands += after.commands if after else []
                self._hold(partition, lot, DATABASE_RETRY_S)

    def _hold(self, partition: int, lot: _Lot, seconds: float) -> None:
        """Keep commands that can't be decided yet, and read no more of that partition: back-pressure, not memory."""
        self._held[partition] = lot
        self._due_database = time.monotonic() + seconds
        self._paused.add(partition)
        self._consumer.pause([TopicPartition(self.settings.commands_topic, partition)])

    def _patience(self) -> float:
        """How long to wait for commands, in seconds: not at all while there is something else to do."""
        if self._asked or any(due <= time.monotonic() for due, _ in self._timers.values()):
            return 0
        busy = self._held or any(writer.phase is not Phase.SERVING for writer in self.writers.values())
        return BUSY_S if busy else IDLE_S

    # ── what the writers say ──

    def _do(self, writer: Writer, action: Action | None) -> None:
        while action is not None:
            if self.writers.get(writer.partition) is not writer:
                return
            action = self._step(writer, action)

    def _step(self, writer: Writer, action: Action) -> Action | None:
        partition = writer.partition
        match action:
            case Append(seq, stream, value, headers):
                acknowledged = partial(self._acknowledged, writer, writer.epoch, seq)
                if headers and tracing.recording():
                    span = tracing.start("decide", SpanKind.CONSUMER, headers)
                    span.set_attributes({"samefold.stream": stream, "samefold.partition": partition})
                    headers, acknowledged = tracing.carrier(span), partial(_ended, span, acknowledged)
                self._produce(stream.encode(), value, partition, acknowledged, headers)
                reach("commit sent")
            case Load():
                # not now: the connection may be asked something already
                self._later(writer, 0, lambda: self._load(writer))
            case Open():
                opening = Opening(writer=self.name, commands_topic_id=writer.commands_topic_id)
                self._produce(None, encode(opening), partition, partial(self._opened, writer, writer.openings))
                reach("opening sent")
            case ReadLog(start, stop):
                return self._read_log(writer, start, stop)
            case Serve(offset):
                reach("opening read")
                metrics.HANDLER_EPOCHS.inc()
                self._say(writer, f"epoch {writer.epoch}, serving from command {offset}")
                self._next[partition] = offset
                self._holes.pop(partition, None)
                self._read_on(writer)
            case Wait(why):
                self._say(writer, why)
                self._later(writer, WAIT_S, writer.start)
            case Confirm(why, doubt):
                if doubt:
                    metrics.HANDLER_DOUBTS.labels(doubt).inc()
                self._say(writer, why, logging.ERROR if doubt is Doubt.COMMAND else logging.INFO)
                self._held.pop(partition, None)
                self._consumer.pause([TopicPartition(self.settings.commands_topic, partition)])
                self._later(writer, random.uniform(*CONFIRM_S), lambda: self._confirm(writer))
            case Refuse(why):
                self._error = _refused(why, self.settings)
        return None

    def _produce(
        self,
        key: bytes | None,
        value: bytes,
        partition: int,
        on_delivery: Callable[..., None],
        headers: Headers | None = None,
    ) -> None:
        while True:
            producer = self._producer.now
            try:
                producer.produce(
                    self._events, value, key=key, partition=partition, on_delivery=on_delivery, headers=headers
                )
                return
            except BufferError:
                self._producer.poll(0.05)
            except KafkaException as error:
                if not clients.is_finished(error.args[0]):
                    self._error = NotTaken(f"The producer takes no record: {error.args[0].str()}.", AGAIN)
                    return
                # as all that it had under way, this is in doubt: each writer that is told so opens again
                self._producer.renew(producer, error.args[0])
                on_delivery(error.args[0], None)
                return

    def _load(self, writer: Writer) -> Action:
        try:
            snapshot = self._snapshots().read()
            reach("position loaded")
            if snapshot.fits and (action := self._first(snapshot)):
                return action
            # after the snapshot, so that the end can't be older than the position
            here = TopicPartition(self.settings.events_topic, writer.partition)
            first, end = self._log_reader.get_watermark_offsets(here, timeout=topics.TIMEOUT_S)
            position = snapshot.positions.get(writer.partition)
            if position and first > position.next_offset and self._archived(writer.partition) < first:
                return Refuse("events-trimmed")
        except (psycopg.Error, DatabaseAway) as error:
            self._database_away(error)
            return Wait("the database is away")
        except KafkaException as error:
            if not clients.may_pass(error.args[0]):
                raise
            return Wait("Kafka is away")
        except clients.KafkaAway:
            return Wait("Kafka is away")
        return writer.on_position(snapshot, end)

    def _first(self, snapshot: Snapshot) -> Action | None:
        """What comes before opening where another release's handlers may be there too: one of all groups decides."""
        if snapshot.unrecorded:
            if not self._reader.shows_this_code:
                return Wait(
                    "other views are live than this code's: `samefold rebuild` with this code switches to its own"
                )
            make_types_live(self._reader.connection, self.settings.events_topic)
            log.info("handler %s: these commands are live now: %s", self.name, _names(snapshot.unrecorded))
            return Load()
        if snapshot.unknown and (other := self._deciding()) != self.group:
            return Wait(f"another release decides, in the group {other}: it knows {_names(snapshot.unknown)}")
        return None

    def _deciding(self) -> str:
        """The group of handlers that decides while those of several releases run."""
        now = time.monotonic()
        if now >= self._due_groups:
            self._alive = release.alive(self._admin, self.settings.group_prefix)
            self._due_groups = now + GROUPS_S
        return release.deciding([*self._alive, self.group], self.settings.group_prefix, self._reader.states)

    def _archived(self, partition: int) -> int:
        """The offset up to which a partition of the log is archived."""
        assert self._database is not None, "a snapshot was just read from it"
        return ends_of(self._database, self.settings.events_topic).get(partition, 0)

    def _read_log(self, writer: Writer, start: int, stop: int) -> Action:
        action: Action | None = None
        try:
            for records in read_range(
                self.settings, self.settings.events_topic, writer.partition, start, stop, consumer=self._log_reader
            ):
                action = writer.on_log(records)
                if not isinstance(action, ReadLog):
                    break
        except (clients.KafkaAway, DatabaseAway) as error:  # the database tells what is archived
            log.warning("handler %s: %s", self.name, error)
            return writer.start()
        return writer.start() if action is None else action  # without a record, nothing was read up to the opening

    def _confirm(self, writer: Writer) -> Action | None:
        """Ask the group: the commit of an offset succeeds only for the member that it holds to be the assignee now.

        One question a partition at a time, so that its answer is to what was asked after this doubt.
        """
        if writer.partition in self._asking_group:
            self._later(writer, CONFIRM_S[1], lambda: self._confirm(writer))
            return None
        offset = TopicPartition(self.settings.commands_topic, writer.partition, max(writer.last_command + 1, 0))
        try:
            self._consumer.commit(offsets=[offset], asynchronous=True)
        except KafkaException as error:
            if clients.is_finished(error.args[0]):
                self._on_consumer_error(error.args[0])
            return Confirm(f"not confirmed by the group: {error.args[0].str()}")
        self._asking_group[writer.partition] = writer, time.monotonic()
        return None

    def _confirmed(self, failed: KafkaError | None, offsets: list[TopicPartition]) -> None:
        """The group's answer."""
        for offset in offsets:
            writer, _ = self._asking_group.pop(offset.partition, (None, 0.0))
            error = failed or offset.error
            if error is not None and _ends(error):
                self._on_finished(error)
            elif writer is not None:
                refused = Confirm(f"not confirmed by the group: {error.str()}") if error else None
                self._do(writer, refused or writer.on_confirmed())

    def _require_answer(self) -> None:
        """Raises GroupSilent: without an answer the partition would wait for ever."""
        late = time.monotonic() - CONFIRM_WITHIN_S
        for partition, (writer, asked) in self._asking_group.items():
            if asked < late and self.writers.get(partition) is writer:
                raise GroupSilent(f"The group {self.group} has not answered for {CONFIRM_WITHIN_S:.0f} s.", AGAIN)

    # ── delivery reports ──

    def _acknowledged(self, writer: Writer, epoch: int, seq: int, error: KafkaError | None, message: Message) -> None:
        """Of one commit, for the writer in the epoch that appended it; a later epoch is none of its business."""
        reach("commit acknowledged")
        if writer.epoch == epoch:
            offset = None if error else message.offset()
            self._do(writer, writer.on_acknowledged(seq, offset, time.monotonic()))

    def _opened(self, writer: Writer, opening: int, error: KafkaError | None, message: Message) -> None:
        """Of an opening, for the try that appended it."""
        reach("opening acknowledged")
        if writer.openings == opening:
            self._do(writer, writer.on_opened(None if error else message.offset()))

    # ── the group ──

    def _join(self) -> None:
        self._finished = None
        self._is_member = False
        self._asking_group.clear()
        self._consumer = clients.group_consumer(
            self.settings,
            self.group,
            instance=self.name,
            connection=self._connection,
            on_commit=self._confirmed,
            on_finished=self._on_finished,
        )
        self._consumer.subscribe(
            [self._topics[0].name], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _rejoin(self, error: KafkaError) -> None:
        """Join once more. A broker that stands still is sent a join twice, takes both, and fences the member that goes on."""
        log.warning("handler %s: joins its group again: %s", self.name, error.str())
        with suppress(KafkaException):
            self._consumer.close()
        self._drop(list(self.writers))
        self.stopping.wait(random.uniform(*CONFIRM_S))  # two of one name would fence each other at the same pace
        self._join()

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        self._is_member = self._rebalanced = True
        # the writer says later from where; what is not there any more would be an error until then
        first = self._topics[0].first
        starts = [TopicPartition(p.topic, p.partition, first.get(p.partition, 0)) for p in assigned]
        consumer.incremental_assign(starts)
        consumer.pause(assigned)
        for partition in sorted(p.partition for p in assigned):
            limits = Limits(self.settings.run_ahead, self.settings.max_commit_bytes, self.settings.ack_timeout_s)
            writer = Writer(partition, self._intake.topic_id, limits)
            self.writers[partition] = writer
            self._later(writer, 0, writer.start)

    def _on_lost(self, consumer: Consumer, lost: list[TopicPartition]) -> None:
        self._is_member = False
        self._on_revoke(consumer, lost)

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        self._rebalanced = True
        self._drop([p.partition for p in revoked])
        consumer.incremental_unassign(revoked)

    def _drop(self, partitions: list[int]) -> None:
        for partition in partitions:
            self.writers.pop(partition, None)
            self._held.pop(partition, None)
            self._paused.discard(partition)
            self._refused.discard(partition)
            self._timers.pop(partition, None)

    # ── time, database, end ──

    def _later(self, writer: Writer, seconds: float, then: Callable[[], Action | None]) -> None:
        self._timers[writer.partition] = (time.monotonic() + seconds, then)

    def _run_timers(self, now: float) -> None:
        for partition, (due, then) in list(self._timers.items()):
            if now >= due and (writer := self.writers.get(partition)):
                del self._timers[partition]
                self._do(writer, then())

    def _snapshots(self) -> SnapshotReader:
        if self._database is None or self._database.closed:
            self._database = connect(
                self.settings, f"samefold handler {self.name}", short_transactions=True, by_key=True
            )
            for topic in self._topics:
                check_contract(self._database, Contract.of(topic))
            self._reader = SnapshotReader(self._database, self.settings.events_topic)
            if self._database_is_away:
                self._database_is_away = False
                log.info("handler %s: the database answers again", self.name)
        return self._reader

    def _database_away(self, error: psycopg.Error | DatabaseAway) -> None:
        if isinstance(error, psycopg.Error) and not passes(error):
            raise named(error, self.settings) from error
        if self._database is not None:
            self._database.close()
            self._database = None
        if not self._database_is_away:
            self._database_is_away = True
            log.warning("handler %s: the database does not answer; waiting for it", self.name)

    def _until_there(self) -> tuple[topics.Topic, topics.Topic] | None:
        """None after `stop`."""
        said = False
        while True:
            try:
                return topics.ensure(self.settings)
            except clients.KafkaAway as error:
                if not said:
                    log.warning("handler %s: %s Waiting for it.", self.name, error.message)
                    said = True
                if self.stopping.wait(1):
                    return None

    def _say(self, writer: Writer, what: str, level: int = logging.INFO) -> None:
        """One log line a change, not one a try."""
        kind = what.rstrip("0123456789")
        if self._said.get(writer.partition) != kind:
            self._said[writer.partition] = kind
            log.log(level, "handler %s, partition %d: %s", self.name, writer.partition, what)

    def _close(self) -> None:
        with suppress(KafkaException):
            self._producer.now.flush(5)
        if not self._asking_group:
            self._consumer.close()  # which waits for what was asked; a static member does not say that it leaves
        self._log_reader.close()
        if self._database is not None:
            self._database.close()


_NOT_YET = {KafkaError._STATE, KafkaError._UNKNOWN_PARTITION, KafkaError._PREV_IN_PROGRESS, KafkaError._OUTDATED}
"""Of a partition that librdkafka does not fetch yet, pauses itself, or does not fetch any more: what is polled next says so."""
_ACCEPTED = metrics.HANDLER_COMMITS.labels("accepted")
_REJECTED = metrics.HANDLER_COMMITS.labels("rejected")


def _count(actions: Sequence[Action]) -> None:
    appends = [action for action in actions if isinstance(action, Append)]
    if not appends:
        return
    rejections = [append.reason for append in appends if append.reason]
    metrics.HANDLER_BATCH_COMMANDS.observe(len(appends))
    _ACCEPTED.inc(len(appends) - len(rejections))
    if rejections:
        _REJECTED.inc(len(rejections))
        # refusals are the business's own affair, and their codes too many to be labels
        for why, count in Counter(one.code if one.code in RECORDED else "refused" for one in rejections).items():
            metrics.HANDLER_REJECTIONS.labels(why).inc(count)


def _ended(span: Span, acknowledged: Callable[..., None], error: KafkaError | None, message: Message) -> None:
    span.end()
    acknowledged(error, message)


def _names(types: Iterable[CommandType]) -> str:
    return ", ".join(sorted(map(str, types)))


def _ends(error: KafkaError) -> bool:
    """Whether the consumer can't go on."""
    return error.code() == KafkaError.FENCED_INSTANCE_ID or clients.is_finished(error)


def _record(message: Message) -> Record:
    return Record(message.partition(), message.offset(), message.timestamp()[1], message.key(), message.value())


def _refused(why: str, settings: Settings) -> WorldChanged:
    match why:
        case "events-shorter-than-position":
            return WorldChanged(
                f"The read model's position lies beyond the end of '{settings.events_topic}': it was made anew or lost records.",
                "Restore the topic, or start with an empty database and new topics.",
            )
        case "events-trimmed":
            return WorldChanged(
                f"'{settings.events_topic}' does not reach back to the read model's position: it was trimmed without an archive.",
                "Restore the topic: what is missing was never applied.",
            )
        case _:
            return WorldChanged(
                f"'{settings.commands_topic}' is not the topic that earlier commits were decided from: it was made anew.",
                "Restore the topic, or start with new topics and an empty database.",
            )


def main() -> NoReturn:
    """`python -m commands.handler --name NAME`: serve until SIGTERM or SIGINT. Exit code 1 after an error."""
    arguments = argparse.ArgumentParser(prog="python -m commands.handler")
    arguments.add_argument("--name", required=True)
    name = arguments.parse_args().name
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    handler = Handler(settings, name)
    collect_seldom()
    for number in (signal.SIGTERM, signal.SIGINT):
        # from a thread: the main one may hold the event's own lock at this very moment
        signal.signal(number, lambda *_: threading.Thread(target=handler.stop).start())

    def work() -> None:
        metrics.serve(settings)
        handler.run()

    # not sys.exit: it would wait for requests to a broker that is away, and dying is always safe here
    os._exit(exit_code_of(work, log, f"handler {name}"))


if __name__ == "__main__":
    main()
