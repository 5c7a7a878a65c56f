"""The two topics: made as the protocol needs them, and checked at each start.

Positions in the database mean nothing in another topic of the same name, and a stream lives in another partition when their number
changes. So a topic is known by its id, and the start is refused, with the cure, when the world is not the one that was promised.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    TopicDescription,
)

from infra.errors import SamefoldError
from infra.log import clients
from infra.settings import Settings

TIMEOUT_S = 15.0
SETTLE_S = 3.0


class TopicMissing(SamefoldError):
    """A topic that must exist does not."""


class TopicUnfit(SamefoldError):
    """A topic has a setting that breaks a promise: it may lose or reorder history."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker has it now. `first` and `end` are the offsets [first, end) that each partition holds."""

    name: str
    id: str
    partitions: int
    first: dict[int, int]
    end: dict[int, int]


class TopicChanged(SamefoldError):
    """A topic is not the one it was: made anew, or with another number of partitions."""


def require_same(was: Topic, now: Topic) -> None:
    """Raises TopicChanged for a topic that changed under running processes or since the positions were made."""
    if was.id != now.id:
        raise TopicChanged(
            f"Topic '{now.name}' was made anew: its id was {was.id} and is {now.id}.",
            "Positions mean nothing in it. Restore the old topic, or start with an empty database and new topics.",
        )
    if was.partitions != now.partitions:
        raise TopicChanged(
            f"Topic '{now.name}' had {was.partitions} partitions and has {now.partitions}: streams would move between them.",
            "Partitions can't be taken back. Copy the log into new topics, and start with an empty database.",
        )


def ensure(settings: Settings) -> tuple[Topic, Topic]:
    """Make the topics that are missing, check both, return (commands, events). Raises TopicUnfit, KafkaAway."""
    admin = clients.admin(settings)
    wanted = [_new_topic(settings, settings.commands_topic), _new_topic(settings, settings.events_topic)]
    with _naming(settings):
        existing = admin.list_topics(timeout=TIMEOUT_S).topics
        missing = [topic for topic in wanted if topic.topic not in existing]
        for name, future in (admin.create_topics(missing, operation_timeout=TIMEOUT_S) if missing else {}).items():
            try:
                future.result(TIMEOUT_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise TopicMissing(
                        f"Topic '{name}' does not exist and can't be made: {error.args[0].str()}.",
                        "Make it with an account that may, with the settings that `samefold topics` checks.",
                    ) from error
    commands = describe(settings, settings.commands_topic, admin=admin)
    events = describe(settings, settings.events_topic, admin=admin)
    check(settings, admin=admin)
    if commands.partitions != events.partitions:
        raise TopicUnfit(
            f"'{commands.name}' has {commands.partitions} partitions and '{events.name}' {events.partitions}; "
            "the writer of a partition of one writes that partition of the other.",
            "Make both anew with the same number; streams can't move to other partitions of a topic that is in use.",
        )
    return commands, events


def describe(settings: Settings, name: str, *, admin: AdminClient | None = None) -> Topic:
    """A topic's id, partitions and offsets. Raises TopicMissing, KafkaAway.

    A broker that just made a topic may not know it yet, or not who leads it: that gets a few seconds.
    """
    admin = admin or clients.admin(settings)
    deadline = time.monotonic() + SETTLE_S
    with _naming(settings):
        while True:
            try:
                return _describe(admin, name)
            except KafkaException as error:
                code = error.args[0].code()
                if code in _SETTLING and time.monotonic() < deadline:
                    time.sleep(0.05)
                elif code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise TopicMissing(
                        f"Topic '{name}' does not exist.",
                        "Run `samefold topics --create`, or correct the topic's name.",
                    ) from error
                else:
                    raise


def _describe(admin: AdminClient, name: str) -> Topic:
    asked = admin.describe_topics(TopicCollection([name]), request_timeout=TIMEOUT_S)
    description: TopicDescription = asked[name].result(TIMEOUT_S)
    partitions = [TopicPartition(name, info.id) for info in description.partitions]
    first = admin.list_offsets({p: OffsetSpec.earliest() for p in partitions}, request_timeout=TIMEOUT_S)
    end = admin.list_offsets({p: OffsetSpec.latest() for p in partitions}, request_timeout=TIMEOUT_S)
    return Topic(
        name=name,
        id=str(description.topic_id),
        partitions=len(partitions),
        first={p.partition: future.result(TIMEOUT_S).offset for p, future in first.items()},
        end={p.partition: future.result(TIMEOUT_S).offset for p, future in end.items()},
    )


def ends(topic: Topic, settings: Settings, admin: AdminClient, timeout_s: float) -> dict[int, int]:
    """Each partition's end as it is now, which a topic that was described knows as of then. Raises KafkaAway."""
    partitions = {TopicPartition(topic.name, number): OffsetSpec.latest() for number in range(topic.partitions)}
    with _naming(settings):
        asked = admin.list_offsets(partitions, request_timeout=timeout_s)
        return {partition.partition: future.result(timeout_s).offset for partition, future in asked.items()}


def offsets_at(settings: Settings, topic: Topic, time_ms: int) -> dict[int, int]:
    """By partition, an offset whose record is from `time_ms` (since the epoch) or later; partitions without one are left out.

    The broker looks into its index: where times are equal, or went back, it need not be the first such record. Raises KafkaAway.
    """
    admin = clients.admin(settings)
    partitions = [TopicPartition(topic.name, number) for number in range(topic.partitions)]
    with _naming(settings):
        asked = admin.list_offsets(
            {partition: OffsetSpec.for_timestamp(time_ms) for partition in partitions}, request_timeout=TIMEOUT_S
        )
        found = {partition.partition: future.result(TIMEOUT_S).offset for partition, future in asked.items()}
    return {partition: offset for partition, offset in found.items() if offset >= 0}


_SETTLING = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}


def check(settings: Settings, *, admin: AdminClient | None = None) -> None:
    """Refuse topics whose settings would lose history. Raises TopicUnfit naming the setting and the command that cures it."""
    admin = admin or clients.admin(settings)
    names = [settings.commands_topic, settings.events_topic]
    with _naming(settings):
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        configs = {
            resource.name: future.result(TIMEOUT_S)
            for resource, future in admin.describe_configs(resources, request_timeout=TIMEOUT_S).items()
        }
    for name in names:
        for key, wanted in _promised(settings).items():
            found = configs[name][key].value
            if not _fits(key, found, wanted):
                raise TopicUnfit(
                    f"Topic '{name}' has {key}={found}; {_WHY[key]}.",
                    f"kafka-configs --alter --entity-type topics --entity-name {name} --add-config {key}={wanted}",
                )


def _new_topic(settings: Settings, name: str) -> NewTopic:
    return NewTopic(
        name,
        num_partitions=settings.partitions,
        replication_factor=settings.replication_factor,
        config=_promised(settings),
    )


def _promised(settings: Settings) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": str(settings.min_insync_replicas),
        "unclean.leader.election.enable": "false",
        "max.message.bytes": str(settings.max_commit_bytes + 100_000),
    }


_WHY = {
    "cleanup.policy": "compaction and deletion take records that rebuilds need",
    "retention.ms": "history would be deleted after that time",
    "retention.bytes": "history would be deleted beyond that size",
    "message.timestamp.type": "event times must be the broker's, not a client's clock",
    "min.insync.replicas": "an acknowledged record could stand on fewer replicas than you asked for",
    "unclean.leader.election.enable": "a replica that lacks acknowledged records could become leader",
    "max.message.bytes": "commits that the handler lets pass would be refused by the broker",
}


def _fits(key: str, found: str, wanted: str) -> bool:
    if key in ("min.insync.replicas", "max.message.bytes"):
        return int(found) >= int(wanted)
    return found == wanted


@contextmanager
def _naming(settings: Settings) -> Iterator[None]:
    """Turns Kafka's errors that mean "away" into KafkaAway."""
    try:
        yield
    except KafkaException as error:
        if clients.may_pass(error.args[0]):
            raise clients.away(settings, error) from error
        raise
    except TimeoutError as error:
        raise clients.away(settings, KafkaError(KafkaError._TIMED_OUT)) from error
