"""Finding the stream whose rows the database refuses: by halving the batch, under savepoints, in the batch's transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg

from infra.database.connect import Connection
from projections.engine.columns import PARTITION
from projections.engine.fold import Blocked, Changes, Decoded, Held, Parked, decode, fold
from projections.engine.plan import Plan
from projections.engine.rows import Refused, writes
from projections.engine.view import Kind, View

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
    """The first stream with which rows of the batch are refused, from its first event in the batch on.

    `plan` is that of one view, whose rows in `table` they are.

    Streams are taken in the order of their first event; of the smallest number of them that is refused, the last is the
    one, also where two are refused only together. None if nothing is refused this time.
    """
    (view,) = plan.views.values()
    parts = [decode(plan, one.partition, one.counted) for one in batch]
    firsts = _first_events(view, parts, blocked)
    streams = list(firsts)

    def refused(count: int) -> psycopg.Error | Refused | None:
        some = set(streams[:count])
        connection.execute("savepoint probe")
        changes = [fold(plan, part.only(some), held[part.partition], blocked) for part in parts]
        error = try_rows(connection, view, table, changes)
        connection.execute("rollback to savepoint probe")
        return error

    error = refused(len(streams))
    if error is None:
        return None
    passes, fails = 0, len(streams)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        found = refused(middle)
        if found is None:
            passes = middle
        else:
            fails, error = middle, found
    stream = streams[fails - 1]
    partition, offset, version = firsts[stream]
    return Parked(view.name, stream, partition, offset, version, _in_words(error))


def _first_events(view: View, parts: Sequence[Decoded], blocked: Blocked) -> dict[str, tuple[int, int, int]]:
    """By stream: partition, offset and version of the first event in the batch that the view takes."""
    firsts: dict[str, tuple[int, int, int]] = {}
    for part in parts:
        if view.kind is Kind.OUTCOMES:
            for one in part.counted:
                firsts.setdefault(one.commit.stream, (part.partition, one.offset, one.commit.version))
        for item in part.items:
            if type(item.event) in view.subscription and not blocked.blocks(view.name, item.at):
                firsts.setdefault(item.at.stream, (part.partition, item.at.offset, item.at.version))
    return firsts


def _in_words(error: psycopg.Error | Refused) -> str:
    if isinstance(error, psycopg.errors.NotNullViolation) and error.diag.column_name == PARTITION:
        return "the row's key belongs to a row of another partition: a key must contain the stream's id"
    return " ".join(str(error).split())
