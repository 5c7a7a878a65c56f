"""The handler: a thin shell around the writers of the partitions that the consumer group assigned to this process.

It reads `commands` in batches, lets each partition's `Writer` decide, and carries out the actions that the writer returns. Handlers
share the partitions through the group; correctness does not depend on it. One thread; librdkafka's own threads send and fetch.
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
from typing import Any, NamedTuple, NoReturn

import msgspec
import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from opentelemetry.trace import Span, SpanKind

from commands import release
from commands.decision import is_slow
from commands.intake import Intake, Received, reason, receive
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
from domain.engine.contexts import RECORDED
from infra.archive.manifest import ends_of
from infra.database.connect import DatabaseUnavailable, connect, is_transient, named_error
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.contract import Contract, check_contract
from infra.log.records import Headers, Opening, Record, encode
from infra.log.source import read_range
from infra.observability import logs, metrics, tracing
from infra.processes.faultpoints import reach
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import AGAIN, exit_code_of
from infra.processes.time_limit import limit_calls
from infra.settings import Settings
from projections.engine.store.command_types import CommandType, make_types_live

log = logging.getLogger(__name__)

IDLE_S = 0.2
GATHER_S = 0.01
"""Under load, how long commands are gathered: a batch of some costs hardly more than one command."""
GATHER_FROM, GATHER_TO = 8, 256
"""Load is a batch of at least that many commands; with so many there is no need to wait for more."""
BUSY_S = 0.005
DATABASE_RETRY_S = 0.25
BEHIND_RETRY_S = 0.02
WAIT_S = 0.2
CHECK_S = 5.0
"""Between two checks of the topics and the command types."""
CHECK_WITHIN_S = 2.0
"""Commands wait while a check runs."""
CONFIRM_S = (0.05, 0.3)
CONFIRM_WITHIN_S = 20.0
ATTEMPTS = 3
ATTEMPT_S = 5.0
"""For what the group keeps of an attempt, and for the acknowledgement of its commits."""
GROUPS_S = 1.0
"""Between two queries for the groups of other releases."""


class TopicsInconsistent(SamefoldError):
    """Topics and positions are inconsistent: a topic was recreated, trimmed or deleted."""


class HandlerFenced(SamefoldError):
    """Another process joined the group under this handler's name."""


class GroupSilent(SamefoldError):
    """The group's coordinator did not answer in time."""


class KafkaClientFailed(SamefoldError):
    """Kafka's client refused a record or an offset: a defect, or the topic changed."""


class _NotJoined(Exception):
    """The consumer failed before it became a member of the group."""

    def __init__(self, error: KafkaError) -> None:
        self.error = error


@dataclass(slots=True)
class _Batch:
    """Commands of one partition in order, for its writer in the epoch in which they were read. In another epoch they are stale."""

    writer: Writer
    epoch: int
    commands: list[Received]


Batches = Mapping[int, _Batch]
"""By partition."""


class _Attempt(NamedTuple):
    """The `number`th one at deciding the commands of these offsets at once (ADR 19)."""

    number: int = 0
    first: int = -1
    last: int = -1


_decode_attempt = msgspec.json.Decoder(_Attempt).decode


class Handler:
    """One handler process. `run` returns after `stop`, and raises a named error when the process must end.

    While the database reads the states for one batch of commands, the next batch is received.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.group = release.group_of(settings.group_prefix)
        self.stopping = threading.Event()
        self.writers: dict[int, Writer] = {}
        self._query: tuple[Batches, Question] | None = None
        """The batches whose states the database is reading."""
        self._is_loaded = False
        """The last batch had many commands."""
        self._held: dict[int, _Batch] = {}
        self._paused: set[int] = set()
        self._resumed: set[int] = set()
        """Since the last poll, while no other partition was fetched."""
        self._next: dict[int, int] = {}
        """Offset of the next command by partition, while its writer serves."""
        self._gaps: dict[int, tuple[int, int]] = {}
        """By partition, the offset expected and the one received. Received twice, the gap is the topic's own."""
        self._attempts: dict[int, _Attempt] = {}
        """By partition whose next commands are an attempt, the one before."""
        self._decided: dict[int, TopicPartition] = {}
        """How far since the group was told."""
        self._is_telling = False
        self._rebalanced = False
        self._timers: dict[int, tuple[float, Callable[[], Action | None]]] = {}
        self._due_database = 0.0
        self._due_check = time.monotonic() + CHECK_S
        self._status = logs.StatusLog(log, f"handler {name}")
        self._progress: dict[int, str] = {}
        """The last log line by partition."""
        self._refused: set[int] = set()
        """Partitions whose reads fail, which was logged."""
        self._is_member = False
        """The group has assigned partitions, or none, since the last join."""
        self._confirming: dict[int, tuple[Writer, float]] = {}
        """By partition, the writer that asked the group for confirmation, and when."""
        self._finished: tuple[KafkaError, bool] | None = None
        """Why the consumer failed, and whether it was a member then: its partitions are revoked right after."""
        self._alive: list[str] = []
        self._due_groups = 0.0
        self._error: SamefoldError | None = None
        self._database: psycopg.Connection[Any] | None = None

    def stop(self) -> None:
        self.stopping.set()

    def run(self) -> None:
        """Serve until stopped. Waits while Kafka or PostgreSQL is unavailable, at the start too."""
        found = self._wait_for_topics()
        if found is None:
            return
        commands, events = found
        self._topics: Sequence[topics.Topic] = found
        self._admin = topics.Admin(self.settings, CHECK_WITHIN_S)
        self._watch = topics.Watch(self.settings, found, self._status, self._admin)
        self._events = events.name
        self._intake = Intake(commands.id, commands.partitions, clients.MAX_COMMAND_BYTES)
        self._connection = clients.Connection(f"handler {self.name}")
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
        """One round of the loop: receive a batch, decide the one before, have the states for this one read."""
        self._producer.poll(0)
        now = time.monotonic()
        for writer in list(self.writers.values()):
            self._execute(writer, writer.on_clock(now))
        if self._query and self._is_loaded:
            self._decide(*self._query)
        batches = self._poll()
        self._require_confirmation()
        if self._query:
            self._decide(*self._query)
        # from here on no query is pending, and the connection is free
        now = time.monotonic()
        self._run_timers(now)
        self._check(now)
        self._request(self._due(batches, now))

    def _check(self, now: float) -> None:
        """Topics may be recreated, and a restored database may lack command types, while no command comes in that would show it.

        What was decided is told to the group: who asks how far the handlers are knows of repeated commands from there alone.
        """
        if now < self._due_check:
            return
        self._due_check = now + CHECK_S
        if self._decided and not self._is_telling:
            with suppress(KafkaException):
                self._consumer.commit(offsets=[*self._decided.values()], asynchronous=True)
                self._is_telling = True
                self._decided.clear()
        with suppress(clients.KafkaUnavailable):
            self._topics = self._watch.check()
        if not any(writer.phase is Phase.SERVING for writer in self.writers.values()):
            return
        try:
            snapshot = self._snapshots().read()
            if snapshot.fits and snapshot.unrecorded:
                self._before_opening(snapshot)
        except (psycopg.Error, DatabaseUnavailable) as error:
            self._database_unavailable(error)

    # ── commands in ──

    def _poll(self) -> dict[int, _Batch]:
        """Wait for the first command, unless there is something else to do, and take all that have arrived."""
        if self._resumed:
            clients.fetch_at_once(self._consumer, self.settings.commands_topic, self._resumed)
            self._resumed.clear()
        try:
            messages = self._consumer.consume(1, self._poll_timeout())
            if messages:
                messages += self._consumer.consume(self.settings.batch, 0)
                room = min(GATHER_TO, self.settings.batch) - len(messages)
                if self._is_loaded and room > 0:
                    messages += self._consumer.consume(room, GATHER_S)
                self._is_loaded = len(messages) >= GATHER_FROM
        except KafkaException as raised:
            if not clients.is_finished(raised.args[0]):
                raise
            self._on_finished(raised.args[0])
            messages = []
        self._require_consumer()
        serving = {p: writer for p, writer in self.writers.items() if writer.phase is Phase.SERVING}
        batches: dict[int, _Batch] = {}
        again: set[int] = set()
        for message in messages:
            if error := message.error():
                self._on_consumer_error(error, message.partition())
                self._gaps.pop(message.partition(), None)
                again.add(message.partition())
                continue
            record = _record(message)
            if (writer := serving.get(record.partition)) and record.partition not in again:
                if record.offset != self._next[record.partition] and not self._is_gap(record, again):
                    continue
                self._next[record.partition] = record.offset + 1
                batch = batches.get(record.partition)
                if batch is None:
                    self._refused.discard(record.partition)
                    batch = batches[record.partition] = _Batch(writer, writer.epoch, [])
                received = receive(record, self._intake, own_checks=record.partition not in self._attempts)
                if (headers := message.headers()) and (kept := tracing.kept(headers)):
                    received = msgspec.structs.replace(received, headers=kept)
                batch.commands.append(received)
                if received.rejection is not None and is_slow(received.rejection):
                    again.add(record.partition)  # many of these in one batch would cost the handler its place
        if self._rebalanced:  # librdkafka paused the partitions that we keep, and may have missed that we resumed one
            self._rebalanced = False
            again |= serving.keys()
            self._resumed |= serving.keys()
        for partition in (again & serving.keys()) - self._paused:
            self._read_on(serving[partition])
        if batches:
            self._connection.seen()
            reach("command read")
        return batches

    def _is_gap(self, record: Record, again: set[int]) -> bool:
        """Whether the topic has no records before this one: it was received twice. The first time its partition is read `again`."""
        expected = self._next[record.partition]
        if record.offset < expected:
            return False
        if self._gaps.get(record.partition) == (expected, record.offset):
            return True
        self._gaps[record.partition] = expected, record.offset
        again.add(record.partition)
        return False

    def _on_consumer_error(self, error: KafkaError, partition: int = -1) -> None:
        if _ends(error):
            self._on_finished(error)
            self._require_consumer()
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            if (writer := self.writers.get(partition)) is not None and writer.phase is not Phase.SERVING:
                # assigned from the topic's beginning of some seconds ago; librdkafka reads no more of it. Whether the next
                # command is still there, only its writer knows
                raise KafkaClientFailed(f"Commands of partition {partition} were deleted while it was assigned.", AGAIN)
            raise TopicsInconsistent(
                f"'{self.settings.commands_topic}' does not hold the next command any more: {error.str()}.",
                "The topic was trimmed or recreated. Restore it, or, if its commands may be lost for good, start with new topics.",
            )
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise TopicsInconsistent(
                f"Topic '{self.settings.commands_topic}' was deleted.", "Restore it: its id is part of every position."
            )
        if clients.is_denied(error):
            is_group = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
            where = f"group '{self.group}'" if is_group else f"topic '{self.settings.commands_topic}'"
            raise clients.denied(self.settings, error, f"Read of {where}")
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
        """Raises HandlerFenced or _NotJoined where the consumer failed."""
        if self._finished is None:
            return
        error, was_member = self._finished
        if not was_member:
            raise _NotJoined(error)
        raise HandlerFenced(
            f"Handler '{self.name}' was fenced out of its group: {error.str()}.",
            "Give each handler a name of its own (`samefold run handler --name`), and start it again.",
        )

    def _due(self, batches: dict[int, _Batch], now: float) -> Batches:
        """The commands to decide next: those that were held back, followed by those that have just arrived."""
        for partition, held in list(self._held.items()):
            if partition in batches:
                held.commands += batches.pop(partition).commands
            if now >= self._due_database:
                batches[partition] = self._held.pop(partition)
        return batches

    def _is_current(self, batch: _Batch) -> bool:
        writer = batch.writer
        is_assigned = self.writers.get(writer.partition) is writer
        return is_assigned and writer.phase is Phase.SERVING and writer.epoch == batch.epoch

    def _request(self, batches: Batches) -> None:
        """Have the database read what the writers need for these commands, as many of them as there is room for."""
        wanted: dict[int, _Batch] = {}
        streams: set[tuple[str, str]] = set()
        outcomes: set[tuple[str, str]] = set()
        for partition, batch in batches.items():
            if not self._is_current(batch):
                continue
            writer = batch.writer
            now = batch.commands[: max(writer.room, 0)]
            if now and now[0].offset <= self._attempts.get(partition, _Attempt()).last:
                now = now[:1]  # one of these ended the handler before
            if rest := batch.commands[len(now) :]:
                self._hold(partition, _Batch(writer, batch.epoch, rest), BEHIND_RETRY_S)
            wanted[partition] = _Batch(writer, batch.epoch, now)
            its_streams, its_outcomes = writer.wants(now)
            streams |= its_streams
            outcomes |= its_outcomes
        if not wanted:
            return
        try:
            self._query = wanted, self._snapshots().ask(streams, outcomes)
        except (psycopg.Error, DatabaseUnavailable) as error:
            self._retry(wanted, error)

    def _decide(self, batches: Batches, question: Question) -> None:
        """Let the writers decide on the states that the database read."""
        self._query = None
        try:
            snapshot = self._reader.answer(question)
        except (psycopg.Error, DatabaseUnavailable) as error:
            self._retry(batches, error)
            return
        reach("states loaded")
        now = time.monotonic()
        for partition, batch in batches.items():
            if not self._is_current(batch):
                continue
            writer = batch.writer
            is_attempt = partition in self._attempts
            commands = self._checked(self._attempted(partition, batch.commands))
            actions = writer.on_commands(commands, snapshot, now)
            for action in actions:
                self._execute(writer, action)
            _count(actions)
            if actions and isinstance(last := actions[-1], Append) and last.reason and is_slow(last.reason):
                commands = [command for command in commands if command.offset <= writer.last_command]
            if commands and writer.phase is Phase.SERVING:
                self._decided[partition] = self._mark(commands[-1].offset + 1, partition)
                if rest := batch.commands[len(commands) :]:  # after one that was too slow
                    self._put_back(partition, _Batch(writer, batch.epoch, rest), 0)
            if is_attempt and actions:  # if this process ends from here on, it was not because of these
                self._producer.now.flush(ATTEMPT_S)
            if partition in self._paused and partition not in self._held and writer.phase is Phase.SERVING:
                self._read_on(writer)

    def _last_attempt(self, partition: int) -> _Attempt:
        try:
            [kept] = self._consumer.committed([TopicPartition(self.settings.commands_topic, partition)], ATTEMPT_S)
            return _decode_attempt(kept.metadata) if kept.metadata else _Attempt()
        except (KafkaException, msgspec.DecodeError):  # then it is not counted
            return _Attempt()

    def _attempted(self, partition: int, commands: list[Received]) -> list[Received]:
        """The commands to decide, or to reject. If they are an attempt, the group keeps that now, beside the partition's offset."""
        before = self._attempts.get(partition)
        if before is None or not commands:
            return commands
        first, last = commands[0].offset, commands[-1].offset
        number = before.number + 1 if before[1:] == (first, last) else 1
        if last >= before.last:
            del self._attempts[partition]
        if number > ATTEMPTS:
            log.error("handler %s: %s of %s ended %d handlers", self.name, commands[0].id, commands[0].stream, ATTEMPTS)
            return [msgspec.structs.replace(one, unchecked=None, rejection=_ENDED) for one in commands]
        with suppress(KafkaException):  # then it is not counted
            mark = self._mark(first, partition, _Attempt(number, first, last))
            self._consumer.commit(offsets=[mark], asynchronous=False)
        return commands

    def _checked(self, commands: list[Received]) -> list[Received]:
        """The commands with all checks made, up to one whose own checks were too slow."""
        checked: list[Received] = []
        for one in commands:
            again = one.unchecked and receive(one.unchecked, self._intake)
            checked.append(msgspec.structs.replace(again, headers=one.headers) if again else one)
            if (why := checked[-1].rejection) and is_slow(why):
                break
        return checked

    def _mark(self, decided: int, partition: int, attempt: _Attempt | None = None) -> TopicPartition:
        """What the group is to keep. It has a text, other than what asks the group for its confirmation."""
        kept = msgspec.json.encode(attempt or self._attempts.get(partition, _Attempt())).decode()
        return TopicPartition(self.settings.commands_topic, partition, decided, metadata=kept)

    def _read_on(self, writer: Writer) -> None:
        """Read commands of the writer's partition, from the next one on.

        The seek is needed: librdkafka before 2.13.2 takes an error for a record (its issue 4844), and after a pause, ours or its
        own while it rebalances, would go on behind a command that was never delivered.
        """
        here = TopicPartition(self.settings.commands_topic, writer.partition, self._next[writer.partition])
        self._paused.discard(writer.partition)
        try:
            self._consumer.seek(here)
            self._consumer.resume([here])
            if self._resumed or not self._is_fetching(writer):
                self._resumed.add(writer.partition)
        except KafkaException as error:  # in a delivery report, from where an exception can't be caught
            if error.args[0].code() in _NOT_YET:
                self._later(writer, BEHIND_RETRY_S, lambda: self._read_on(writer))
            elif not clients.is_finished(error.args[0]):
                self._error = KafkaClientFailed(f"No commands can be read: {error.args[0].str()}.", AGAIN)

    def _is_fetching(self, but: Writer) -> bool:
        """Whether commands of some other partition are fetched."""
        others = (one for one in self.writers.values() if one is not but)
        return any(one.phase is Phase.SERVING and one.partition not in self._paused for one in others)

    def _retry(self, batches: Batches, error: psycopg.Error | DatabaseUnavailable) -> None:
        """Retry these commands a moment later, before those that are held already."""
        self._database_unavailable(error)
        for partition, batch in batches.items():
            if self._is_current(batch):
                self._put_back(partition, batch, DATABASE_RETRY_S)

    def _put_back(self, partition: int, batch: _Batch, seconds: float) -> None:
        """Hold commands again, before those that are held already."""
        after = self._held.pop(partition, None)
        batch.commands += after.commands if after else []
        self._hold(partition, batch, seconds)

    def _hold(self, partition: int, batch: _Batch, seconds: float) -> None:
        """Keep commands that can't be decided yet, and pause their partition: back-pressure, not memory."""
        self._held[partition] = batch
        self._due_database = time.monotonic() + seconds
        self._paused.add(partition)
        self._consumer.pause([TopicPartition(self.settings.commands_topic, partition)])

    def _poll_timeout(self) -> float:
        """How long to wait for commands, in seconds: not at all while there is something else to do."""
        if self._query or any(due <= time.monotonic() for due, _ in self._timers.values()):
            return 0
        busy = self._held or any(writer.phase is not Phase.SERVING for writer in self.writers.values())
        return BUSY_S if busy else IDLE_S

    # ── the writers' actions ──

    def _execute(self, writer: Writer, action: Action | None) -> None:
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
                # later: a query may be pending on the connection
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
                self._log_progress(writer, f"epoch {writer.epoch}, serving from command {offset}")
                self._next[partition] = offset
                self._gaps.pop(partition, None)
                self._attempts[partition] = self._last_attempt(partition)
                self._decided[partition] = self._mark(offset, partition)
                self._read_on(writer)
            case Wait(why):
                self._log_progress(writer, why)
                self._later(writer, WAIT_S, writer.start)
            case Confirm(why, doubt):
                if doubt:
                    metrics.HANDLER_DOUBTS.labels(doubt).inc()
                self._log_progress(writer, why, logging.ERROR if doubt is Doubt.COMMAND else logging.INFO)
                self._held.pop(partition, None)
                self._consumer.pause([TopicPartition(self.settings.commands_topic, partition)])
                self._later(writer, random.uniform(*CONFIRM_S), lambda: self._confirm(writer))
            case Refuse(why):
                message, hint = _REFUSALS[why]
                names = {"commands": self.settings.commands_topic, "events": self._events}
                self._error = TopicsInconsistent(message.format(**names), hint)
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
                    self._error = KafkaClientFailed(f"The producer takes no record: {error.args[0].str()}.", AGAIN)
                    return
                # in doubt, as are all records that it had in flight: each writer that gets such a report opens again
                self._producer.renew(producer, error.args[0])
                on_delivery(error.args[0], None)
                return

    def _load(self, writer: Writer) -> Action:
        try:
            snapshot = self._snapshots().read()
            reach("position loaded")
            if snapshot.fits and (action := self._before_opening(snapshot)):
                return action
            # after the snapshot, so that the end can't be older than the position
            here = TopicPartition(self._events, writer.partition)
            first, end = self._log_reader.get_watermark_offsets(here, timeout=topics.TIMEOUT_S)
            position = snapshot.positions.get(writer.partition)
            if position and first > position.next_offset and self._archived(writer.partition) < first:
                return Refuse("events-trimmed")
        except (psycopg.Error, DatabaseUnavailable) as error:
            self._database_unavailable(error)
            return Wait("PostgreSQL is unavailable")
        except KafkaException as error:
            if clients.is_denied(error.args[0]):
                raise clients.denied(self.settings, error.args[0], f"Read of topic '{self._events}'") from error
            if not clients.may_pass(error.args[0]):
                raise
            # seen once: after a broker was overloaded for minutes, it did not answer this client any more, but a new one
            self._log_reader.close()
            self._log_reader = clients.range_consumer(self.settings)
            return Wait(f"Kafka is unavailable: {error.args[0].str()}")
        except clients.KafkaUnavailable as error:
            return Wait(f"Kafka is unavailable: {error.message}")
        return writer.on_position(snapshot, end)

    def _before_opening(self, snapshot: Snapshot) -> Action | None:
        """Record this code's command types, once agents can fold its events.

        Where another release's handlers run too, only one of the groups decides.
        """
        if snapshot.unfoldable:
            return Wait(
                f"no agent that can fold these events has run yet, start those first: {_names(snapshot.unfoldable)}"
            )
        if snapshot.unrecorded:
            if not self._reader.shows_this_code():
                return Wait(
                    "other views are live than this code's: `samefold rebuild` with this code switches to its own"
                )
            make_types_live(self._reader.connection, self.settings.events_topic)
            log.info("handler %s: these commands are live now: %s", self.name, _names(snapshot.unrecorded))
            return Load()
        if (more := snapshot.unknown or snapshot.newer) and (other := self._deciding()) != self.group:
            return Wait(f"another release decides, in the group {other}: it knows {_names(more)}")
        return None

    def _deciding(self) -> str:
        """The group of handlers that decides while handlers of several releases run."""
        now = time.monotonic()
        if now >= self._due_groups:
            self._alive = release.alive(self._admin, self.settings.group_prefix)
            self._due_groups = now + GROUPS_S
        return release.deciding([*self._alive, self.group], self.settings.group_prefix, self._reader.states)

    def _archived(self, partition: int) -> int:
        """The offset up to which a partition of the log is archived."""
        assert self._database is not None, "a snapshot was just read from it"
        return ends_of(self._database, self._events).get(partition, 0)

    def _read_log(self, writer: Writer, start: int, stop: int) -> Action:
        action: Action | None = None
        try:
            for records in read_range(
                self.settings, self._events, writer.partition, start, stop, consumer=self._log_reader
            ):
                action = writer.on_log(records)
                if not isinstance(action, ReadLog):
                    break
        except (clients.KafkaUnavailable, DatabaseUnavailable) as error:  # the database knows what is archived
            log.warning("handler %s: %s", self.name, error)
            return writer.start()
        return writer.start() if action is None else action  # without a record, nothing was read up to the opening

    def _confirm(self, writer: Writer) -> Action | None:
        """Ask the group: it lets only the partition's current assignee commit an offset.

        One commit a partition at a time, so that its answer comes after this doubt.
        """
        if writer.partition in self._confirming:
            self._later(writer, CONFIRM_S[1], lambda: self._confirm(writer))
            return None
        offset = TopicPartition(self.settings.commands_topic, writer.partition, max(writer.last_command + 1, 0))
        try:
            self._consumer.commit(offsets=[offset], asynchronous=True)
        except KafkaException as error:
            if clients.is_finished(error.args[0]):
                self._on_consumer_error(error.args[0])
            return Confirm(f"not confirmed by the group: {error.args[0].str()}")
        self._confirming[writer.partition] = writer, time.monotonic()
        return None

    def _on_commit(self, failed: KafkaError | None, offsets: list[TopicPartition]) -> None:
        """The group's answer."""
        for offset in offsets:
            if offset.metadata:
                self._is_telling = False
            writer, _ = (None, 0.0) if offset.metadata else self._confirming.pop(offset.partition, (None, 0.0))
            error = failed or offset.error
            if error is not None and offset.metadata and offset.partition in self.writers:
                self._decided.setdefault(offset.partition, offset)  # told with the next ones
            if error is not None and _ends(error):
                self._on_finished(error)
            elif writer is not None:
                refused = Confirm(f"not confirmed by the group: {error.str()}") if error else None
                self._execute(writer, refused or writer.on_confirmed())

    def _require_confirmation(self) -> None:
        """Raises GroupSilent: without an answer the partition would wait for ever."""
        late = time.monotonic() - CONFIRM_WITHIN_S
        for partition, (writer, asked) in self._confirming.items():
            if asked < late and self.writers.get(partition) is writer:
                raise GroupSilent(f"The group {self.group} has not answered for {CONFIRM_WITHIN_S:.0f} s.", AGAIN)

    # ── delivery reports ──

    def _acknowledged(self, writer: Writer, epoch: int, seq: int, error: KafkaError | None, message: Message) -> None:
        """A commit's report, for the writer in the epoch that appended it; in a later epoch it means nothing."""
        reach("commit acknowledged")
        self._require_right(error)
        if writer.epoch == epoch:
            offset = None if error else message.offset()
            self._execute(writer, writer.on_acknowledged(seq, offset, time.monotonic()))

    def _opened(self, writer: Writer, opening: int, error: KafkaError | None, message: Message) -> None:
        """An opening's report, for the attempt that appended it."""
        reach("opening acknowledged")
        self._require_right(error)
        if writer.openings == opening:
            self._execute(writer, writer.on_opened(None if error else message.offset()))

    def _require_right(self, error: KafkaError | None) -> None:
        if error is not None and clients.is_denied(error):
            self._error = clients.denied(self.settings, error, f"Write of topic '{self._events}'")

    # ── the group ──

    def _join(self) -> None:
        self._finished = None
        self._is_member = self._is_telling = False
        self._confirming.clear()
        self._consumer = clients.group_consumer(
            self.settings,
            self.group,
            instance=self.name,
            connection=self._connection,
            on_commit=self._on_commit,
            on_finished=self._on_finished,
        )
        self._consumer.subscribe(
            [self._topics[0].name], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _rejoin(self, error: KafkaError) -> None:
        """Join again. A broker that was frozen may receive a join twice, make two members of it, and fence the one in use."""
        log.warning("handler %s: joins its group again: %s", self.name, error.str())
        with suppress(KafkaException):
            self._consumer.close()
        self._drop(list(self.writers))
        self.stopping.wait(random.uniform(*CONFIRM_S))  # two of one name would fence each other at the same pace
        self._join()

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        self._is_member = self._rebalanced = True
        # the writer seeks later; until then an offset that was deleted would be an error
        first = self._topics[0].first
        starts = [TopicPartition(p.topic, p.partition, first.get(p.partition, 0)) for p in assigned]
        consumer.incremental_assign(starts)
        consumer.pause(assigned)
        limits = Limits(self.settings.run_ahead, clients.MAX_COMMIT_BYTES, clients.ACK_TIMEOUT_S)
        for partition in sorted(p.partition for p in assigned):
            writer = self.writers[partition] = Writer(partition, self._intake.topic_id, limits)
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
            for kept in (self.writers, self._held, self._timers, self._attempts, self._decided):
                kept.pop(partition, None)
            self._paused.discard(partition)
            self._refused.discard(partition)

    # ── time, database, end ──

    def _later(self, writer: Writer, seconds: float, then: Callable[[], Action | None]) -> None:
        self._timers[writer.partition] = (time.monotonic() + seconds, then)

    def _run_timers(self, now: float) -> None:
        for partition, (due, then) in list(self._timers.items()):
            if now >= due and (writer := self.writers.get(partition)):
                del self._timers[partition]
                self._execute(writer, then())

    def _snapshots(self) -> SnapshotReader:
        if self._database is None or self._database.closed:
            self._database = connect(
                self.settings, f"samefold handler {self.name}", short_transactions=True, by_key=True
            )
            for topic in self._topics:
                check_contract(self._database, Contract.of(topic))
            self._reader = SnapshotReader(self._database, self._events)
            self._status.well("database", "PostgreSQL answers again")
        return self._reader

    def _database_unavailable(self, error: psycopg.Error | DatabaseUnavailable) -> None:
        if isinstance(error, psycopg.Error) and not is_transient(error):
            raise named_error(error, self.settings) from error
        if self._database is not None:
            self._database.close()
            self._database = None
        self._status.wrong("database", "PostgreSQL does not answer; waiting for it")

    def _wait_for_topics(self) -> tuple[topics.Topic, topics.Topic] | None:
        """The topics (commands, events); None after `stop`."""
        while True:
            try:
                return topics.ensure(self.settings)
            except clients.KafkaUnavailable as error:
                self._status.wrong("kafka", f"{error.message} Waiting for it.", "away")
                if self.stopping.wait(1):
                    return None

    def _log_progress(self, writer: Writer, what: str, level: int = logging.INFO) -> None:
        """Log a change once, not at each attempt: another number at its end is no change."""
        kind = what.rstrip("0123456789")
        if self._progress.get(writer.partition) != kind:
            self._progress[writer.partition] = kind
            log.log(level, "handler %s, partition %d: %s", self.name, writer.partition, what)

    def _close(self) -> None:
        self._drop(list(self.writers))  # reports that still come must start nothing
        with suppress(KafkaException):
            self._producer.now.flush(5)
        if not self._confirming and not self._is_telling:
            self._consumer.close()  # it would wait for the commits; a static member leaves without a message
        self._log_reader.close()
        if self._database is not None:
            self._database.close()


_NOT_YET = {KafkaError._STATE, KafkaError._UNKNOWN_PARTITION, KafkaError._PREV_IN_PROGRESS, KafkaError._OUTDATED}
"""Of a partition that librdkafka does not fetch yet, pauses itself, or does not fetch any more: the next poll shows which."""
_REFUSALS = {
    "events-shorter-than-position": (
        "The read model's position lies beyond the end of '{events}': it was recreated or lost records.",
        "Restore the topic, or start with an empty database and new topics.",
    ),
    "events-trimmed": (
        "'{events}' does not reach back to the read model's position: it was trimmed without an archive.",
        "Restore the topic: what is missing was never applied.",
    ),
    "commands-topic-recreated": (
        "'{commands}' is not the topic that earlier commits were decided from: it was recreated.",
        "Restore the topic, or start with new topics and an empty database.",
    ),
}
"""Message and hint by the reason of a `Refuse`."""
_ENDED = reason(
    "failed", f"ended-the-handler: its decision ended {ATTEMPTS} handlers; their logs or exit codes say how"
)
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
        # the domain's refusals are one label: their codes are too many
        for why, count in Counter(one.code if one.code in RECORDED else "refused" for one in rejections).items():
            metrics.HANDLER_REJECTIONS.labels(why).inc(count)
            if why not in ("refused", "version-conflict"):
                first = next(one.stream for one in appends if one.reason and one.reason.code == why)
                log.warning("%d commands were rejected as %s, the first of %s: outcomes say why", count, why, first)


def _ended(span: Span, acknowledged: Callable[..., None], error: KafkaError | None, message: Message) -> None:
    span.end()
    acknowledged(error, message)


def _names(types: Iterable[CommandType | str]) -> str:
    return ", ".join(sorted(map(str, types)))


def _ends(error: KafkaError) -> bool:
    """Whether the consumer can't go on."""
    return error.code() == KafkaError.FENCED_INSTANCE_ID or clients.is_finished(error)


def _record(message: Message) -> Record:
    return Record(message.partition(), message.offset(), message.timestamp()[1], message.key(), message.value())


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
        limit_calls(settings.decide_limit_s)
        handler.run()

    # not sys.exit: it would wait for requests to an unavailable broker, and a process may die at any point
    os._exit(exit_code_of(work, log, f"handler {name}"))


if __name__ == "__main__":
    main()
