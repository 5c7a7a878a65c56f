"""This process as a member of the group in which the handlers of one release share the partitions of `commands`.

Correctness does not depend on the group. It spreads the work, confirms a writer that is to open again (rule 6), and keeps attempts
at commands that may end their handler (ADR 19).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import count

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from commands.intake import Received, reason
from commands.partition import Attempt, Partition
from commands.writer import Action, Confirm, Limits, Writer
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.topics import Topic
from infra.processes.process_end import AGAIN
from infra.settings import Settings

log = logging.getLogger(__name__)

CONFIRM_S = (0.05, 0.3)
CONFIRM_WITHIN_S = 20.0
ATTEMPTS = 3
ATTEMPT_S = 5.0
"""For what the group keeps of an attempt, and for the acknowledgement of its commits."""

_decode_attempt = msgspec.json.Decoder(Attempt).decode
_ENDED = reason(
    "failed", f"ended-the-handler: its decision ended {ATTEMPTS} handlers; their logs or exit codes say how"
)


class TopicsInconsistent(SamefoldError):
    """Topics and positions are inconsistent: a topic was recreated, trimmed or deleted."""


class HandlerFenced(SamefoldError):
    """Another process joined the group under this handler's name."""


class KafkaClientFailed(SamefoldError):
    """Kafka's client did not answer, or refused a record or an offset: a defect, or the topic changed."""


class Group:
    """The membership of the handler `member` in the group `name`. It joins again by itself where that helps."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        member: str,
        commands: Topic,
        connection: clients.Connection,
        stopping: threading.Event,
    ) -> None:
        self.commands = commands
        """The topic as it was checked last."""
        self.partitions: dict[int, Partition] = {}
        """Those that are assigned to this process."""
        self.is_rebalanced = False
        """Partitions were assigned or revoked."""
        self._settings = settings
        self._name = name
        self._member = member
        self._connection = connection
        self._stopping = stopping
        self._numbers = count()
        self._join()

    def _join(self) -> None:
        self._failure: tuple[KafkaError, bool] | None = None
        """Why the consumer failed, and whether it was a member then: its partitions are revoked right after."""
        self._is_member = False
        """The group has assigned partitions, or none, since the join."""
        self._asked: dict[str, tuple[Partition, float]] = {}
        """Questions for confirmation without an answer, and when they were asked."""
        self._is_reporting = False
        self.consumer = clients.group_consumer(
            self._settings,
            self._name,
            instance=self._member,
            connection=self._connection,
            on_commit=self._on_commit,
            on_finished=self._on_failure,
        )
        self.consumer.subscribe(
            [self.commands.name], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def consume(self, most: int, seconds: float) -> list[Message]:
        """The next commands, and errors."""
        try:
            messages: list[Message] = self.consumer.consume(most, seconds)
            return messages
        except KafkaException as raised:
            if not clients.is_finished(raised.args[0]):
                raise
            self._on_failure(raised.args[0])
            return []

    def check(self) -> None:
        """Join again, without partitions, where the consumer failed before it was a member.

        Raises HandlerFenced where it failed later, KafkaClientFailed where the group does not answer.
        """
        late = time.monotonic() - CONFIRM_WITHIN_S
        if any(asked < late and self.has(partition) for partition, asked in self._asked.values()):
            # the partition would wait for ever
            raise KafkaClientFailed(f"The group {self._name} has not answered for {CONFIRM_WITHIN_S:.0f} s.", AGAIN)
        if self._failure is None:
            return
        error, was_member = self._failure
        if was_member:
            raise HandlerFenced(
                f"Handler '{self._member}' was fenced out of its group: {error.str()}.",
                "Give each handler a name of its own (`samefold run handler --name`), and start it again.",
            )
        # a broker that was frozen may receive a join twice, make two members of it, and fence the one in use
        log.warning("handler %s: joins its group again: %s", self._member, error.str())
        with suppress(KafkaException):
            self.consumer.close()
        self.partitions.clear()
        self._stopping.wait(random.uniform(*CONFIRM_S))  # two of one name would fence each other at the same pace
        self._join()

    def has(self, partition: Partition) -> bool:
        """Whether it is still assigned to this process."""
        return self.partitions.get(partition.number) is partition

    def close(self) -> None:
        # with commits under way it would wait for them; a static member leaves its group without a message anyway
        if not self._asked and not self._is_reporting:
            self.consumer.close()

    # ── partitions come and go ──

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        self._is_member = self.is_rebalanced = True
        # the writer seeks later; until then an offset that was deleted would be an error
        first = self.commands.first
        starts = [TopicPartition(p.topic, p.partition, first.get(p.partition, 0)) for p in assigned]
        consumer.incremental_assign(starts)
        consumer.pause(assigned)
        settings = self._settings
        limits = Limits(settings.run_ahead, clients.MAX_COMMIT_BYTES, clients.ACK_TIMEOUT_S)
        for number in sorted(p.partition for p in assigned):
            partition = self.partitions[number] = Partition(number, Writer(number, self.commands.id, limits))
            partition.later(0, partition.writer.start)

    def _on_lost(self, consumer: Consumer, lost: list[TopicPartition]) -> None:
        self._is_member = False
        self._on_revoke(consumer, lost)

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        self.is_rebalanced = True
        for one in revoked:
            self.partitions.pop(one.partition, None)
        consumer.incremental_unassign(revoked)

    def _on_failure(self, error: KafkaError) -> None:
        if self._failure is None:
            self._failure = error, self._is_member

    def on_error(self, error: KafkaError, number: int) -> None:
        """An error that came instead of a command of this partition. Raises what must end the process."""
        topic, partition = self.commands.name, self.partitions.get(number)
        if _ends(error):
            self._on_failure(error)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            if partition and not partition.is_serving:
                # assigned from the topic's beginning of some seconds ago; librdkafka reads no more of it. Whether the next
                # command is still there, only its writer knows
                raise KafkaClientFailed(f"Commands of partition {number} were deleted while it was assigned.", AGAIN)
            raise TopicsInconsistent(
                f"'{topic}' does not hold the next command any more: {error.str()}.",
                "The topic was trimmed or recreated. Restore it, or, if its commands may be lost for good, start with new topics.",
            )
        elif error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise TopicsInconsistent(f"Topic '{topic}' was deleted.", "Restore it: its id is part of every position.")
        elif clients.is_denied(error):
            is_group = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
            where = f"group '{self._name}'" if is_group else f"topic '{topic}'"
            raise clients.denied(self._settings, error, f"Read of {where}")
        elif not clients.may_pass(error) and not (partition and partition.is_refused):
            log.warning("handler %s%s: %s", self._member, f", partition {number}" if partition else "", error.str())
            if partition:
                partition.is_refused = True

    # ── what the group confirms and keeps: commits of offsets ──

    def confirm(self, partition: Partition) -> Action | None:
        """Ask the group: it lets only the partition's current assignee commit an offset. The answer is the partition's timer."""
        question = f"confirm {next(self._numbers)}"  # comes back with the answer, which so is that to this question
        self._asked[question] = partition, time.monotonic()
        try:
            self._commit([self._mark(partition, max(partition.reported, partition.writer.last_command + 1), question)])
        except KafkaException as error:
            del self._asked[question]
            if _ends(error.args[0]):
                self._on_failure(error.args[0])
            return Confirm(f"not confirmed by the group: {error.args[0].str()}")
        return None

    def report_progress(self) -> None:
        """Commit to the group how far commands are decided: of repeated commands, nothing else shows it."""
        news = [one for one in self.partitions.values() if one.is_serving and one.undecided != one.reported]
        if news and not self._is_reporting:
            with suppress(KafkaException):
                self._commit([self._mark(one, one.undecided, one.attempt) for one in news])
                self._is_reporting = True
                for one in news:
                    one.reported = one.undecided

    def last_attempt(self, partition: Partition) -> Attempt:
        """The attempt that the group keeps."""
        here = TopicPartition(self.commands.name, partition.number)
        try:
            [kept] = self.consumer.committed([here], ATTEMPT_S)
            return _decode_attempt(kept.metadata) if kept.metadata else Attempt()
        except (KafkaException, msgspec.DecodeError):  # then it is not counted
            return Attempt()

    def attempt(self, partition: Partition, commands: list[Received]) -> list[Received]:
        """The commands to decide, or to reject. If they are an attempt, the group keeps that now, beside the partition's offset."""
        before = partition.attempt
        if before is None or not commands:
            return commands
        first, last = commands[0].offset, commands[-1].offset
        number = before.number + 1 if before[1:] == (first, last) else 1
        if last >= before.last:
            partition.attempt = None
        if number > ATTEMPTS:
            log.error(
                "handler %s: %s of %s ended %d handlers", self._member, commands[0].id, commands[0].stream, ATTEMPTS
            )
            return [msgspec.structs.replace(one, rejection=_ENDED) for one in commands]
        with suppress(KafkaException):  # then it is not counted
            mark = self._mark(partition, first, Attempt(number, first, last))
            self.consumer.commit(offsets=[mark], asynchronous=False)
        return commands

    def _mark(self, partition: Partition, offset: int, kept: Attempt | str | None) -> TopicPartition:
        """What the group is to keep: an offset, and an attempt or a question."""
        text = kept if isinstance(kept, str) else msgspec.json.encode(kept or Attempt()).decode()
        return TopicPartition(self.commands.name, partition.number, offset, metadata=text)

    def _commit(self, marks: list[TopicPartition]) -> None:
        self.consumer.commit(offsets=marks, asynchronous=True)

    def _on_commit(self, failed: KafkaError | None, marks: list[TopicPartition]) -> None:
        """The group's answer."""
        for mark in marks:
            error = failed or mark.error
            partition, _ = self._asked.pop(mark.metadata, (None, 0.0))
            if error is not None and _ends(error):
                self._on_failure(error)
            elif partition is not None:
                refused = error and partial(Confirm, f"not confirmed by the group: {error.str()}")
                partition.later(0, refused or partition.writer.on_confirmed)
            else:
                self._is_reporting = False
                if error is not None and (partition := self.partitions.get(mark.partition)):
                    partition.reported = -1


def _ends(error: KafkaError) -> bool:
    """Whether the consumer can't go on."""
    return error.code() == KafkaError.FENCED_INSTANCE_ID or clients.is_finished(error)
