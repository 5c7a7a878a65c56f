"""The log as it grows: all its records, and what the newest of them mean for who writes where.

And the agents' positions, read many times a second: how far they are, and that they never go back.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import psycopg
from confluent_kafka import TopicPartition

from demo.background_thread import BackgroundThread
from infra.database.connect import Connection, DatabaseUnavailable, connect
from infra.log import clients
from infra.settings import Settings
from proofs.bank_oracle import Entry, Place, Reader, places_in
from proofs.policy_oracle import POLICIES

BATCH = 2_000
WAIT_S = 0.02
LOOK_S = 0.03


class Mark(NamedTuple):
    """The log at one moment, by partition: its end, and the epoch of its last opening."""

    ends: tuple[int, ...]
    epochs: tuple[int, ...]


class Tail(BackgroundThread):
    """Reads `events` in a thread, past any fault of the broker's."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("tail")
        self._topic, partitions = settings.events_topic, settings.partitions
        self.records: list[list[Entry]] = [[] for _ in range(partitions)]
        """By partition and offset."""
        self.readers = [Reader() for _ in range(partitions)]
        self.counted: list[tuple[int, int]] = [(-1, -1)] * partitions
        """By partition, epoch and offset of the newest commit that counts."""
        self.wished = 0
        """Commits that count of policies' commands, timers aside."""
        self._consumer = clients.range_consumer(settings)

    def __enter__(self) -> Self:
        self._consumer.assign([TopicPartition(self._topic, p, 0) for p in range(len(self.records))])
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._consumer.close()

    def mark(self) -> Mark:
        return Mark(
            tuple(len(records) for records in self.records), tuple(reader.place.epoch for reader in self.readers)
        )

    def void(self) -> int:
        """How many records have been void."""
        return sum(reader.void for reader in self.readers)

    def _work(self) -> None:
        while not self._ended.is_set():
            for message in self._consumer.consume(1, WAIT_S) + self._consumer.consume(BATCH, 0):
                if message.error() is None:
                    self._take(message.partition(), message.offset(), message.timestamp()[1], message.value())

    def _take(self, partition: int, offset: int, time_ms: int, value: bytes | None) -> None:
        reader = self.readers[partition]
        commit = reader.read(offset, value)
        if commit is not None:
            self.wished += "depth" in commit
            self.counted[partition] = (reader.place.epoch, offset)
        self.records[partition].append(Entry(time_ms, value))


class Progress(BackgroundThread):
    """Positions of `core`, and of policies, by partition, as last read; what was seen to go back is in `violations`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("progress")
        self.settings = settings
        self.places = [Place()] * settings.partitions
        self.policies = {f"policy_{policy}": self.places for policy in POLICIES}
        self.violations: list[str] = []
        self.looks = 0

    def _work(self) -> None:
        connection: Connection | None = None
        while not self._ended.wait(LOOK_S):
            try:
                connection = connection or connect(self.settings, "chaos progress")
                self._look(connection)
            except (psycopg.Error, DatabaseUnavailable):
                if connection is not None:
                    connection.close()
                    connection = None
        if connection is not None:
            connection.close()

    def _look(self, connection: Connection) -> None:
        self.places = self._looked(connection, "core", self.places)
        self.policies = {agent: self._looked(connection, agent, places) for agent, places in self.policies.items()}
        self.looks += 1

    def _looked(self, connection: Connection, agent: str, before: list[Place]) -> list[Place]:
        now = places_in(connection, agent)
        for partition, (was, place) in enumerate(zip(before, now, strict=bool(now))):
            if place[:2] < was[:2] or place.epoch < was.epoch or place.command_offset < was.command_offset:
                self.violations.append(f"I9: the position of {agent}, {partition}, went from {was} to {place}")
        return now or before
