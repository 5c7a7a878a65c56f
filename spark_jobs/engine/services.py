"""The identity of Kafka and of the database. Work that is sent to another process carries its sender's, and the worker compares.

The same settings may name two brokers or two databases on two machines, one a copy of the other. So both are identified by values
that no copy shares: the topic's id, and the database's oid with the start time of its server.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from psycopg.conninfo import conninfo_to_dict

from infra.database.connect import session
from infra.errors import SamefoldError
from infra.log import topics
from infra.settings import Settings


class WrongKafka(SamefoldError):
    """A worker reads another topic of events than the process that sent it work."""


class WrongDatabase(SamefoldError):
    """A worker has another database than the process that sent it work, or the server was restarted meanwhile."""


_DATABASE = "select pg_postmaster_start_time()::text, oid from pg_database where datname = current_database()"
_CURE = (
    "Set {} in the environment of the executors to what the driver has, as seen from their machine: docs/operating.md."
)


@dataclass(frozen=True, slots=True)
class Services:
    """The Kafka and the database that a process uses, without secrets."""

    kafka: str
    topic_id: str
    database: tuple[str, int]

    @classmethod
    def of(cls, settings: Settings) -> Services:
        """Raises TopicMissing, KafkaUnavailable, DatabaseUnavailable."""
        return cls(settings.kafka, topics.describe(settings, settings.events_topic).id, _database(settings))

    def require(self, settings: Settings) -> None:
        """Raises WrongKafka, WrongDatabase where these settings lead elsewhere; KafkaUnavailable, DatabaseUnavailable."""
        where = f"as a worker on {socket.gethostname()} reaches it,"
        require_kafka(settings, self.kafka, self.topic_id)
        if _database(settings) != self.database:
            known = conninfo_to_dict(settings.database)
            raise WrongDatabase(
                f"The database {known.get('dbname') or ''} at {known.get('host') or 'the local socket'}, {where} is not "
                "that of the process that sent it work, but another one, perhaps a copy.",
                _CURE.format("SAMEFOLD_DATABASE_URL"),
            )


def require_kafka(settings: Settings, sender: str, topic_id: str, within_s: float | None = None) -> None:
    """Raises WrongKafka where these settings lead to another topic of events than the sender's; KafkaUnavailable."""
    try:
        found = topics.describe(settings, settings.events_topic, admin=topics.Admin(settings, within_s)).id
    except topics.TopicMissing:
        found = "none"
    if found != topic_id:
        raise WrongKafka(
            f"Kafka at {settings.kafka}, as a worker on {socket.gethostname()} reaches it, is not that of the process that "
            f"sent it work, {sender}: the id of its topic '{settings.events_topic}' is {found}, not {topic_id}.",
            _CURE.format("SAMEFOLD_KAFKA_BOOTSTRAP and SAMEFOLD_EVENTS_TOPIC"),
        )


def _database(settings: Settings) -> tuple[str, int]:
    with session(settings, "samefold sender") as connection:
        [(started, oid)] = connection.execute(_DATABASE)
    return started, oid
