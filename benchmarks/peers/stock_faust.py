"""Faust as its documentation shows it: an agent over a topic, `async for event in stream`, the three statements for each."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import faust
import psycopg

from benchmarks.peers.job import Done, Job, Stopwatch, read_job, tell
from benchmarks.peers.simple_tables import TABLES, statements
from infra.log.records import Commit, Record, decode_event


async def main() -> None:
    job = read_job()
    with psycopg.connect(job.database_url, autocommit=True) as connection:
        connection.execute(TABLES % (job.partitions - 1))
    finished: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
    app = await _app(job, finished)
    await app.start()
    tell(await finished)
    # not app.stop: it would take its time, and nothing is left to do
    os._exit(0)


async def _app(job: Job, finished: asyncio.Future[Done]) -> Any:
    app = faust.App(
        job.group,
        broker=f"kafka://{job.kafka}",
        store="memory://",
        datadir=str(Path(sys.argv[1]).parent / "faust"),
        web_enabled=False,
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
    )
    topic = app.topic(job.topic, value_type=bytes, value_serializer="raw", key_serializer="raw")
    connection = await psycopg.AsyncConnection.connect(job.database_url, autocommit=True)

    @app.agent(topic)  # type: ignore[untyped-decorator]
    async def balances(stream: Any) -> None:
        done, watch = 0, Stopwatch()
        async for event in stream.events():
            message = event.message
            entry = decode_event(Record(message.partition, message.offset, 0, None, message.value))
            if not isinstance(entry, Commit) or done == job.count:
                continue
            if not done:
                watch = Stopwatch()
            async with connection.transaction():
                for query, values in statements(entry, message.partition, message.offset):
                    await connection.execute(query, values)
            done += 1
            if done == job.count:
                finished.set_result(watch.done(done))

    return app


if __name__ == "__main__":
    asyncio.run(main())
