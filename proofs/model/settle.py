"""The faults stop: every command gets its answer (promise F), and every stored position leads to the same end (H)."""

from __future__ import annotations

from collections.abc import Sequence

from proofs.model.history import View, Violation
from proofs.model.world import World

ROUNDS = 150


APPENDS, AGENT = "appends", "agent"


def settle(world: World, order: Sequence[str] = (), promise: str = "F") -> World:
    """The world at its end, by a fair schedule: all writers act in turn, appends arrive, the read model follows. Raises Violation.

    `order`: of a round, if not that; names of writers, APPENDS and AGENT.
    """
    world = world.copy()
    world.handlers = {name: handler.clone() for name, handler in world.handlers.items()}
    world.faults, world.openings = 0, 10**9
    world.era_number = len(world.setting.bounds.eras) - 1
    for handler in world.handlers.values():
        if handler.code != world.era.version:
            world.handlers = {n: h for n, h in world.handlers.items() if h is not handler}  # old code is shut down
    if world.assignee not in world.handlers:
        world.births = max(world.births, 1)
        world.born()
    for _ in range(ROUNDS):
        if world.answered:
            break
        for actor in order or (*world.handlers, APPENDS, AGENT):
            if actor == APPENDS:
                for flight in world.flights:
                    world.do(("lands", flight.label))
            elif actor == AGENT:
                while len(world.log) > world.database.reading.next_offset:
                    world.do(("agent",))
            elif actor in world.handlers:
                _act(world, actor)
    else:
        missing = world.setting.keys - world.database.outcomes.keys()
        raise Violation(f"{promise}: no answer to {sorted(missing)} after {ROUNDS} rounds in which everyone acted")
    parts = world.setting.parts
    for view, _ in world.stored:
        end: View = parts.fold(view, parts.rule, world.log.records[view.reading.next_offset :])
        if end != world.log.truth[-1]:
            raise Violation(f"H: the position {view.reading} continues to another result")
    return world


def _act(world: World, name: str) -> None:
    """One turn of a live writer: a report to it, or what it does by itself."""
    handler = world.handlers[name]
    may = {choice[0]: choice for choice in handler.choices(world)}
    owned = {flight.token for flight in world.flights if flight.owner == name}
    if "hears" in may:
        world.do(may["hears"])
    elif "go" in may:
        world.do(may["go"])
    elif handler.reports and handler.reports[0].token not in owned:
        handler.timed_out(world)
    elif "takes" in may:
        world.do(may["takes"])
