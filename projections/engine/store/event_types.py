"""The event types that a running agent can fold. Handlers append no others: the agents would stop at them.

The agent `core` records those of its code once its views are live. So of a release with a new event, or a new version of one,
agents start first; its handlers wait for them. Types stay until views of code that can't read them go live, or until they are
dropped with `samefold switch`.
"""

from __future__ import annotations

from domain.engine.contexts import contexts
from infra.database.connect import Connection


def own_event_types() -> frozenset[str]:
    """The stored types that this code can read, older versions too: `rooms.RoomBooked/2`."""
    return frozenset(f"{one.name}.{name}" for one in contexts().values() for name in one.readers)


def foldable_types(connection: Connection) -> frozenset[str]:
    """Those that some release's agents can fold."""
    return frozenset(name for (name,) in connection.execute("select type from event_types"))


def record_event_types(connection: Connection) -> frozenset[str]:
    """Record that agents of this code run. Returns the types that were not recorded before."""
    new = own_event_types() - foldable_types(connection)
    if new:
        connection.execute(
            "insert into event_types (type) select * from unnest(%s::text[]) on conflict do nothing", [sorted(new)]
        )
    return new


def drop_other_event_types(connection: Connection) -> None:
    """Drop the types that this code can't read. Agents that can, record them again once their views are live."""
    connection.execute("delete from event_types where type <> all(%s)", [sorted(own_event_types())])
