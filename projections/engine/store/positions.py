"""An agent's positions and live tables, read in one statement and therefore of one moment.

Every other process that changes rows or live tables locks all positions of the agents and sets a new generation,
which fences the batches that were folded before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from infra.database.connect import Connection
from infra.log.rule import Reading
from projections.engine.fold.fold import Blocked
from projections.engine.views.sql_views import STOPPED
from projections.engine.views.view import POLICY


@dataclass(frozen=True, slots=True)
class Live:
    """A view's live version and its table. A policy counts as a view, live in its newest version."""

    version: int
    table: str


class Attempt(NamedTuple):
    """At folding these records at once; with a view, at folding the only one for it alone, the `number`th time (ADR 19)."""

    first: int = -1
    last: int = -1
    view: str = ""
    number: int = 0
    code: str = ""
    """A hash of the code that did: with other code it is tried anew."""


@dataclass(frozen=True, slots=True)
class Positions:
    """An agent's positions and live tables at one moment. `readings` is by partition, `live` by view."""

    agent: str
    topic: str
    topic_id: str
    generation: UUID
    """A batch that was folded under another generation is fenced."""
    readings: Mapping[int, Reading]
    live: Mapping[str, Live]
    """The views that a batch folds."""
    blocked: Blocked
    stopped: Mapping[str, int] = field(default_factory=dict)
    """The versions of views that met an event they can't fold, and are not folded until they are resumed."""
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    """By partition, the last one."""

    @property
    def live_set(self) -> dict[str, int]:
        """The versions that code must have to fold, of stopped views too."""
        return {name: live.version for name, live in self.live.items()} | dict(self.stopped)

    @property
    def tables(self) -> dict[str, str]:
        return {name: live.table for name, live in self.live.items()}


@dataclass(frozen=True, slots=True)
class StoppedView:
    """A view that could not take this event. `version` is the view's; its table holds what came before the event."""

    view: str
    version: int
    table: str
    stream: str
    stream_version: int
    partition: int
    offset: int
    code: str
    error: str
    stopped_at: datetime


LIVE = f"""(
select view, agent, version, table_name from live union all
(select distinct on (policy) '{POLICY}' || policy, '{POLICY}' || policy, version, '{POLICY}' || policy from activations
  order by policy, number desc))"""  # noqa: S608
"""What is live, in SQL: views, and each policy as a view of its own agent, in its newest version, 0 where it was removed."""

POINTERS = f"""(
select view, agent, version, table_name from live union all select view, agent, version, table_name from {STOPPED} s)"""  # noqa: S608
"""What is live of the views, and of a stopped one what was, in SQL."""

AGENTS = f"(select agent from {LIVE} l where version > 0)"  # noqa: S608
"""The agents whose positions count, in SQL: those of live views, and of policies that have not been removed."""

_READ = f"""
with mine as (select * from {LIVE} l where agent = %(agent)s)
select
  (select json_agg(json_build_array(p.partition, p.next_offset, p.epoch, p.seq, p.command_offset,
                                    p.generation, p.topic_id, p.attempt) order by p.partition)
     from positions p where p.agent = %(agent)s and p.topic = %(topic)s),
  (select json_agg(json_build_array(l.view, l.version, l.table_name) order by l.view) from mine l),
  (select json_agg(json_build_array(k.view, k.stream, k.since_version)) from parked k join mine l using (table_name)),
  (select json_agg(json_build_array(s.view, s.stream, s.version, s.through)) from skips s join mine l using (view)),
  (select json_agg(json_build_array(s.view, s.version)) from {STOPPED} s where agent = %(agent)s)
"""  # noqa: S608


def read_positions(connection: Connection, agent: str, topic: str) -> Positions | None:
    """The agent's positions in a topic; None before its first start. Raises psycopg.Error."""
    row = connection.execute(_READ, {"agent": agent, "topic": topic}).fetchone()
    at, live, parked, skips, stopped = row or (None,) * 5
    if not at:
        return None
    generations = {(generation, topic_id) for *_, generation, topic_id, _ in at}
    if len(generations) != 1:
        raise AssertionError(f"positions of agent '{agent}' have several generations: {sorted(generations)}")
    ((generation, topic_id),) = generations
    return Positions(
        agent=agent,
        topic=topic,
        topic_id=topic_id,
        generation=UUID(generation),
        readings={partition: Reading(*reading) for partition, *reading, _, _, _ in at},
        live={view: Live(version, table) for view, version, table in live or ()},
        blocked=Blocked({(view, stream): since for view, stream, since in parked or ()}, skips_of(skips or ())),
        stopped=dict(stopped or ()),
        attempts={partition: Attempt(*attempt) for partition, *_, attempt in at if attempt},
    )


def live_set(connection: Connection, agent: str) -> dict[str, int]:
    """`Positions.live_set` of the agent's views as they are now. Raises psycopg.Error."""
    found = connection.execute(f"select view, version from {POINTERS} p where agent = %s", (agent,))  # noqa: S608
    return dict(found.fetchall())


def stopped_views(connection: Connection) -> list[StoppedView]:
    """By name. Raises psycopg.Error."""
    columns = "view, version, table_name, stream, stream_version, partition, log_offset, code, error, stopped_at"
    return [StoppedView(*row) for row in connection.execute(f"select {columns} from {STOPPED} s order by view")]  # noqa: S608


def skips_of(rows: Any) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Rows of (view, stream, first, last), by (view, stream)."""
    skips: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for view, stream, first, last in rows:
        skips.setdefault((view, stream), []).append((first, last))
    return skips


def channel(agent: str) -> str:
    """The channel of PostgreSQL's notifications: `partition:next_offset,…` after each batch, or a word when the agent is fenced."""
    return f"samefold_{agent}"


def lock_positions(connection: Connection, agents: Iterable[str], topic: str) -> dict[str, dict[int, Reading]]:
    """Lock all positions of these agents until the transaction ends, always in the same order, and return them."""
    found = connection.execute(
        "select agent, partition, next_offset, epoch, seq, command_offset from positions "
        "where agent = any(%s) and topic = %s order by agent, topic, partition for update",
        (sorted(set(agents)), topic),
    )
    at: dict[str, dict[int, Reading]] = {}
    for agent, partition, *reading in found:
        at.setdefault(agent, {})[partition] = Reading(*reading)
    return at


def set_generation(connection: Connection, topic: str, at: Mapping[str, Mapping[int, Reading]], why: str) -> None:
    """Write these agents' positions, which are locked or new, with a generation that was never used before."""
    generation = uuid4()
    for agent, readings in at.items():
        connection.execute(
            "insert into positions (agent, generation, topic, topic_id, partition, next_offset, epoch, seq, "
            "command_offset) select %s, %s, t.topic, t.topic_id, u.* from topics t, "
            "unnest(%s::int[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) u where t.topic = %s "
            "on conflict (agent, topic, partition) do update set generation = excluded.generation, "
            "next_offset = excluded.next_offset, epoch = excluded.epoch, seq = excluded.seq, "
            "command_offset = excluded.command_offset",
            (agent, generation, *by_column(readings), topic),
        )
        connection.execute("select pg_notify(%s, %s)", (channel(agent), why))


def write_build_positions(connection: Connection, build: UUID, topic: str, readings: Mapping[int, Reading]) -> None:
    """Record how far a build's table is folded."""
    connection.execute(
        "insert into build_positions (build, topic, partition, next_offset, epoch, seq, command_offset) "
        "select %s, %s, * from unnest(%s::int[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) "
        "on conflict (build, topic, partition) do update set next_offset = excluded.next_offset, "
        "epoch = excluded.epoch, seq = excluded.seq, command_offset = excluded.command_offset",
        (build, topic, *by_column(readings)),
    )


def by_column(readings: Mapping[int, Reading]) -> list[list[int]]:
    """Partitions, next offsets, epochs, … as columns for `unnest`."""
    return [list(column) for column in zip(*((p, *reading) for p, reading in sorted(readings.items())), strict=True)]
