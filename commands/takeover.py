"""What a writer needs before it serves: the database's position of its partition, the end of the log, and what lies between."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from confluent_kafka import KafkaException, TopicPartition

from commands import release
from commands.snapshots import SnapshotReader
from commands.writer import Action, Load, ReadLog, Refuse, Snapshot, Wait, Writer
from infra.archive.manifest import ends_of
from infra.archive.whole_log import read_range
from infra.database.connect import DatabaseUnavailable
from infra.log import clients, topics
from infra.processes.faultpoints import reach
from infra.settings import Settings
from projections.engine.store.command_types import CommandType, make_types_live
from projections.engine.store.positions import live_set
from projections.engine.views.core_views import agent_views, code_set
from projections.engine.views.view import CORE

log = logging.getLogger(__name__)

GROUPS_S = 1.0
"""Between two queries for the groups of other releases."""


class Takeover:
    """Carries out the actions `Load` and `ReadLog` of all writers."""

    def __init__(
        self, settings: Settings, who: str, group: str, admin: topics.Admin, read_model: SnapshotReader
    ) -> None:
        self._settings = settings
        self._who = who
        self._group = group
        self._admin = admin
        self._read_model = read_model
        self._consumer = clients.range_consumer(settings)
        self._groups: list[str] = []
        self._due_groups = 0.0

    def load(self, writer: Writer) -> Action:
        """The action that follows from the database's position and the log's end."""
        try:
            snapshot = self._read_model.read()
            reach("position loaded")
            if snapshot.fits and (action := self._before_opening(snapshot)):
                return action
            # after the snapshot, so that the end can't be older than the position
            here = TopicPartition(self._settings.events_topic, writer.partition)
            first, end = self._consumer.get_watermark_offsets(here, timeout=topics.TIMEOUT_S)
            position = snapshot.positions.get(writer.partition)
            if position and first > position.next_offset and self._archived(writer.partition) < first:
                return Refuse(
                    "The log does not reach back to the read model's position: it was trimmed without an archive, and what is "
                    "missing was never applied."
                )
        except DatabaseUnavailable:
            return Wait("PostgreSQL is unavailable")
        except KafkaException as error:
            if clients.is_denied(error.args[0]):
                raise clients.denied(
                    self._settings, error.args[0], f"Read of topic '{self._settings.events_topic}'"
                ) from error
            if not clients.may_pass(error.args[0]):
                raise
            # seen once: after a broker was overloaded for minutes, it did not answer this client any more, but a new one
            self._consumer.close()
            self._consumer = clients.range_consumer(self._settings)
            return Wait(f"Kafka is unavailable: {error.args[0].str()}")
        except clients.KafkaUnavailable as error:
            return Wait(f"Kafka is unavailable: {error.message}")
        return writer.on_position(snapshot, end)

    def _archived(self, partition: int) -> int:
        """The offset up to which a partition of the log is archived."""
        with self._read_model.session() as db:
            return ends_of(db, self._settings.events_topic).get(partition, 0)

    def read_log(self, writer: Writer, start: int, stop: int) -> Action:
        """The action that follows from the records of [start, stop)."""
        action: Action | None = None
        try:
            for records in read_range(
                self._settings, self._settings.events_topic, writer.partition, start, stop, consumer=self._consumer
            ):
                action = writer.on_log(records)
                if not isinstance(action, ReadLog):
                    break
        except (clients.KafkaUnavailable, DatabaseUnavailable) as error:  # the database knows what is archived
            log.warning("%s: %s", self._who, error)
            return writer.start()
        return writer.start() if action is None else action  # without a record, nothing was read up to the opening

    def close(self) -> None:
        self._consumer.close()

    # ── releases ──

    def check_types(self) -> None:
        """A restored database may lack this code's command types, while no command comes in that would show it."""
        snapshot = self._read_model.read()
        if snapshot.fits and snapshot.unrecorded:
            self._before_opening(snapshot)

    def _before_opening(self, snapshot: Snapshot) -> Action | None:
        """Record this code's command types, once agents can fold its events.

        Where another release's handlers run too, only one of the groups decides.
        """
        if snapshot.unfoldable:
            return Wait(
                f"no agent that can fold these events has run yet, start those first: {_names(snapshot.unfoldable)}"
            )
        if snapshot.unrecorded:
            with self._read_model.session() as db:
                if live_set(db, CORE) != code_set(agent_views(CORE)):  # then agents may not fold all of its events
                    return Wait(
                        "other views are live than this code's: `samefold rebuild` with this code switches to its own"
                    )
                make_types_live(db, self._settings.events_topic)
            log.info("%s: these commands are live now: %s", self._who, _names(snapshot.unrecorded))
            return Load()
        if (more := snapshot.unknown or snapshot.newer) and (other := self._deciding()) != self._group:
            return Wait(f"another release decides, in the group {other}: it knows {_names(more)}")
        return None

    def _deciding(self) -> str:
        """The group of handlers that decides while handlers of several releases run."""
        now = time.monotonic()
        if now >= self._due_groups:
            self._groups = release.alive(self._admin, self._settings.group_prefix)
            self._due_groups = now + GROUPS_S
        return release.deciding([*self._groups, self._group], self._settings.group_prefix, self._read_model.states)


def _names(types: Iterable[CommandType | str]) -> str:
    return ", ".join(sorted(map(str, types)))
