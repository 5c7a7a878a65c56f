"""make test-all: a query and its restarts take half a minute.

The log as a stream of Spark: whatever batch a query is restarted at, each event that counts comes once, and nothing else.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from domain.accounts import MoneyDeposited
from infra.log import topics
from infra.settings import Settings
from projections.engine.fold.as_of import Cut
from projections.engine.rebuild.folded import counted_to
from spark_jobs import register
from tests.engine.bookkeeper import DAY, Bookkeeper
from tests.engine.spine import in_a_transaction, set_up

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
