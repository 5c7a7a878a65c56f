"""Publishing one partition of `events`: reads it by the reading rule, and writes its public events in Kafka transactions.

A transaction holds the public events of some commits and the position after them, so both are committed or neither. Each partition
has a transactional id: the producer that initialises it last fences all others. A position is read only after that.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from infra.errors import SamefoldError
from infra.log import clients, names, topics
from infra.log.clients import KafkaUnavailable
from infra.log.records import Headers, Record, Traced, UnreadableRecord
from infra.log.rule import START, Counted, Reading, read_readable
from infra.log.source import read_held
from infra.observability import logs, metrics
from infra.observability.tracing import traceparent
from infra.processes.faultpoints import reach
from infra.processes.time_limit import in_main_thread
from infra.settings import Settings
from policies.engine.policy import LowerVersion
from policies.engine.public_schema import CONTENT_TYPE, Outgoing, Publication, Writer
from projections.engine.fold.errors import EngineStop

log = logging.getLogger(__name__)

SOURCE = "samefold-source"
"""The header of a public record that holds the position after its commit."""
WITHIN_S = clients.TRANSACTION_MS / 1000
"""For each request of a transaction."""
POLL_S = 1.0
"""How often a lane that gets no records looks whether its connection broke."""
IDLE_POSITION_S = 5.0
"""How often the position is committed while nothing is public."""
RETRY_S = 0.5
_NO_CONNECTION = re.compile(r"Connect to \S+ failed")
"""librdkafka's error where it had no connection yet, as for the first of a name's addresses: nothing was sent."""
STEP = 1_000
"""How many public records are searched first for a lost position."""


class PositionUnknown(SamefoldError):
    """A position of the publisher was lost, or changed by other programs."""


class Position(msgspec.Struct, frozen=True, array_like=True, tag="1"):
    """How far a partition was published: in the committed offset's metadata, and in a header of each public record."""

    events_id: str
    public_id: str
    version: int
    """Of the publication."""
    reading: Reading


_decode_position = msgspec.json.Decoder(Position).decode


@dataclass(frozen=True, slots=True)
class Work:
    """What the lanes of one publisher share. `most_bytes` is the public topic's limit, `consumer` the member of the group."""

    settings: Settings
    publication: Publication
    events: topics.Topic
    public: topics.Topic
    most_bytes: int
    consumer: Consumer


@dataclass(slots=True)
class Inbox:
    """The records of the log for a lane, from its position on: the publisher puts them in. `next` is the next one's offset."""

    next: int
    batches: SimpleQueue[list[Record]] = field(default_factory=SimpleQueue)


class Lane:
    """One partition, with a thread of its own. `report` gets the error for which the process must end."""

    def __init__(self, work: Work, partition: int, report: Callable[[BaseException], None]) -> None:
        self.partition = partition
        self.reading: Reading | None = None
        """How far it has published."""
        self._work = work
        self._transactional_id = names.transactions(work.settings.group_prefix) + str(partition)
        self._report = report
        self._writer = Writer(work.settings, work.publication, work.events.id, work.most_bytes)
        self._status = logs.StatusLog(log, f"publisher, partition {partition}")
        self._stopping = threading.Event()
        self.inbox: Inbox | None = None
        """None before it has its position, and after it has stopped."""
        self._disturbed = False
        """Whether the producer ever lost a connection: librdkafka does not report the same error twice within 30 s."""
        self._thread = threading.Thread(target=self._run, name=f"partition {partition}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if inbox := self.inbox:
            inbox.batches.put([])

    def join(self, seconds: float) -> None:
        """Wait for its end. A lane that goes on for longer does no harm: its successor fences it."""
        self._thread.join(seconds)

    def _run(self) -> None:
        metrics.PUBLISHER_STOPPED.labels(str(self.partition)).set(0)
        try:
            while not self._stopping.is_set():
                try:
                    self._publish()
                except KafkaUnavailable as error:
                    self._status.wrong("kafka", error.message, "away")
                except KafkaException as raised:
                    why: KafkaError = raised.args[0]
                    if clients.is_denied(why):
                        of = f"topic '{self._work.public.name}' and transactional id '{self._transactional_id}'"
                        raise clients.denied(self._work.settings, why, f"Write of {of}") from raised
                    self._status.wrong("kafka", f"starts again with a new producer: {why.str()}", why.name())
                self._stopping.wait(RETRY_S)
        except (EngineStop, UnreadableRecord) as stop:  # other partitions go on
            metrics.PUBLISHER_STOPPED.labels(str(self.partition)).set(1)
            log.error("publisher, partition %d, stops: %s: %s", self.partition, stop.code, stop)
        except BaseException as error:
            self._report(error)

    def _publish(self) -> None:
        """Publish until it is stopped, with one producer. Raises KafkaException, and named errors."""
        work = self._work
        self._disturbed = False
        producer = clients.transactional_producer(
            work.settings, self._transactional_id, work.most_bytes, self._on_error
        )
        try:
            producer.init_transactions(WITHIN_S)
            reading = self._start()
            reach("publisher's position read")
            log.info(
                "publisher, partition %d: version %d continues at offset %d",
                *(self.partition, work.publication.version, reading.next_offset),
            )
            self.inbox = Inbox(reading.next_offset)
            self._go_on(producer, self.inbox.batches, reading)
        finally:
            # after an error its transaction is in an unknown state: it is never aborted and used again
            producer.purge()
            self.inbox = None

    def _go_on(self, producer: Producer, batches: SimpleQueue[list[Record]], reading: Reading) -> None:
        """Publish until it is stopped, or a connection breaks.

        librdkafka repeats requests whose connection broke. The first one may still arrive, and would end the producer's next
        transaction: there must be none.
        """
        self.reading = reading
        committed_at = time.monotonic()
        while not self._must_end():
            records: list[Record] = []
            with suppress(Empty):
                records = batches.get(timeout=POLL_S)
            for outgoing, after, error in self._parts(reading, records):
                producer.poll(0)
                if self._must_end():
                    break
                is_due = error is not None or time.monotonic() - committed_at > IDLE_POSITION_S
                reading = after
                if outgoing or (is_due and reading != self.reading):
                    self._commit(producer, outgoing, reading)
                    self.reading, committed_at = reading, time.monotonic()
                self._status.well("kafka", "publishes again")
                if error is not None:
                    raise error
        if self._disturbed:
            log.info("publisher, partition %d: a connection broke; a new producer goes on", self.partition)

    def _parts(
        self, reading: Reading, records: Sequence[Record]
    ) -> Iterator[tuple[Sequence[Outgoing], Reading, SamefoldError | None]]:
        """What these records publish, a transaction each, the position after it, and the error that follows."""
        end, counted, _, unreadable = read_readable(reading, records)
        traces = {one.offset: traceparent(one.headers) for one in records if isinstance(one, Traced)}
        while counted:
            outgoing, taken, stop = in_main_thread(partial(self._writer.outgoing, self.partition, counted, traces))
            if taken == len(counted):
                yield outgoing, end, unreadable
                return
            if taken:
                reading = _after(counted[taken - 1])
            yield outgoing, reading, stop
            counted = counted[taken:]
        yield (), end, unreadable

    def _must_end(self) -> bool:
        return self._disturbed or self._stopping.is_set()

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._TRANSPORT and not _NO_CONNECTION.search(error.str()):
            self._disturbed = True

    def _commit(self, producer: Producer, outgoing: Sequence[Outgoing], reading: Reading) -> None:
        """One transaction. Raises KafkaException; then it may have been committed or not."""
        work = self._work
        status = "unknown"
        try:
            producer.begin_transaction()
            for key, value, source in outgoing:
                headers = {"content-type": CONTENT_TYPE, SOURCE: self._at(_after(source))}
                producer.produce(work.public.name, value, key, self.partition, headers=headers)
            if outgoing:
                if producer.flush(WITHIN_S):
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
                reach("public records sent")
            here = TopicPartition(work.events.name, self.partition, reading.next_offset, self._at(reading))
            producer.send_offsets_to_transaction([here], work.consumer.consumer_group_metadata(), WITHIN_S)
            reach("publisher's position sent")
            producer.commit_transaction(WITHIN_S)
            status = "committed"
        finally:
            metrics.PUBLISHER_TRANSACTIONS.labels(status).inc()
        reach("publication committed")
        metrics.PUBLISHER_RECORDS.inc(len(outgoing))

    def _at(self, reading: Reading) -> str:
        work = self._work
        return msgspec.json.encode(Position(work.events.id, work.public.id, work.publication.version, reading)).decode()

    # ── the position ──

    def _start(self) -> Reading:
        """Where to go on. Raises PositionUnknown, LowerVersion, TopicChanged, KafkaException, KafkaUnavailable."""
        work = self._work
        name = work.events.name
        [found] = work.consumer.committed([TopicPartition(name, self.partition)], WITHIN_S)
        if found.error:
            raise KafkaException(found.error)
        position = self._recovered() if found.offset < 0 else _committed(f"{name}[{self.partition}]", found)
        if position is None:
            return START
        for topic, known in ((work.events, position.events_id), (work.public, position.public_id)):
            if topic.id != known:
                raise topics.TopicChanged(
                    f"Topic '{topic.name}' was recreated: its id was {known} and is {topic.id}.",
                    "Restore the old topic. To publish all events again, use a new public topic (SAMEFOLD_PUBLIC_TOPIC) and "
                    "delete the publisher's group, while no publisher runs.",
                )
        if position.version > work.publication.version:
            raise LowerVersion(
                f"Version {position.version} of policies/public.py has published, and this code has version "
                f"{work.publication.version} (partition {self.partition}, offset {position.reading.next_offset}).",
                f"Run the code with version {position.version}, or raise VERSION above it.",
            )
        return position.reading

    def _recovered(self) -> Position | None:
        """The position without a committed one: that of the last public record, or None if there was never any."""
        work, admin = self._work, topics.Admin(self._work.settings)
        public = topics.describe(work.settings, work.public.name, admin=admin)
        first, start = public.first[self.partition], public.end[self.partition]
        if topics.stable_ends(public, admin)[self.partition] < start:
            raise KafkaUnavailable(f"{public.name}[{self.partition}] has an open transaction. Waiting for its end.")
        step, any_records = STEP, first > 0
        while start > first:
            start, end = max(first, start - step), start
            headers: dict[int, Headers] = {}
            for records, _ in read_held(work.settings, public.name, self.partition, start, end, headers=headers):
                any_records = any_records or bool(records)
            sources = [value for _, some in sorted(headers.items()) for name, value in some if name == SOURCE and value]
            if sources:
                log.warning("publisher, partition %d: no offset is committed; found the last record's", self.partition)
                return _decode_position(sources[-1])
            step *= 8
        if any_records:
            raise PositionUnknown(
                f"The publisher's group has no offset for {work.events.name}[{self.partition}], and no record of "
                f"{public.name}[{self.partition}] holds a position: its records expired.",
                "Nothing was published twice. To publish all events again, use a new public topic (SAMEFOLD_PUBLIC_TOPIC).",
            )
        return None


def _after(one: Counted) -> Reading:
    """The position after a commit."""
    return Reading(one.offset + 1, one.commit.epoch, one.commit.seq, one.commit.command_offset)


def _committed(name: str, found: TopicPartition) -> Position:
    """The position in a committed offset. Raises PositionUnknown."""
    try:
        position = _decode_position(found.metadata or "")
        if position.reading.next_offset == found.offset:
            return position
    except msgspec.DecodeError:
        pass
    raise PositionUnknown(
        f"The offset {found.offset} that the publisher's group has for {name} was not written by the publisher.",
        "Another program reset it. Delete the group's offsets: the publisher finds its position in the public topic.",
    )
