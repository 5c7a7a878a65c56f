"""Reads a range of a topic's partition from Kafka, without a consumer group. `infra/archive/whole_log.py` has the archive too."""

import time
from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from infra.errors import SamefoldError
from infra.log import clients, names
from infra.log.records import Headers, Record
from infra.settings import Settings

BATCH = 1_000
"""Small enough for the processor's cache: with 10,000, decoding and folding took a quarter longer."""
NO_PROGRESS_S = 60.0


class LogTrimmed(SamefoldError):
    """A range of the log is missing: it was deleted without an archive, or the topic was recreated."""


class NotHeld(SamefoldError):
    """Kafka does not hold an offset any more. The archive may: `whole_log.read_range` asks it."""


def read_held(
    settings: Settings,
    topic: str,
    partition: int,
    start: int,
    stop: int,
    *,
    consumer: Consumer | None = None,
    headers: dict[int, Headers] | None = None,
) -> Iterator[tuple[list[Record], int]]:
    """The records of [start, stop) in Kafka, in batches, each with the offset after it; the last batch may be empty.

    `headers` receives the records' headers by offset. Raises NotHeld where Kafka does not hold the next record any more,
    LogTrimmed where the partition ends before `stop`, KafkaUnavailable.
    """
    if start >= stop:
        return
    new = tuple.__new__  # as Record(), in half the time
    own = consumer is None
    reader = consumer or clients.range_consumer(settings)
    try:
        reader.assign([TopicPartition(topic, partition, start)])
        position = start
        deadline = time.monotonic() + NO_PROGRESS_S
        while position < stop:
            batch: list[Record] = []
            wrong: Message | None = None
            # consume(n) waits for all n: ask for one first, then for what is there
            messages = reader.consume(1, 0.2) or []
            if messages and messages[0].error() is None:
                messages += reader.consume(min(BATCH, stop - position), 0)
            for message in messages:
                if message.error() is not None:
                    wrong = message
                    break
                offset = message.offset()
                if offset >= stop:
                    position = stop
                    break
                batch.append(new(Record, (partition, offset, message.timestamp()[1], message.key(), message.value())))
                position = offset + 1
                if headers is not None and (found := message.headers()):
                    headers[offset] = found
            if batch or position >= stop:
                deadline = time.monotonic() + NO_PROGRESS_S
                yield batch, position
            elif time.monotonic() > deadline:
                raise clients.away(settings, KafkaException(KafkaError(KafkaError._TIMED_OUT)))
            if wrong is not None and position < stop:
                error = wrong.error()
                if error.code() != KafkaError._PARTITION_EOF:
                    raise named(settings, topic, partition, position, error)
                position = max(position, wrong.offset() or 0)
                if position < stop:
                    raise LogTrimmed(
                        f"{topic}[{partition}] ends at {position}, but {stop} records were expected.",
                        "The topic was recreated or lost records. Restore it, or start with an empty database.",
                    )
                yield [], position
    finally:
        if own:
            reader.close()
        else:
            reader.unassign()


def is_not_held(error: KafkaError) -> bool:
    """Whether the broker does not hold the requested offset."""
    return error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


def named(settings: Settings, topic: str, partition: int, start: int, error: KafkaError) -> SamefoldError:
    """The named error for an error of a consumer that was to read from `start` on."""
    if is_not_held(error):
        return NotHeld(f"{topic}[{partition}] does not hold offset {start} any more.", "Read it from the archive.")
    if clients.is_denied(error):
        of_group = f"Describe of group '{names.readers(settings.group_prefix)}'"
        is_group = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        return clients.denied(settings, error, of_group if is_group else f"Read of topic '{topic}'")
    return clients.away(settings, error)
