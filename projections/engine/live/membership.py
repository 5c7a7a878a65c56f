"""An agent's membership of its consumer group, which only assigns partitions.

Positions come from the database, and records through the fetcher: the consumer of the group fetches none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, errors
from aiokafka.helpers import create_ssl_context
from confluent_kafka import KafkaError

from infra.log import clients
from infra.observability.logs import StatusLog
from infra.processes.process_end import Parts
from infra.settings import Settings

log = logging.getLogger(__name__)

CHECK_MS = 1_000
AGAIN_S = 0.5
LEAVE_S = 2.0
"""How long to wait for a broker that is unavailable."""


@dataclass
class Membership:
    """Tells `assigned` which partitions are the agent's; none during a rebalance, and after it has left."""

    settings: Settings
    group: str
    name: str
    parts: Parts
    status: StatusLog
    assigned: Callable[[Sequence[int]], None]
    consumer: Any = None
    """That of the membership; none before it joins, and after it has left."""
    is_ending: bool = False
    """Cancelled while it joins: what is assigned still is ignored."""

    async def stay(self) -> None:
        """Join, and join again after errors, until this task is cancelled. Raises KafkaDenied."""
        while True:
            try:
                await self._join()
                while True:
                    # returns no records, but raises the group's errors
                    await self.consumer.getmany(timeout_ms=CHECK_MS)
                    self.status.well("group", "a member of Kafka's group again")
            except errors.GroupAuthorizationFailedError:
                denied = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
                raise clients.denied(self.settings, denied, f"Read of group '{self.group}'") from None
            except errors.KafkaError as error:
                what = f"Kafka's group is unavailable, joining again until it succeeds: {error}"
                self.status.wrong("group", what, type(error).__name__)
                await self.leave()
                await asyncio.sleep(AGAIN_S)

    async def _join(self) -> None:
        settings, password = self.settings, self.settings.kafka_sasl_password
        tls, ca = settings.kafka_security_protocol.endswith("SSL"), settings.kafka_ssl_ca_location
        self.consumer = AIOKafkaConsumer(
            bootstrap_servers=settings.kafka,
            security_protocol=settings.kafka_security_protocol,
            ssl_context=create_ssl_context(cafile=str(ca) if ca else None) if tls else None,
            sasl_mechanism=settings.kafka_sasl_mechanism or "PLAIN",
            sasl_plain_username=settings.kafka_sasl_username,
            sasl_plain_password=password.get_secret_value() if password else None,
            group_id=self.group,
            group_instance_id=self.name,
            enable_auto_commit=False,
            # it fetches nothing, and must not fail for lack of an offset
            auto_offset_reset="latest",
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=max(settings.session_timeout_ms // 5, 200),
            rebalance_timeout_ms=30_000,
            # a group leader that knows no partitions yet assigns none until its metadata is this old
            metadata_max_age_ms=5_000,
            max_poll_interval_ms=2**31 - 1,
            consumer_timeout_ms=5_000,  # how often it looks for something to fetch
        )
        self.consumer.subscribe([self.settings.events_topic], listener=_Rebalance(self, self.consumer))
        starting = asyncio.ensure_future(self.consumer.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.is_ending = True
            # aiokafka 0.14 leaves its first connection open where it is cancelled before the first answer
            await asyncio.wait({starting}, timeout=LEAVE_S)
            starting.cancel()
            raise

    async def leave(self) -> None:
        consumer, self.consumer = self.consumer, None
        if consumer is not None:
            self.assigned(())
            try:
                await asyncio.wait_for(consumer.stop(), LEAVE_S)
            except (errors.KafkaError, TimeoutError) as error:
                log.info("agent %s: could not leave Kafka's group: %s", self.name, error or "timeout")


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]
    """Passes one consumer's assignments on, until it is leaving the group."""

    def __init__(self, member: Membership, consumer: AIOKafkaConsumer) -> None:
        self.member = member
        self.consumer = consumer

    async def on_partitions_revoked(self, _revoked: Any) -> None:
        await self.on_partitions_assigned(())

    async def on_partitions_assigned(self, assigned: Any) -> None:
        # aiokafka would only log an error and continue
        await self.member.parts.within("rebalance of the group", self._take(assigned), may_return=True)

    async def _take(self, assigned: Any) -> None:
        if self.member.consumer is not self.consumer or self.member.is_ending:
            return
        mine = sorted(where.partition for where in assigned)
        if mine:
            log.info("agent %s: has partitions %s", self.member.name, mine)
            self.consumer.pause(*assigned)
        self.member.assigned(mine)


def what_it_knows(code: Mapping[str, int], events: Collection[str]) -> str:
    """A short hash of a set of views and the events that the code knows.

    Other code is another consumer group and has all partitions too: where one release can't continue, another may.
    """
    return hashlib.sha256(json.dumps([dict(sorted(code.items())), sorted(events)]).encode()).hexdigest()[:8]
