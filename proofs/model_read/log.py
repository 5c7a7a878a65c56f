"""The log of a run: records that count and records that do not, and a consumer over them as confluent-kafka's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import TopicPartition

from infra.log.records import EventRecord, Record
from tests.engine.log import commit, opening

TOPIC = "events"


class Entry(NamedTuple):
    """One record, as the scenario means it. `kind` is opening, commit or garbage."""

    kind: str
    epoch: int = 0
    seq: int = 0
    stream: str = ""
    version: int = 0
    cents: tuple[int, ...] = ()
    """One deposit each."""
    command_offset: int = 0
    note: str = ""


class Story:
    """Writes a partition's records down, as writers and their zombies would."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._versions: dict[str, int] = {}
        self._epoch = -1
        self._seq = 0
        self._command = -1

    def open(self) -> Story:
        self._epoch, self._seq = len(self.entries), 0
        self.entries.append(Entry("opening"))
        return self

    def deposit(self, stream: str, *cents: int, note: str = "") -> Story:
        self._seq += 1
        self._command += 1
        self._versions[stream] = self._versions.get(stream, 0) + len(cents)
        self.entries.append(
            Entry("commit", self._epoch, self._seq, stream, self._versions[stream], cents, self._command, note)
        )
        return self

    def again(self) -> Story:
        """The last commit's record once more."""
        self.entries.append(next(e for e in reversed(self.entries) if e.kind == "commit"))
        return self

    def zombie(self, stream: str, *cents: int) -> Story:
        """A commit of an epoch before, which was decided on an older state."""
        self.entries.append(Entry("commit", self._epoch - 1, 1, stream, 1, cents, 99))
        return self

    def garbage(self) -> Story:
        self.entries.append(Entry("garbage"))
        return self


class Log:
    """The records of all partitions."""

    def __init__(self, stories: Sequence[Story]) -> None:
        self.entries = {partition: story.entries for partition, story in enumerate(stories)}
        self.records = {p: [_record(p, o, e) for o, e in enumerate(entries)] for p, entries in self.entries.items()}

    def consumer(self, *_arguments: Any, **_more: Any) -> Consumer:
        return Consumer(self)


def _record(partition: int, offset: int, entry: Entry) -> Record:
    value: bytes | None = None
    if entry.kind == "opening":
        value = opening()
    elif entry.kind == "commit":
        bodies = [{"cents": cents, "on": "2020-01-01", "details": {"purpose": entry.note}} for cents in entry.cents]
        value = commit(
            entry.epoch,
            entry.seq,
            stream=entry.stream,
            version=entry.version,
            events=[EventRecord("MoneyDeposited", msgspec.Raw(msgspec.json.encode(body))) for body in bodies],
            command_id=f"{partition}/{offset}",
            command_offset=entry.command_offset,
        )
    return Record(partition, offset, 1000 * offset, None, value)


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
