"""Whom a process works for: work that is handed to another process names its sender's Kafka and database, which compares its own.

By the same settings, two machines may mean two brokers or two databases, one of them a copy of the other. So both are known by what
no copy shares: the topic's id, and the database's number in a server that started at that very microsecond.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from psycopg.conninfo import conninfo_to_dict

from infra.database.connect import connect, naming
from infra.errors import SamefoldError
from infra.log import topics
from infra.settings import Settings


class WrongKafka(SamefoldError):
    """A process that was handed work reads another topic of events than its sender."""


class WrongDatabase(SamefoldError):
    """A process that was handed work has another database than its sender, or one whose server was started again since."""


_DATABASE = "select pg_postmaster_start_time()::text, oid from pg_database where datname = current_database()"
_CURE = (
    "Set {} in the environment of the executors to what the driver has, as seen from their machine: docs/operating.md."
)


@dataclass(frozen=True, slots=True)
class Services:
    """Where its process reads and writes, without any secret."""

    kafka: str
    topic_id: str
    database: tuple[str, int]

    @classmethod
    def of(cls, settings: Settings) -> Services:
        """Raises TopicMissing, KafkaAway, DatabaseAway."""
        return cls(settings.kafka, topics.describe(settings, settings.events_topic).id, _database(settings))

    def require(self, settings: Settings) -> None:
        """Raises WrongKafka, WrongDatabase where these settings lead elsewhere; KafkaAway, DatabaseAway."""
        where = f"as a worker on {socket.gethostname()} reaches it,"
        try:
            topic_id = topics.describe(settings, settings.events_topic).id
        except topics.TopicMissing:
            topic_id = "none"
        if topic_id != self.topic_id:
            raise WrongKafka(
                f"Kafka at {settings.kafka}, {where} is not that of the process that sent it work, {self.kafka}: "
                f"the id of its topic '{settings.events_topic}' is {topic_id}, not {self.topic_id}.",
                _CURE.format("SAMEFOLD_KAFKA_BOOTSTRAP and SAMEFOLD_EVENTS_TOPIC"),
            )
        if _database(settings) != self.database:
            known = conninfo_to_dict(settings.database)
            raise WrongDatabase(
                f"The database {known.get('dbname') or ''} at {known.get('host') or 'the local socket'}, {where} is not "
                "that of the process that sent it work, but another one, perhaps a copy.",
                _CURE.format("SAMEFOLD_DATABASE_URL"),
            )


def _database(settings: Settings) -> tuple[str, int]:
    with naming(settings), connect(settings, "samefold sender") as connection:
        row = connection.execute(_DATABASE).fetchone()
    assert row is not None, "a session has a database"
    return row[0], row[1]
