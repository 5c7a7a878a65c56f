"""Folding a batch within a transaction of the caller's: the rows that it asks for and those that it makes, refused ones and all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from infra.database.connect import Connection
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.fold import Blocked, Changes, Decoded, Held, Parked, fold, keys_to_load
from projections.engine.fold.plan import Plan
from projections.engine.store.refused_rows import find_refused, try_rows
from projections.engine.store.rows import loaded, select_rows


class Asked(NamedTuple):
    """Rows that were asked for, and are to be held."""

    held: Held
    view: str
    keys: Sequence[Any]
    found: Any
    """A cursor: in a pipeline its rows come later."""


def ask_for_missing(
    connection: Connection, plan: Plan, tables: Mapping[str, str], batch: Sequence[Decoded], held: Mapping[int, Held]
) -> list[Asked]:
    """Ask for the rows that the fold will ask for and that are not held, of the views that have a table here. For `hold`."""
    asked = []
    for one in batch:
        for name, keys in keys_to_load(plan, one, held[one.partition]).items():
            if name in tables:
                query, parameters = select_rows(plan.views[name], tables[name], keys)
                asked.append(Asked(held[one.partition], name, keys, connection.execute(query, parameters)))
    return asked


def hold(plan: Plan, asked: Iterable[Asked]) -> None:
    """Hold what came, and of the rest that it is absent."""
    for held, name, keys, cursor in asked:
        context = plan.states.get(name)
        found = loaded(plan.views[name], context.state if context else None, cursor.fetchall())
        held.rows[name].update(dict.fromkeys(keys) | found)


def fold_and_write(
    connection: Connection,
    plan: Plan,
    tables: Mapping[str, str],
    batch: Sequence[Decoded],
    *,
    held: Mapping[int, Held],
    blocked: Blocked,
) -> tuple[list[Changes], list[Parked]]:
    """Fold, and write the rows of the views that have a table here; the changes, and the streams parked by either.

    An event whose row the database refuses is found under savepoints; its stream is parked from it on, or PoisonEvent raised
    where its view does not park. `held` must hold what the fold asks for, by partition.
    """
    found: list[Parked] = []
    while True:
        changes = [fold(plan, one, held[one.partition], blocked) for one in batch]
        connection.execute("savepoint batch")
        refused = None
        for name, table in tables.items():
            view = plan.views[name]
            if (refused := try_rows(connection, view, table, changes)) is None:
                continue
            connection.execute("rollback to savepoint batch")
            one = find_refused(connection, plan.only(name), table, batch, held=held, blocked=blocked)
            if one is None:
                raise refused
            if view.on_poison != "park":
                raise PoisonEvent(
                    name, one.stream, one.version, partition=one.partition, offset=one.offset, cause=one.error
                ) from refused
            found.append(one)
            blocked = Blocked({**blocked.parked, (name, one.stream): one.version}, blocked.skips)
            break
        if refused is None:
            return changes, [*found, *(one for change in changes for one in change.parked.values())]
