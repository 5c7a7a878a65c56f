"""The contract between the log and the database.

Positions are valid only for the topic, the partitions and the partitioner with which they were written. The first check records
these, and each later one compares.
"""

from dataclasses import dataclass
from typing import Self

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log import partitioner, topics
from infra.log.topics import Topic
from infra.settings import Settings


class ContractBroken(SamefoldError):
    """The topic is not the one that the database's positions belong to."""


@dataclass(frozen=True, slots=True)
class Contract:
    """The properties of a topic on which positions depend."""

    topic: str
    topic_id: str
    partitions: int
    partitioner: str

    @classmethod
    def of(cls, topic: Topic) -> Self:
        """The contract of a topic as it is now, with this code's partitioner."""
        return cls(topic.name, topic.id, topic.partitions, partitioner.NAME)


def check_contract(connection: Connection, contract: Contract) -> None:
    """Compare the topic with the recorded contract, which the first check records. Raises ContractBroken."""
    connection.execute(
        "insert into topics (topic, topic_id, partitions, partitioner) values (%s, %s, %s, %s) on conflict do nothing",
        (contract.topic, contract.topic_id, contract.partitions, contract.partitioner),
    )
    row = connection.execute(
        "select topic_id, partitions, partitioner from topics where topic = %s", [contract.topic]
    ).fetchone()
    require_promised(Contract(contract.topic, *row) if row else contract, contract)


def require_contract(settings: Settings, connection: Connection) -> Topic:
    """The topic of events, checked against the contract. Raises ContractBroken, TopicMissing, KafkaUnavailable."""
    topic = topics.describe(settings, settings.events_topic)
    check_contract(connection, Contract.of(topic))
    return topic


def require_promised(promised: Contract, contract: Contract) -> None:
    """Raises ContractBroken unless the topic's contract equals the recorded one."""
    if promised.topic_id != contract.topic_id:
        raise ContractBroken(
            f"Topic '{contract.topic}' was recreated: its id is {contract.topic_id}, but the database's positions belong to "
            f"{promised.topic_id}.",
            "Restore the topic, or start with an empty database (`samefold dev reset` for the local one).",
        )
    if promised.partitions != contract.partitions:
        raise ContractBroken(
            f"Topic '{contract.topic}' has {contract.partitions} partitions; it had {promised.partitions}, so streams would move.",
            "Copy the log into a new topic and start with an empty database.",
        )
    if promised.partitioner != contract.partitioner:
        raise ContractBroken(
            f"This code uses the partitioner {contract.partitioner}, but topic '{contract.topic}' was written with "
            f"{promised.partitioner}.",
            f"Run the code that uses {promised.partitioner}.",
        )
