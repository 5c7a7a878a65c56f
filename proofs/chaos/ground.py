"""The services of all fields: one Kafka and one PostgreSQL, each with a proxy before it for the processes under fire."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import psycopg
import pytest
from pydantic import SecretStr

from infra.settings import PREFIX, Settings
from proofs.chaos.armed import Control
from proofs.chaos.proxy import Proxy
from proofs.chaos.wires import KafkaWire, PostgresWire
from tools.dev.kafka import HOST, Front, Kafka
from tools.dev.postgres import USER
from tools.dev.process import free_ports
from tools.dev.stack import Stack

SOCKET = ".s.PGSQL.5432"
SHORT = {
    "partitions": 4,
    "session_timeout_ms": 2_000,
    "idle_in_transaction_timeout_ms": 1_000,
    "batch": 50,
}
"""Short enough to outlast every timeout in seconds, batches small enough to hit the middle of one."""


class Ground:
    """`folder` must be short: sockets lie in it. `direct` settings go past the proxies, `fronted` ones through them."""

    def __init__(self, folder: Path) -> None:
        self.stack = Stack(folder)
        back, front = free_ports(2)
        self.stack.kafka = Kafka(self.stack.folder / "kafka", fronts=[Front(back, front)])
        # the JVM's second compiler would take twice what the broker's own work does
        self.stack.kafka.jvm = (*self.stack.kafka.jvm, "-XX:TieredStopAtLevel=1")
        self._sockets = self.stack.folder / "front"
        self.kafka = Proxy((HOST, front), (HOST, back), KafkaWire)
        self.postgres = Proxy(self._sockets / SOCKET, self.stack.postgres.socket_folder / SOCKET, PostgresWire)
        self._sockets.mkdir(parents=True, exist_ok=True)
        self.control = Control(self._sockets / "control")
        self._worlds = count(1)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.callback(self.stack.down)
        self.stack.up()
        self._open.callback(self.control.close)
        self._open.enter_context(self.kafka)
        self._open.enter_context(self.postgres)
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def world(self) -> Settings:
        """Direct settings of topics that are not made yet, and of an empty database."""
        number = next(self._worlds)
        database = f"world_{number}"
        with psycopg.connect(self.stack.postgres.url(), autocommit=True) as connection:
            connection.execute(f'create database "{database}"')
        return self.stack.settings(
            commands_topic=f"commands-{number}",
            events_topic=f"events-{number}",
            policies_topic=f"policies-{number}",
            public_topic=f"public-{number}",
            group_prefix=f"chaos-{number}",
            database_url=self.stack.postgres.url(database),
            **SHORT,
        )

    def fronted(self, world: Settings) -> Settings:
        database = world.database.rpartition("?")[0].rpartition("/")[2]
        host, port = self.kafka.front if isinstance(self.kafka.front, tuple) else ("", 0)
        return world.model_copy(
            update={
                "kafka_bootstrap": f"{host}:{port}",
                "database_url": SecretStr(f"postgresql://{USER}@/{database}?host={self._sockets}"),
            }
        )


@contextmanager
def ground_in() -> Iterator[tuple[Ground, Path]]:
    """A ground, and the folder in which it is. A developer's own settings (environment, .env) must not decide a run."""
    with TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as made, pytest.MonkeyPatch.context() as patch:
        folder = Path(made)
        folder.chmod(0o711)  # where root may not make a user namespace, PostgreSQL runs as nobody and must get in
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            patch.delenv(name)
        patch.chdir(folder)
        with Ground(folder / "ground") as ground:
            yield ground, folder
