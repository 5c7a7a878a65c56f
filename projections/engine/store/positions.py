"""Where an agent stands, and what it is to write: read in one statement, so that all of it is of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from infra.database.connect import Connection
from infra.log.rule import Reading
from projections.engine.fold.fold import Blocked


@dataclass(frozen=True, slots=True)
class Live:
    """A view as readers see it: the version that is live, and its table."""

    version: int
    table: str


@dataclass(frozen=True, slots=True)
class Positions:
    """An agent's world in one snapshot of the database. `readings` is by partition, `live` by view."""

    agent: str
    topic: str
    topic_id: str
    generation: UUID
    """Changed by whoever moves rows or pointers; a batch folded under another generation is fenced."""
    readings: Mapping[int, Reading]
    live: Mapping[str, Live]
    blocked: Blocked

    @property
    def live_set(self) -> dict[str, int]:
        return {name: live.version for name, live in self.live.items()}

    @property
    def tables(self) -> dict[str, str]:
        return {name: live.table for name, live in self.live.items()}


_READ = """
select
  (select json_agg(json_build_array(p.partition, p.next_offset, p.epoch, p.seq, p.command_offset,
                                    p.generation, p.topic_id) order by p.partition)
     from positions p where p.agent = %(agent)s and p.topic = %(topic)s),
  (select json_agg(json_build_array(l.view, l.version, l.table_name) order by l.view)
     from live l where l.agent = %(agent)s),
  (select json_agg(json_build_array(k.view, k.stream, k.since_version))
     from parked k join live l using (table_name) where l.agent = %(agent)s),
  (select json_agg(json_build_array(s.view, s.stream, s.version, s.through))
     from skips s join live l using (view) where l.agent = %(agent)s)
"""


def read_positions(connection: Connection, agent: str, topic: str) -> Positions | None:
    """Where the agent stands in a topic; None before its first start. Raises psycopg.Error."""
    row = connection.execute(_READ, {"agent": agent, "topic": topic}).fetchone()
    at, live, parked, skips = row or (None, None, None, None)
    if not at:
        return None
    generations = {(generation, topic_id) for *_, generation, topic_id in at}
    if len(generations) != 1:
        raise AssertionError(f"positions of agent '{agent}' have several generations: {sorted(generations)}")
    ((generation, topic_id),) = generations
    return Positions(
        agent=agent,
        topic=topic,
        topic_id=topic_id,
        generation=UUID(generation),
        readings={partition: Reading(*reading) for partition, *reading, _, _ in at},
        live={view: Live(version, table) for view, version, table in live or ()},
        blocked=Blocked({(view, stream): since for view, stream, since in parked or ()}, skips_of(skips or ())),
    )


def skips_of(rows: Any) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(view, stream, first, last) rows by (view, stream)."""
    skips: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for view, stream, first, last in rows:
        skips.setdefault((view, stream), []).append((first, last))
    return skips
