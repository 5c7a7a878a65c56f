"""Places for one log each: topics with so many partitions, and databases with all tables, made from one that was set up once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import psycopg
from confluent_kafka import Consumer, TopicPartition
from psycopg import sql
from pydantic import SecretStr

from infra.database.connect import connect
from infra.log import topics
from infra.log.clients import producer
from infra.settings import Settings
from projections.engine.views.view import View
from proofs.bank_oracle import Entry, Place, places_in
from proofs.one_fold.expect import Parked, Skip
from tests.engine.projections.bankviews import make_tables
from tools.dev.stack import Stack
from tools.migrations.migrate import upgrade
from tools.testing.waiting import DEADLINE_S, until

_numbers = count(1)
"""Of all places in one process: topics stay when they are no longer used."""


class Places:
    """`make(logs)` gives settings with the log written into a topic of its own, and an empty database. `name` is that of the
    database from which the others are made."""

    def __init__(self, stack: Stack, name: str, views: Mapping[str, View]) -> None:
        self.stack = stack
        self._template = name
        self._databases: list[str] = []
        self._admin(sql.SQL("create database {}"), name)
        self._databases.append(name)
        self._base = stack.settings(database_url=stack.postgres.url(name), session_timeout_ms=3_000)
        upgrade(self._base)
        make_tables(self._base, views)

    def make(self, logs: Sequence[Sequence[bytes | None]]) -> Settings:
        number = next(_numbers)
        prefix = f"{self._template}-{number}"
        topic = {"commands_topic": f"{prefix}-commands", "events_topic": f"{prefix}-events", "group_prefix": prefix}
        place = self._base.model_copy(update={**topic, "partitions": len(logs)})
        place = self.with_database(place)
        topics.ensure(place)
        client = producer(place)
        for partition, log in enumerate(logs):
            for value in log:
                client.produce(place.events_topic, value, partition=partition)
        assert client.flush(DEADLINE_S) == 0
        return place

    def with_database(self, place: Settings) -> Settings:
        """The same log, with a database of its own."""
        name = f"{self._template}_{next(_numbers)}"
        self._admin(sql.SQL("create database {} template {}"), name, self._template)
        self._databases.append(name)
        return place.model_copy(update={"database_url": SecretStr(self.stack.postgres.url(name))})

    def close(self) -> None:
        while self._databases:
            self._admin(sql.SQL("drop database {} with (force)"), self._databases.pop())

    def _admin(self, statement: sql.SQL, *names: str) -> None:
        with psycopg.connect(self.stack.postgres.url(), autocommit=True) as connection:
            connection.execute(statement.format(*map(sql.Identifier, names)))


def read_log(place: Settings) -> list[list[Entry]]:
    """All records, by a consumer that has nothing to do with the product's."""
    ends = topics.describe(place, place.events_topic).end
    found: list[list[Entry]] = [[] for _ in ends]
    quiet = {"enable.auto.commit": False, "enable.metrics.push": False}
    consumer = Consumer({"bootstrap.servers": place.kafka, "group.id": "oracle", **quiet})

    def is_read() -> bool:
        for message in consumer.consume(10_000, 0.05):
            assert message.error() is None, message.error()
            assert message.offset() == len(found[message.partition()]), "the log has a hole"
            found[message.partition()].append(Entry(message.timestamp()[1], message.value()))
        return all(len(found[partition]) == end for partition, end in ends.items())

    try:
        consumer.assign([TopicPartition(place.events_topic, partition, 0) for partition in ends])
        until(is_read, "the log is read to its end")
    finally:
        consumer.close()
    return found


# ── what the database holds ──


def write_skips(place: Settings, skips: Iterable[Skip]) -> None:
    with connect(place, "test") as db:
        for skip in skips:
            db.execute(
                "insert into skips (view, stream, version, through, partition, reason) values (%s, %s, %s, %s, 0, '')",
                skip,
            )


def places_of(place: Settings, build_of: str | None = None, agent: str = "core") -> list[Place]:
    """The agent's positions, or those of the build with this table, by partition."""
    with connect(place, "test") as db:
        if build_of is None:
            return places_in(db, agent)
        found = db.execute(
            "select p.next_offset, p.epoch, p.seq, p.command_offset from build_positions p join builds b on b.id = p.build "
            "where b.table_name = %s order by p.partition",
            [build_of],
        )
        return [Place(*row) for row in found]


def rows_of(place: Settings, table: str) -> list[tuple[Any, ...]]:
    """In column order, the partition last."""
    with connect(place, "test") as db:
        return db.execute(sql.SQL("select * from {}").format(sql.Identifier(table))).fetchall()


def parked_of(place: Settings, tables: Iterable[str]) -> set[Parked]:
    with connect(place, "test") as db:
        found = db.execute(
            "select view, stream, partition, since_offset, since_version from parked where table_name = any(%s)",
            [list(tables)],
        )
        return {Parked(*row) for row in found}


def live_tables(place: Settings) -> dict[str, str]:
    with connect(place, "test") as db:
        return dict(db.execute("select view, table_name from live").fetchall())
