"""The topics: creates them with the settings that the protocol needs, and checks them at each start.

A position is valid in one topic only, so a topic is identified by its id. The number of partitions may not change either: streams
would move. Each process refuses to start, with a hint, when either has changed.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, TopicDescription

from infra.errors import SamefoldError
from infra.log import clients
from infra.observability import metrics
from infra.observability.logs import StatusLog
from infra.settings import Settings

T = TypeVar("T")

TIMEOUT_S = 15.0
TRY_S = 2.0
"""Time-out of the first attempt; it doubles with each further one."""
HOUR_MS = 3_600_000
SETTLE_S = 3.0
"""A broker that just created a topic may not know it yet."""


class TopicMissing(SamefoldError):
    """A topic that must exist does not."""


class TopicUnfit(SamefoldError):
    """A topic has a setting with which it may lose or reorder history."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker has it now. `first` and `end` are the offsets [first, end) that each partition holds."""

    name: str
    id: str
    partitions: int
    first: dict[int, int]
    end: dict[int, int]


class TopicChanged(SamefoldError):
    """A topic was recreated, or its number of partitions changed."""


def require_same(was: Topic, now: Topic) -> None:
    """Raises TopicChanged for a topic that was recreated or has another number of partitions."""
    if was.id != now.id:
        raise TopicChanged(
            f"Topic '{now.name}' was recreated: its id was {was.id} and is {now.id}.",
            "No position is valid in it. Restore the old topic, or start with an empty database and new topics.",
        )
    if was.partitions != now.partitions:
        raise TopicChanged(
            f"Topic '{now.name}' had {was.partitions} partitions and has {now.partitions}: streams would move between them.",
            "Partitions can't be removed. Copy the log into new topics, and start with an empty database.",
        )


class Admin:
    """Queries the brokers, and retries until `timeout_s`, with a new client each time.

    librdkafka's admin client may query a former leader for 15 minutes, even when the broker reports a new one (2.16), and waits in
    vain where a partition has no leader (2.8, too).
    """

    def __init__(self, settings: Settings, timeout_s: float | None = None) -> None:
        self._settings = settings
        self._timeout_s = timeout_s or TIMEOUT_S
        self._broken: list[KafkaError] = []
        """Why connections broke during the last attempt."""
        self._client = self._new()

    def ask(self, question: Callable[[AdminClient, float], T], right: str = "") -> T:
        """The result of `question`, which gets the client and a time-out in seconds; `right` is what it takes, in words.

        Raises KafkaUnavailable, KafkaRefused, TopicMissing, KafkaException.
        """
        began = time.monotonic()
        within_s = TRY_S
        while True:
            left = began + self._timeout_s - time.monotonic()
            try:
                return question(self._client, max(min(within_s, left), 0.1))
            except (KafkaException, TimeoutError) as raised:
                # its frames hold the client and a future, which holds the error: the client would keep its threads until a garbage
                # collection, and librdkafka aborts the process if that comes in one of these threads
                raised.__traceback__ = None
                error = KafkaError(KafkaError._TIMED_OUT) if isinstance(raised, TimeoutError) else raised.args[0]
                self._require_welcome()
                is_unknown = error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
                patience_s = SETTLE_S if is_unknown else self._timeout_s
                may_settle = is_unknown or error.code() in clients.MOVING
                if not may_settle or time.monotonic() - began > patience_s:
                    raise self._named(error, right) from raised
                if not is_unknown:
                    self._client = self._new()
            within_s *= 2
            time.sleep(0.05)

    def _named(self, error: KafkaError, right: str) -> SamefoldError | KafkaException:
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return TopicMissing(
                f"There is no {right.rpartition(' of ')[2] or 'such topic'} in the Kafka at {self._settings.kafka}.",
                "Correct its name, or create it: `samefold topics --create` for this service's own, the other team for a source's.",
            )
        if clients.is_denied(error):
            return clients.denied(self._settings, error, right or "see Kafka's authorizer log")
        return clients.away(self._settings, error) if clients.may_pass(error) else KafkaException(error)

    def _new(self) -> AdminClient:
        self._broken.clear()
        return clients.admin(self._settings, self._broken.append)

    def _require_welcome(self) -> None:
        """Raises KafkaRefused where a connection broke because one side refuses the other."""
        self._client.poll(0)
        for error in self._broken:
            if refused := clients.refusal(self._settings, error):
                raise refused
        self._broken.clear()


def ensure(settings: Settings) -> tuple[Topic, Topic]:
    """Create the missing topics, check both, return (commands, events). Raises TopicUnfit, TopicMissing, KafkaUnavailable."""
    admin, names = Admin(settings), (settings.commands_topic, settings.events_topic)
    commands, events = _ensure(settings, admin, names, settings.partitions)
    if commands.partitions != events.partitions:
        raise TopicUnfit(
            f"'{commands.name}' has {commands.partitions} partitions and '{events.name}' {events.partitions}; "
            "a command and its commit need the same partition.",
            "Recreate both with the same number; streams can't move to other partitions of a topic that is in use.",
        )
    return commands, events


def ensure_policies(settings: Settings, admin: Admin | None = None) -> Topic:
    """Create the topic of policies if it is missing, check and return it. Raises TopicUnfit, TopicMissing, KafkaUnavailable."""
    return _ordered(settings, admin, settings.policies_topic, "SAMEFOLD_POLICIES_TOPIC")


def ensure_keys(settings: Settings, admin: Admin | None = None) -> Topic:
    """Create the topic of keys if it is missing, check and return it. Raises TopicUnfit, TopicMissing, KafkaUnavailable.

    Compaction removes a key that was destroyed from the disks within a day, and nothing else.
    """
    return _ordered(settings, admin, settings.keys_topic, "SAMEFOLD_KEYS_TOPIC")


def _ordered(settings: Settings, admin: Admin | None, name: str, setting: str) -> Topic:
    """The topic, which this setting names. Raises TopicUnfit unless all its records are in one order."""
    [topic] = _ensure(settings, admin or Admin(settings), [name], 1)
    if topic.partitions != 1:
        raise TopicUnfit(
            f"'{topic.name}' has {topic.partitions} partitions; the order of its records counts, so it needs exactly one.",
            f"Name another topic in {setting}; it is made with one.",
        )
    return topic


def _ensure(settings: Settings, admin: Admin, names: Sequence[str], partitions: int) -> list[Topic]:
    """Create the missing topics of these, check and return them."""
    there = existing(settings, admin)
    missing = [
        NewTopic(name, partitions, settings.replication_factor, config=_log(settings) | _promised(settings, name))
        for name in names
        if name not in there
    ]
    if missing:
        admin.ask(lambda client, within_s: _make(settings, client, missing, within_s))
    found = [describe(settings, name, admin=admin) for name in names]
    check(settings, names, admin=admin)
    return found


def ensure_public(settings: Settings, events: Topic) -> tuple[Topic, int]:
    """Create the public topic if it is missing and check it; the topic, and the most bytes of one of its records.

    How long it keeps its records is the operator's decision. Raises TopicUnfit, TopicMissing, KafkaUnavailable.
    """
    admin, name = Admin(settings), settings.public_topic
    [public] = _ensure(settings, admin, [name], events.partitions)
    if public.partitions != events.partitions:
        raise TopicUnfit(
            f"'{name}' has {public.partitions} partitions and '{events.name}' {events.partitions}; "
            "an event and its public events need the same partition.",
            f"Recreate '{name}' with {events.partitions} partitions; consumers must then start from the beginning.",
        )
    return public, int(_configs(admin, [name])[name]["max.message.bytes"])


def ensure_inbox(settings: Settings) -> Topic:
    """Create the topic of webhooks' messages if it is missing, check and return it. Raises as `ensure` does."""
    return _ensure(settings, Admin(settings), [settings.inbox_topic], settings.partitions)[0]


def _make(settings: Settings, client: AdminClient, missing: list[NewTopic], within_s: float) -> None:
    for name, future in client.create_topics(missing, operation_timeout=within_s).items():
        if (raised := future.exception(within_s)) is None:
            continue
        [error] = raised.args
        if clients.is_denied(error):
            raise TopicMissing(
                f"Topic '{name}' does not exist, or user '{settings.kafka_sasl_username}' may not see it; it may not "
                "create it either.",
                f"Create it with an account that may, by `samefold topics --create`; {clients.ACLS}.",
            ) from raised
        if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise TopicMissing(
                f"Topic '{name}' does not exist and can't be created: {error.str()}.",
                "Create it with an account that may, and with the settings that `samefold topics` checks.",
            ) from raised


def describe(settings: Settings, name: str, *, admin: Admin | None = None) -> Topic:
    """A topic's id, partitions and offsets. Raises TopicMissing, KafkaUnavailable."""
    return (admin or Admin(settings)).ask(
        lambda client, within_s: _describe(client, name, within_s), f"Describe of topic '{name}'"
    )


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
    client: AdminClient, name: str, partitions: Iterable[int], which: OffsetSpec, within_s: float, **options: Any
) -> dict[int, int]:
    wanted = {TopicPartition(name, partition): which for partition in partitions}
    asked = client.list_offsets(wanted, request_timeout=within_s, **options)
    found = {partition.partition: future.result(within_s).offset for partition, future in asked.items()}
    if OFFSET_INVALID in found.values():
        # librdkafka (2.16) gives this instead of an error where a broker that it knows as leader does not answer in time
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return found


def ends(topic: Topic, admin: Admin, isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED) -> dict[int, int]:
    """Each partition's current end. Raises KafkaUnavailable."""
    wanted, latest = range(topic.partitions), OffsetSpec.latest()
    return admin.ask(
        lambda client, within_s: _offsets(client, topic.name, wanted, latest, within_s, isolation_level=isolation)
    )


def stable_ends(topic: Topic, admin: Admin) -> dict[int, int]:
    """Each partition's last stable offset: the offset of its first open transaction, or its end. Raises KafkaUnavailable."""
    return ends(topic, admin, IsolationLevel.READ_COMMITTED)


def offsets_at(settings: Settings, topic: Topic, time_ms: int) -> dict[int, int]:
    """By partition, an offset whose record is from `time_ms` (since the epoch) or later; partitions without one are left out.

    It comes from the broker's index: where times are equal, or went back, it need not be the first such record.
    Raises KafkaUnavailable.
    """
    numbers, then = range(topic.partitions), OffsetSpec.for_timestamp(time_ms)
    found = Admin(settings).ask(lambda client, within_s: _offsets(client, topic.name, numbers, then, within_s))
    return {partition: offset for partition, offset in found.items() if offset >= 0}


def check(settings: Settings, names: Sequence[str] = (), *, admin: Admin | None = None) -> None:
    """Check the settings of these topics, or of commands and events.

    Raises TopicUnfit with the commands that correct settings which would lose history, of all of them.
    """
    names = names or [settings.commands_topic, settings.events_topic]
    if errors := unfit(settings, names, admin or Admin(settings)).values():
        raise TopicUnfit(" ".join(error.message for error in errors), "\n".join(error.hint for error in errors))


def unfit(settings: Settings, names: Iterable[str], admin: Admin) -> dict[str, TopicUnfit]:
    """Those of these topics that have settings with which they may lose or reorder history, each with all of them."""
    errors = {}
    for name, found in _configs(admin, names).items():
        promised = _promised(settings, name)
        if wrong := [key for key, wanted in promised.items() if not _fits(key, found[key], wanted)]:
            errors[name] = TopicUnfit(
                f"Topic '{name}' has {', and '.join(f'{key}={found[key]}; {_WHY[key]}' for key in wrong)}.",
                f"kafka-configs --alter --entity-type topics --entity-name {name} "
                f"--add-config {','.join(f'{key}={promised[key]}' for key in wrong)}",
            )
    return errors


def existing(settings: Settings, admin: Admin) -> list[str]:
    """The service's topics that exist and that this user may describe."""
    found = admin.ask(lambda client, within_s: client.list_topics(timeout=within_s).topics)
    return [name for name in settings.topics if name in found]


class Watch:
    """Checks the topics of a running process: that they are the same, and that their settings are still fit.

    A setting that is not ends nothing, since the broker deletes records whether this process runs or not: it is logged, and `unfit`
    and a metric have it until it is corrected. `also` are further topics, whose settings alone are checked.
    """

    def __init__(
        self, settings: Settings, topics: Sequence[Topic], status: StatusLog, admin: Admin, also: Sequence[str] = ()
    ) -> None:
        self._settings, self._topics, self._status, self._admin = settings, topics, status, admin
        self._names = [*(topic.name for topic in topics), *also]
        self.unfit: dict[str, TopicUnfit] = {}

    def check(self) -> list[Topic]:
        """The topics as they are now. Raises TopicChanged, TopicMissing, KafkaUnavailable."""
        now = [describe(self._settings, was.name, admin=self._admin) for was in self._topics]
        for was, found in zip(self._topics, now, strict=True):
            require_same(was, found)
        self.unfit = unfit(self._settings, self._names, self._admin)
        for name in self._names:
            metrics.TOPIC_UNFIT.labels(name).set(name in self.unfit)
            if error := self.unfit.get(name):
                self._status.wrong(f"settings of {name}", f"{error.code}: {error}", level=logging.ERROR)
            else:
                self._status.well(f"settings of {name}", f"topic '{name}' has the settings that it must have again")
        return now


def _configs(admin: Admin, names: Iterable[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    return admin.ask(
        lambda client, within_s: {
            resource.name: {key: entry.value for key, entry in future.result(within_s).items()}
            for resource, future in client.describe_configs(resources, request_timeout=within_s).items()
        },
        f"DescribeConfigs of topics {', '.join(names)}",
    )


def _promised(settings: Settings, name: str) -> dict[str, str]:
    """The settings that this topic must have."""
    log = _log(settings)
    if name == settings.public_topic:  # how long it keeps its records is the operator's decision
        return {key: log[key] for key in ("cleanup.policy", "min.insync.replicas", "unclean.leader.election.enable")}
    if name == settings.inbox_topic:  # here, too
        return {key: value for key, value in log.items() if not key.startswith("retention.")}
    if name == settings.keys_topic:
        soon = {"segment.ms": str(12 * HOUR_MS), "max.compaction.lag.ms": str(6 * HOUR_MS)}
        return log | {"cleanup.policy": "compact"} | soon
    return log


def _log(settings: Settings) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": str((settings.replication_factor + 1) // 2),
        "unclean.leader.election.enable": "false",
        "max.message.bytes": str(clients.MAX_COMMIT_BYTES + 100_000),
    }


_WHY = {
    "cleanup.policy": "the broker would remove records that are needed",
    "segment.ms": "a destroyed key would stay on the disks for longer than a day",
    "max.compaction.lag.ms": "a destroyed key would stay on the disks for longer than a day",
    "retention.ms": "history would be deleted after that time",
    "retention.bytes": "history would be deleted beyond that size",
    "message.timestamp.type": "event times must be the broker's, not a client's clock",
    "min.insync.replicas": "an acknowledged record could be on fewer replicas than configured",
    "unclean.leader.election.enable": "a replica that lacks acknowledged records could become leader",
    "max.message.bytes": "the broker would refuse records that the service accepts",
}


def _fits(key: str, found: str, wanted: str) -> bool:
    if key in ("min.insync.replicas", "max.message.bytes"):
        return int(found) >= int(wanted)
    if key in ("segment.ms", "max.compaction.lag.ms"):
        return int(found) <= int(wanted)
    return found == wanted
