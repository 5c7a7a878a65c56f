"""What the tests of the publisher need: commits, publisher processes, and a plain consumer of the public topic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, TopicPartition

from infra.log import clients, topics
from infra.log.partitioner import partition_of
from infra.log.records import Commit, EventRecord, Opening, encode
from infra.settings import Settings
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

ON = "2026-01-01"


class Log:
    """Writes a world's log as the writers of all its partitions would, without handlers; `accepted` are the events' ids."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        topics.ensure(settings)
        self.accepted: list[str] = []
        self._producer = clients.producer(settings)
        self._versions: dict[str, int] = defaultdict(int)
        self._seqs: dict[int, int] = defaultdict(int)
        self._epochs = {p: self.append(p, encode(Opening("test", "commands"))) for p in range(settings.partitions)}

    def append(self, partition: int, value: bytes) -> int:
        """The record's offset."""
        offsets: list[int] = []
        self._send(partition, value, offsets)
        self._producer.flush(30)
        assert offsets != [-1]
        return offsets[0]

    def deposit(self, account: str, cents: int = 1, count: int = 1) -> None:
        """So many commits with a deposit each, without waiting for each; the first one opens the account."""
        for _ in range(count):
            first = not self._versions[account]
            body = {"overdraft_limit": 0, "on": ON} if first else {"cents": cents, "on": ON}
            self.event(account, "AccountOpened" if first else "MoneyDeposited", **body)
        self._producer.flush(30)

    def event(self, account: str, kind: str, **body: Any) -> None:
        stream = f"accounts/{account}"
        partition = partition_of(stream, self.settings.partitions)
        self._versions[account] += 1
        self._seqs[partition] += 1
        version, seq = self._versions[account], self._seqs[partition]
        event = EventRecord(kind, msgspec.Raw(msgspec.json.encode(body)))
        commit = Commit(
            stream, version, [event], f"c{version}", seq, "f" * 32, "accepted", None, self._epochs[partition], seq
        )  # fmt: skip
        self._send(partition, encode(commit), [])
        self.accepted.append(f"{stream}@{version}")

    def flush(self) -> None:
        self._producer.flush(30)

    def _send(self, partition: int, value: bytes, offsets: list[int]) -> None:
        self._producer.produce(
            self.settings.events_topic,
            value,
            partition=partition,
            on_delivery=lambda error, message: offsets.append(-1 if error else message.offset()),
        )
        self._producer.poll(0)

    def partition(self, account: str) -> int:
        return partition_of(f"accounts/{account}", self.settings.partitions)


# the code of `policies/public.py` can be replaced, and a signal comes where a point is reached for the nth time
_STARTED = """
import os, runpy, signal, sys, types
from infra.processes import faultpoints
point, left, action, code, *rest = sys.argv[1:]
left = int(left)
def hook(at):
    global left
    left -= at == point
    if at == point and left == 0:
        os.kill(os.getpid(), getattr(signal, action))
faultpoints.hook = hook if point else None
if code:
    import policies.public
    exec(code, policies.public.__dict__)
sys.argv = ["publisher", *rest]
runpy.run_module("policies.engine.publisher", run_name="__main__", alter_sys=True)
"""


class Process:
    """A publisher process of a world. `code` is run in `policies/public.py`."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        name: str = "p1",
        *,
        code: str = "",
        point: str = "",
        nth: int = 1,
        action: str = "SIGKILL",
    ) -> None:
        self.log = folder / f"{name}.log"
        self._before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _STARTED, point, str(nth), action, code, "--name", name],
                env=os.environ | {"PYTHONPATH": str(ROOT)} | settings.environment(),
                cwd=folder,
                stderr=output,
            )

    def says(self, text: str) -> bool:
        return text in self.log.read_bytes()[self._before :].decode()

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def ends(self) -> int:
        return self.process.wait(60)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)


@contextmanager
def publisher(settings: Settings, folder: Path, name: str = "p1", **more: Any) -> Iterator[Process]:
    running = Process(settings, folder, name, **more)
    try:
        yield running
    finally:
        running.end()


@dataclass
class Reader:
    """A plain consumer of the whole public topic, as another team would write one; `ids` are in its order."""

    settings: Settings
    isolation: str = "read_committed"
    ids: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, bytes]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.consumer = Consumer(
            {
                "bootstrap.servers": self.settings.kafka,
                "group.id": f"{self.settings.group_prefix}-other-team-{self.isolation}",
                "isolation.level": self.isolation,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "allow.auto.create.topics": False,
            }
        )
        self.consumer.assign(
            [TopicPartition(self.settings.public_topic, p, 0) for p in range(self.settings.partitions)]
        )

    def read(self) -> None:
        """What has come."""
        for message in self.consumer.consume(1_000, 0.2):
            if message.error() is not None:
                assert message.error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART, message.error()
                continue
            event = json.loads(message.value())
            self.events.append(event)
            self.headers.append(dict(message.headers()))
            self.keys.append(message.key().decode())
            self.ids.append(event["id"])

    def wait(self, ids: Iterable[str]) -> None:
        """Wait until all of these have come."""
        wanted = set(ids)

        def come() -> bool:
            self.read()
            return wanted <= set(self.ids)

        until(come, f"{len(wanted)} public events")

    def require_exactly(self, accepted: Iterable[str]) -> None:
        """Each of these once, and per stream in order."""
        wanted = Counter(accepted)
        found = Counter(self.ids)
        assert found == wanted, (list((found - wanted).items())[:5], list((wanted - found).items())[:5])
        last: dict[str, int] = defaultdict(int)
        for event in self.events:
            assert event["streamversion"] > last[event["subject"]], event
            last[event["subject"]] = event["streamversion"]

    def close(self) -> None:
        self.consumer.close()


@contextmanager
def reader(settings: Settings, isolation: str = "read_committed") -> Iterator[Reader]:
    """Makes the public topic if it is not there."""
    _, events = topics.ensure(settings)
    topics.ensure_public(settings, events)
    reading = Reader(settings, isolation)
    try:
        yield reading
    finally:
        reading.close()
