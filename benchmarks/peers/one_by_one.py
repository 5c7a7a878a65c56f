"""One event, one transaction: a loop around librdkafka's consumer and psycopg. With `pipeline` it is one round trip."""

from __future__ import annotations

from contextlib import nullcontext

import psycopg
from confluent_kafka import Consumer, TopicPartition

from benchmarks.peers.job import Done, Job, Stopwatch, read_job, tell
from benchmarks.peers.simple_tables import TABLES, statements
from infra.log.records import Commit, Record, decode_event


def main() -> None:
    job = read_job()
    with psycopg.connect(job.database_url, autocommit=True) as connection:
        connection.execute(TABLES % (job.partitions - 1))
        tell(_apply(job, connection))


def _apply(job: Job, connection: psycopg.Connection) -> Done:
    consumer = Consumer({"bootstrap.servers": job.kafka, "group.id": job.group, "fetch.queue.backoff.ms": 1})
    consumer.assign([TopicPartition(job.topic, partition, 0) for partition in range(job.partitions)])
    pipelined = bool(job.options.get("pipeline"))
    done, watch = 0, Stopwatch()
    while done < job.count:
        for message in consumer.consume(500, 0.1):
            record = Record(message.partition(), message.offset(), 0, None, message.value())
            entry = decode_event(record)
            if not isinstance(entry, Commit) or done == job.count:
                continue
            if not done:
                watch = Stopwatch()
            with connection.pipeline() if pipelined else nullcontext(), connection.transaction():
                for query, values in statements(entry, record.partition, record.offset):
                    connection.execute(query, values)
            done += 1
    told = watch.done(done)
    consumer.close()
    return told


if __name__ == "__main__":
    main()
