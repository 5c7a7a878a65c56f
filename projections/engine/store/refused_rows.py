"""Finding the event whose row the database refuses: by halving the batch, under savepoints, in the batch's transaction.

What it can refuse is what no row shows by itself: a journal's second row of one key, a row, an index or a constraint that
somebody changed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg

from infra.database.connect import Connection
from projections.engine.fold.fold import Blocked, Changes, Decoded, Held, Parked, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.store.rows import Refused, writes
from projections.engine.views.columns import PARTITION
from projections.engine.views.view import Kind, View

_CLASSES = ("21", "22", "23", "54")
"""SQLSTATE classes that speak about the data: cardinality, data exception, integrity constraint, program limit."""


def is_refusal(error: BaseException) -> bool:
    """Whether an error is about the rows sent, and would come back with them."""
    if isinstance(error, psycopg.Error):
        return (error.sqlstate or "").startswith(_CLASSES)
    return isinstance(error, Refused)


def try_rows(
    connection: Connection, view: View, table: str, changes: Sequence[Changes]
) -> psycopg.Error | Refused | None:
    """Write a view's rows; the error if they are refused, after which the transaction needs a rollback to a savepoint."""
    try:
        for query, parameters in writes(view, table, changes):
            connection.execute(query, parameters)
    except (psycopg.Error, Refused) as error:
        if not is_refusal(error):
            raise
        return error
    return None


def find_refused(
    connection: Connection,
    plan: Plan,
    table: str,
    batch: Sequence[Decoded],
    *,
    held: Mapping[int, Held],
    blocked: Blocked,
) -> Parked | None:
    """The first event with which rows of the batch are refused: with all that stand before it in the batch, they are not.

    `plan` is that of one view, whose rows in `table` they are. None if nothing is refused this time.
    """
    (view,) = plan.views.values()
    parts = [decode(plan, one.partition, one.counted) for one in batch]

    def refused(count: int) -> psycopg.Error | Refused | None:
        connection.execute("savepoint probe")
        changes = [fold(plan, part, held[part.partition], blocked) for part in _first(view, parts, count)]
        error = try_rows(connection, view, table, changes)
        connection.execute("rollback to savepoint probe")
        return error

    passes, fails = 0, sum(_count(view, part) for part in parts)
    error = refused(fails)
    if error is None:
        return None
    while fails - passes > 1:
        middle = (passes + fails) // 2
        found = refused(middle)
        if found is None:
            passes = middle
        else:
            fails, error = middle, found
    last = [part for part in _first(view, parts, fails) if _count(view, part)][-1]
    if view.kind is Kind.OUTCOMES:
        offset, _, commit = last.counted[-1]
        stream, version = commit.stream, commit.version
    else:
        stream, version, offset = last.items[-1].at.stream, last.items[-1].at.version, last.items[-1].at.offset
    return Parked(view.name, stream, last.partition, offset, version, _in_words(error))


def _count(view: View, part: Decoded) -> int:
    """Of what can be refused one by one: events, or the commits that have outcomes."""
    return len(part.counted if view.kind is Kind.OUTCOMES else part.items)


def _first(view: View, parts: Sequence[Decoded], count: int) -> list[Decoded]:
    """So many of them, part after part."""
    first = []
    for part in parts:
        few = min(count, _count(view, part))
        outcomes = view.kind is Kind.OUTCOMES
        first.append(part._replace(counted=part.counted[:few]) if outcomes else part._replace(items=part.items[:few]))
        count -= few
    return first


def _in_words(error: psycopg.Error | Refused) -> str:
    if isinstance(error, psycopg.errors.NotNullViolation) and error.diag.column_name == PARTITION:
        return "the row's key belongs to a row of another partition, which no fold makes: it was changed by hand"
    return " ".join(str(error).split())
