"""The processes of a run: the product's own code, with as little of a shell around it as there can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from infra.database.connect import DatabaseAway
from projections.engine.plan import Plan
from projections.engine.reader import Action, Apply, Done, Fate, Hold, Reader, ReadPositions, Seek, Stop
from projections.engine.system import code_set
from projections.engine.view import View
from projections.engine.work import Work
from tests.model_read.world import World, settings

LOOKS = 6
"""How often an agent that is held looks at the positions before it gives up; a real one never does."""


def agent(world: World, name: str, views: Mapping[str, View], partitions: list[int], batch: int) -> None:
    """An agent process that is sure to own these partitions; it ends at the log's end."""
    work = Work(settings(), "core", views, name, _plan(views))
    reader = Reader(code_set(dict(views)), batch=batch, max_age=0.0)
    todo: deque[Action] = deque(reader.assigned(partitions))
    at: dict[int, int] = {}
    looks = 0
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
                case Hold():
                    looks += 1
                    if looks == LOOKS:
                        return
                case Stop(error):
                    raise error
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
                return


_plans: dict[tuple[int, ...], Plan] = {}


def _plan(views: Mapping[str, View]) -> Plan:
    which = tuple(map(id, views.values()))
    if which not in _plans:
        _plans[which] = Plan(views)
    return _plans[which]
