"""What the overview remembers: curves of the last quarter of an hour, and which process has which partition."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from confluent_kafka import Consumer, ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription, MemberDescription

from api.services import Services
from infra.archive.whole_log import read_range
from infra.errors import SamefoldError
from infra.log import names
from infra.log.clients import range_consumer
from infra.log.records import Opening, decode_event, time_of
from infra.log.topics import Admin
from infra.settings import Settings

STEP_S = 5.0
STEPS = 180
"""Of STEP_S: a quarter of an hour."""
KAFKA_S = 2.0
COMMITS = "commits"
_ENDED = {ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD}


class Curves:
    """By name, a value for each STEP_S of the last quarter of an hour: the log's records in a second, and agents' lags."""

    def __init__(self, services: Services) -> None:
        self.values: dict[str, deque[float]] = {}
        self._stores = services.stores
        self._at, self._end = 0.0, 0
        services.stores.subscribe(self._checked)

    def _checked(self) -> None:
        seen = self._stores.seen
        if seen is None or seen.at < self._at + STEP_S:
            return
        end, passed = sum(seen.ends.values()), seen.at - self._at
        now = {agent: float(seen.behind(agent)) for agent in seen.positions}
        if self._at:
            now[COMMITS] = max(end - self._end, 0) / passed
        self._at, self._end = seen.at, end
        self.values = {name: self.values.get(name, deque(maxlen=STEPS)) for name in now}
        for name, value in now.items():
            self.values[name].append(value)


@dataclass(frozen=True, slots=True)
class Member:
    """A process in a consumer group. `partitions` are those that the group assigned to it."""

    name: str
    host: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of one role and release."""

    role: str
    release: str
    """The rest of the group's name, which tells what its code knows."""
    state: str
    members: tuple[Member, ...]


class Epoch(NamedTuple):
    """A partition's writer, since when, and why it had given up the epoch before; "" where it took the partition over."""

    writer: str
    since: datetime
    why: str


class Processes:
    """Asks Kafka which processes there are, and the log for the openings of partitions. Its calls block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._admin: Admin | None = None
        self._epochs: dict[tuple[int, int], Epoch | None] = {}
        """By (partition, epoch): an opening never changes."""

    def groups(self, agents: Iterable[str]) -> list[Group]:
        """The groups that have members, by role. Raises KafkaUnavailable, KafkaRefused, KafkaException."""
        prefix = self._settings.group_prefix
        begins = {names.agents(prefix, agent): agent for agent in agents}
        begins |= {f"{names.handlers(prefix)}.": "handlers", names.publisher(prefix): "publisher"}
        if self._admin is None:
            self._admin = Admin(self._settings, KAFKA_S)

        def found(client: AdminClient, within_s: float) -> list[ConsumerGroupDescription]:
            listed = client.list_consumer_groups(request_timeout=within_s).result()
            if listed.errors:  # a broker that does not answer may be the one that knows a group
                raise KafkaException(listed.errors[0])
            ids = [
                one.group_id for one in listed.valid if one.state not in _ENDED and one.group_id.startswith((*begins,))
            ]
            asked = client.describe_consumer_groups(ids, request_timeout=within_s) if ids else {}
            return [one.result() for one in asked.values()]

        groups = []
        for one in self._admin.ask(found, "Describe of consumer groups"):
            start = max((start for start in begins if one.group_id.startswith(start)), key=len)
            members = sorted(map(_member, one.members), key=lambda member: member.name)
            release = one.group_id.removeprefix(start)
            groups.append(Group(begins[start], release, one.state.name.lower(), tuple(members)))
        return sorted(groups, key=lambda group: (group.role != "handlers", group.role, group.release))

    def epochs(self, current: Mapping[int, int]) -> dict[int, Epoch]:
        """By partition, who writes since when; `current` are the epochs. Without those that the log does not hold any more."""
        wanted = {key for key in current.items() if key not in self._epochs and key[1] >= 0}
        if wanted:
            self._epochs = {key: epoch for key, epoch in self._epochs.items() if key in current.items()}
            consumer = range_consumer(self._settings)
            try:
                for partition, epoch in wanted:
                    with suppress(SamefoldError, KafkaException):  # trimmed, or Kafka is away: the page does without
                        self._epochs[partition, epoch] = self._opening(partition, epoch, consumer)
            finally:
                consumer.close()
        found = {partition: self._epochs.get((partition, epoch)) for partition, epoch in current.items()}
        return {partition: epoch for partition, epoch in found.items() if epoch is not None}

    def _opening(self, partition: int, offset: int, consumer: Consumer) -> Epoch | None:
        topic = self._settings.events_topic
        for records in read_range(self._settings, topic, partition, offset, offset + 1, consumer=consumer):
            for record in records:
                if isinstance(opening := decode_event(record), Opening):
                    return Epoch(opening.writer, time_of(record.time_ms), opening.why or "")
        return None


def _member(one: MemberDescription) -> Member:
    partitions = tuple(sorted(part.partition for part in one.assignment.topic_partitions)) if one.assignment else ()
    return Member(one.group_instance_id or one.client_id, one.host.lstrip("/"), partitions)


def line(values: Iterable[float], width: int = 120, height: int = 28) -> str:
    """The points of a curve, newest at the right, as SVG has them; its largest value is at the top."""
    shown = [*values]
    top = max(shown, default=0.0) or 1.0
    left = STEPS - len(shown)
    points = ((left + at) * width / (STEPS - 1) for at in range(len(shown)))
    return " ".join(
        f"{x:.1f},{height - 2 - value / top * (height - 4):.1f}" for x, value in zip(points, shown, strict=True)
    )


def since(seconds: float) -> datetime:
    """The moment that many seconds ago."""
    return datetime.fromtimestamp(time.time() - seconds, UTC)
