"""Looks at how far things are, over connections that stay open: looking must cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import LiteralString

from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from benchmarks.fill import fill_commands
from benchmarks.processes import Process, wait_until
from benchmarks.stage import Bench, World
from benchmarks.workload import Order
from infra.database.connect import Connection, connect
from infra.log import names, topics
from projections.engine.views.view import CORE


class Progressed:
    """How far a world's handlers and agents are."""

    def __init__(self, world: World, database: Connection) -> None:
        self._world = world
        self._database = database
        self._admin = topics.Admin(world.settings)

    def ends(self) -> dict[int, int]:
        """The ends of `events` now, by partition."""
        return topics.describe(self._world.settings, self._world.events.name, admin=self._admin).end

    def appended(self) -> int:
        """Records in `events`."""
        return sum(self.ends().values())

    def folded(self, agent: str = CORE) -> int:
        """Records of `events` that the agent has folded."""
        return self._number("select coalesce(sum(next_offset), 0) from positions where agent = %s", agent)

    def answered(self) -> int:
        """Commands whose outcome is visible, where each came to one commit."""
        return self._number("select coalesce(sum(command_offset + 1), 0) from positions where agent = %s", CORE)

    def asked(self) -> int:
        """Records in `commands`."""
        return sum(topics.describe(self._world.settings, self._world.commands.name, admin=self._admin).end.values())

    def published(self) -> int:
        """Records of `events` that the publisher has gone past, by the offsets that it commits with what it publishes."""
        group = ConsumerGroupTopicPartitions(names.publisher(self._world.settings.group_prefix))

        def committed(client: AdminClient, within_s: float) -> int:
            [future] = client.list_consumer_group_offsets([group], request_timeout=within_s).values()
            return sum(max(one.offset, 0) for one in future.result(within_s).topic_partitions)

        return self._admin.ask(committed)

    def carry_out(self, bench: Bench, orders: Sequence[Order], what: str, *processes: Process) -> None:
        """Send orders, the world's first, and wait until all have their outcome. Raises BenchmarkStalled."""
        fill_commands(self._world.settings, orders, lambda _: None)
        bench.progress.begin(what, len(orders))
        wait_until(self.answered, len(orders), processes, bench.progress.advance, every=0.05)

    def vacuum(self) -> None:
        """So that no autovacuum of what came before runs in the middle of a measurement."""
        self._database.execute("vacuum analyze")

    def _number(self, query: LiteralString, agent: str) -> int:
        row = self._database.execute(query, [agent]).fetchone()
        return int(row[0]) if row else 0


@contextmanager
def progress_of(world: World) -> Iterator[Progressed]:
    with connect(world.settings, "samefold bench", statement_timeout_ms=0) as database:
        yield Progressed(world, database)
