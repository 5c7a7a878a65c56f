"""Stopping a view: it leaves its agent at an event that it can't fold, and the agent goes on without it.

To stop is a switch that removes the view: one transaction locks all of the agent's positions, keeps them with the view's table,
takes the view out of the live set, and sets a new generation. From then on the table is an old build, whose rows are the fold of
the log below its own positions; `samefold views resume` catches it up and switches to it.
"""

from __future__ import annotations

import logging

from infra.database.connect import Connection
from infra.processes.faultpoints import reach
from projections.engine.fold.errors import PoisonEvent
from projections.engine.store.positions import (
    Positions,
    lock_positions,
    read_positions,
    set_generation,
    write_build_positions,
)

log = logging.getLogger(__name__)


def stop_view(connection: Connection, positions: Positions, poison: PoisonEvent) -> None:
    """Stop the view that can't fold an event, if the agent is still right before it, at positions of this generation.

    If not, another process has moved or switched meanwhile: it may have better code, so nothing is changed. `connection` is in
    autocommit mode. Raises psycopg.Error.
    """
    view = poison.view
    with connection.transaction():
        lock_positions(connection, [positions.agent], positions.topic)
        now = read_positions(connection, positions.agent, positions.topic)  # after the locks, so it stays like this
        if now is None or now.generation != positions.generation:
            return
        if now.readings[poison.partition].next_offset != poison.offset:
            return
        table, event = now.live[view].table, (poison.stream, poison.version, poison.partition, poison.offset)
        [(build,)] = connection.execute(
            "update builds set state = 'old' where table_name = %s returning id", [table]
        ).fetchall()
        write_build_positions(connection, build, now.topic, now.readings)
        connection.execute("delete from live where view = %s", [view])
        # one of an earlier release's switch may have stayed
        connection.execute("delete from stopped_views where view = %s", [view])
        connection.execute(
            "insert into stopped_views (view, agent, version, table_name, stream, stream_version, partition, log_offset, code, "
            "error) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (view, now.agent, now.live[view].version, table, *event, poison.code, poison.cause),
        )
        set_generation(connection, now.topic, {now.agent: now.readings}, "stopped")
        reach("view stopped")
    log.error("view %s stopped, the others go on: %s", view, poison)
