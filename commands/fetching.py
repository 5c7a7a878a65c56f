"""Fetches commands and leaves none out: each partition's by their offsets, from the one that its writer wants next."""

from __future__ import annotations

import time

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from commands.group import Group, KafkaClientFailed
from commands.partition import BEHIND_RETRY_S, Partition
from infra.log import clients
from infra.processes.gathering import Window
from infra.processes.process_end import AGAIN

_NOT_YET = {KafkaError._STATE, KafkaError._UNKNOWN_PARTITION, KafkaError._PREV_IN_PROGRESS, KafkaError._OUTDATED}
"""Of a partition that librdkafka does not fetch yet, pauses itself, or does not fetch any more: the next poll shows which."""


class Fetching:
    """Fetches, pauses and resumes the partitions that the group has assigned."""

    def __init__(self, group: Group, most: int) -> None:
        self._group = group
        self._most = most
        self._window = Window()
        self._taken_at: float | None = None
        """When the last batch was taken."""
        self._resumed: set[int] = set()
        """Partitions that were resumed since the last poll, while no other one was fetched."""

    def poll(self, seconds: float) -> list[tuple[Partition, int, Message]]:
        """Wait for the first command and take all that have arrived, with their offsets. Raises what must end the process."""
        messages = self._take(seconds)
        serving = {number: one for number, one in self._group.partitions.items() if one.is_serving}
        found: list[tuple[Partition, int, Message]] = []
        again: set[int] = set()
        """Partitions to be read from their next command on."""
        for message in messages:
            number = message.partition()
            partition = serving.get(number)
            if error := message.error():
                self._group.on_error(error, number)
                again.add(number)
                if partition:
                    partition.gap = None
            elif partition and number not in again:
                offset = message.offset()
                if offset != partition.next_offset and not self._is_gap(partition, offset, again):
                    continue
                partition.next_offset = offset + 1
                partition.is_refused = False
                found.append((partition, offset, message))
        self._group.check()
        if self._group.is_rebalanced:
            # librdkafka paused the partitions that stay assigned, and may have missed that one was resumed
            self._group.is_rebalanced = False
            again |= serving.keys()
            self._resumed |= serving.keys()
        for number in again & serving.keys():
            if not serving[number].is_paused and self._group.has(serving[number]):
                self.read_on(serving[number])
        return found

    def _take(self, seconds: float) -> list[Message]:
        if self._resumed:
            clients.fetch_at_once(self._group.consumer, self._group.commands.name, self._resumed)
            self._resumed.clear()
        if self._taken_at is not None:
            self._window.took(time.monotonic() - self._taken_at)
            self._taken_at = None
        messages = self._group.consume(1, seconds)
        if messages:
            messages += self._group.consume(self._most, 0)
            room = min(self._window.enough, self._most) - len(messages)
            if room > 0:
                messages += self._group.consume(room, self._window.seconds)
            self._window.began(len(messages))
            self._taken_at = time.monotonic()
        return messages

    def _is_gap(self, partition: Partition, offset: int, again: set[int]) -> bool:
        """Whether the offsets before this one have no records, as a second read shows. The partition is read `again` for that."""
        gap = partition.next_offset, offset
        if offset < partition.next_offset:
            return False
        if partition.gap == gap:
            return True
        partition.gap = gap
        again.add(partition.number)
        return False

    def read_on(self, partition: Partition) -> None:
        """Read commands of the partition, from the next one on.

        The seek is needed: librdkafka before 2.13.2 takes an error for a record (its issue 4844), and after a pause, ours or its
        own while it rebalances, would go on behind a command that was never delivered.
        """
        here = self._place(partition)
        others = (one for one in self._group.partitions.values() if one is not partition)
        is_alone = not any(one.is_serving and not one.is_paused for one in others)
        partition.is_paused = False
        try:
            self._group.consumer.seek(here)
            self._group.consumer.resume([here])
        except KafkaException as error:
            if error.args[0].code() in _NOT_YET:
                partition.later(BEHIND_RETRY_S, lambda: self.read_on(partition))
            elif not clients.is_finished(error.args[0]):
                raise KafkaClientFailed(f"No commands can be read: {error.args[0].str()}.", AGAIN) from error
        else:
            if self._resumed or is_alone:
                self._resumed.add(partition.number)

    def pause(self, partition: Partition) -> None:
        partition.is_paused = True
        self._group.consumer.pause([self._place(partition)])

    def _place(self, partition: Partition) -> TopicPartition:
        return TopicPartition(self._group.commands.name, partition.number, partition.next_offset)
