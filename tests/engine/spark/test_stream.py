"""make test + test-all: a query and its restarts take half a minute.

The log as a stream of Spark: whatever batch a query is restarted at, each event that counts comes once, and nothing else.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import NewPartitions
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable

from domain.accounts import MoneyDeposited
from infra.archive import marks
from infra.log import clients, topics
from infra.log.source import LogTrimmed
from infra.settings import Settings
from projections.engine.fold.as_of import BadMoment, Cut
from projections.engine.rebuild.folded import counted_to
from spark_jobs import register
from spark_jobs.engine import source
from spark_jobs.engine.source import Range, Stream, Table, batches
from tests.engine.bookkeeper import DAY, Bookkeeper, fold_all
from tests.engine.spine import in_a_transaction, set_up
from tools.testing.waiting import until

if TYPE_CHECKING:
    from spark_jobs.engine.spark import Spark

Event = tuple[int, int, str, int]
"""Partition, offset, stream, version."""


def counted_events(world: Settings) -> list[Event]:
    """By the fold's own reading."""
    return sorted(
        (partition, one.offset, one.commit.stream, one.commit.version - len(one.commit.events) + number)
        for partition, end in topics.describe(world, world.events_topic).end.items()
        for batch in counted_to(world, world.events_topic, partition, Cut(end))
        for one in batch.counted
        for number, _ in enumerate(one.commit.events, 1)
    )


def a_batch(spark: Any, checkpoint: Path, most: int) -> list[Event] | None:
    """Start the query, let it process one micro-batch and stop it; what that batch held, None where nothing was left."""
    held: list[list[Event]] = []

    def take(frame: Any, _number: int) -> None:
        if not held:
            rows = frame.select("partition", "offset", "stream", "version").collect()
            held.append([tuple(row) for row in rows])
        else:
            raise InterruptedError  # a second one is not taken: the next query begins with it

    rows = spark.readStream.format("samefold").option("most", most).load()
    query = rows.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint.as_uri())
    running = query.trigger(availableNow=True).start()
    with suppress(StreamingQueryException):
        running.awaitTermination()
    failure = running.exception()
    assert failure is None or "InterruptedError" in str(failure), failure
    return held[0] if held else None


def test_a_task_that_begins_anywhere_has_the_events_from_there_on(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a mark, from the log's start, or from where the task before it ended."""
    monkeypatch.setattr(marks, "EVERY", 20)
    set_up(world)
    first = Bookkeeper(world)
    first.life([str(number) for number in range(4)], 30)
    for partition in range(world.partitions):
        first.garbage(partition)
    Bookkeeper(world).life([str(number) for number in range(4, 8)], 20)  # an opening in each partition
    first.commit("1", MoneyDeposited(cents=7, on=DAY))  # superseded: void
    first.flush()
    fold_all(world, most=15)
    topic, every = topics.describe(world, world.events_topic), counted_events(world)
    assert marks.between(world, topic, 0, 0, topic.end[0]), "there are marks"
    table = Table.of({}).only(["partition", "offset", "stream", "version"])
    for partition, end in topic.end.items():
        for begin in (*range(0, end, 3), end - 1, end):
            part = Range(partition, begin, Cut(end))
            if begin % 2:  # as in a process of its own
                source._reached.clear()
            read = [tuple(row.values()) for batch in batches(world, topic.id, table, part) for row in batch.to_pylist()]
            assert read == [one for one in every if one[0] == partition and one[1] >= begin]


@pytest.mark.slow
def test_a_stream_restarted_at_each_batch_gives_each_counted_event_once(
    world: Settings, spark_engine: Spark, tmp_path: Path
) -> None:
    spark = spark_engine.session
    register(spark)
    set_up(world)
    first = Bookkeeper(world)
    first.life([str(number) for number in range(4)], 2)
    came: list[Event] = a_batch(spark, tmp_path, 12) or []
    second = Bookkeeper(world)  # an opening in each partition
    first.commit("1", MoneyDeposited(cents=7, on=DAY))  # superseded: void
    first.flush()
    second.garbage(1)
    in_a_transaction(world, world.events_topic, 2, None, b"garbage")  # its marker is an offset without a record
    second.life([str(number) for number in range(4)], 1)
    while (batch := a_batch(spark, tmp_path, 12)) is not None:
        came += batch
    assert sorted(came) == counted_events(world)


def test_a_stream_of_another_topic_is_not_gone_on_with(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(world)
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    stream = Stream({}, Table.of({}))
    start = stream.initialOffset()
    assert stream.latestOffset(start, ReadAllAvailable()) == start
    for other in ({**start, "topic": "another"}, {**start, "next": {"0": 0}}):
        with pytest.raises(topics.TopicChanged, match="another"):
            stream.latestOffset(other, ReadAllAvailable())
    with pytest.raises(LogTrimmed, match="continues at 7"):
        stream.latestOffset({**start, "next": start["next"] | {"1": 7}}, ReadAllAvailable())
    for wrong in ("0:7", "77:5"):
        with pytest.raises(BadMoment):
            Stream({"starting": wrong}, Table.of({}))
    admin = clients.admin(world)
    admin.create_partitions([NewPartitions(world.events_topic, 6)])[world.events_topic].result(10)
    with pytest.raises(topics.TopicChanged, match="partitions"):
        until(lambda: stream.latestOffset(start, ReadAllAvailable()) != start, "the broker tells of more partitions")
