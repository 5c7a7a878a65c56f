"""make test: a partition that can't be read holds up no other that one consumer reads for all."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import KafkaError

from infra.log.clients import KafkaUnavailable
from infra.settings import Settings
from projections.engine.live.log_reader import LogReader


class Message:
    def __init__(self, partition: int, offset: int, error: KafkaError | None = None) -> None:
        self._at = partition, offset
        self._error = error

    def partition(self) -> int:
        return self._at[0]

    def offset(self) -> int:
        return self._at[1]

    def error(self) -> KafkaError | None:
        return self._error

    def timestamp(self) -> tuple[int, int]:
        return 1, 0

    def key(self) -> bytes:
        return b"k"

    value = key

    def headers(self) -> None:
        return None


class Consumer:
    """Each fetch has one record of partition 0, from its position on, and partition 1's error, in either order."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.at = 0
        self.asked: list[str] = []

    def list_topics(self, topic: str, *_: Any) -> None:
        self.asked.append(topic)

    def unassign(self) -> None: ...

    def assign(self, partitions: list[Any]) -> None:
        self.at = next(one.offset for one in partitions if one.partition == 0)

    def consume(self, most: int, _: float) -> list[Message]:
        record, wrong = Message(0, self.at), Message(1, 0, KafkaError(KafkaError.UNKNOWN))
        found = [record, wrong] if self.first == 0 else [wrong, record]
        if most == 1:
            return found[:1]
        self.at += 1
        return found[1:]


@pytest.mark.parametrize("first", [0, 1])
def test_a_partition_whose_fetch_fails_holds_up_no_other(first: int) -> None:
    consumer: Any = Consumer(first)
    log = LogReader(Settings(kafka_bootstrap="127.0.0.1:1"), "events", consumer)
    log.go_on({0: 0, 1: 0})
    got = []
    for _ in range(10):
        with suppress(KafkaUnavailable):
            got += [record.offset for record in log.take(10, 0.0).get(0, [])]
    assert got == list(range(len(got)))
    assert len(got) >= 3


def test_leaders_are_asked_for_before_the_first_fetch_alone() -> None:
    """librdkafka asks for a topic that is new to it only once a second."""
    consumer: Any = Consumer(0)
    log = LogReader(Settings(kafka_bootstrap="127.0.0.1:1"), "events", consumer)
    assert consumer.asked == []
    log.go_on({0: 0, 1: 0})
    with suppress(KafkaUnavailable):
        log.take(10, 0.0)
    log.go_on({0: 1, 1: 0})
    assert consumer.asked == ["events"]
