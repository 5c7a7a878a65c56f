"""Which release's handlers decide while handlers of several releases run.

Handlers that know the same commands and events, and outcomes of the same version, share one consumer group. Those of another
release have their own group, which is assigned all partitions too. Of the groups that fit the live write model, the one that
knows most types decides; the others wait, and take over when it has no members left. A group's name holds all that the others
need to know:

    samefold-handler.rooms-v1.orders-v2.7-1f0c3b5a      7 types of commands and events, of two contexts
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping

from confluent_kafka import ConsumerGroupState, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConsumerGroupListing

from domain.engine.contexts import contexts
from infra.errors import SamefoldError
from infra.log import clients, names
from infra.log.topics import TIMEOUT_S, Admin
from infra.settings import Settings
from projections.engine.store.command_types import CommandType, own_types
from projections.engine.store.event_types import own_event_types
from projections.engine.views.core_views import OUTCOMES, OUTCOMES_VERSION


class OtherReleaseRuns(SamefoldError):
    """Handlers of another release run, and know commands that would be rejected as malformed."""


_NAME = re.compile(r"(?P<contexts>(?:\.[a-z][a-z0-9_]*-v\d+)*)\.(?P<count>\d+)-(?P<hash>[0-9a-f]{8})")
_GONE = {ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD}


def group_of(prefix: str) -> str:
    """The consumer group of this code's handlers."""
    states = "".join(f".{name}-v{one.state_version}" for name, one in sorted(contexts().items()))
    types = sorted([*map(str, own_types()), *own_event_types()])
    known = " ".join([*types, f"{OUTCOMES}-v{OUTCOMES_VERSION}"])
    return f"{names.handlers(prefix)}{states}.{len(types)}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def deciding(groups: Iterable[str], prefix: str, live: Mapping[str, int]) -> str:
    """The group that decides, of these groups; `live` is the version of each context's states."""

    def rank(group: str) -> tuple[int, str]:
        """Larger for groups that know more types; smallest where the group does not fit the live write model."""
        found = _NAME.fullmatch(group.removeprefix(names.handlers(prefix)))
        if found is None:
            return -1, ""
        states = dict(one.rsplit("-v", 1) for one in found["contexts"].split(".") if one)
        fits = all(str(live.get(name)) == version for name, version in states.items())
        return (int(found["count"]), found["hash"]) if fits else (-1, "")

    return max(groups, key=rank)


def alive(admin: Admin, prefix: str) -> list[str]:
    """The handlers' groups that have members. Raises KafkaUnavailable, KafkaException."""
    return [
        one.group_id
        for one in admin.ask(_groups)
        if one.state not in _GONE and one.group_id.startswith(names.handlers(prefix))
    ]


def decided(settings: Settings, partitions: int, within_s: float = TIMEOUT_S) -> dict[int, int]:
    """By partition, how far this release's handlers have decided, as they reported it. Raises KafkaUnavailable, KafkaRefused."""
    # not by an AdminClient: librdkafka (2.8, its issue 5040) ends the process where the group's coordinator moves
    consumer = clients.range_consumer(settings, group=group_of(settings.group_prefix))
    try:
        wanted = [TopicPartition(settings.commands_topic, partition) for partition in range(partitions)]
        found = consumer.committed(wanted, within_s)
    except KafkaException as error:
        if clients.is_denied(error.args[0]):
            raise clients.denied(settings, error.args[0], "Describe of the handlers' groups") from error
        raise clients.away(settings, error) from error
    finally:
        consumer.close()
    return {one.partition: one.offset for one in found if not one.error and one.offset >= 0}


def require_alone(settings: Settings, types: Collection[CommandType]) -> None:
    """Require that no other release's handlers run, before these types, which this code does not know, are removed.

    Raises OtherReleaseRuns, KafkaUnavailable.
    """
    if not types:
        return
    own = group_of(settings.group_prefix)
    others = [group for group in alive(Admin(settings), settings.group_prefix) if group != own]
    if others:
        raise OtherReleaseRuns(
            f"Handlers of another release run, in {', '.join(others)}. These commands would be rejected as malformed: "
            f"{', '.join(sorted(map(str, types)))}.",
            "Stop that release's API, then its handlers, wait until Kafka has noticed (some seconds), and run the command again.",
        )


def _groups(client: AdminClient, within_s: float) -> list[ConsumerGroupListing]:
    """Raises KafkaException, also where only one of the brokers does not answer: it may be the one that knows a group."""
    found = client.list_consumer_groups(request_timeout=within_s).result()
    if found.errors:
        raise KafkaException(found.errors[0])
    return list(found.valid)
