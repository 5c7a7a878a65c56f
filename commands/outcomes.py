"""Reads the outcomes of commands from their view."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from infra.errors import SamefoldError
from projections.engine.live.startup import HOW_IT_GOES_LIVE
from projections.engine.views.columns import PARTITION
from projections.engine.views.core_views import OUTCOMES, all_views, command_key
from projections.engine.views.token import Token


class ReadModelNotSetUp(SamefoldError):
    """The database has no live tables yet."""

    is_public = True


class Outcome(NamedTuple):
    """The only answer to a command. An id with another `fingerprint` was used before for another command."""

    outcome: str
    code: str | None
    message: str | None
    version: int
    fingerprint: str
    at: datetime
    position: Token | None
    """Of its partition, from the same snapshot; None where no topic was named."""
    by: str | None = None
    """Not read for the command's sender."""

    @classmethod
    def of(cls, row: Sequence[Any]) -> Outcome:
        """From a row of `outcomes_query` that has one."""
        _, _, outcome, code, message, version, fingerprint, at, topic_id, partition, next_offset = row
        position = None if topic_id is None else Token.of(topic_id, {partition: next_offset})
        return cls(outcome, code, message, version, fingerprint, at, position)


def outcomes_of(
    connection: psycopg.Connection[Any], commands: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Outcome]:
    """The outcomes that are there, by (stream, command id). Raises ReadModelNotSetUp."""
    version = all_views()[OUTCOMES].version  # whose columns the query names
    while True:
        table = live_table(connection, OUTCOMES, version)
        rows = connection.execute(
            outcomes_query(table), ([command_key(*one) for one in commands], "", OUTCOMES)
        ).fetchall()
        if rows and rows[0][0] == table:
            return {commands[row[1] - 1]: Outcome.of(row) for row in rows if row[1] is not None}


def live_table(connection: psycopg.Connection[Any], view: str, version: int | None = None) -> str:
    """The table that is live for a view, whatever its version is, or only if it is `version`. Raises ReadModelNotSetUp."""
    row = connection.execute(
        "select table_name from live where view = %s and version = coalesce(%s, version)", (view, version)
    ).fetchone()
    if row is None:
        raise ReadModelNotSetUp(
            f"View '{view}' is not live yet{f' in version {version}' if version else ''}.",
            HOW_IT_GOES_LIVE,
        )
    return str(row[0])


@cache
def outcomes_query(table: str) -> bytes:
    """The query for (command keys, topic, view of the outcomes): the live table, the outcomes in `table`, their positions.

    An outcome has its key's number, from 1. If the live table is not `table`, a switch came in between: ignore the outcomes and
    query the live table.
    """
    return _QUERY.format(table=sql.Identifier(table), partition=sql.Identifier(PARTITION)).as_bytes()


_QUERY = sql.SQL("""
select l.table_name, o.number, case when o.code is null then 'accepted' else 'rejected' end, o.code, o.message, o.version,
       replace(o.fingerprint::text, '-', ''), o.at, p.topic_id, p.partition, p.next_offset
  from live l
  left join (
    select asked.number, o.* from unnest(%s::uuid[]) with ordinality as asked(key, number) join {table} o on o.command = asked.key
  ) o on true
  left join positions p on p.agent = l.agent and p.topic = %s and p.partition = o.{partition}
 where l.view = %s
""")
