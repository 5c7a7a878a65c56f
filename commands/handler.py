"""The handler: the way of a command from its record in `commands` to its commit in `events`.

    fetched ─▶ checked ─▶ waiting ─▶ decided ─▶ appended ─▶ acknowledged
    Fetching    receive   Partition   Writer     Producer     Writer

A commit is the outcome; agents fold it into the read model. `Group` assigns the partitions, `Takeover` leads a writer to where it
serves. Correctness rests on the writers alone. One thread; librdkafka's own threads send and fetch.
"""

from __future__ import annotations

import argparse
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeAlias

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message
from opentelemetry.trace import Span, SpanKind

from commands import release
from commands.fetching import Fetching
from commands.group import ATTEMPT_S, CONFIRM_S, Group, KafkaClientFailed, TopicsInconsistent
from commands.intake import Intake, receive
from commands.partition import Partition
from commands.snapshots import SnapshotReader
from commands.takeover import Takeover
from commands.writer import Action, Append, Confirm, Load, Open, ReadLog, Refuse, ReopenReason, Serve, Wait
from domain.engine.contexts import RECORDED
from infra.database.connect import DatabaseUnavailable
from infra.log import clients, topics
from infra.log.records import Headers, Opening, Record, encode
from infra.observability import logs, metrics, tracing
from infra.processes.faultpoints import reach
from infra.processes.process_end import AGAIN
from infra.processes.serving import Blocking, in_a_thread, serve_blocking
from infra.settings import Settings

log = logging.getLogger(__name__)

Report: TypeAlias = Callable[..., None]
IDLE_S = 0.2
BUSY_S = 0.005
DATABASE_RETRY_S = 0.25
WAIT_S = 0.2
CHECK_S = 5.0
"""Between two checks of the topics and the command types."""
CHECK_WITHIN_S = 2.0
"""Commands wait while a check runs."""


class Handler:
    """One handler process. `run` returns after `stop`, and raises a named error when the process must end."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.group = release.group_of(settings.group_prefix)
        self._stopping = threading.Event()
        self._who = f"handler {name}"
        self._status = logs.StatusLog(log, self._who)
        self._due_check = time.monotonic() + CHECK_S
        self.partitions: Mapping[int, Partition] = {}
        """Those that are assigned to this process."""

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Serve until stopped. Waits while Kafka or PostgreSQL is unavailable, at the start too."""
        found = self._wait_for_topics()
        if found is None:
            return
        (commands, events), settings, who = found, self.settings, self._who
        admin = topics.Admin(settings, CHECK_WITHIN_S)
        self._watch = topics.Watch(settings, found, self._status, admin)
        self._intake = Intake(commands.id, commands.partitions, clients.MAX_COMMAND_BYTES)
        self._connection = clients.Connection(who)
        self._producer = clients.LastingProducer(settings, who, self._connection)
        clients.learn_leaders(self._producer.now, events.name)
        self._read_model = SnapshotReader(settings, f"samefold {who}", found, self._status)
        self._takeover = Takeover(settings, who, self.group, admin, self._read_model)
        self._members = Group(settings, self.group, self.name, commands, self._connection, self._stopping)
        self.partitions = self._members.partitions
        self._fetching = Fetching(self._members, settings.batch)
        metrics.HANDLER_REJECTIONS.labels("failed")  # from 0 on: `increase` does not count what a series begins with
        log.info("%s: serving '%s' to '%s', in the group %s", who, commands.name, events.name, self.group)
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            self._close()

    def _wait_for_topics(self) -> tuple[topics.Topic, topics.Topic] | None:
        """The topics (commands, events); None after `stop`."""
        while True:
            try:
                return topics.ensure(self.settings)
            except clients.KafkaUnavailable as error:
                self._status.wrong("kafka", f"{error.message} Waiting for it.", "away")
                if self._stopping.wait(1):
                    return None

    def _turn(self) -> None:
        self._fetch()
        self._producer.poll(0)  # before the clock: acknowledgements that came are not late
        now = time.monotonic()
        for partition in list(self.partitions.values()):
            self._execute(partition, partition.writer.on_clock(now))
            if then := partition.due(now):
                self._execute(partition, then())
        self._check(now)
        self._decide(now)

    def _check(self, now: float) -> None:
        """Topics may be recreated, and a restored database may lack command types, while no command comes in that would show it."""
        if now < self._due_check:
            return
        self._due_check = now + CHECK_S
        self._members.report_progress()
        with suppress(clients.KafkaUnavailable):
            self._members.commands = self._watch.check()[0]
        if any(partition.is_serving for partition in self.partitions.values()):
            with suppress(DatabaseUnavailable):
                self._takeover.check_types()

    # ── the way of a command ──

    def _fetch(self) -> None:
        """Check fetched commands, and let them wait for their decision."""
        fetched = self._fetching.poll(self._idle_s())
        for partition, offset, message in fetched:
            record = Record(partition.number, offset, message.timestamp()[1], message.key(), message.value())
            received = receive(record, self._intake)
            if (headers := message.headers()) and (kept := tracing.kept(headers)):
                received = msgspec.structs.replace(received, headers=kept)
            partition.waiting.append(received)
        if fetched:
            self._connection.seen()
            reach("command read")

    def _idle_s(self) -> float:
        """How long to wait for commands: not at all while there is something else to do."""
        now, partitions = time.monotonic(), self.partitions.values()
        if any(one.is_due(now) for one in partitions):
            return 0
        return BUSY_S if any(one.waiting or not one.is_serving for one in partitions) else IDLE_S

    def _decide(self, now: float) -> None:
        """Let the writers decide what waits, on states that the database reads while reports of appends are served."""
        batches = [(one, batch) for one in self.partitions.values() if (batch := one.next_batch(now)) is not None]
        if not batches:
            return
        streams, outcomes = set[tuple[str, str]](), set[tuple[str, str]]()
        for partition, batch in batches:
            wanted = partition.writer.wants(batch)
            streams |= wanted[0]
            outcomes |= wanted[1]
        try:
            question = self._read_model.ask(streams, outcomes)
            self._producer.poll(0)
            snapshot = self._read_model.answer(question)
        except DatabaseUnavailable:
            for partition, _ in batches:
                partition.decide_at = time.monotonic() + DATABASE_RETRY_S
                self._fetching.pause(partition)
            return
        reach("states loaded")
        now = time.monotonic()
        for partition, batch in batches:
            if not partition.is_serving or not self._members.has(partition):
                continue
            is_attempt = partition.attempt is not None
            actions = partition.writer.on_commands(self._members.attempt(partition, batch), snapshot, now)
            for action in actions:
                if isinstance(action, Append):
                    self._append(partition, action)
                else:
                    self._execute(partition, action)
            _count(actions)
            if is_attempt and actions:  # if this process ends from here on, it was not because of these
                self._producer.now.flush(ATTEMPT_S)
            if not partition.is_serving:
                continue
            partition.drop_decided()
            if partition.waiting:
                self._fetching.pause(partition)
            elif partition.is_paused:
                self._fetching.read_on(partition)

    def _append(self, partition: Partition, commit: Append) -> None:
        report: Report = partial(self._acknowledged, partition, partition.writer.epoch, commit.seq)
        headers = commit.headers
        if headers and tracing.recording():
            span = tracing.start("decide", SpanKind.CONSUMER, headers)
            span.set_attributes({"samefold.stream": commit.stream, "samefold.partition": partition.number})
            headers, report = tracing.carrier(span), partial(_ended, span, report)
        self._produce(partition.number, commit.stream.encode(), commit.value, report, headers)
        reach("commit sent")

    def _acknowledged(
        self, partition: Partition, epoch: int, seq: int, error: KafkaError | None, message: Message
    ) -> None:
        """A commit's report, for the writer in the epoch that appended it; in a later epoch it means nothing."""
        reach("commit acknowledged")
        self._require_right(partition, error)
        if partition.writer.epoch == epoch:
            offset = None if error else message.offset()
            self._execute(partition, partition.writer.on_acknowledged(seq, offset, time.monotonic()))

    def _produce(
        self, number: int, key: bytes | None, value: bytes, report: Report, headers: Headers | None = None
    ) -> None:
        while True:
            producer = self._producer.now
            try:
                producer.produce(self.settings.events_topic, value, key, number, report, headers=headers)
                return
            except BufferError:
                self._producer.poll(0.05)
            except KafkaException as error:
                if clients.is_denied(error.args[0]):
                    raise clients.denied(
                        self.settings, error.args[0], f"Write of topic '{self.settings.events_topic}'"
                    ) from error
                if not clients.is_finished(error.args[0]):
                    raise KafkaClientFailed(f"The producer takes no record: {error.args[0].str()}.", AGAIN) from error
                # it may be in the log, as may all records that were in flight: each writer that gets such a report opens again
                self._producer.renew(producer, error.args[0])
                report(error.args[0], None)
                return

    def _require_right(self, partition: Partition, error: KafkaError | None) -> None:
        if error is not None and clients.is_denied(error) and self._members.has(partition):
            raise clients.denied(self.settings, error, f"Write of topic '{self.settings.events_topic}'")

    # ── the writers' actions ──

    def _execute(self, partition: Partition, action: Action | None) -> None:
        """Carry out what follows from a fact, while the partition is assigned."""
        while action is not None and self._members.has(partition):
            action = self._step(partition, action)

    def _step(self, partition: Partition, action: Action) -> Action | None:
        writer = partition.writer
        match action:
            case Append():
                self._append(partition, action)
            case Load():
                # later: a question may be pending on the connection
                partition.later(0, lambda: self._takeover.load(writer))
            case Open():
                opening = Opening(self.name, writer.commands_topic_id, partition.doubt)
                report = partial(self._opened, partition, writer.openings)
                self._produce(partition.number, None, encode(opening), report)
                reach("opening sent")
            case ReadLog(start, stop):
                return self._takeover.read_log(writer, start, stop)
            case Serve(offset):
                reach("opening read")
                metrics.HANDLER_EPOCHS.inc()
                self._log_progress(partition, f"epoch {writer.epoch}, serving from command {offset}")
                partition.serve(offset, self._members.last_attempt(partition))
                self._fetching.read_on(partition)
            case Wait(why):
                self._log_progress(partition, why)
                partition.later(WAIT_S, writer.start)
            case Confirm(why, reason):
                if reason:
                    metrics.HANDLER_REOPENINGS.labels(reason).inc()
                    partition.doubt = why
                self._log_progress(partition, why, logging.ERROR if reason is ReopenReason.COMMAND else logging.INFO)
                partition.waiting.clear()
                self._fetching.pause(partition)
                partition.later(random.uniform(*CONFIRM_S), lambda: self._members.confirm(partition))
            case Refuse(why):
                names = f"'{self.settings.commands_topic}' and '{self.settings.events_topic}'"
                hint = "Restore the topic, or start with an empty database and new topics."
                raise TopicsInconsistent(f"{why} The topics are {names}.", hint)
        return None

    def _opened(self, partition: Partition, opening: int, error: KafkaError | None, message: Message) -> None:
        """An opening's report, for the attempt that appended it."""
        reach("opening acknowledged")
        self._require_right(partition, error)
        if partition.writer.openings == opening:
            self._execute(partition, partition.writer.on_opened(None if error else message.offset()))

    def _log_progress(self, partition: Partition, what: str, level: int = logging.INFO) -> None:
        """Log a change once, not at each attempt: another number at its end is no change."""
        subject = f"partition {partition.number}"
        self._status.wrong(subject, f"{subject}: {what}", what.rstrip("0123456789"), level)

    def _close(self) -> None:
        self._members.partitions.clear()  # reports that still come must start nothing
        with suppress(KafkaException):
            self._producer.now.flush(5)
        self._members.close()
        self._takeover.close()
        self._read_model.close()


def _count(actions: Sequence[Action]) -> None:
    appends = [action for action in actions if isinstance(action, Append)]
    if not appends:
        return
    # the domain's refusals are one label: their codes are too many
    codes = Counter(one.reason.code if one.reason.code in RECORDED else "refused" for one in appends if one.reason)
    metrics.HANDLER_BATCH_COMMANDS.observe(len(appends))
    metrics.HANDLER_COMMITS.labels("accepted").inc(len(appends) - codes.total())
    metrics.HANDLER_COMMITS.labels("rejected").inc(codes.total())
    for why, count in codes.items():
        metrics.HANDLER_REJECTIONS.labels(why).inc(count)
        if why not in ("refused", "version-conflict"):
            first = next(one.stream for one in appends if one.reason and one.reason.code == why)
            log.warning(
                "%d commands were rejected as %s, the first of %s: `samefold history` says why", count, why, first
            )


def _ended(span: Span, report: Report, error: KafkaError | None, message: Message) -> None:
    span.end()
    report(error, message)


def main() -> NoReturn:
    """`python -m commands.handler --name NAME`: serve until SIGTERM or SIGINT. Exit code 1 after an error."""
    arguments = argparse.ArgumentParser(prog="python -m commands.handler")
    arguments.add_argument("--name", required=True)
    name = arguments.parse_args().name

    def made(settings: Settings) -> Blocking:
        handler = Handler(settings, name)
        return handler.run, in_a_thread(handler.stop)

    serve_blocking(f"handler {name}", made, log)


if __name__ == "__main__":
    main()
