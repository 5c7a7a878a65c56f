"""The log of a run: records that count and records that do not, and a consumer over them as confluent-kafka's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import TopicPartition

from infra.log.records import EventRecord, Record
from tests.engine.log import commit, opening


class Story:
    """Writes a partition's records down, as writers and their zombies would."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self._versions: Counter[str] = Counter()
        self._epoch, self._seq, self._command = -1, 0, -1
        self._last = b""

    def open(self) -> Story:
        self._epoch, self._seq = len(self.values), 0
        self.values.append(opening())
        return self

    def deposit(self, stream: str, *cents: int, note: str = "") -> Story:
        """A commit with one event each."""
        self._seq, self._command = self._seq + 1, self._command + 1
        self._versions[stream] += len(cents)
        self._last = _commit(self._epoch, self._seq, stream, self._versions[stream], self._command, cents, note)
        self.values.append(self._last)
        return self

    def again(self) -> Story:
        """The last commit's record once more."""
        self.values.append(self._last)
        return self

    def zombie(self, stream: str, *cents: int) -> Story:
        """A commit of an epoch before, which was decided on an older state."""
        self.values.append(_commit(self._epoch - 1, 1, stream, 1, 99, cents))
        return self

    def garbage(self) -> Story:
        self.values.append(None)
        return self


def _commit(
    epoch: int, seq: int, stream: str, version: int, command: int, cents: Sequence[int], note: str = ""
) -> bytes:
    bodies = [{"cents": one, "on": "2020-01-01", "details": {"purpose": note}} for one in cents]
    events = [EventRecord("MoneyDeposited", msgspec.Raw(msgspec.json.encode(body))) for body in bodies]
    return commit(
        epoch, seq, stream=stream, version=version, events=events, command_id=f"c{command}", command_offset=command
    )


class Log:
    """The records of all partitions."""

    def __init__(self, stories: Sequence[Story]) -> None:
        self.records = {
            partition: [
                Record(partition, offset, 1000 * offset, None, value) for offset, value in enumerate(one.values)
            ]
            for partition, one in enumerate(stories)
        }

    def consumer(self, *_arguments: Any, **_more: Any) -> Consumer:
        return Consumer(self)


class Message(NamedTuple):
    """One record as confluent-kafka hands it over."""

    record: Record

    def error(self) -> None:
        return None

    def partition(self) -> int:
        return self.record.partition

    def offset(self) -> int:
        return self.record.offset

    def timestamp(self) -> tuple[int, int]:
        return 1, self.record.time_ms

    def key(self) -> bytes | None:
        return self.record.key

    def value(self) -> bytes | None:
        return self.record.value


class Consumer:
    """Reads what it is assigned, in order."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.at: dict[int, int] = {}
        self.paused: set[int] = set()

    def list_topics(self, _topic: str, _timeout: float) -> None: ...

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self.at = {one.partition: one.offset for one in partitions}

    def unassign(self) -> None:
        self.at = {}

    def consume(self, most: int, _timeout: float) -> list[Message]:
        taken: list[Message] = []
        for partition, offset in self.at.items():
            if partition in self.paused:
                continue
            for record in self.log.records[partition][offset : offset + most - len(taken)]:
                taken.append(Message(record))
                self.at[partition] = record.offset + 1
        return taken

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused |= {one.partition for one in partitions}

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused -= {one.partition for one in partitions}

    def close(self) -> None:
        self.at = {}
