"""The two topics: made as the protocol needs them, and checked at each start.

Positions in the database mean nothing in another topic of the same name, and a stream lives in another partition when their number
changes. So a topic is known by its id, and the start is refused, with the cure, when the world is not the one that was promised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

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

T = TypeVar("T")

TIMEOUT_S = 15.0
TRY_S = 2.0
"""How long the first try may take; each further one twice as long."""
SETTLE_S = 3.0
"""A broker that just made a topic may not know it yet."""


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


class Admin:
    """Asks the brokers, for `timeout_s` at most.

    librdkafka's admin client may ask the leader that it knows, in the epoch that it knows, and look for no other for 15 minutes,
    even when told that these are over (2.16). Where nobody leads at the moment it waits in vain (2.8, too). So it is made anew.
    """

    def __init__(self, settings: Settings, timeout_s: float | None = None) -> None:
        self._settings = settings
        self._timeout_s = timeout_s or TIMEOUT_S
        self._client = clients.admin(settings)

    def ask(self, question: Callable[[AdminClient, float], T]) -> T:
        """The answer to a question that may take so many seconds. Raises KafkaAway, KafkaException."""
        began = time.monotonic()
        patience = TRY_S
        with _naming(self._settings):
            while True:
                left = began + self._timeout_s - time.monotonic()
                try:
                    return question(self._client, max(min(patience, left), 0.1))
                except (KafkaException, TimeoutError) as error:
                    code = KafkaError._TIMED_OUT if isinstance(error, TimeoutError) else error.args[0].code()
                    if code not in _SETTLING:
                        raise
                    is_unknown = code == KafkaError.UNKNOWN_TOPIC_OR_PART
                    if not is_unknown:
                        self._client = clients.admin(self._settings)
                    if time.monotonic() - began > (SETTLE_S if is_unknown else self._timeout_s):
                        raise
                patience *= 2
                time.sleep(0.05)


def ensure(settings: Settings) -> tuple[Topic, Topic]:
    """Make the topics that are missing, check both, return (commands, events). Raises TopicUnfit, KafkaAway."""
    admin = Admin(settings)
    wanted = [_new_topic(settings, settings.commands_topic), _new_topic(settings, settings.events_topic)]
    existing = admin.ask(lambda client, within_s: client.list_topics(timeout=within_s).topics)
    if missing := [topic for topic in wanted if topic.topic not in existing]:
        admin.ask(lambda client, within_s: _make(client, missing, within_s))
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


def _make(client: AdminClient, missing: list[NewTopic], within_s: float) -> None:
    for name, future in client.create_topics(missing, operation_timeout=within_s).items():
        try:
            future.result(within_s)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise TopicMissing(
                    f"Topic '{name}' does not exist and can't be made: {error.args[0].str()}.",
                    "Make it with an account that may, with the settings that `samefold topics` checks.",
                ) from error


def describe(settings: Settings, name: str, *, admin: Admin | None = None) -> Topic:
    """A topic's id, partitions and offsets. Raises TopicMissing, KafkaAway."""
    try:
        return (admin or Admin(settings)).ask(lambda client, within_s: _describe(client, name, within_s))
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise TopicMissing(
                f"Topic '{name}' does not exist.", "Run `samefold topics --create`, or correct the topic's name."
            ) from error
        raise


def _describe(client: AdminClient, name: str, within_s: float) -> Topic:
    asked = client.describe_topics(TopicCollection([name]), request_timeout=within_s)
    description: TopicDescription = asked[name].result(within_s)
    partitions = [info.id for info in description.partitions]
    return Topic(
        name=name,
        id=str(description.topic_id),
        partitions=len(partitions),
        first=_offsets(client, name, partitions, OffsetSpec.earliest(), within_s),
        end=_offsets(client, name, partitions, OffsetSpec.latest(), within_s),
    )


def _offsets(
    client: AdminClient, name: str, partitions: Iterable[int], which: OffsetSpec, within_s: float
) -> dict[int, int]:
    wanted = {TopicPartition(name, partition): which for partition in partitions}
    asked = client.list_offsets(wanted, request_timeout=within_s)
    return {partition.partition: future.result(within_s).offset for partition, future in asked.items()}


def ends(topic: Topic, admin: Admin) -> dict[int, int]:
    """Each partition's end as it is now, which a topic that was described knows as of then. Raises KafkaAway."""
    numbers = range(topic.partitions)
    return admin.ask(lambda client, within_s: _offsets(client, topic.name, numbers, OffsetSpec.latest(), within_s))


def offsets_at(settings: Settings, topic: Topic, time_ms: int) -> dict[int, int]:
    """By partition, an offset whose record is from `time_ms` (since the epoch) or later; partitions without one are left out.

    The broker looks into its index: where times are equal, or went back, it need not be the first such record. Raises KafkaAway.
    """
    numbers, then = range(topic.partitions), OffsetSpec.for_timestamp(time_ms)
    found = Admin(settings).ask(lambda client, within_s: _offsets(client, topic.name, numbers, then, within_s))
    return {partition: offset for partition, offset in found.items() if offset >= 0}


_SETTLING = {
    KafkaError._TIMED_OUT,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,  # nobody leads at the moment
}


def check(settings: Settings, *, admin: Admin | None = None) -> None:
    """Refuse topics whose settings would lose history. Raises TopicUnfit naming the setting and the command that cures it."""
    names = [settings.commands_topic, settings.events_topic]
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    configs = (admin or Admin(settings)).ask(
        lambda client, within_s: {
            resource.name: future.result(within_s)
            for resource, future in client.describe_configs(resources, request_timeout=within_s).items()
        }
    )
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
