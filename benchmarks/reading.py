"""Looks at how far things are, over connections that stay open: looking must cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import LiteralString

from benchmarks.fill import fill_commands
from benchmarks.processes import Process, wait_until
from benchmarks.stage import Bench, World
from benchmarks.workload import Order
from infra.database.connect import Connection, connect
from infra.log import topics
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
