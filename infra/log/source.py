"""Reading a range of a topic's partition, without a group: for takeovers, rebuilds, verify and people."""

from __future__ import annotations

import time
from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from infra.errors import SamefoldError
from infra.log import clients
from infra.log.records import Record
from infra.settings import Settings

BATCH = 1_000
"""What is handled together stays in the processor's cache: with 10,000, decoding and folding took a quarter longer."""
NO_PROGRESS_S = 60.0


class LogTrimmed(SamefoldError):
    """A range of the log that is needed is not there: it was deleted, or the topic made anew."""


def read_range(
    settings: Settings, topic: str, partition: int, start: int, stop: int, *, consumer: Consumer | None = None
) -> Iterator[list[Record]]:
    """The records of `topic[partition]` with offsets in [start, stop), in order, in batches.

    The last offset counts as read only when a record at or beyond it, or the partition's end beyond it, was seen.
    Raises LogTrimmed where the range does not exist, KafkaAway after 60 s without progress.
    """
    if start >= stop:
        return
    new = tuple.__new__  # what Record() comes to, in half the time
    own = consumer is None
    reader = consumer or clients.range_consumer(settings)
    try:
        reader.assign([TopicPartition(topic, partition, start)])
        position = start
        deadline = time.monotonic() + NO_PROGRESS_S
        while position < stop:
            batch: list[Record] = []
            # consume(n) waits for all n: ask for one first, then for what is there
            messages = reader.consume(1, 0.2) or []
            if messages and messages[0].error() is None:
                messages += reader.consume(min(BATCH, stop - position), 0)
            for message in messages:
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        position = max(position, message.offset() or 0)
                        if message.offset() < stop:
                            raise LogTrimmed(
                                f"{topic}[{partition}] ends at {message.offset()}, but {stop} records were expected.",
                                "The topic was made anew or lost records: restore it, or start with an empty database.",
                            )
                        continue
                    raise named(settings, topic, partition, start, error)
                offset = message.offset()
                if offset >= stop:
                    position = stop
                    break
                batch.append(new(Record, (partition, offset, message.timestamp()[1], message.key(), message.value())))
                position = offset + 1
            if batch:
                deadline = time.monotonic() + NO_PROGRESS_S
                yield batch
            elif time.monotonic() > deadline:
                raise clients.away(settings, KafkaException(KafkaError(KafkaError._TIMED_OUT)))
    finally:
        if own:
            reader.close()
        else:
            reader.unassign()


def named(settings: Settings, topic: str, partition: int, start: int, error: KafkaError) -> SamefoldError:
    """The named error for one of a consumer's, which was to read from `start` on."""
    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        return LogTrimmed(
            f"{topic}[{partition}] does not hold offset {start} any more.",
            "The log was trimmed or the topic made anew: restore it, or read from an archive.",
        )
    return clients.away(settings, error)
