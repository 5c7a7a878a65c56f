"""The handler: a thin shell around the writers of the partitions that the group gave to this process.

Reads `commands` in batches, lets each partition's `Writer` decide, carries out what it says. Several handlers share the partitions
through a consumer group; safety does not rest on it. One thread; librdkafka's own threads do the sending and fetching.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from commands.intake import Intake, Received, receive
from commands.snapshots import SnapshotReader
from commands.writer import Action, Append, Confirm, Limits, Load, Open, Phase, ReadLog, Refuse, Serve, Wait, Writer
from infra import logs
from infra.database.connect import DatabaseAway, connect, named, passes
from infra.errors import SamefoldError
from infra.faultpoints import reach
from infra.log import clients, topics
from infra.log.records import Opening, Record, encode
from infra.log.source import read_range
from infra.settings import Settings
from projections.engine.start import Contract, check_contract

log = logging.getLogger(__name__)

IDLE_S = 0.2
BUSY_S = 0.005
DATABASE_RETRY_S = 0.25
BEHIND_RETRY_S = 0.02
WAIT_S = 0.2
CHECK_S = 5.0
CONFIRM_S = (0.05, 0.3)


class WorldChanged(SamefoldError):
    """Topics and positions do not belong together any more."""


class HandlerFenced(SamefoldError):
    """Another process runs under this handler's name, or the producer can't go on: this process must end."""


class Handler:
    """One handler process. `run` returns after `stop`; it raises a named error when it must not go on."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.stopping = threading.Event()
        self.writers: dict[int, Writer] = {}
        self._held: dict[int, list[Received]] = {}
        self._paused: set[int] = set()
        self._timers: dict[int, tuple[float, Callable[[], Action]]] = {}
        self._due_database = 0.0
        self._due_check = time.monotonic() + CHECK_S
        self._said: dict[int, str] = {}
        self._error: SamefoldError | None = None
        self._database: psycopg.Connection[Any] | None = None
        self._database_is_away = False

    def stop(self) -> None:
        self.stopping.set()

    def run(self) -> None:
        """Serve until stopped. Waits out Kafka and PostgreSQL being away, at the start too."""
        commands, events = self._topics = self._until_there()
        self._intake = Intake(commands.id, commands.partitions, self.settings.max_command_bytes)
        self._connection = clients.Connection(f"handler {self.name}")
        self._admin = clients.admin(self.settings)
        self._producer = clients.producer(self.settings, connection=self._connection)
        self._log_reader = clients.range_consumer(self.settings)
        self._consumer = clients.group_consumer(
            self.settings, f"{self.settings.group_prefix}-handler", instance=self.name, connection=self._connection
        )
        self._consumer.subscribe(
            [commands.name], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
        )
        log.info("handler %s: serving '%s' to '%s'", self.name, commands.name, events.name)
        try:
            while not self.stopping.is_set():
                self._turn()
                if self._error:
                    raise self._error
        finally:
            self._close()

    def _turn(self) -> None:
        self._producer.poll(0)
        now = time.monotonic()
        for writer in list(self.writers.values()):
            self._do(writer, writer.on_clock(now))
        self._run_timers(now)
        self._check_topics(now)
        self._serve_held(now)
        batch = self._poll()
        if batch:
            reach("command read")
            self._serve(batch)

    def _check_topics(self, now: float) -> None:
        """A topic that is made anew or gets more partitions while we run is as wrong as at the start."""
        if now < self._due_check:
            return
        self._due_check = now + CHECK_S
        for topic in self._topics:
            try:
                found = topics.describe(self.settings, topic.name, admin=self._admin)
            except clients.KafkaAway:
                return
            if (found.id, found.partitions) != (topic.id, topic.partitions):
                raise topics.changed(topic, found)

    # ── commands in ──

    def _poll(self) -> dict[int, list[Received]]:
        """What has arrived: wait for the first, take what is there."""
        busy = self._held or any(writer.phase is not Phase.SERVING for writer in self.writers.values())
        messages = self._consumer.consume(1, BUSY_S if busy else IDLE_S)
        if messages:
            messages += self._consumer.consume(self.settings.handler_batch, 0)
        batch: dict[int, list[Received]] = defaultdict(list)
        for message in messages:
            partition = message.partition()
            if error := message.error():
                self._on_consumer_error(error)
            elif partition in self.writers and self.writers[partition].phase is Phase.SERVING:
                batch[partition].append(receive(_record(message), self._intake))
        if batch:
            self._connection.seen()
        return batch

    def _on_consumer_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError.FENCED_INSTANCE_ID or error.fatal():
            raise HandlerFenced(
                f"Handler '{self.name}' was fenced out of its group: {error.str()}.",
                "Give each handler a name of its own (`samefold run handler --name`), and start it again.",
            )
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise WorldChanged(
                f"'{self.settings.commands_topic}' does not hold the next command any more: {error.str()}.",
                "The topic was trimmed or made anew. Restore it, or, if its commands may be lost for good, start with new topics.",
            )
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise WorldChanged(
                f"Topic '{self.settings.commands_topic}' is gone.", "Restore it: its id is part of every position."
            )
        if not clients.may_pass(error):
            log.warning("handler %s: %s", self.name, error.str())

    def _serve_held(self, now: float) -> None:
        if self._held and now >= self._due_database:
            held, self._held = self._held, {}
            self._serve(held)

    def _serve(self, batch: dict[int, list[Received]]) -> None:
        """One reading of the database for a batch over all partitions, then each partition's decisions."""
        taken: dict[int, list[Received]] = {}
        streams: set[tuple[str, str]] = set()
        outcomes: set[tuple[str, str]] = set()
        for partition, received in batch.items():
            writer = self.writers.get(partition)
            if writer is None or writer.phase is not Phase.SERVING:
                continue
            taken[partition] = received[: max(writer.room, 0)]
            if rest := received[len(taken[partition]) :]:
                self._hold(partition, rest, BEHIND_RETRY_S)
            wanted = writer.wants(taken[partition])
            streams |= wanted[0]
            outcomes |= wanted[1]
        try:
            snapshot = self._snapshots().read(streams, outcomes)
            reach("states loaded")
        except (psycopg.Error, DatabaseAway) as error:
            self._database_away(error)
            for partition, received in taken.items():
                self._hold(partition, received + self._held.pop(partition, []), DATABASE_RETRY_S)
            return
        now = time.monotonic()
        for partition, received in taken.items():
            writer = self.writers[partition]
            for action in writer.on_commands(received, snapshot, now):
                self._do(writer, action)
            if partition in self._paused and partition not in self._held and writer.phase is Phase.SERVING:
                self._paused.discard(partition)
                self._consumer.resume([TopicPartition(self.settings.commands_topic, partition)])

    def _hold(self, partition: int, commands: list[Received], seconds: float) -> None:
        """Keep commands that can't be decided yet, and read no more of that partition: back-pressure, not memory."""
        self._held[partition] = commands
        self._due_database = time.monotonic() + seconds
        self._paused.add(partition)
        self._consumer.pause([TopicPartition(self.settings.commands_topic, partition)])

    # ── what the writers say ──

    def _do(self, writer: Writer, action: Action | None) -> None:
        while action is not None:
            if self.writers.get(writer.partition) is not writer:
                return
            action = self._step(writer, action)

    def _step(self, writer: Writer, action: Action) -> Action | None:
        partition = writer.partition
        match action:
            case Append(seq, stream, value):
                self._produce(stream.encode(), value, partition, _Acknowledged(self, writer, writer.epoch, seq))
                reach("commit sent")
            case Load():
                return self._load(writer)
            case Open():
                opening = Opening(writer=self.name, commands_topic_id=writer.commands_topic_id)
                self._produce(None, encode(opening), partition, _Opened(self, writer, writer.openings))
                reach("opening sent")
            case ReadLog(start, stop):
                return self._read_log(writer, start, stop)
            case Serve(offset):
                reach("opening read")
                self._say(writer, f"epoch {writer.epoch}, serving from command {offset}")
                here = TopicPartition(self.settings.commands_topic, partition, offset)
                self._paused.discard(partition)
                self._consumer.seek(here)
                self._consumer.resume([here])
            case Wait(why):
                self._say(writer, why)
                self._later(writer, WAIT_S, writer.start)
            case Confirm(why):
                self._say(writer, why)
                self._held.pop(partition, None)
                self._consumer.pause([TopicPartition(self.settings.commands_topic, partition)])
                self._later(writer, random.uniform(*CONFIRM_S), lambda: self._confirm(writer))
            case Refuse(why):
                self._error = _refused(why, self.settings)
        return None

    def _produce(self, key: bytes | None, value: bytes, partition: int, on_delivery: Callable[..., None]) -> None:
        while True:
            try:
                self._producer.produce(
                    self.settings.events_topic, value, key=key, partition=partition, on_delivery=on_delivery
                )
                return
            except BufferError:
                self._producer.poll(0.05)
            except KafkaException as error:
                self._error = HandlerFenced(f"The producer can't go on: {error.args[0].str()}.", "It is started anew.")
                return

    def _load(self, writer: Writer) -> Action:
        try:
            snapshot = self._snapshots().read()
            reach("position loaded")
            # after the snapshot, so that the end can't be older than the position
            here = TopicPartition(self.settings.events_topic, writer.partition)
            first, end = self._log_reader.get_watermark_offsets(here, timeout=topics.TIMEOUT_S)
        except (psycopg.Error, DatabaseAway) as error:
            self._database_away(error)
            return Wait("the database is away")
        except KafkaException as error:
            if not clients.may_pass(error.args[0]):
                raise
            return Wait("Kafka is away")
        position = snapshot.positions.get(writer.partition)
        if position and first > position.next_offset:
            return Refuse("events-trimmed")
        return writer.on_position(snapshot, end)

    def _read_log(self, writer: Writer, start: int, stop: int) -> Action | None:
        action: Action | None = None
        try:
            for records in read_range(
                self.settings, self.settings.events_topic, writer.partition, start, stop, consumer=self._log_reader
            ):
                action = writer.on_log(records)
                if not isinstance(action, ReadLog):
                    break
        except clients.KafkaAway as error:
            log.warning("handler %s: %s", self.name, error)
            return writer.start()
        return action

    def _confirm(self, writer: Writer) -> Action:
        """A synchronous commit of a group offset succeeds only for the member that the group holds to be the assignee now."""
        offset = TopicPartition(self.settings.commands_topic, writer.partition, max(writer.last_command + 1, 0))
        try:
            self._consumer.commit(offsets=[offset], asynchronous=False)
        except KafkaException as error:
            if error.args[0].fatal():
                self._on_consumer_error(error.args[0])
            return Confirm(f"not confirmed by the group: {error.args[0].str()}")
        return writer.on_confirmed()

    # ── the group ──

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        consumer.incremental_assign([TopicPartition(p.topic, p.partition, 0) for p in assigned])
        consumer.pause(assigned)
        for partition in sorted(p.partition for p in assigned):
            limits = Limits(self.settings.run_ahead, self.settings.max_commit_bytes, self.settings.ack_timeout_s)
            writer = Writer(partition, self._intake.topic_id, limits)
            self.writers[partition] = writer
            self._later(writer, 0, writer.start)

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        for partition in (p.partition for p in revoked):
            self.writers.pop(partition, None)
            self._held.pop(partition, None)
            self._paused.discard(partition)
            self._timers.pop(partition, None)
        consumer.incremental_unassign(revoked)

    # ── time, database, end ──

    def _later(self, writer: Writer, seconds: float, then: Callable[[], Action]) -> None:
        self._timers[writer.partition] = (time.monotonic() + seconds, then)

    def _run_timers(self, now: float) -> None:
        for partition, (due, then) in list(self._timers.items()):
            if now >= due and (writer := self.writers.get(partition)):
                del self._timers[partition]
                self._do(writer, then())

    def _snapshots(self) -> SnapshotReader:
        if self._database is None or self._database.closed:
            self._database = connect(self.settings, f"samefold handler {self.name}", short_transactions=True)
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

    def _until_there(self) -> tuple[topics.Topic, topics.Topic]:
        said = False
        while True:
            try:
                return topics.ensure(self.settings)
            except clients.KafkaAway as error:
                if not said:
                    log.warning("handler %s: %s Waiting for it.", self.name, error.message)
                    said = True
                if self.stopping.wait(1):
                    raise

    def _say(self, writer: Writer, what: str) -> None:
        """One log line a change, not one a try."""
        kind = what.rstrip("0123456789")
        if self._said.get(writer.partition) != kind:
            self._said[writer.partition] = kind
            log.info("handler %s, partition %d: %s", self.name, writer.partition, what)

    def _close(self) -> None:
        self._producer.flush(5)
        self._consumer.close()
        self._log_reader.close()
        if self._database is not None:
            self._database.close()


class _Acknowledged:
    """Delivery report of one commit, for the writer in the epoch that appended it; a later epoch is none of its business."""

    __slots__ = ("epoch", "handler", "seq", "writer")

    def __init__(self, handler: Handler, writer: Writer, epoch: int, seq: int) -> None:
        self.handler, self.writer, self.epoch, self.seq = handler, writer, epoch, seq

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        reach("commit acknowledged")
        if self.writer.epoch == self.epoch:
            offset = None if error else message.offset()
            self.handler._do(self.writer, self.writer.on_acknowledged(self.seq, offset, time.monotonic()))


class _Opened:
    """Delivery report of an opening, for the try that appended it."""

    __slots__ = ("handler", "opening", "writer")

    def __init__(self, handler: Handler, writer: Writer, opening: int) -> None:
        self.handler, self.writer, self.opening = handler, writer, opening

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        reach("opening acknowledged")
        if self.writer.openings == self.opening:
            self.handler._do(self.writer, self.writer.on_opened(None if error else message.offset()))


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
                f"'{settings.events_topic}' does not reach back to the read model's position: it was trimmed.",
                "Restore the topic: what is missing was never applied.",
            )
        case _:
            return WorldChanged(
                f"'{settings.commands_topic}' is not the topic that earlier commits were decided from: it was made anew.",
                "Restore the topic, or start with new topics and an empty database.",
            )


def main() -> None:
    """`python -m commands.handler --name NAME`: serve until SIGTERM or SIGINT. Exit code 1 after a named error."""
    arguments = argparse.ArgumentParser(prog="python -m commands.handler")
    arguments.add_argument("--name", required=True)
    name = arguments.parse_args().name
    settings = Settings()
    logs.configure(settings.log_level)
    handler = Handler(settings, name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: handler.stop())
    try:
        handler.run()
    except SamefoldError as error:
        log.error("handler %s stops: %s", name, error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
