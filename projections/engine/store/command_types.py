"""The live types of commands: those that the handlers of some release can decide.

The first handler that knows a type records it before it serves, or the first start does. From then on a command of the type is
never `malformed`: a handler of older code leaves it to a newer one. Types stay until they are dropped explicitly, because the log
may hold commands of them.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import uuid4

from domain.engine.contexts import contexts
from infra.database.connect import Connection
from infra.errors import SamefoldError
from projections.engine.store.positions import channel, lock_positions
from projections.engine.views.view import CORE


class CommandType(NamedTuple):
    """A command's stored name in its context. An empty name stands for all commands of the context."""

    context: str
    name: str

    def __str__(self) -> str:
        return f"{self.context}.{self.name or '*'}"


def own_types() -> frozenset[CommandType]:
    """The types that this code decides."""
    return frozenset(CommandType(one.name, name) for one in contexts().values() for name in one.command_types)


def live_types(connection: Connection) -> frozenset[CommandType]:
    return frozenset(CommandType(*row) for row in connection.execute("select context, type from command_types"))


def add_types(connection: Connection) -> None:
    """Add this code's types to the live ones, in a transaction that sets a new generation."""
    connection.execute(
        "insert into command_types (context, type) select * from unnest(%s::text[], %s::text[]) on conflict do nothing",
        [list(column) for column in zip(*sorted(own_types()), strict=True)] or [[], []],
    )


def make_types_live(connection: Connection, topic: str) -> None:
    """Make this code's types live. All handlers read the types again before their next commit."""
    with connection.transaction():
        _fence_writers(connection, topic)
        add_types(connection)


class TypesWished(SamefoldError):
    """A policy's wishes under way have types of commands that are to be dropped."""


def require_unwished(connection: Connection) -> None:
    """Raises TypesWished where commands that this code does not know, or follow-ups, are in the outbox: they would be malformed."""
    unknown = sorted(live_types(connection) - own_types())
    columns = [[one.context for one in unknown], [one.name for one in unknown]]
    if found := connection.execute(_WISHED, columns).fetchall() if unknown else []:
        what = ", ".join(f"{count:,} of {context}.{kind} (policy {policy})" for policy, context, kind, count in found)
        raise TypesWished(
            f"Policies have wished commands that this code does not know: {what}.",
            "`samefold outbox list` shows them. Run the release that knows them until they have ended, or drop them.",
        )


_WISHED = """
select policy, context, w.type, count(*)
  from outbox, lateral (values (target, outbox.type), (stream, then_type), (stream, otherwise_type), (stream, later_type))
                       w (stream, type),
       unnest(%s::text[], %s::text[]) dropped (context, type)
 where w.type = dropped.type and split_part(w.stream, '/', 1) = context and kind = 'send' group by 1, 2, 3 order by 1, 2, 3
"""


def drop_other_types(connection: Connection, topic: str) -> list[CommandType]:
    """Drop the types that this code does not know; commands of them are malformed from now on. Returns the dropped types.

    Raises TypesWished.
    """
    if not live_types(connection) - own_types():
        return []
    with connection.transaction():
        _fence_writers(connection, topic)
        require_unwished(connection)
        dropped = sorted(live_types(connection) - own_types())
        connection.execute(
            "delete from command_types where (context, type) in (select * from unnest(%s::text[], %s::text[]))",
            [[one.context for one in dropped], [one.name for one in dropped]],
        )
    return dropped


def _fence_writers(connection: Connection, topic: str) -> None:
    """Make every writer read the database again before its next commit."""
    # no more than this column: a handler's role may write no other
    lock_positions(connection, [CORE], topic)
    connection.execute("update positions set generation = %s where agent = %s and topic = %s", (uuid4(), CORE, topic))
    connection.execute("select pg_notify(%s, %s)", (channel(CORE), "command types"))
