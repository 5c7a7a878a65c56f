"""What a benchmark works with: options, databases and topics of its own, processes and a meter of their cost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.processes import Cpu, Process
from infra.database import migrate
from infra.dev.stack import Stack
from infra.log import topics
from infra.log.topics import Topic
from infra.settings import Settings
from projections.engine.rebuild.progress import Progress

PARTITIONS = 8
_numbers = count(1)
SESSION_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True)
class Options:
    """`scale` multiplies sizes, of loads and of the number of streams; 1 is what the aims are stated for."""

    rounds: int = 3
    scale: float = 1.0
    seed: int = 1

    def scaled(self, size: int, least: int = 10) -> int:
        return max(round(size * self.scale), least)


@dataclass(frozen=True, slots=True)
class World:
    """A database and topics of one measurement's own."""

    settings: Settings
    commands: Topic
    events: Topic

    def ends(self) -> dict[int, int]:
        """The ends of `events` now, by partition."""
        return topics.describe(self.settings, self.settings.events_topic).end


@dataclass(slots=True)
class Bench:
    """What a benchmark works with."""

    options: Options
    stack: Stack
    folder: Path
    progress: Progress

    @contextmanager
    def world(self, **settings: Any) -> Iterator[World]:
        """A database with this code's tables, and two empty topics."""
        number = next(_numbers)
        topic = {"commands_topic": f"bench-{number}-commands", "events_topic": f"bench-{number}-events"}
        with self.database() as url:
            mine = self._settings(number, url, topic | settings)
            migrate.upgrade(mine)
            yield World(mine, *topics.ensure(mine))

    @contextmanager
    def beside(self, world: World, **settings: Any) -> Iterator[World]:
        """Another database, with this code's tables, on the topics of a world."""
        number = next(_numbers)
        topic = {"commands_topic": world.commands.name, "events_topic": world.events.name}
        with self.database() as url:
            mine = self._settings(number, url, topic | settings)
            migrate.upgrade(mine)
            yield World(mine, world.commands, world.events)

    @contextmanager
    def database(self) -> Iterator[str]:
        """An empty database; its connection string."""
        name = f"bench_{next(_numbers)}"
        with psycopg.connect(self.stack.postgres.url(), autocommit=True) as connection:
            connection.execute(f'create database "{name}"'.encode())
            yield self.stack.postgres.url(name)
            connection.execute(f'drop database "{name}" with (force)'.encode())

    def chance(self, *what: object) -> random.Random:
        """Random numbers of the run's seed, others for each `what`."""
        return random.Random(repr((self.options.seed, *what)))

    def handler(self, world: World, name: str = "handler") -> Process:
        member = f"{world.settings.group_prefix}-{name}"
        return Process(world.settings, self.folder, member, "commands.handler", "--name", member)

    def agent(self, world: World, views: Sequence[str], name: str = "agent") -> Process:
        """An agent's process with the system's views and, of the authors', only these."""
        member = f"{world.settings.group_prefix}-{name}"
        only = [argument for view in views for argument in ("--only", view)]
        return Process(world.settings, self.folder, member, "benchmarks.agent", *only, "--name", member)

    def cpu(self, **ours: Sequence[Process]) -> Cpu:
        """A meter of these processes, the broker and PostgreSQL."""
        groups = {name: [process.pid for process in processes] for name, processes in ours.items()}
        services = {"kafka": self.stack.kafka.process(), "postgres": self.stack.postgres.process()}
        return Cpu(groups | {name: [process.pid] for name, process in services.items() if process})

    def _settings(self, number: int, url: str, more: dict[str, Any]) -> Settings:
        ours = {
            "database_url": url,
            "group_prefix": f"bench-{number}",
            "partitions": PARTITIONS,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            # this very stack, whatever the environment says of another one
            "kafka_security_protocol": "PLAINTEXT",
            "replication_factor": 1,
            "min_insync_replicas": 1,
        }
        return self.stack.settings(**(ours | more))
