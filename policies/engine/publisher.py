"""`python -m policies.engine.publisher --name NAME`: publishes what `policies/public.py` makes public, in Kafka transactions.

Publishers share the partitions of `events` through a consumer group. Correctness does not depend on the group: each partition has a
transactional id, which only one producer can use (`publishing.py`).
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
from functools import partial
from typing import NoReturn

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from infra.database.connect import DatabaseUnavailable
from infra.errors import SamefoldError
from infra.log import clients, names, topics
from infra.log.clients import KafkaUnavailable
from infra.observability import logs, metrics
from infra.processes.process_end import Parts
from infra.processes.serving import Blocking, in_a_thread, serve_blocking
from infra.processes.time_limit import serve_main_thread
from infra.settings import Settings
from policies.engine.public_schema import Publication, publication
from policies.engine.publishing import Lane, Work
from projections.engine.live.log_reader import LogReader

log = logging.getLogger(__name__)

POLL_S = 0.1
GATHER_MS = 250
"""How long events gather for a transaction of their partition, which costs the broker as much as one to four commands."""
MOST_BATCHES = 2
"""That may wait for a lane: each may have megabytes."""
CHECK_S = 2.0
"""Between two checks of the topics."""
HANGS_S = 3 * clients.TRANSACTION_MS / 1000
"""A transaction that is open for longer hangs: the broker should have aborted it."""
LEAVE_S = 5.0
"""How long a lane's transaction may take to end before its partition goes to another publisher."""


class PublisherFenced(SamefoldError):
    """Another process joined the group under this publisher's name."""


class Publisher:
    """One publisher process. `run` returns after `stop`, and raises the error that ended it."""

    def __init__(self, settings: Settings, publication: Publication, name: str) -> None:
        self.settings = settings
        self.name = name
        self.group = names.publisher(settings.group_prefix)
        self._publication = publication
        self._stopping = threading.Event()
        self._has_read = threading.Event()
        self._error: SamefoldError | None = None
        self._parts = Parts(f"publisher {name}", self._end)
        self._status = logs.StatusLog(log, f"publisher {name}")
        self._lanes: dict[int, Lane] = {}
        self._stable: dict[int, tuple[int, float]] = {}
        """By partition of the public topic, the last stable offset and since when it stands there."""
        self._due_check = 0.0

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Publish until stopped. Waits while Kafka is unavailable, at the start too. Raises SamefoldError."""
        found = self._started()
        if found is None:
            return
        events, public, most_bytes = found
        consumer = clients.group_consumer(
            self.settings,
            self.group,
            instance=self.name,
            connection=clients.Connection(f"publisher {self.name}"),
            on_commit=lambda _error, _offsets: None,
            on_finished=self._on_finished,
        )
        self._log = LogReader(self.settings, events.name, gather_ms=GATHER_MS, traced=True)
        self._work = Work(self.settings, self._publication, events, public, most_bytes, consumer)
        self._admin = topics.Admin(self.settings, CHECK_S)
        self._watch = topics.Watch(self.settings, [events, public], self._status, self._admin)
        consumer.subscribe([events.name], on_assign=self._on_assign, on_revoke=self._on_revoke)
        log.info("publisher %s: '%s' to '%s', in the group %s", self.name, events.name, public.name, self.group)
        reading = self._parts.thread("reader", self._reading)
        try:
            while not self._stopping.is_set():
                self._poll(consumer)
                self._check()
        finally:
            self._parts.over()
            self._has_read.set()
            self._drop(list(self._lanes))
            reading.join()
            self._log.close()
            if not self._error:
                consumer.close()
        if self._error:
            raise self._error

    def _started(self) -> tuple[topics.Topic, topics.Topic, int] | None:
        """The topics, and the public one's limit; None after `stop`."""
        while not self._stopping.is_set():
            try:
                _, events = topics.ensure(self.settings)
                return events, *topics.ensure_public(self.settings, events)
            except KafkaUnavailable as error:
                self._status.wrong("kafka", error.message, "away")
                self._stopping.wait(1)
        return None

    def _end(self, error: SamefoldError) -> None:
        self._error = error
        self._stopping.set()

    # ── the group ──

    def _poll(self, consumer: Consumer) -> None:
        """Let the group assign partitions. They are paused: lanes read them."""
        try:
            message = consumer.poll(POLL_S)
            error = message.error() if message is not None else None
        except KafkaException as raised:
            error = raised.args[0]
            if not clients.is_finished(error):
                raise
        if error is not None and clients.is_finished(error):
            self._on_finished(error)
        elif error is not None and not clients.may_pass(error):
            if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise clients.denied(self.settings, error, f"Read of group '{self.group}'")
            self._status.wrong("group", error.str(), error.name())

    def _on_finished(self, error: KafkaError) -> None:
        fenced = PublisherFenced(
            f"Publisher '{self.name}' was fenced out of its group: {error.str()}.",
            "Give each publisher a name of its own (`samefold run publisher --name`), and start it again.",
        )
        self._parts.ended("group", fenced)

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        consumer.incremental_assign([TopicPartition(one.topic, one.partition, OFFSET_END) for one in assigned])
        consumer.pause(assigned)
        mine = sorted(one.partition for one in assigned)
        if mine:
            log.info("publisher %s: has partitions %s", self.name, mine)
        for partition in mine:
            self._lanes[partition] = Lane(self._work, partition, lambda error: self._parts.ended("lane", error))

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        self._drop([one.partition for one in revoked])
        consumer.incremental_unassign(revoked)

    def _drop(self, partitions: list[int]) -> None:
        lanes = [self._lanes.pop(partition) for partition in partitions if partition in self._lanes]
        deadline = time.monotonic() + LEAVE_S
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join(max(deadline - time.monotonic(), 0))
            for gauge in (metrics.PUBLISHER_LAG, metrics.PUBLISHER_STOPPED, metrics.PUBLISHER_STILL):
                gauge.remove(str(lane.partition))

    def _reading(self) -> None:
        """In a thread of its own: neither checks nor the group hold up the lanes."""
        while not self._has_read.is_set():
            self._read()

    def _read(self) -> None:
        """Give the lanes their records, from one consumer for all. One that is slow holds up no other. Waits up to POLL_S."""
        inboxes = {partition: inbox for partition, lane in list(self._lanes.items()) if (inbox := lane.inbox)}
        wanted = {partition: inbox.next for partition, inbox in inboxes.items()}
        if wanted != self._log.next:
            self._log.go_on(wanted)
        full = [partition for partition, inbox in inboxes.items() if inbox.batches.qsize() >= MOST_BATCHES]
        try:
            taken = self._log.take(self.settings.batch, POLL_S, full)
        except (KafkaUnavailable, DatabaseUnavailable) as error:  # the database has the archive's manifest
            self._status.wrong("log", error.message, "away")
            self._has_read.wait(POLL_S)
            return
        for partition, inbox in inboxes.items():
            inbox.next = self._log.next[partition]
            if partition in taken:
                inbox.batches.put(taken[partition])
                self._status.well("log", "the log can be read again")

    # ── checks ──

    def _check(self) -> None:
        """Compare the topics with those of the start, and set the metrics. Raises TopicChanged, TopicMissing."""
        now = time.monotonic()
        if now < self._due_check:
            return
        self._due_check = now + CHECK_S
        try:
            events, public = self._watch.check()
            stable = topics.stable_ends(public, self._admin)
        except KafkaUnavailable as error:
            self._status.wrong("kafka", error.message, "away")
            return
        self._status.well("kafka", "Kafka is available again")
        stands: dict[int, tuple[int, float]] = {}
        for partition, lane in self._lanes.items():
            if lane.reading is not None:
                lag = events.end[partition] - lane.reading.next_offset
                metrics.PUBLISHER_LAG.labels(str(partition)).set(max(lag, 0))
            at, since = self._stable.get(partition, (-1, now))
            if at != stable[partition] or at >= public.end[partition]:
                at, since = stable[partition], now
            stands[partition] = at, since
            metrics.PUBLISHER_STILL.labels(str(partition)).set(now - since)
            subject, where = f"partition {partition}", f"{public.name}[{partition}]"
            if now - since > HANGS_S:
                what = (
                    f"a transaction hangs in {where} at offset {at}: consumers get nothing behind it. Find and abort it: "
                    "docs/adr/0013-hanging-transactions.md."
                )
                self._status.wrong(subject, what, "hangs", logging.ERROR)
            else:
                self._status.well(subject, f"the transaction in {where} has ended")
        self._stable = stands


def main() -> NoReturn:
    """Publish until SIGTERM or SIGINT. Exit code 1 after an error."""
    parser = argparse.ArgumentParser(prog="python -m policies.engine.publisher")
    parser.add_argument("--name", default="publisher")
    name = parser.parse_args().name

    def made(settings: Settings) -> Blocking:
        publisher = Publisher(settings, publication(), name)
        return partial(serve_main_thread, publisher.run), in_a_thread(publisher.stop)

    serve_blocking(f"publisher {name}", made, log)


if __name__ == "__main__":
    main()
