"""The processes of a run: the product's own code, with as little of a shell around it as there can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import psycopg

from infra.database.connect import Connection, DatabaseAway, connect
from projections.engine.plan import Plan
from projections.engine.reader import Action, Apply, Done, Fate, Hold, Reader, ReadPositions, Seek, Stop
from projections.engine.rebuild import go_to, rebuild
from projections.engine.replaying import drop, replay
from projections.engine.system import code_set
from projections.engine.view import View
from projections.engine.work import Work
from tests.model_read.world import World, settings

LOOKS = 6
"""How often an agent that is held looks at the positions before it gives up; a real one never does."""


def agent(
    world: World,
    name: str,
    views: Mapping[str, View],
    partitions: list[int],
    batch: int,
    *,
    batches: int | None = None,
    gives_up: bool = False,
) -> None:
    """An agent process that is sure to own these partitions; it ends at the log's end, or after so many batches.

    With `gives_up`, the group takes them away after each batch and gives them back.
    """
    work = Work(settings(), "core", views, name, _plan(views))
    reader = Reader(code_set(dict(views)), batch=batch, max_age=0.0)
    todo: deque[Action] = deque(reader.assigned(partitions))
    at: dict[int, int] = {}
    looks = applied = 0
    while True:
        while todo:
            match todo.popleft():
                case ReadPositions(turn, after):
                    if after:
                        world.play.sleep(after)
                    try:
                        todo += reader.positions(turn, work.positions())
                    except DatabaseAway:
                        todo += reader.away(turn)
                case Seek(partition, offset):
                    at[partition] = offset
                case Apply(turn, takes):
                    try:
                        done = work.apply(takes)
                    except DatabaseAway:
                        done = Done(Fate.AWAY)
                    todo += reader.done(turn, done, world.play.now)
                    if done.fate is Fate.APPLIED and not done.stop:
                        applied += 1
                        if applied == batches:
                            return
                        if gives_up:
                            reader.assigned(())
                            todo = deque(reader.assigned(partitions))
                case Hold():
                    looks += 1
                    if looks == LOOKS:
                        return
                case Stop(error):
                    raise error
        if world.pings:
            world.play.pause()
            with suppress(DatabaseAway):
                work.ping()
        fetched = False
        for partition in reader.fetching:
            log = world.log.records[partition]
            if records := log[at[partition] : at[partition] + batch]:
                at[partition] += len(records)
                fetched = True
                todo += reader.records(partition, records, len(log), world.play.now)
        if not fetched and not todo:
            todo += reader.tick(world.play.now + 1)
            if not todo:
                world.at_end.add(name)
                return


_plans: dict[tuple[int, ...], Plan] = {}


def _plan(views: Mapping[str, View]) -> Plan:
    which = tuple(map(id, views.values()))
    if which not in _plans:
        _plans[which] = Plan(views)
    return _plans[which]


def rebuilder(views: Mapping[str, View], names: list[str], *, make_live: bool = True) -> None:
    """`samefold rebuild`, with one process."""
    rebuild(settings(), names, views, make_live=make_live, processes=1)


def switcher(views: Mapping[str, View], names: list[str]) -> None:
    """`samefold switch`, forth or back."""
    go_to(settings(), names, views, processes=1)


def parker(view: Mapping[str, View], stream: str, *, drop_it: bool) -> None:
    """`samefold parked replay` or `drop`, with code that takes what could not be taken before."""
    (drop if drop_it else replay)(settings(), view["balances"], stream)


def reader(world: World, times: int, *, sql_view: bool) -> None:
    """Somebody who asks for all balances over and over; each answer must show all that anybody saw before it was asked."""
    table = "balances_v1"
    connection = connect(settings(), "reader")
    for _ in range(times):
        known = dict(world.seen)
        try:
            if sql_view:
                found = dict(connection.execute("select * from balances").fetchall())
            else:
                table, found = _ask(connection, table)
        except psycopg.OperationalError:
            connection = connect(settings(), "reader")
        else:
            world.saw(known, {account: trail.count(" ") for account, trail in found.items()})


def _ask(connection: Connection, table: str) -> tuple[str, dict[str, str]]:
    """DESIGN §4: if the pointer names another table than the one asked, that one is asked, and its answer stands."""
    rows: list[tuple[str, str, str]] = []
    for _ in range(2):
        query = f"select l.table_name, b.* from live l left join {table} b on true where l.view = 'balances'"
        rows = connection.execute(query.encode()).fetchall()
        if rows[0][0] == table:
            break
        table = rows[0][0]
    return table, {account: trail for _, account, trail in rows if account is not None}
