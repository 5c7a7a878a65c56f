"""What a benchmark works with: options, databases and topics of its own, processes and a meter of their cost."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.other_code import FIRST
from benchmarks.processes import Cpu, Process
from benchmarks.profile import Profile
from infra.database.connect import connect
from infra.log import topics
from infra.log.topics import Topic
from infra.processes.engines import Progress
from infra.settings import Settings
from projections.engine.views.core_views import all_views
from projections.engine.views.tables import to_add_indexes
from projections.engine.views.view import CORE
from tools.dev.stack import Stack
from tools.migrations import migrate

PARTITIONS = 8
SHARED_BUFFERS = 4 * 2**30
"""Bytes of PostgreSQL's, or a quarter of the machine's memory if that is less."""
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Options:
    """`scale` multiplies sizes, of loads and of the number of streams; 1 is what the aims are stated for."""

    rounds: int = 3
    scale: float = 1.0
    seed: int = 1
    part: str = ""
    commits: int = 8
    """Millions, of `growth`."""

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
    profile: Profile | None = None

    @contextmanager
    def world(self, beside: World | None = None, **settings: Any) -> Iterator[World]:
        """A database with this code's tables, and two empty topics, or those of the world `beside` it.

        The authors' views have no indexes there, as the peers' tables have none.
        """
        number = next(_numbers)
        names = [beside.commands.name, beside.events.name] if beside else [f"bench-{number}-{n}" for n in ("c", "e")]
        with self.database() as url:
            ours = {
                "database_url": url,
                "group_prefix": f"bench-{number}",
                "commands_topic": names[0],
                "events_topic": names[1],
                "policies_topic": f"bench-{number}-p",  # else a policy is held: the log knows it, and the database is new
                "public_topic": f"bench-{number}-public",
                "partitions": PARTITIONS,
                # this very stack, whatever the environment says of another one
                "kafka_security_protocol": "PLAINTEXT",
                "replication_factor": 1,
            }
            mine = self.stack.settings(**(ours | settings))
            migrate.upgrade(mine)
            with connect(mine, "samefold bench") as connection:
                for view in all_views().values():
                    for name in to_add_indexes(view, view.table_name):
                        connection.execute(f'drop index "{name}"'.encode())
            yield World(mine, *((beside.commands, beside.events) if beside else topics.ensure(mine)))

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

    def process(self, world: World, name: str, module: str, /, *arguments: str, **flags: object) -> Process:
        """A module with these arguments and flags, on a world."""
        given = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        return Process(world.settings, self.folder, name, module, *arguments, *given)

    def handler(self, world: World, name: str = "handler") -> Process:
        member = f"{world.settings.group_prefix}-{name}"
        return self.process(world, member, "commands.handler", name=member)

    def agent(
        self, world: World, views: Sequence[str], name: str = "agent", version: int = FIRST, agent: str = CORE
    ) -> Process:
        """An agent's process with, of the authors' views, only these: `balances` in that version and of that agent."""
        member = f"{world.settings.group_prefix}-{name}"
        code = (",".join(views), str(version), agent, "projections.engine.live.agent")
        return self.process(world, member, "benchmarks.other_code", *code, agent=agent, name=member)

    def cpu(self, **ours: Sequence[Process]) -> Cpu:
        """A meter of these processes, the broker and PostgreSQL; a profile begins with it."""
        groups = {name: [process.pid for process in processes] for name, processes in ours.items()}
        services = {"kafka": self.stack.kafka.process(), "postgres": self.stack.postgres.process()}
        groups |= {name: [process.pid] for name, process in services.items() if process}
        if self.profile is None:
            return Cpu(groups)
        self.profile.begin(list(chain.from_iterable(ours.values())))
        return Cpu(groups, at_end=self.profile.end)


def postgres_for_work() -> dict[str, str]:
    """Sized as on a server of its own: pages in memory, and no checkpoint because the log of changes is full."""
    megabytes = min(psutil.virtual_memory().total // 4, SHARED_BUFFERS) // 2**20
    return {"shared_buffers": f"{megabytes}MB", "max_wal_size": "16GB"}


@contextmanager
def bench_on_own_stack(
    options: Options,
    progress: Progress,
    *,
    profile: Profile | None = None,
) -> Iterator[Bench]:
    """What a benchmark works with, on a fresh stack in a temporary folder, which is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="samefold-bench-"))
    folder.chmod(0o711)  # where root may not make a user namespace, PostgreSQL runs as nobody and must get in
    settings = {**postgres_for_work(), **(profile.settings if profile else {})}
    stack = Stack(folder, settings=settings, programs=profile.programs if profile else None)
    try:
        stack.up()
        (folder / "logs").mkdir()
        with profile.of(stack) if profile else nullcontext():
            yield Bench(options, stack, folder / "logs", progress, profile)
    finally:
        stack.down()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Background:
    """The load's process; what it sent is known when it has ended."""

    process: Process

    def sent(self) -> int:
        return self._told()[0]

    def rate(self) -> float:
        """Sent per second: what the machine made of the rate that was asked for."""
        sent, milliseconds = self._told()
        return 1000 * sent / milliseconds

    def _told(self) -> tuple[int, int]:
        sent, milliseconds = json.loads(self.process.last_line())
        return sent, milliseconds


@contextmanager
def background(bench: Bench, world: World, first: int, accounts: int, rate: int, seed: int) -> Iterator[Background]:
    given = {"first": first, "accounts": accounts, "rate": rate, "seed": seed}
    with bench.process(world, "background", "benchmarks.background", **given) as process:
        process.wait_for_log("begun")
        yield Background(process)
