"""Which types of commands are live: those that a release's handlers were ready to decide.

A type is recorded by the first handler that knows it, when that handler is about to serve (or by the first start). From then on a
command of it is never `malformed`: a handler of older code leaves it to a newer one. Types stay until they are taken out by name,
because a command of one may stand in the log.
"""

from __future__ import annotations

from typing import NamedTuple

from infra.database.connect import Connection
from infra.domain_model.contexts import contexts
from projections.engine.store.positions import lock_positions, set_generation
from projections.engine.views.view import CORE


class CommandType(NamedTuple):
    """A stored name in its context. An empty name stands for all commands of a context."""

    context: str
    name: str

    def __str__(self) -> str:
        return f"{self.context}.{self.name or '*'}"


def own_types() -> frozenset[CommandType]:
    """The types that this code decides."""
    return frozenset(CommandType(one.name, name) for one in contexts().values() for name in one.commands)


def live_types(connection: Connection) -> frozenset[CommandType]:
    return frozenset(CommandType(*row) for row in connection.execute("select context, type from command_types"))


def add_types(connection: Connection) -> None:
    """Record the types of this code beside those that are live. In a transaction, whose generation is a new one."""
    connection.execute(
        "insert into command_types (context, type) select * from unnest(%s::text[], %s::text[]) on conflict do nothing",
        [list(column) for column in zip(*sorted(own_types()), strict=True)] or [[], []],
    )


def make_types_live(connection: Connection, topic: str) -> None:
    """From now on no handler takes a command of this code's types for malformed: all of them read the types again."""
    with connection.transaction():
        _fence_writers(connection, topic)
        add_types(connection)


def drop_other_types(connection: Connection, topic: str) -> list[CommandType]:
    """Take out the types that this code does not know: their commands are malformed from now on. What was taken out."""
    if not live_types(connection) - own_types():
        return []
    with connection.transaction():
        _fence_writers(connection, topic)
        gone = sorted(live_types(connection) - own_types())
        connection.execute(
            "delete from command_types where (context, type) in (select * from unnest(%s::text[], %s::text[]))",
            [[one.context for one in gone], [one.name for one in gone]],
        )
    return gone


def _fence_writers(connection: Connection, topic: str) -> None:
    """Every writer reads the database anew before its next commit."""
    set_generation(connection, topic, lock_positions(connection, [CORE], topic), "command types")
