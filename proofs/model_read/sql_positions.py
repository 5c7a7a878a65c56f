"""Statements about positions and pointers: the compare-and-set, where an agent stands, the switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from psycopg import errors

from proofs.model_read.catalogue import even, reads, writes
from proofs.model_read.postgres import Key, Lock, Result, Row, Statement, Steps
from proofs.model_read.sql_rows import values_of

READING = ("next_offset", "epoch", "seq", "command_offset")


def reading_of(row: Row) -> list[int]:
    return [row[name] for name in READING]


@reads(
    """
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
)
def where_it_stands(statement: Statement, parameters: Any) -> Result:
    agent, topic = parameters["agent"], parameters["topic"]
    positions = statement.where("positions", agent=agent, topic=topic)
    live = statement.where("live", agent=agent)
    tables, views = {row["table_name"] for row in live}, {row["view"] for row in live}
    parked = [row for row in statement.where("parked") if row["table_name"] in tables]
    skips = [row for row in statement.where("skips") if row["view"] in views]
    return Result(
        [
            (
                [[p["partition"], *reading_of(p), str(p["generation"]), p["topic_id"]] for p in positions] or None,
                [[row["view"], row["version"], row["table_name"]] for row in live] or None,
                [[row["view"], row["stream"], row["since_version"]] for row in parked] or None,
                [[row["view"], row["stream"], row["version"], row["through"]] for row in skips] or None,
            )
        ],
        1,
    )


MOVE = """
with mine as materialized (
  select p.agent, p.topic, p.partition, u.next_offset, u.epoch, u.seq, u.command_offset
    from positions p
    join unnest(%s, %s, %s, %s, %s, %s, %s, %s)
      u(partition, was, was_epoch, was_seq, next_offset, epoch, seq, command_offset) using (partition)
   where p.agent = %s and p.topic = %s and p.generation = %s
     and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)
   order by p.topic, p.partition for update of p),
moved as (
  update positions p
     set next_offset = m.next_offset, epoch = m.epoch, seq = m.seq, command_offset = m.command_offset
    from mine m where (p.agent, p.topic, p.partition) = (m.agent, m.topic, m.partition) returning 1)
select 1 / (count(*) = %s)::int, pg_notify(%s, %s) from moved
"""

Fence = Callable[[Row, tuple[int, ...], UUID], bool]
"""Whether a position, the batch's reading before it, and the generation let the batch pass."""


def fence(row: Row, was: tuple[int, ...], generation: UUID) -> bool:
    return row["generation"] == generation and tuple(reading_of(row)[:3]) == was


def move(fits: Fence, beside: Callable[[Statement, UUID], bool] = lambda _statement, _generation: True) -> Any:
    """The compare-and-set with this fence in the locked row, and perhaps another `beside` it, read before any wait."""

    def steps(statement: Statement, parameters: Any) -> Steps:
        columns = [values_of(array) for array in parameters[:8]]
        agent, topic, generation, count = parameters[8:12]
        wanted = {row[0]: (row[1:4], row[4:]) for row in zip(*columns, strict=True)}
        yield from statement.use("positions", Lock.WRITE)
        seen = beside(statement, generation)
        moved = 0
        for partition, (was, new) in sorted(wanted.items()):
            key: Key = (agent, topic, partition)
            row = statement.one("positions", key)
            if row is None or not seen or not fits(row, was, generation):
                continue
            yield from statement.lock(("positions", key), Lock.UPDATE)
            newest = statement.newest("positions", key)
            if newest is not None and fits(newest, was, generation):
                statement.put("positions", key, {**newest, **dict(zip(READING, new, strict=True))})
                moved += 1
        if moved != count:
            raise errors.DivisionByZero("division by zero")
        return Result([(1, "")], 1)

    return steps


writes(MOVE)(move(fence))


@reads("select view, agent, version, table_name from live order by view")
def pointers(statement: Statement, _parameters: Any) -> Result:
    found = statement.where("live")
    return Result([(row["view"], row["agent"], row["version"], row["table_name"]) for row in found], len(found))


def _lock_positions(statement: Statement, agents: Iterable[str], topic: str) -> Any:
    yield from statement.use("positions", Lock.WRITE)
    keys = [key for key in sorted(statement.table("positions")) if key[0] in agents and key[1] == topic]
    rows = []
    for key in keys:
        yield from statement.lock(("positions", key), Lock.UPDATE)
        if (newest := statement.newest("positions", key)) is not None:
            rows.append(newest)
    return rows


@writes(
    "select agent, partition, next_offset, epoch, seq, command_offset from positions "
    "where agent = any(%s) and topic = %s order by agent, topic, partition for update"
)
def lock_for_switch(statement: Statement, parameters: Any) -> Steps:
    rows = yield from _lock_positions(statement, *parameters)
    return Result([(row["agent"], row["partition"], *reading_of(row)) for row in rows], len(rows))


@writes("select from positions where agent = %s and topic = %s order by topic, partition for update")
def lock_for_replay(statement: Statement, parameters: Any) -> Steps:
    rows = yield from _lock_positions(statement, [parameters[0]], parameters[1])
    return Result([() for _ in rows], len(rows))


@reads(
    "select partition, next_offset, epoch, seq, command_offset from positions "
    "where agent = %s and topic = %s order by partition"
)
def pin(statement: Statement, parameters: Any) -> Result:
    found = statement.where("positions", agent=parameters[0], topic=parameters[1])
    return Result([(row["partition"], *reading_of(row)) for row in found], len(found))


@writes("update positions set generation = %s where agent = %s and topic = %s")
def new_generation(statement: Statement, parameters: Any) -> Steps:
    generation, agent, topic = parameters
    count = yield from statement.update(
        "positions", lambda row: (row["agent"], row["topic"]) == (agent, topic), {"generation": generation}
    )
    return Result(count=count)


INSERT_POSITIONS = even(
    "insert into positions (agent, generation, topic, topic_id, partition, next_offset, epoch, seq, "
    "command_offset) select %s, %s, t.topic, t.topic_id, u.* from topics t, "
    "unnest(%s::int[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) u where t.topic = %s "
    "on conflict (agent, topic, partition) do update set generation = excluded.generation, "
    "next_offset = excluded.next_offset, epoch = excluded.epoch, seq = excluded.seq, "
    "command_offset = excluded.command_offset"
)


@writes(INSERT_POSITIONS)
def switch_positions(statement: Statement, parameters: Any) -> Steps:
    agent, generation, *columns, topic = parameters
    topic_id = next(row["topic_id"] for row in statement.where("topics", topic=topic))
    for partition, *reading in zip(*columns, strict=True):
        row: Row = {
            "agent": agent,
            "topic": topic,
            "partition": partition,
            "topic_id": topic_id,
            "generation": generation,
            **dict(zip(READING, reading, strict=True)),
        }
        yield from statement.upsert("positions", (agent, topic, partition), row)
    return Result(count=len(columns[0]))


@writes("delete from live where view = any(%s)")
def remove_pointers(statement: Statement, parameters: Any) -> Steps:
    count = yield from statement.delete("live", lambda row: row["view"] in parameters[0])
    return Result(count=count)


@writes(
    "insert into live (view, agent, version, table_name) values (%s, %s, %s, %s) on conflict (view) do update "
    "set agent = excluded.agent, version = excluded.version, table_name = excluded.table_name"
)
def point(statement: Statement, parameters: Any) -> Steps:
    row = dict(zip(("view", "agent", "version", "table_name"), parameters, strict=True))
    yield from statement.upsert("live", (row["view"],), row)
    return Result(count=1)


@writes("insert into topics (topic, topic_id, partitions, partitioner) values (%s, %s, %s, %s) on conflict do nothing")
def promise(statement: Statement, parameters: Any) -> Steps:
    row = dict(zip(("topic", "topic_id", "partitions", "partitioner"), parameters, strict=True))
    written = yield from statement.insert("topics", (row["topic"],), row, lambda _there: None)
    return Result(count=int(written))


@reads("select topic_id, partitions, partitioner from topics where topic = %s")
def promised(statement: Statement, parameters: Any) -> Result:
    found = statement.where("topics", topic=parameters[0])
    return Result([(row["topic_id"], row["partitions"], row["partitioner"]) for row in found], len(found))
