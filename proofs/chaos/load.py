"""Keeps commands coming: new accounts, deposits, withdrawals of which some are refused, transfers, and some that were sent before.

Of the transfers some are between the same account, of too much, or with a closed account.
"""

from __future__ import annotations

import random
import time
from collections import deque
from datetime import date, timedelta

import msgspec
from confluent_kafka import KafkaError, Message, Producer

from demo.background_thread import BackgroundThread
from infra.log.partitioner import partition_of
from infra.log.records import Command, encode
from infra.settings import Settings
from proofs.chaos.ledger import Key, Sent
from proofs.chaos.tail import Progress

TICK_S = 0.02
DAY = date(2026, 1, 1)
LIMIT = 100
TRANSFERS = 0.05
"""Their share of the commands. A completed one leads to five more."""


class Load(BackgroundThread):
    """Sends `rate` commands a second in a thread, and waits while `ahead` of them have no outcome yet.

    `sent` has a command before it goes out; `acknowledged` says which ones the log of commands has for sure, and `ends` up to
    which offset of each partition. Other senders add theirs to both.
    """

    def __init__(self, settings: Settings, progress: Progress, seed: int, rate: int, ahead: int = 4_000) -> None:
        super().__init__("load")
        self.settings, self.progress, self.rate, self.ahead = settings, progress, rate, ahead
        self.sent: dict[Key, Sent] = {}
        self.acknowledged: set[Key] = set()
        self.ends = [-1] * settings.partitions
        self._random = random.Random(seed)
        # it tries for ever, and again after any fault: a command may come twice, or after a later one
        self._producer = Producer({"bootstrap.servers": settings.kafka, "message.timeout.ms": 0, "log_level": 2})
        self._accounts: list[str] = []
        self._recent: deque[Sent] = deque(maxlen=500)
        self._closing: list[Sent] = []
        self._abandoned = False

    def _end(self, join_s: float = 120) -> None:
        super()._end(join_s)
        assert not self._thread.is_alive(), "the broker never acknowledged the last commands"

    def _work(self) -> None:
        owed = 0.0
        last = time.monotonic()
        while not self._ended.wait(TICK_S):
            now = time.monotonic()
            owed = min(owed + self.rate * (now - last), self.rate)
            last = now
            if self._waiting() > self.ahead:
                owed = 0.0
            while owed >= 1:
                self._send(self._next())
                owed -= 1
            self._producer.poll(0)
        self._flush()
        # one that is new comes last in each partition: of a repeated one nothing would be seen
        for stream in self._last_streams():
            self._send(Sent(stream, "last", "OpenAccount", LIMIT, str(DAY)))
        self._flush()

    def stop(self) -> None:
        """No more commands; returns when each one sent is acknowledged."""
        self._end()

    def abandon(self) -> None:
        """Wait for no acknowledgement any more."""
        self._abandoned = True

    def _flush(self) -> None:
        while len(self._producer) and not self._abandoned:
            self._producer.flush(0.2)

    def _last_streams(self) -> list[str]:
        """One for each partition."""
        streams = (f"accounts/last-{number}" for number in range(100 * self.settings.partitions))
        return list({partition_of(stream, self.settings.partitions): stream for stream in streams}.values())

    def _waiting(self) -> int:
        places = self.progress.places
        return sum(end - place.command_offset for end, place in zip(self.ends, places, strict=True))

    def _next(self) -> Sent:
        chance = self._random.random()
        number = len(self.sent)
        on = str(DAY + timedelta(days=number // 500))
        if chance < 0.05 or len(self._accounts) < 8:
            name = f"a{len(self._accounts)}"
            self._accounts.append(name)
            if len(self._accounts) % 10 == 0:
                self._closing.append(Sent(f"accounts/{name}", f"close-{number}", "CloseAccount", 0, on))
            return Sent(f"accounts/{name}", f"c{number}", "OpenAccount", LIMIT, on)
        if self._closing:
            return self._closing.pop()
        if chance < 0.08 and self._recent:
            return self._random.choice(self._recent)
        if chance > 1 - TRANSFERS:
            source, target = self._random.choices(self._accounts, k=2)
            cents = self._random.randint(1, 60)
            return Sent(f"transfers/t{number}", f"c{number}", "RequestTransfer", cents, on, source, target)
        stream = f"accounts/{self._random.choice(self._accounts)}"
        cents = self._random.randint(1, 100)
        return Sent(stream, f"c{number}", "Deposit" if chance < 0.6 else "Withdraw", cents, on)

    def _send(self, command: Sent) -> None:
        key = (command.stream, command.id)
        self.sent[key] = command
        self._recent.append(command)
        body = Command(command.id, command.stream, command.type, msgspec.Raw(msgspec.json.encode(command.body)))

        def acknowledged(error: KafkaError | None, message: Message) -> None:
            if error:  # as of a topic that a broker does not know, right after its start
                self._send(command)
                return
            self.acknowledged.add(key)
            partition = message.partition()
            self.ends[partition] = max(self.ends[partition], message.offset())

        self._producer.produce(
            self.settings.commands_topic,
            encode(body),
            key=command.stream.encode(),
            partition=partition_of(command.stream, self.settings.partitions),
            on_delivery=acknowledged,
        )
