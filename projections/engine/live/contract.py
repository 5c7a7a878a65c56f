"""The promise about the topic, checked by whoever reads the log and the database together."""

from __future__ import annotations

from infra.database.connect import Connection
from infra.log import topics
from infra.settings import Settings
from projections.engine.live.startup import Contract, check_contract


def require_contract(settings: Settings, connection: Connection) -> topics.Topic:
    """The topic of events, which is the one that the positions are in. Raises ContractBroken, TopicMissing, KafkaAway."""
    topic = topics.describe(settings, settings.events_topic)
    check_contract(connection, Contract.of(topic))
    return topic
