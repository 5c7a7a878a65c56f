"""Fold and write statement by statement, in the caller's transaction, to find the streams whose rows are refused.

An event whose row the database refuses is found by bisecting the batch under savepoints. The fold refuses everything that a
single row shows to be wrong; what remains is a journal's second row of one key, or a row, index or constraint changed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg

from infra.database.connect import Connection
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.fold import Blocked, Changes, Decoded, Parked, RowCache, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.store.parking import insert_parked
from projections.engine.store.rows import Refused, ask_for_missing, writes
from projections.engine.views.columns import PARTITION
from projections.engine.views.view import Kind, View

_ABOUT_ROWS = ("21", "22", "23", "54")
"""SQLSTATE classes: cardinality violation, data exception, integrity constraint violation, program limit exceeded."""


def fold_and_write(
    connection: Connection,
    plan: Plan,
    tables: Mapping[str, str],
    batch: Sequence[Decoded],
    *,
    held: Mapping[int, RowCache],
    blocked: Blocked,
) -> tuple[list[Changes], list[Parked]]:
    """Load the rows that the fold needs and `held` lacks, fold, and write the rows of the views in `tables`.

    A stream whose row the database refuses is parked from that event on. Raises PoisonEvent where its view does not park. Returns
    the changes and all streams that were parked, which are recorded.
    """
    hold = ask_for_missing(connection, plan, tables, batch, held)
    hold()
    found: list[Parked] = []
    while True:
        changes = [fold(plan, one, held[one.partition], blocked) for one in batch]
        connection.execute("savepoint batch")
        refused = None
        for name, table in tables.items():
            view = plan.views[name]
            if (refused := _try_rows(connection, view, table, changes)) is None:
                continue
            connection.execute("rollback to savepoint batch")
            one = _find_refused(connection, plan.only(name), table, batch, held=held, blocked=blocked)
            if one is None:
                raise refused
            if view.on_poison != "park":
                raise PoisonEvent(
                    name, one.stream, one.version, partition=one.partition, offset=one.offset, cause=one.error
                ) from refused
            found.append(one)
            blocked = blocked.and_parked([one])
            break
        if refused is None:
            found += [one for change in changes for one in change.parked]
            insert_parked(connection, tables, found)
            return changes, found


def is_refusal(error: BaseException) -> bool:
    """Whether an error is about the rows that were sent, so that the same rows would fail again."""
    if isinstance(error, psycopg.Error):
        return (error.sqlstate or "").startswith(_ABOUT_ROWS)
    return isinstance(error, Refused)


def _try_rows(
    connection: Connection, view: View, table: str, changes: Sequence[Changes]
) -> psycopg.Error | Refused | None:
    """Write a view's rows. Returns the error if they are refused; the caller then rolls back to a savepoint."""
    try:
        for query, parameters, _ in writes(view, table, changes):
            connection.execute(query, parameters)
    except (psycopg.Error, Refused) as error:
        if not is_refusal(error):
            raise
        return error
    return None


def _find_refused(
    connection: Connection,
    plan: Plan,
    table: str,
    batch: Sequence[Decoded],
    *,
    held: Mapping[int, RowCache],
    blocked: Blocked,
) -> Parked | None:
    """The first event whose rows are refused, by bisection; None if nothing is refused this time.

    `plan` has one view, whose rows are in `table`.
    """
    (view,) = plan.views.values()
    parts = [decode(plan, one.partition, one.counted) for one in batch]

    def refused(count: int) -> psycopg.Error | Refused | None:
        connection.execute("savepoint probe")
        changes = [fold(plan, part, held[part.partition], blocked) for part in _first(view, parts, count)]
        error = _try_rows(connection, view, table, changes)
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
    counted = [part for part in _first(view, parts, fails) if _count(view, part)]
    if not counted:  # an outcome of a policy's command, which is no event
        raise error
    last = counted[-1]
    if view.kind is Kind.OUTCOMES:
        offset, _, commit = last.counted[-1]
        stream, version = commit.stream, commit.version
    else:
        stream, version, offset = last.items[-1].at.stream, last.items[-1].at.version, last.items[-1].at.offset
    return Parked(view.name, stream, last.partition, offset, version, _in_words(error))


def _count(view: View, part: Decoded) -> int:
    """How many events, or commits of the outcomes, can be refused one by one."""
    return len(part.counted if view.kind is Kind.OUTCOMES else part.items)


def _first(view: View, parts: Sequence[Decoded], count: int) -> list[Decoded]:
    """The parts, cut after `count` events or commits."""
    first = []
    for part in parts:
        few = min(count, _count(view, part))
        outcomes = view.kind is Kind.OUTCOMES
        first.append(part._replace(counted=part.counted[:few]) if outcomes else part._replace(items=part.items[:few]))
        count -= few
    return first


def _in_words(error: psycopg.Error | Refused) -> str:
    if isinstance(error, psycopg.errors.NotNullViolation) and error.diag.column_name == PARTITION:
        return "the row's key belongs to a row of another partition, which no fold makes: that row was changed by hand"
    return " ".join(str(error).split())
